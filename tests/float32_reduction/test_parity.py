"""Sums over devices against records of PyTorch: divide factors, order of cast and division."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp._mesh.device_sums import WireFormat, divide_factors
from jaxmp.sharding import gather_params, reduce_gradients

RECORDS = json.loads((pathlib.Path(__file__).parents[1] / "parity" / "reduction.json").read_text())
FACTORS, ORDERS = RECORDS["fsdp2_divide_factors"], RECORDS["ddp_compress_order"]
SUMS = RECORDS["bf16_sum_error"]
P = jax.P


def on_devices(function: Any, grads: np.ndarray) -> Any:
    """The results of all devices, each of which has one row; devices are what a vmap maps."""
    return jax.jit(jax.vmap(function, axis_name="d"))(grads)


def test_the_records_are_there() -> None:
    assert (len(FACTORS), len(ORDERS), len(SUMS)) == (57, 15, 4)


@pytest.mark.parametrize("case", FACTORS, ids=lambda c: f"{c['world']}-{c['reduce_dtype']}")
def test_divide_factors(case: dict[str, Any]) -> None:
    got = divide_factors(case["world"], case["reduce_dtype"])
    assert got == (case["pre"], case["post"])
    wire = WireFormat.of(jnp.dtype(case["reduce_dtype"]), case["world"])
    assert wire.divisor == (case["pre"] or 1)


SMALL = [c for c in FACTORS if c["world"] <= 16]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c['world']}-{c['reduce_dtype']}")
def test_a_mean_with_these_factors(case: dict[str, Any]) -> None:
    """`reduce_gradients(dtype=...)` divides, casts, adds up in that dtype and divides again."""
    world, dtype = case["world"], jnp.dtype(case["reduce_dtype"])
    grads = np.random.default_rng(world).normal(size=(world, 50)).astype(np.float32) * 100
    got = on_devices(lambda g: reduce_gradients(g, "d", dtype=dtype), grads)
    assert got.dtype == jnp.float32
    sent = (grads / np.float32(case["pre"] or 1)).astype(dtype)
    total = sent.astype(np.float64).sum(0)  # added up in some order and rounded to the dtype
    want = total / (case["post"] or world)
    tolerance = 2.0 ** -({"float16": 11, "bfloat16": 8, "float32": 21}[dtype.name])
    np.testing.assert_allclose(got[0], want, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("case", ORDERS, ids=lambda c: f"{c['grad']}-{c['world']}")
def test_division_comes_before_the_cast(case: dict[str, Any]) -> None:
    """Numbers as they travel, to the bit; DDP's hook casts first and sends infinities."""
    grad, world = jnp.float32(case["grad"]), case["world"]
    sent = WireFormat(jnp.dtype(jnp.float16), world).send(grad)
    assert sent.dtype == jnp.float16
    assert float(sent) == float(case["div_then_cast_fp16"])  # the records write "inf"
    assert np.isfinite(sent)
    # Positive control: the other order is the record's other column.
    other = grad.astype(jnp.float16) / jnp.float16(world)
    assert float(other) == float(case["cast_then_div_fp16"])
    # bfloat16 has the range, so nothing is divided; these worlds are powers of two.
    low = WireFormat.of(jnp.dtype(jnp.bfloat16), world).send(grad)
    assert float(low) == float(case["cast_then_div_bf16"]) * world


@pytest.mark.parametrize("case", ORDERS, ids=lambda c: f"{c['grad']}-{c['world']}")
@pytest.mark.parametrize("comm", ["float16", "bfloat16"])
def test_where_the_order_matters(case: dict[str, Any], comm: str) -> None:
    """All devices have this gradient, so that it is the mean: sent in 16 bits, it arrives."""
    grads = np.full((case["world"], case["world"]), case["grad"], np.float32)
    got = on_devices(lambda g: reduce_gradients(g, "d", comm_dtype=comm), grads)
    before, _ = divide_factors(case["world"], comm)
    wire = np.dtype(jnp.dtype(comm))
    sent = (grads[0] / np.float32(before or 1)).astype(wire)
    want = sent.astype(np.float64) * (before or 1)
    np.testing.assert_array_equal(got[0], want.astype(np.float32))
    if case["grad"] >= 65504:
        assert np.all(np.abs(np.asarray(got) / case["grad"] - 1) < 2.0**-8)


@pytest.mark.parametrize("case", SUMS, ids=lambda c: str(c["world"]))
def test_errors_of_sums(case: dict[str, Any]) -> None:
    """Three ways to add up bfloat16 gradients have the errors of the records, on other numbers."""
    world = case["world"]
    rng = np.random.default_rng(world)
    grads = (1 + rng.normal(size=(world, 1024))).astype(jnp.bfloat16)
    want = grads.astype(np.float64).mean(0)

    def error(got: Any) -> float:
        difference = np.asarray(got, np.float64) - want
        return float(np.linalg.norm(difference) / np.linalg.norm(want))

    wide = error(on_devices(lambda g: reduce_gradients(g, "d"), grads)[0])
    half = error(on_devices(lambda g: reduce_gradients(g, "d", comm_dtype="bf16"), grads)[0])
    ring = grads[0]
    for row in grads[1:]:
        ring = (ring.astype(np.float32) + row.astype(np.float32)).astype(jnp.bfloat16)
    assert wide < max(1e-7, 10 * case["rel_l2_err_f32"])
    assert wide * 1000 < error(ring.astype(np.float64) / world)
    np.testing.assert_allclose(half, case["rel_l2_err_f32_then_bf16"], rtol=0.35)
    sequential = error(ring.astype(np.float64) / world)
    np.testing.assert_allclose(sequential, case["rel_l2_err_bf16_sequential"], rtol=0.6)


@pytest.mark.parametrize("world", [2, 3, 6, 7, 8])
def test_a_reduce_scatter_in_float16(world: int) -> None:
    """The transpose of `gather_params` divides before the cast too: no infinity, no N-fold."""
    large = np.full((world, world, 4), 90000.0, np.float32)  # the gradient, beyond float16

    def local(w: Any, g: Any) -> Any:
        whole = gather_params(w, P("d"), "d", dtype="float32", comm_dtype="float16")
        return jnp.sum(whole * g)

    w = jnp.zeros((world, 1, 4))
    got = jax.jit(jax.vmap(jax.grad(local), axis_name="d"))(w, large)
    np.testing.assert_allclose(got, 90000.0, rtol=1e-3)
