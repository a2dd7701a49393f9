"""Numbers of the program among its results: flags as of a BatchNorm's state, counts, constants."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxmp
from tests.support.autocast_checks import BF16, FP16, W, X, compiled


def numbers() -> tuple[Any, ...]:
    """One number of each sort of dtype, and arrays."""
    return (
        jnp.array(False),
        jnp.array(3),
        jnp.array(2.5),
        jnp.float32(1),
        jnp.bfloat16(2),
        np.uint8(3),
        jnp.array(1j),
        jnp.array([True, False]),
    )


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return x * 2, jnp.array(True), jnp.float32(1)


@with_jvp.defjvp
def _with_jvp_rule(primals: Any, tangents: Any) -> Any:
    return with_jvp(*primals), (tangents[0] * 2, np.zeros((), jax.dtypes.float0), jnp.float32(0))


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return x * 2, jnp.array(True), jnp.float32(1)


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, grads: (grads[0] * 2,))


def in_shard_map(x: Any, w: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec()
    return jax.shard_map(
        lambda x, w: (x @ w, *numbers()), mesh=mesh, in_specs=spec, out_specs=spec
    )(x, w)


def in_while(x: Any, w: Any) -> Any:
    def turn(carry: Any) -> Any:
        return carry[0] + 1, jnp.array(False), carry[2] @ w, jnp.float32(1)

    begin = (0, jnp.array(True), x, jnp.float32(0))
    return lax.while_loop(lambda carry: carry[0] < 3, turn, begin)


def in_scan(x: Any, w: Any) -> Any:
    def turn(carry: Any, row: Any) -> Any:
        return (jnp.array(False), 5, jnp.bfloat16(1)), (row @ w, *numbers())

    return lax.scan(turn, (jnp.array(True), 3, jnp.bfloat16(0)), x)


CONSTRUCTS: dict[str, Callable[..., Any]] = {
    "function": lambda x, w: (x @ w, *numbers()),
    "jit": lambda x, w: jax.jit(lambda: (x @ w, *numbers()))(),
    "jit of numbers alone": lambda x, w: (x @ w, jax.jit(numbers)()),
    "jit of a Python bool": lambda x, w: (x @ w, jax.jit(lambda: False)()),
    "vmap": lambda x, w: jax.vmap(lambda row: (row @ w, *numbers()))(x),
    "cond": lambda x, w: lax.cond(
        x[0, 0] > 0, lambda: (x @ w, True, 1.5), lambda: (x @ w, False, 2.5)
    ),
    "scan": in_scan,
    "while": in_while,
    "checkpoint": lambda x, w: jax.checkpoint(lambda w: (x @ w, *numbers()))(w),
    "custom_jvp": lambda x, w: with_jvp(x @ w),
    "custom_vjp": lambda x, w: with_vjp(x @ w),
    "shard_map": in_shard_map,
    "full_precision": lambda x, w: (x @ w, jaxmp.full_precision(numbers)()),
    "stop_gradient": lambda x, w: (x @ w, lax.stop_gradient(False), lax.stop_gradient(2.0)),
    "a cast": lambda x, w: (x @ w, jax.jit(lambda flag: jnp.asarray(flag, jnp.float32))(False)),
}


@pytest.mark.programs(70, reason="what calls outside of a jit return")
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_numbers_are_results_like_any_other(name: str) -> None:
    """A model with BatchNorm returns flags; each is what it is without autocast."""
    fun = CONSTRUCTS[name]
    cast = jaxmp.autocast(fun, BF16, enter_custom_vjp=name == "custom_vjp")
    want = compiled(fun)(X, W)
    for got in (cast(X, W), compiled(cast)(X, W)):
        _check_same(got, want)
    # Without a trace around it, an operation may hand a Python bool through as it is.
    mapped = jax.vmap(jaxmp.autocast(fun, FP16), (0, None))(X[None], W)
    _check_same(jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[0]), mapped), want)


def _check_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, other in zip(
        map(jnp.asarray, jax.tree.leaves(got)), jax.tree.leaves(want), strict=True
    ):
        assert mine.dtype == other.dtype
        wide = np.asarray(other).astype(np.complex128)
        np.testing.assert_allclose(
            np.asarray(mine).astype(np.complex128), wide, rtol=0.02, atol=0.02
        )


def test_weakly_typed_numbers_stay_so() -> None:
    """What is added to such a number later has its own dtype, as without autocast."""
    for made in (jnp.array(3), jnp.array(2.5), jnp.float32(1)):
        got = jaxmp.autocast(lambda x, w, made=made: (x @ w, jax.jit(lambda: made)()), BF16)(X, W)
        assert got[1].weak_type == made.weak_type


@pytest.mark.parametrize("output", ["policy", "computed"])
def test_numbers_in_other_outputs(output: Any) -> None:
    fun = CONSTRUCTS["function"]
    got = jaxmp.autocast(fun, BF16, output=output)(X, W)
    assert got[0].dtype == (jnp.float32 if output == "policy" else jnp.bfloat16)
    assert got[1].dtype == jnp.bool_
    assert got[3] == 2.5
