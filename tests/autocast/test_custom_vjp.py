"""`enter_custom_vjp=True` on loops with gradients of their own, as Equinox and diffrax make them.

Such a loop asks which of its arguments are differentiated, refuses some, and gives no gradient for
others; its backward pass is a loop of its own, over what the forward pass wrote down.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jaxmp
from tests.support.autocast_checks import BF16, compiled, rows, weights
from tests.support.dots import count_dots

X, W = rows(4, 16), weights(16, 16)
TURNS = 5


def turn(y: Any, w: Any) -> Any:
    return jnp.tanh(y @ w)


@jax.custom_vjp
def loop(y: Any, w: Any, limit: Any) -> Any:
    """Turns a value, at most TURNS times, while it is smaller than a limit; and counts."""

    def goes_on(carry: Any) -> Any:
        return (carry[1] < TURNS) & (jnp.max(carry[0]) < limit)

    return lax.while_loop(goes_on, lambda carry: (turn(carry[0], w), carry[1] + 1), (y, 0))


def _forward(y: Any, w: Any, limit: Any) -> Any:
    if limit.perturbed:
        raise ValueError("the limit has no gradient")

    def body(carry: Any) -> Any:
        y, count, kept = carry
        return turn(y, w.value), count + 1, kept.at[count].set(y)

    kept = jnp.zeros((TURNS, *y.value.shape), y.value.dtype)
    y, count, kept = lax.while_loop(
        lambda carry: (carry[1] < TURNS) & (jnp.max(carry[0]) < limit.value),
        body,
        (y.value, 0, kept),
    )
    return (y, count), (kept, count, w.value)


def _backward(residuals: Any, cotangents: Any) -> Any:
    kept, count, w = residuals
    dot, of_count = cotangents
    assert isinstance(of_count, SymbolicZero) or of_count.dtype == jax.dtypes.float0

    def body(carry: Any) -> Any:
        i, dot, total = carry
        _, pull = jax.vjp(turn, kept[i], w)
        dot, of_w = pull(dot)
        return i - 1, dot, total + of_w

    _, dot, total = lax.while_loop(lambda c: c[0] >= 0, body, (count - 1, dot, jnp.zeros_like(w)))
    return dot, total, None


loop.defvjp(_forward, _backward, symbolic_zeros=True)


def loss(w: Any, x: Any, limit: Any) -> Any:
    y, count = loop(x, w, limit)
    return jnp.mean(y**2) * count


def unrolled(w: Any, x: Any) -> Any:
    """The same in plain JAX, whose gradient is the reference."""
    for _ in range(TURNS):
        x = turn(x, w)
    return jnp.mean(x**2) * TURNS


def off(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


WAYS: dict[str, Callable[..., Any]] = {
    "as it is": loss,
    "jit": jax.jit(loss),
    "checkpoint": jax.checkpoint(loss),
    "scan": lambda w, x, limit: lax.scan(lambda c, _: (c + loss(w, x, limit), None), 0.0, length=1)[
        0
    ],
    "cond": lambda w, x, limit: lax.cond(limit > 0, loss, lambda *args: 0.0, w, x, limit),
}


@pytest.mark.parametrize("name", WAYS)
def test_loops_that_refuse_gradients_for_some_arguments(name: str) -> None:
    """It was an AssertionError without a word: all floats were differentiated."""
    fast = jaxmp.autocast(WAYS[name], BF16, enter_custom_vjp=True)
    args = (W, X, jnp.float32(10))
    got = compiled(jax.grad(fast))(*args)
    want = compiled(jax.grad(unrolled))(W, X)
    assert off(got, want) < 0.02
    # Floats end the loop of the forward pass, which stays float32. The backward pass counts.
    assert count_dots(jax.grad(fast), *args).keys() == {"bfloat16", "float32"}
    not_entered = jaxmp.autocast(WAYS[name], BF16)
    with pytest.warns(UserWarning, match="autocast leaves 100 % of the FLOPs"):
        assert count_dots(jax.grad(not_entered), *args).keys() == {"float32"}  # control


def test_which_arguments_are_differentiated() -> None:
    """Any of them, all, and one by one: each gets the gradient that is its own."""
    fast = jaxmp.autocast(loss, BF16, enter_custom_vjp=True)
    limit = jnp.float32(10)
    both = compiled(jax.grad(fast, (0, 1)))(W, X, limit)
    want = compiled(jax.grad(unrolled, (0, 1)))(W, X)
    for i in range(2):
        alone = compiled(jax.grad(fast, i))(W, X, limit)
        assert off(alone, want[i]) < 0.02
        assert off(both[i], want[i]) < 0.02
    np.testing.assert_allclose(fast(W, X, limit), unrolled(W, X), rtol=0.02)
    mapped = compiled(jax.vmap(jax.grad(fast), (0, None, None)))(jnp.stack([W, W / 2]), X, limit)
    assert off(mapped[0], want[0]) < 0.02


def test_a_refusal_comes_through() -> None:
    """What a loop says of a gradient that it has not got, it says under autocast."""
    fast = jaxmp.autocast(loss, BF16, enter_custom_vjp=True)
    with pytest.raises(ValueError, match="the limit has no gradient"):
        jax.grad(fast, 2)(W, X, jnp.float32(10))
