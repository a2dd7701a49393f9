"""The collectives of gradients as TPU and GPU compilers make them, on eight devices and on 128."""

import pytest

from tests.aot.conftest import Compiler
from tests.support import sharded_models as models
from tests.support.reduction_matrix import Case, cases, check, collectives_of

# Kernels are not looked at: how a GPU multiplies, and how well its code is optimized, takes half of
# the time, and comes after what is.
OPTIONS: dict[str, dict[str, bool]] = {
    "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_llvm_disable_expensive_passes": True},
    "tpu": {},
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


def verify(compiler: Compiler, author: models.Author, mode: models.Mode, remat: bool) -> None:
    case = Case(author, mode, remat, compiler.mesh)
    read = collectives_of(case)
    check(case, lambda lowered: read(lowered.compile(OPTIONS[compiler.platform])))


@pytest.mark.jax
@pytest.mark.parametrize(("author", "mode", "remat"), cases(1))
def test_every_mode_on_gpus(
    gpu: Compiler, author: models.Author, mode: models.Mode, remat: bool
) -> None:
    verify(gpu, author, mode, remat)


@pytest.mark.parametrize(("author", "mode", "remat"), cases(2))
def test_every_mode_on_tpus(
    tpu: Compiler, author: models.Author, mode: models.Mode, remat: bool
) -> None:
    verify(tpu, author, mode, remat)
