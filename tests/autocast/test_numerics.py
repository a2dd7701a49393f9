"""Autocast keeps in float32 what 16 bits would spoil; each test shows that they would."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, FP16, UNIT, W, X, both, check, error, rows, weights
from tests.support.ways import both_ways, in_16_bits, whole

EYE = jax.device_put(np.eye(16, dtype=np.float32))
# Scales and biases.
AFFINE = np.linspace(0.5, 1.5, 16, dtype=np.float32), np.linspace(-1, 1, 16, dtype=np.float32)


def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(mean)  # Flax's fast variance
    normal = (x - mean) * lax.rsqrt(jnp.maximum(var, 0.0) + 1e-6)
    return normal * scale[None] + bias[None]


# --- norms -------------------------------------------------------


@both
@pytest.mark.parametrize("mean", [0.0, 3.0, 10.0])
def test_layer_norm_with_a_big_mean(mean: float, policy: str) -> None:
    # Integers, so that the product is exact: what is left is the error of the norm.
    args = (whole(rows(8, 16)) + np.float32(4 * mean), EYE, *AFFINE)

    def f(x: Any, w: Any, g: Any, b: Any) -> Any:
        return layer_norm(x @ w, g, b)

    got, want = both_ways(f, *args, policy=policy)
    assert error(got, want) <= 2 * UNIT[policy]
    if mean == 10.0:
        assert error(in_16_bits(f, policy, *args), want) > 8 * UNIT[policy]


@both
def test_gradient_of_layer_norm_with_a_big_mean(policy: str) -> None:
    def f(x: Any, w: Any, g: Any, b: Any) -> Any:
        return jnp.sum(layer_norm(x @ w, g, b) * jnp.cos(jnp.arange(16.0))[None])

    args = (whole(rows(8, 16)) + 40.0, EYE, *AFFINE)
    grads = both_ways(f, *args, policy=policy, of=lambda f: jax.grad(f, (0, 2, 3)))
    assert error(*grads) <= 4 * UNIT[policy]


@both
def test_rms_group_batch_and_weight_norm(policy: str) -> None:
    def rms(x: Any, w: Any, g: Any) -> Any:
        h = x @ w
        return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * g[None]

    def group(x: Any, w: Any, g: Any) -> Any:
        h = (x @ w).reshape(-1, 4, 4)
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
        return h.reshape(-1, 16) * g[None]

    def batch(x: Any, w: Any, g: Any) -> Any:
        h = x @ w
        return (h - h.mean(0, keepdims=True)) / (h.std(0, keepdims=True) + 1e-5) * g[None]

    def weight(x: Any, w: Any, g: Any) -> Any:
        return x @ (g[None] * w / jnp.linalg.norm(w, axis=0, keepdims=True))

    for norm in (rms, group, batch, weight):
        args = (whole(rows(8, 16), 8) * 4, np.add(EYE, np.roll(EYE, 1, 0)), AFFINE[0])
        check(norm, *args, policy=policy, dots={"low": 1}, roundings=4, grad_roundings=16)


@both
def test_l2_normalization_and_cosine_similarity(policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        h = h / jnp.linalg.norm(h, axis=-1, keepdims=True)
        return h @ h.T

    x = X * (300 if policy == FP16 else 1e15)  # squares overflow float16
    check(f, x, W, policy=policy, dots={"low": 2}, grad_roundings=32)
    if policy == FP16:
        assert not np.all(np.isfinite(in_16_bits(lambda x: jnp.sum(x * x, -1), policy, x)))


@both
def test_variance_and_standard_deviation(policy: str) -> None:
    x = whole(rows(64, 16)) + 100.0
    for of in (jnp.var, jnp.std):
        check(lambda x, of=of: of(x @ EYE, axis=0), x, policy=policy, roundings=1)
    if policy == BF16:
        naive = in_16_bits(lambda h: jnp.mean(h * h, 0) - jnp.mean(h, 0) ** 2, policy, x)
        assert error(naive, np.var(x, 0)) > 1


# --- sums --------------------------------------------------------


@both
@pytest.mark.parametrize("count", [300, 1000, 5000])
def test_sums_of_ones(count: int, policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        return h.sum(0), h.mean(0) * count, jnp.einsum("ij->j", h), jnp.cumsum(h, 0)[-1]

    x = np.full((count, 2), 0.5, np.float32)
    for out in jax.jit(jaxmp.autocast(f, policy))(x, np.ones((2, 1), np.float32)):
        np.testing.assert_allclose(out, [count], rtol=1e-6)
    stuck = lax.fori_loop(0, count, lambda i, c: c + 1, jnp.bfloat16(0))
    assert float(stuck) == 256


@both
@pytest.mark.parametrize("count", [300, 1000, 5000])
def test_embeddings_looked_up_many_times(count: int, policy: str) -> None:
    def f(table: Any, w: Any, tokens: Any) -> Any:
        return jnp.sum(table[tokens] @ w)

    tokens = np.zeros(count, np.int32)
    tokens[0] = 1
    fast = jaxmp.autocast(f, policy)
    for grad in (jax.grad(fast), jaxmp.autocast(jax.grad(f), policy)):
        got = jax.jit(grad)(np.ones((3, 2), np.float32), np.ones((2, 1), np.float32), tokens)
        np.testing.assert_array_equal(got, [[count - 1] * 2, [1, 1], [0, 0]])
    naive = in_16_bits(lambda x: x.at[tokens].add(1), BF16, np.zeros((3, 2)))
    assert float(naive[0, 0]) != count - 1


@both
def test_bias_gradient_is_summed_in_float32(policy: str) -> None:
    def f(b: Any, x: Any, w: Any) -> Any:
        return jnp.sum(x @ w + b[None])

    args = [np.zeros(4, np.float32), *(np.ones(s, np.float32) for s in ((3001, 2), (2, 4)))]
    for grad in (jax.grad(jaxmp.autocast(f, policy)), jaxmp.autocast(jax.grad(f), policy)):
        np.testing.assert_array_equal(jax.jit(grad)(*args), [3001.0] * 4)
    low = jax.device_put(np.zeros(4, policy.removeprefix("mixed_")))
    naive = jax.grad(lambda b: jnp.sum(jnp.broadcast_to(b, (3001, 4)).astype(jnp.float32)))(low)
    assert float(naive[0]) != 3001 or policy == FP16  # 3008 in bfloat16


@both
@pytest.mark.parametrize("shape", [(1, 4), (1, 1, 4), ()])
def test_gradients_of_scales_and_reshaped_biases(shape: tuple[int, ...], policy: str) -> None:
    def f(b: Any, s: Any, x: Any, w: Any) -> Any:
        h = (x @ w).reshape(-1, 1, 4)
        wide = (
            (lambda p: p)
            if not shape
            else (lambda p: jnp.reshape(p, (1,) * (3 - p.ndim) + p.shape))
        )
        return jnp.sum((h + wide(b)) * wide(s))

    numbers = zip((shape, shape, (3001, 2), (2, 4)), (0, 1, 1, 0.5), strict=True)
    args = [np.full(of, number, np.float32) for of, number in numbers]
    grads = both_ways(f, *args, policy=policy, of=lambda f: jax.grad(f, (0, 1)))
    for got, want in zip(*grads, strict=True):
        np.testing.assert_array_equal(got, want)


@both
def test_scatter_and_segment_sums(policy: str) -> None:
    ids = np.array([0] * 3001 + [1], np.int32)

    def f(x: Any, w: Any) -> Any:
        h = x @ w
        sums = jax.ops.segment_sum(h, ids, 2)
        return sums, jnp.zeros((2, 4)).at[ids].add(h), jnp.zeros((2, 4)).at[ids].max(h)

    args = np.ones((3002, 2), np.float32), np.full((2, 4), 0.5, np.float32)
    sums, scattered, largest = jax.jit(jaxmp.autocast(f, policy))(*args)
    np.testing.assert_array_equal(sums, [[3001] * 4, [1] * 4])
    np.testing.assert_array_equal(scattered, sums)
    np.testing.assert_array_equal(largest, np.ones((2, 4)))


@both
def test_sums_in_the_backward_pass_of_broadcasts(policy: str) -> None:
    def f(x: Any, w: Any, s: Any) -> Any:
        h = x @ w
        return jnp.sum(h * jnp.broadcast_to(s, h.shape)), jnp.sum(jnp.tile(s[None], (3001, 1)) * h)

    numbers = zip(((3001, 2), (2, 4), 4), (1, 0.5, 1), strict=True)
    args = [np.full(of, number, np.float32) for of, number in numbers]
    for i in range(2):
        got = jax.jit(jax.grad(lambda *a, i=i: jaxmp.autocast(f, policy)(*a)[i], 2))(*args)
        np.testing.assert_array_equal(got, [3001.0] * 4)


def test_16_bits_do_round() -> None:
    """A control of all of these: autocast does compute in 16 bits."""
    got, want = both_ways(jnp.matmul, X, weights(16, 16))
    assert 0.1 * UNIT[BF16] < error(got, want) < 8 * UNIT[BF16]
