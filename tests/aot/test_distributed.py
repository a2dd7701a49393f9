"""The collectives of gradients as TPU and GPU compilers make them, on eight devices and on 128."""

import pytest
from jax.sharding import AxisType, Mesh

from tests.aot.conftest import Compiler
from tests.support import sharded_models as models
from tests.support.reduction_matrix import Case, cases, check, check_alike, collectives_of

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


def verify_explicit(
    compiler: Compiler, author: models.Author, mode: models.Mode, remat: bool
) -> None:
    def explicit(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
        devices = compiler.mesh(shape, names).devices
        return Mesh(devices, names, axis_types=(AxisType.Explicit,) * len(names))

    case = Case(author, mode, remat, explicit)
    read = collectives_of(case)
    check_alike(
        case,
        Case(author, mode, remat, compiler.mesh),
        lambda lowered: read(lowered.compile(OPTIONS[compiler.platform])),
    )


@pytest.mark.jax
@pytest.mark.parametrize(("author", "mode", "remat"), cases(3, at_most=2))
def test_explicit_axes_on_gpus(
    gpu: Compiler, author: models.Author, mode: models.Mode, remat: bool
) -> None:
    """A mesh as JAX makes it has the same collectives as one of automatic axes."""
    verify_explicit(gpu, author, mode, remat)


@pytest.mark.parametrize(("author", "mode", "remat"), cases(4, at_most=2))
def test_explicit_axes_on_tpus(
    tpu: Compiler, author: models.Author, mode: models.Mode, remat: bool
) -> None:
    verify_explicit(tpu, author, mode, remat)
