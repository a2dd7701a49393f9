"""The collectives of gradients as TPU and GPU compilers make them, on eight devices and on 128."""

import functools
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import jaxmp
from jaxmp.sharding import FSDP
from tests.aot.conftest import Compiler
from tests.support import sharded_models as models
from tests.support.collective_programs import LAST, LAYER, LAYERS, arguments, loss
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
@pytest.mark.parametrize(("author", "mode", "remat"), cases(1, at_most=3))
def test_every_mode_on_gpus(
    gpu: Compiler, author: models.Author, mode: models.Mode, remat: bool
) -> None:
    verify(gpu, author, mode, remat)


@pytest.mark.parametrize(("author", "mode", "remat"), cases(2, at_most=3))
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


@pytest.mark.parametrize(("author", "mode", "remat"), cases(4, at_most=1))
def test_explicit_axes_on_tpus(
    tpu: Compiler, author: models.Author, mode: models.Mode, remat: bool
) -> None:
    verify_explicit(tpu, author, mode, remat)


@pytest.mark.parametrize("remat", [True, False])
def test_replicas_sum_parts(compiler: Compiler, remat: bool) -> None:
    """Gradients are scattered within a replica; plain JAX sums them whole over all devices."""
    mesh = compiler.mesh((2, 4), ("replica", "data"))
    params, x = arguments(mesh, (None, "data"), (None, "data"), ("replica", "data"))
    placed = jax.tree.map(lambda p: p.sharding, params)
    fsdp = FSDP(shardings=placed, axis="data")

    def summed(fun: Any) -> dict[tuple[str, ...], int]:
        lowered = compiler.lower(fun, params, x, out_shardings=(None, placed))
        found: dict[Any, int] = {}
        for row in jaxmp.sharding.collectives(lowered.compile(OPTIONS[compiler.platform])):
            if row.reducer == "add" and row.elements > 128:
                found[row.axes] = found.get(row.axes, 0) + row.elements * row.runs
        return found

    def gathered(w: Any) -> Any:
        for spec in (P(None, "data"), P()):
            w = jax.lax.with_sharding_constraint(w, jax.sharding.NamedSharding(mesh, spec))
        return w

    def wrapped(**options: Any) -> Any:
        fun = functools.partial(loss, **options)
        return jax.checkpoint(fun) if remat else fun

    ours = summed(jaxmp.value_and_grad(wrapped(), reduce_dtype="float32", fsdp=fsdp))
    plain = summed(jax.value_and_grad(wrapped(gather=gathered)))
    whole = LAYERS * LAYER + LAST
    assert ours == {("data",): whole, ("replica",): whole // 4}
    assert plain == {("replica", "data"): whole}
