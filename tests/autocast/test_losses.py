"""Masks, losses, literals, positions and updates: where 16 bits lose what float32 keeps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from tests.support.autocast_checks import BF16, FP16, UNIT, W, X, both, check, error, rows
from tests.support.ways import both_ways, in_16_bits, rounded, whole

pytestmark = pytest.mark.annotations

EYE = jax.device_put(np.eye(16, dtype=np.float32))


# --- softmax and losses ------------------------------------------


@both
@pytest.mark.parametrize("mask_value", ["finfo.min", "-inf", "-1e9", "-1e30"])
@pytest.mark.parametrize("shown", [False, True])
def test_masked_softmax(mask_value: str, shown: bool, policy: str) -> None:
    """A row that is masked as a whole is uniform, or NaN as in float32, and no gradient is NaN."""
    least = {"finfo.min": jnp.finfo(jnp.float32).min, "-inf": -jnp.inf}.get(mask_value)
    least = float(mask_value) if least is None else float(least)

    def f(x: Any, w: Any, mask: Any) -> Any:
        scores = jnp.where(mask, x @ w, least)
        return (jax.nn.softmax(scores) @ w, scores) if shown else jax.nn.softmax(scores) @ w

    mask = np.tril(np.ones((4, 16), bool), -1 if mask_value != "-inf" else 0)
    got, want = both_ways(f, X, W, mask, policy=policy)
    assert error(jax.tree.leaves(got)[0], jax.tree.leaves(want)[0]) <= 4 * UNIT[policy]
    if shown:
        np.testing.assert_array_equal(got[1] < -1e8, ~mask)
    fast = jaxmp.autocast(f, policy)
    grads = jax.grad(lambda w: jnp.sum(jax.tree.leaves(fast(X, w, mask))[0]))
    assert np.all(np.isfinite(jax.jit(grads)(W)))


@both
@pytest.mark.parametrize("least", [float(jnp.finfo(jnp.float32).min), -1e9, -1e4])
@pytest.mark.parametrize("shown", [False, True])
def test_additive_mask_that_is_an_argument(least: float, shown: bool, policy: str) -> None:
    """The way of BERT: `scores + (1 - mask)[:, None] * -1e9`, with a row that sees nothing."""

    def f(x: Any, w: Any, mask: Any) -> Any:
        scores = (x @ w).reshape(2, 2, 16) + ((1.0 - mask) * least)[:, None, :]
        probabilities = jax.nn.softmax(scores)
        return (probabilities, jnp.tanh(scores)) if shown else probabilities

    mask = np.repeat(np.float32([[1], [0]]), 16, axis=1)
    got, want = both_ways(f, X, W, mask, policy=policy)
    got, want = jax.tree.leaves(got)[0], jax.tree.leaves(want)[0]
    assert np.all(np.isfinite(got))
    assert error(got[0], want[0]) <= 8 * UNIT[policy]


@pytest.mark.slow
@both
def test_softmax_logsumexp_and_losses(policy: str) -> None:
    labels = jax.device_put(np.array([3, 1, 0, 15], np.int32))

    def cross_entropy(x: Any, w: Any) -> Any:
        logp = jax.nn.log_softmax(x @ w)
        return -jnp.mean(jnp.take_along_axis(logp, labels[:, None], 1))

    def binary(x: Any, w: Any) -> Any:
        z = x @ w
        return jnp.mean(jnp.maximum(z, 0) - z * 0.3 + jnp.log1p(jnp.exp(-jnp.abs(z))))

    x = whole(X)
    for loss in (cross_entropy, binary):
        check(loss, x, EYE, policy=policy, dots={"low": 1}, roundings=1, grad_roundings=8)


@both
@pytest.mark.parametrize("shown", [False, True])
def test_binary_cross_entropy_of_probabilities(shown: bool, policy: str) -> None:
    """log(1 - p) needs more digits of p than 16 bits have, also when p is returned as well."""
    z = rounded(np.linspace(-9.0, 9.0, 16).reshape(1, 16), policy)

    def f(z: Any, w: Any) -> Any:
        p = jax.nn.sigmoid(z @ w)
        loss = -jnp.mean(0.3 * jnp.log(p) + 0.7 * jnp.log(1 - p))
        return (loss, p) if shown else loss

    got, want = (jax.tree.leaves(out)[0] for out in both_ways(f, z, EYE, policy=policy))
    assert error(got, want) < UNIT[policy]
    p = in_16_bits(lambda z: jax.nn.sigmoid(z), BF16, z)
    assert (p == 1).any()  # and its loss infinite


@both
def test_clipped_probabilities(policy: str) -> None:
    def f(z: Any, w: Any) -> Any:
        p = jnp.clip(jax.nn.sigmoid(z @ w), 1e-6, 1 - 1e-6)
        return -jnp.log(1 - p).mean(), -jnp.log(p).mean(), (p > 0.5).astype(jnp.float32).mean()

    z = rounded(np.linspace(-30.0, 30.0, 16).reshape(1, 16), policy)
    assert error(*both_ways(f, z, EYE, policy=policy)) < UNIT[policy]


# --- literals, positions, updates --------------------------------


@both
@pytest.mark.parametrize("eps", [1e-5, 1e-8, 1e-12])
def test_small_literals(eps: float, policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        return h / (jnp.abs(h) + eps), jnp.maximum(h, eps) ** -0.5, jnp.log(jnp.abs(h) + eps)

    x = np.array(X)
    x[0] = 0.0  # 0 / 0 where the literal is lost
    check(f, x, EYE, policy=policy, argnums=(), roundings=4)
    if policy == FP16 and eps <= 1e-8:
        assert not np.all(np.isfinite(in_16_bits(lambda x: x / (jnp.abs(x) + eps), policy, x)))


@both
@pytest.mark.parametrize("big", [1e4, 1e5, 1e38])
def test_big_literals(big: float, policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        return jnp.where(h > 0, h, -big), jnp.clip(h, -big, big), jnp.minimum(h, big)

    check(f, X, W, policy=policy, argnums=())


@both
def test_literals_times_activations_do_not_overflow(policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.tanh((x @ w) * 1e4 / 1e4)

    check(f, whole(X, 8), EYE, policy=policy)


@both
def test_squares_and_powers(policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        return jnp.square(h).mean(), (h**2).sum(), (h**4).mean(), jnp.sqrt((h * h).sum(-1))

    check(f, whole(X, 200), EYE, policy=policy, roundings=1, argnums=())
    check(f, whole(X, 20), EYE, policy=policy, roundings=1, grad_roundings=8)


@both
def test_rotary_phases(policy: str) -> None:
    positions = jax.device_put(np.arange(16, dtype=np.int32) * 700)

    def f(x: Any, w: Any) -> Any:
        q = x @ w
        inverse = 1.0 / (10000.0 ** (jnp.arange(0, 8, dtype=jnp.float32) / 8))
        angles = positions[:, None].astype(jnp.float32) * inverse[None]
        again = jnp.einsum("i,j->ij", positions.astype(jnp.float32), inverse)
        a, b = jnp.split(q, 2, -1)
        sin, cos = jnp.sin(angles), jnp.cos(again)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    x = rows(16, 16)
    check(f, x, W, policy=policy, dots=None, roundings=4)
    assert np.abs(np.sin(rounded(positions, policy)) - np.sin(positions)).max() > 0.1


@both
def test_moving_averages_and_moments(policy: str) -> None:
    def f(mean: Any, var: Any, x: Any, w: Any) -> Any:
        h = x @ w
        mean = 0.999 * mean + 0.001 * h.mean(0)
        return mean, 0.999 * var + 0.001 * h.var(0), 0.999 * w + 0.001 * (x.T @ h)

    ones = np.ones(16, np.float32)
    results = both_ways(f, ones, ones, X, W, policy=policy)
    for a, b, start in zip(*results, (ones, ones, np.asarray(W)), strict=True):
        assert error(a - start, b - start) < 4 * UNIT[policy]


@both
def test_cancellation_of_large_activations(policy: str) -> None:
    """x - mean(x), and the difference of a maximum: what normalization is made of."""
    x = whole(rows(8, 16)) + 200.0

    def f(x: Any, w: Any) -> Any:
        h = x @ w
        centred = h - h.mean(-1, keepdims=True)
        return jnp.exp(h - h.max(-1, keepdims=True)), jnp.sum(centred * centred, -1)

    check(f, x, EYE, policy=policy, roundings=1, grad_roundings=8)
