"""Autocast and jax.checkpoint, with all its policies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from tests.support.autocast_checks import BF16, BOTH, UNIT, W, X, check, error
from tests.support.dots import count_dots, equations

both = pytest.mark.parametrize("policy", BOTH)


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@both
def test_checkpoint(policy: str) -> None:
    block = jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w) * 0.3 + 1e-3)
    check(lambda x, w: block(block(x, w), w), X, W, policy=policy, dots={"low": 2}, roundings=12)


def kept(fun: Any, *args: Any) -> list[str]:
    """What is kept for the backward pass: dtype and shape."""
    closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]))(*args)
    inputs = set(map(id, closed.jaxpr.invars))
    return sorted(v.aval.str_short() for v in closed.jaxpr.outvars if id(v) not in inputs)


POLICIES = jax.checkpoint_policies
NAMED = POLICIES.save_only_these_names("h")


@pytest.mark.parametrize(
    "remat_policy",
    [None, POLICIES.dots_saveable, NAMED, POLICIES.everything_saveable],
)
def test_checkpoint_policies(remat_policy: Any) -> None:
    @functools.partial(jax.checkpoint, policy=remat_policy)
    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(checkpoint_name(jax.nn.sigmoid(x @ w) * 0.5, "h")) @ w

    fast = jaxmp.autocast(block, BF16)
    check(block, X, W, dots={"low": 2})
    # As many activations are kept as without autocast, and they are 16-bit ones.
    plain = [each for each in kept(block, X, W) if "4,16" in each]
    low = [each for each in kept(fast, X, W) if "bfloat16[4,16]" in each]
    if remat_policy is NAMED or remat_policy is POLICIES.dots_saveable:
        assert plain == ["float32[4,16]"] * len(plain)
        assert len(low) == len(plain) > 0
    if remat_policy is None:
        assert not plain
        assert not low


def test_checkpoint_recomputes_under_autocast_of_grad() -> None:
    block = jax.checkpoint(layer, policy=POLICIES.nothing_saveable)
    grad = jax.grad(lambda w: jnp.sum(block(block(X, w), w) ** 2))
    fast = jaxmp.autocast(grad, BF16)
    assert count_dots(fast, W) == {"bfloat16": sum(count_dots(grad, W).values())}
    assert error(fast(W), grad(W)) < 24 * UNIT[BF16]
    names = [e.primitive.name for e in equations(jax.make_jaxpr(fast)(W))]
    assert "remat2" in names or "checkpoint" in names


def test_checkpoint_inside_scan_with_captured_arrays() -> None:
    table = np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 16)
    scale = jnp.linspace(1, 2, 16).reshape(1, 16)

    def f(x: Any, ws: Any) -> Any:
        @jax.checkpoint
        def body(c: Any, w: Any) -> Any:
            h = layer(c, w) * jnp.asarray(table).repeat(4, 0)
            return jnp.where(h > 0, h, 0.01 * h) + jnp.tile(scale, (4, 1)), None

        return lax.scan(body, x, ws)[0]

    check(f, X, jnp.stack([W] * 2), dots={"low": 1}, roundings=16)


@both
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_jitted_helper_that_holds_an_array(policy: str, kind: Any) -> None:
    table = kind(np.linspace(1, 2, 16, dtype=np.float32).reshape(1, 16))

    @jax.jit
    def scaled(h: Any) -> Any:
        return h * table

    block = jax.checkpoint(lambda x, w: jnp.tanh(scaled(x @ w)))
    check(lambda x, w: block(block(x, w), w), X, W, policy=policy, dots={"low": 2}, roundings=12)

    def stacked(x: Any, ws: Any) -> Any:
        return lax.scan(lambda h, w: (block(h, w), None), x, ws)[0]

    check(stacked, X, jnp.stack([W] * 2), policy=policy, roundings=16)
