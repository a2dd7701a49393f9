"""Autocast and the functions of jax.numpy, jax.nn, jax.scipy and optax, one by one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import (
    BF16,
    LOW,
    UNIT,
    W,
    X,
    both,
    check,
    compiled,
    error,
    results_of,
    rows,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

special = jax.scipy.special


def test_products_of_many_kinds() -> None:
    v, m = rows(16), rows(3, 4, 16)
    check(lambda v, w: (jnp.dot(v, w), jnp.vdot(v, v), jnp.inner(w, v)), v, W, dots={"low": 3})
    check(lambda m, w: (m @ w, jnp.tensordot(m, w, 1), m @ w[:, 0]), m, W, dots={"low": 3})
    check(lambda x, w: jnp.linalg.multi_dot([x, w, w]), X, W, dots={"low": 2})
    check(lambda x, w: jnp.outer((x @ w)[0], w[0]) + jnp.kron(w[:4, :4], w[:4, :4]), X, W)
    check(lambda a, b: jnp.convolve(a, b, mode="same"), rows(16), rows(3), dots={"low": 1})
    check(lambda x, w: jnp.linalg.matrix_power(w, 3) + jnp.cov(x.T), X, W, roundings=16)
    check(lambda x, w: x.T @ x + w.T, X, W, dots={"low": 1})
    check(lambda x: jnp.einsum("ab,bc,cd,de->ae", x, W, W, W), X, dots={"low": 3})


@both
def test_pooling_and_images(policy: str) -> None:
    def f(x: Any, k: Any) -> Any:
        h = jnp.tanh(lax.conv(x, k, (1, 1), "SAME"))  # smooth: no kink near a rounding
        big = lax.reduce_window(h, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        mean = lax.reduce_window(h, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4
        return (mean, jax.image.resize(h, (2, 4, 3, 3), "bilinear")), big, jnp.max(h, (2, 3))

    with jax.numpy_rank_promotion("allow"):
        args = (rows(2, 3, 6, 6), rows(4, 3, 3, 3, seed=1) / 5)
        check(f, *args, policy=policy, argnums=())
        check(lambda x, k: f(x, k)[0], *args, policy=policy)  # where maxima are, may change
    means = jaxmp.autocast(lambda x: jnp.mean((x @ jnp.eye(2)), (1, 2)), policy)
    np.testing.assert_array_equal(means(jnp.ones((1, 70, 70, 2))), [[1.0, 1.0]])


@pytest.mark.filterwarnings("ignore:autocast leaves .* of the FLOPs")
def test_linear_algebra() -> None:
    good = W @ W.T + 4 * jnp.eye(16)
    same = {
        "solve": lambda a, x: jnp.linalg.solve(a, x.T),
        "cholesky": lambda a, x: jnp.linalg.cholesky(a),
        "eigh": lambda a, x: jnp.linalg.eigh(a)[0],
        "svd": lambda a, x: jnp.linalg.svd(x, compute_uv=False),
        "qr": lambda a, x: jnp.abs(jnp.linalg.qr(x.T)[1]),
    }
    for name, fun in same.items():
        got, want = jaxmp.autocast(fun, BF16)(good, X), jax.jit(fun)(good, X)
        assert error(got, want) < 1e-3, name  # as exact as without autocast
    for name in ("solve", "cholesky"):
        fun = same[name]
        grad = jax.grad(lambda a, fun=fun: jaxmp.autocast(fun, BF16)(a, X).sum())(good)
        assert error(grad, jax.grad(lambda a, fun=fun: fun(a, X).sum())(good)) < 1e-3, name


@both
def test_fft(policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        return jnp.abs(jnp.fft.fft(h)), jnp.fft.irfft(jnp.fft.rfft(h) * 2), jnp.fft.fft2(h).real

    check(f, X, W, policy=policy, dots={"low": 1})


def test_statistics_sorting_and_selection() -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        top, where = lax.top_k(h, 3)
        pairs = lax.sort((h, x), dimension=-1, num_keys=1)
        return (
            (jnp.sort(h), top, jnp.max(h), jnp.median(h, -1), jnp.quantile(h, 0.3, axis=-1)),
            (jnp.cumsum(h, -1), jnp.cumprod(h, -1), lax.cummax(h, 1), jnp.percentile(h, 90)),
            (jnp.take_along_axis(x, where, -1), pairs[0], jnp.diff(h), jnp.ptp(h)),
            (jnp.nanmean(h), jnp.average(h, weights=x * x), jnp.prod(h, -1), jnp.roll(h, 1)),
        )

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        # Powers of two, so that no two numbers change places.
        x = jax.random.permutation(jax.random.key(4), 1.1 ** jnp.arange(64.0)).reshape(4, 16) / 20
        check(f, x, jnp.eye(16), dots={"low": 1}, roundings=32, grad_roundings=64)

    def integers(x: Any, w: Any) -> Any:
        h = x @ w
        return jnp.argmax(h, -1), jnp.argsort(h, -1), h > 0.5, jnp.searchsorted(jnp.sort(h[0]), 0.7)

    got, want = jaxmp.autocast(integers, BF16)(x, jnp.eye(16)), integers(x, jnp.eye(16))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_ragged_dot() -> None:
    def f(x: Any, ws: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, ws, sizes)

    args = (X, jnp.stack([W, W * 2]), jnp.array([1, 3], jnp.int32))
    check(f, *args, argnums=(0, 1))
    assert results_of("ragged_dot_general", f, *args) == ["bfloat16"]


@both
def test_a_recurrent_cell(policy: str) -> None:
    def lstm(x: Any, w: Any, u: Any, b: Any) -> Any:
        def cell(carry: Any, row: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ w + h @ u + b[None], 4, -1)
            c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[1], 4))
        return lax.scan(cell, (zeros, zeros), x)

    args = (rows(5, 3, 16), weights(16, 16), weights(4, 16), jnp.linspace(-1, 1, 16))
    check(lstm, *args, policy=policy, dots={"low": 2}, roundings=12, grad_roundings=32)


LOSSES = {
    "softmax_cross_entropy": lambda z: optax.softmax_cross_entropy(z, jax.nn.softmax(z[::-1])),
    "integer labels": lambda z: optax.softmax_cross_entropy_with_integer_labels(
        z, jnp.array([1, 2, 3, 4])
    ),
    "sigmoid": lambda z: optax.sigmoid_binary_cross_entropy(z, jnp.float32(0.2) + 0 * z),
    "huber": lambda z: optax.huber_loss(z, z[::-1]),
    "log_cosh": lambda z: optax.log_cosh(z),
    "kl": lambda z: optax.kl_divergence(jax.nn.log_softmax(z), jax.nn.softmax(z[::-1])),
    "cosine": lambda z: optax.cosine_similarity(z, z[::-1]),
    "squared": lambda z: optax.squared_error(z, z[::-1]).mean(),
    "focal": lambda z: optax.sigmoid_focal_loss(z, jnp.float32(1.0) + 0 * z),
    "hinge": lambda z: optax.hinge_loss(z, jnp.sign(z[::-1])),
    "triplet": lambda z: optax.losses.triplet_margin_loss(z[0], z[1], z[2]),
    "ctc": lambda z: optax.ctc_loss(
        z[None], jnp.zeros((1, 4)), jnp.array([[1, 2]], jnp.int32), jnp.zeros((1, 2))
    ),
}


@both
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_optax(name: str, policy: str) -> None:
    z = jnp.round(X * 4) / 2
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        check(
            lambda z, w: LOSSES[name](z @ w), z, jnp.eye(16),
            policy=policy, argnums=(0,), roundings=4, grad_roundings=16,
        )  # fmt: skip


# Functions of one number, and the range over which they are tried. The dtypes of those that are one
# operation, as `exp`, are in test_parity.py.
UNARY: dict[str, tuple[Any, float, float]] = {
    "celu": (jax.nn.celu, -20, 20),
    "glu": (lambda x: jax.nn.glu(x.reshape(-1, 2), -1), -8, 8),
    "log_sigmoid": (jax.nn.log_sigmoid, -80, 80),
    "mish": (jax.nn.mish, -20, 20),
    "selu": (jax.nn.selu, -20, 20),
    "sparse_plus": (jax.nn.sparse_plus, -2, 2),
    "squareplus": (jax.nn.squareplus, -20, 20),
    "standardize": (lambda x: jax.nn.standardize(x), -8, 8),
    "arcsinh": (jnp.arcsinh, -100, 100),
    "arccosh": (jnp.arccosh, 1.1, 100),
    "arctanh": (jnp.arctanh, -0.96, 0.96),
    "sinc": (jnp.sinc, -4, 4),
    "i0": (jnp.i0, -8, 8),
    "fmod": (lambda x: jnp.fmod(x, 3.0), -30, 30),
    "logaddexp": (lambda x: jnp.logaddexp(x, -x), -30, 30),
    "interp": (lambda x: jnp.interp(x, jnp.array([-9.0, 0.0, 9.0]), jnp.array([0.0, 1, 4])), -8, 8),
    "zeta": (lambda x: special.zeta(x, 1.0), 1.5, 8),
    "entr": (special.entr, 0.01, 0.99),
    "logit": (special.logit, 0.02, 0.98),
    "xlogy": (lambda x: special.xlogy(x, x), 0.01, 8),
    "ndtr": (special.ndtr, -4, 4),
    "log_ndtr": (special.log_ndtr, -12, 4),
    "ndtri": (special.ndtri, 0.01, 0.99),
    "i1e": (special.i1e, -8, 8),
    "betainc": (lambda x: special.betainc(2.0, 3.0, x), 0.05, 0.95),
    "gammainc": (lambda x: special.gammainc(2.0, x), 0.1, 8),
    "expi": (special.expi, 0.1, 4),
}
# Smaller at 0 than any rounding of what they are computed from.
_LOOSE = {"sinc", "expi"}


@both
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str, policy: str) -> None:
    """The product is exact, so that all that is left is the error of the function."""
    fun, least, most = UNARY[name]
    z = jnp.linspace(least, most, 64).reshape(4, 16).astype(LOW[policy]).astype(jnp.float32)

    def with_grad(fun: Any, z: Any, of: Any) -> Any:
        out, pull = jax.vjp(fun, z)
        return out, pull(of)[0]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ones = jnp.ones_like(jax.eval_shape(fun, z))
        fast = jaxmp.autocast(lambda z: fun(z @ jnp.eye(16)), policy)
        got, grads = compiled(functools.partial(with_grad, fast))(z, ones)
        want, want_grads = compiled(functools.partial(with_grad, fun))(z, ones)
    allowed = UNIT[policy] * (16 if name in _LOOSE else 4)
    size = np.maximum(np.abs(want), max(1.0, float(np.abs(want).max()) * 0.1))
    assert np.all(np.abs(got - want) <= allowed * size)
    assert error(grads, want_grads) <= 2 * allowed
