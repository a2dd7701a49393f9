"""Gradients of weights that are computed from params, over eight devices, against float64."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from jaxmp.sharding import FSDP
from tests.support.computed_weights import (
    KINDS,
    RANK,
    ROWS,
    TURNS,
    WIDTH,
    batch,
    by_hand,
    in_float32,
)
from tests.support.reduction_checks import split_over


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_merged_weight_that_is_used_in_many_turns(axis_type: Any) -> None:
    """A sum in bfloat16 stops at 256 of equal terms; here it is of 400 turns and 16 rows."""
    params = {
        "w": np.zeros((WIDTH, WIDTH), np.float32),
        "a": np.zeros((WIDTH, RANK), np.float32),
        "b": np.full((RANK, WIDTH), 1 / RANK, np.float32),
    }
    batch = {"x": np.ones((16, WIDTH), np.float32)}
    mesh = jax.make_mesh((8,), ("data",), (axis_type,))
    args = split_over(params, mesh=mesh), split_over(batch, "data", mesh=mesh)
    # Of a product of zeros the sine has slope 1: d/dw is the sum of x over rows and turns, and
    # d/da is that times b.T.
    scales = np.linspace(0.5, 1, TURNS, dtype=np.float32).astype(jnp.bfloat16).astype(np.float64)
    expected = scales.sum() * 16 * WIDTH / RANK
    for loss in (by_hand("one weight in all turns"), autocast("one weight in all turns")):
        ours = jax.jit(jaxmp.grad(loss, reduce_dtype="float32"))(*args)["a"]
        np.testing.assert_allclose(ours, expected, rtol=2**-8)
    # On one device: of explicit axes jax 0.12 asks how to shard the gradient.
    plain = jax.jit(jax.grad(by_hand("one weight in all turns")))(params, batch)["a"]
    assert abs(float(plain[0, 0]) / expected - 1) > 0.05


def autocast(kind: str) -> Any:
    return jaxmp.autocast(in_float32(kind), "mixed_bfloat16")


def test_a_table_of_factors_that_is_read_many_times() -> None:
    params = {"a": np.ones((WIDTH, RANK), np.float32), "b": np.zeros((RANK, WIDTH), np.float32)}
    batch = {"x": np.ones((8 * ROWS, WIDTH), np.float32), "ids": np.zeros(8 * ROWS, np.int32)}
    args = split_over(params), split_over(batch, "data")
    for loss in (by_hand("table of factors"), autocast("table of factors")):
        ours = jax.jit(jaxmp.grad(loss, reduce_dtype="float32"))(*args)["b"]
        np.testing.assert_allclose(ours, 8 * ROWS)
    plain = jax.jit(jax.grad(by_hand("table of factors")))(*args)["b"]
    assert float(plain[0, 0]) == 8 * 256


@pytest.mark.parametrize("kind", ["lora", "all in float32", "sum before a product"])
def test_nothing_is_rounded_on_other_devices(kind: str) -> None:
    """Products of float32 numbers are exact on CPUs, and stay so."""
    args = KINDS[kind].params(), batch()
    ours = jax.jit(jaxmp.grad(in_float32(kind), reduce_dtype="float32"))(*args)
    plain = jax.jit(jax.grad(in_float32(kind)))(*args)
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def test_bits_are_not_rounded() -> None:
    """A sum that is read as its two halves of 16 bits keeps the lower one."""

    def loss(w: Any, x: Any) -> Any:
        halves = jax.lax.bitcast_convert_type(jnp.sum(x * 1.001, 0), jnp.bfloat16)
        return jnp.sum(halves[:, 0].astype(jnp.float32)) + jnp.sum(w)

    x = np.linspace(0.1, 1, 64, dtype=np.float32).reshape(16, 4)
    w = np.ones(3, np.float32)
    value, _ = jax.jit(jaxmp.value_and_grad(loss, reduce_dtype="float32"))(w, x)
    assert value == jax.jit(loss)(w, x)


def test_programs_are_freed() -> None:
    """Jitted functions are kept as long as their callers keep them."""
    from jaxmp._float32_reduction.control_flow import _JITTED

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.jit(lambda w, x: jnp.tanh(x @ w))(w, x))

    jax.make_jaxpr(jaxmp.grad(loss, reduce_dtype="float32"))(jnp.ones((4, 4)), jnp.ones((8, 4)))
    before = len(_JITTED)
    assert before > 0
    jax.clear_caches()
    gc.collect()
    assert len(_JITTED) < before


def test_functions_of_weights_alone_are_gathered_in_16_bits() -> None:
    """A function with its own derivative runs on the parts of a param that devices store."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, P("data"))
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=split)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=split)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ jax.nn.relu(w).astype(jnp.bfloat16)).astype(jnp.float32))

    gradient = jaxmp.grad(loss, fsdp=FSDP(shardings=split, axis="data"))
    report = jaxmp.sharding.collectives(jax.jit(gradient, out_shardings=split), w, x)
    assert {row.dtype for row in report if row.kind == "all-gather"} == {"bfloat16"}
