"""What collectives carry in compiled TPU and GPU programs, counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from tests.aot.conftest import GPU, Compiler
from tests.support.collective_programs import (
    BF16,
    F32,
    LAST,
    LAYER,
    LAYERS,
    WIDTH,
    arguments,
    array,
    carried,
    every_kind,
    every_kind_carries,
    fully_sharded,
    size,
    step,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

SUMMED = ("all-reduce", "reduce-scatter")
GRADIENTS = LAYERS * LAYER + LAST


@pytest.fixture(params=[GPU, "tpu", "pod"])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """One of 8 GPUs, 8 TPUs or 128 TPUs."""
    return request.getfixturevalue(request.param)


def mesh_of(compiler: Compiler, model: int = 1) -> Any:
    count = len(compiler.devices)
    if model == 1:
        return compiler.mesh((count,), ("data",))
    return compiler.mesh((count // model, model), ("data", "model"))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_data_parallel(compiler: Compiler, dtype: Any) -> None:
    program = compiler.lower(step(dtype), *arguments(mesh_of(compiler))).compile()
    report = jaxmp.sharding.collectives(program)
    assert report.origin == "compiled program"
    assert report.mesh_axes == (("data", len(compiler.devices)),)
    sums = report.select(SUMMED, reducer="add")
    assert sums.bytes() == report.bytes() == size(GRADIENTS, dtype=dtype) + 4  # and the loss
    assert sums.bytes(dtype=dtype) == size(GRADIENTS, dtype=dtype) + (4 if dtype == F32 else 0)
    in_scan = [row for row in sums if row.size == size(LAYER, dtype=dtype)]
    assert [row.runs for row in in_scan] == [LAYERS]
    assert {row.direction for row in sums if row.elements > row.arrays} == {"backward"}
    assert all(row.line.startswith("collective_programs.py:") for row in report)
    if dtype == F32:
        jaxmp.assert_reduced_in(program, F32, axis="data")
    else:
        with pytest.raises(jaxmp.AuditError, match="should carry float32 or wider, these do not"):
            jaxmp.assert_reduced_in(program, F32, axis="data")


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_fully_sharded(compiler: Compiler, dtype: Any) -> None:
    run, args = fully_sharded(mesh_of(compiler), dtype)
    report = jaxmp.sharding.collectives(compiler.lower(run, *args).compile())
    # TPUs multiply float32 in bfloat16 unless they are told not to, and gather it so, too.
    gathered = BF16 if compiler.platform == "tpu" else dtype
    assert report.bytes("all-gather", gathered, "data") == size(GRADIENTS, dtype=gathered)
    assert report.bytes("all-gather") == size(GRADIENTS, dtype=gathered)
    sums = report.bytes(SUMMED, dtype, "data", "add") - (4 if dtype == F32 else 0)  # the loss
    assert sums == size(GRADIENTS, dtype=dtype)


def test_fully_sharded_and_tensor_parallel(compiler: Compiler) -> None:
    mesh = mesh_of(compiler, model=2)
    args = arguments(mesh, ("data", "model"), ("data", "model"))
    program = compiler.lower(step(), *args).compile()
    report = jaxmp.sharding.collectives(program)
    # Over `data` go the gradients of half of each weight, over `model` those of activations.
    assert report.bytes(SUMMED, BF16, "data") == size(GRADIENTS) // 2
    activations = report.select(SUMMED, BF16, "model")
    assert {row.size for row in activations} == {size(16, WIDTH)}
    gathered = report.select("all-gather", BF16, "data")
    assert {row.size for row in gathered} <= {size(LAYER) // 2, size(LAST) // 2, size(LAST)}
    assert report.bytes(dtype=F32) == 4
    with pytest.raises(jaxmp.AuditError) as error:
        jaxmp.assert_reduced_in(program.as_text(), F32, mesh=mesh, axis="data")
    assert "over model" not in str(error.value)


def test_every_kind(compiler: Compiler) -> None:
    mesh = mesh_of(compiler, model=2)
    run, args = every_kind(mesh)
    report = jaxmp.sharding.collectives(compiler.lower(run, *args).compile())
    assert carried(report) == every_kind_carries(mesh)


def test_functions_are_compiled_for_where_their_arguments_are(tpu: Compiler) -> None:
    """Though JAX itself runs on a CPU here."""
    args = arguments(tpu.mesh((8,), ("data",)))
    from_function = jaxmp.sharding.collectives(step(), *args)
    assert from_function.origin == "compiled program"
    assert carried(from_function) == carried(jaxmp.sharding.collectives(tpu.lower(step(), *args)))
    assert from_function.bytes(dtype=BF16) == size(GRADIENTS)


def test_a_lookup_in_a_split_table_rounds_nothing(compiler: Compiler) -> None:
    mesh = mesh_of(compiler)

    def run(table: Any, tokens: Any) -> Any:
        return jnp.sum(jnp.tanh(table.astype(BF16)[tokens]).astype(F32))

    tokens = array(mesh, (8 * mesh.size, 64), "data", dtype=jnp.int32)
    table = array(mesh, (2048 * mesh.size, 512), "data")
    report = jaxmp.sharding.collectives(
        compiler.lower(jax.value_and_grad(run), table, tokens).compile()
    )
    lookups = report.select(SUMMED, BF16, reducer="select")
    assert [row.elements for row in lookups] == [8 * mesh.size * 64 * 512]
    gradients = report.select(SUMMED, BF16, reducer="add")
    assert [row.elements for row in gradients] == [2048 * mesh.size * 512]
