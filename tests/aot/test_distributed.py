"""The collectives of gradients as TPU and GPU compilers make them, on eight devices and on 128."""

import pytest

from tests import sharded_models as models
from tests.aot.conftest import Compiler
from tests.reduction_matrix import MODES, Case, check, collectives_of

# Authors differ in what they cast, which shows where params are gathered; tests/test_distributed.py
# has all of them in all modes.
CASES = [
    pytest.param(author, *mode.values, marks=mode.marks)
    for mode in MODES
    for author in (models.AUTHORS if not mode.marks else ("linen",))
]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


@pytest.mark.parametrize(("author", "mode", "remat"), CASES)
def test_every_mode(
    compiler: Compiler, author: models.Author, mode: models.Mode, remat: bool
) -> None:
    case = Case(author, mode, remat, compiler.mesh)
    read = collectives_of(case)
    check(case, lambda lowered: read(lowered.compile()))
