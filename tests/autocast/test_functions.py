"""Autocast and the functions of jax.numpy, jax.nn, jax.scipy and jax.lax, one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, BOTH, W, X, check, error, rows

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

both = pytest.mark.parametrize("policy", BOTH)

EINSUMS = {
    "matmul": ("bi,io->bo", (4, 6), (6, 5)),
    "attention": ("bqhd,bkhd->bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
    "batched": ("bij,bjk->bik", (2, 3, 4), (2, 4, 3)),
    "sum over all": ("ij,ij->", (4, 6), (4, 6)),
    "transposed": ("ij,kj->ki", (4, 6), (5, 6)),
    "repeated": ("ii,ij->j", (4, 4), (4, 5)),
    "ellipsis": ("...i,io->...o", (2, 3, 4), (4, 5)),
    "lhs sum": ("bij,jk->bk", (2, 3, 4), (4, 5)),
}


@both
@pytest.mark.parametrize("name", EINSUMS)
def test_einsums(name: str, policy: str) -> None:
    text, a, b = EINSUMS[name]
    check(lambda a, b: jnp.einsum(text, a, b), rows(*a), rows(*b, seed=1), policy=policy,
          dots={"low": 1})  # fmt: skip


@both
@pytest.mark.parametrize("text", ["bi,j->bij", "bi,bj->bij", "bi,i->bi", "b,bi->bi", "i,j->ij"])
def test_einsums_that_sum_nothing(text: str, policy: str) -> None:
    names, _ = text.split("->")
    first, second = names.split(",")
    size = {"b": 4, "i": 16, "j": 3}

    def f(x: Any, w: Any, p: Any) -> Any:
        h = x @ w if len(first) == 2 else (x @ w)[0] if first == "i" else (x @ w)[:, 0]
        return jnp.einsum(text, h, p), jnp.einsum(text, h, jnp.sin(p))

    p = rows(*(size[c] for c in second), seed=5)
    check(f, X, W, p, policy=policy)


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


CONVOLUTIONS = {
    "plain": {},
    "strided": {"window_strides": (2, 2)},
    "dilated": {"rhs_dilation": (2, 2)},
    "transposed": {"lhs_dilation": (2, 2), "padding": ((1, 2), (1, 2))},
    "depthwise": {"feature_group_count": 4, "kernel": (3, 3, 1, 8)},
    "grouped": {"feature_group_count": 2, "kernel": (3, 3, 2, 6)},
    "batch groups": {"batch_group_count": 2, "kernel": (3, 3, 4, 6)},
}


@both
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, policy: str) -> None:
    options = {"window_strides": (1, 1), "padding": "SAME", **CONVOLUTIONS[name]}
    kernel = options.pop("kernel", (3, 3, 4, 6))

    def f(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    check(f, rows(2, 6, 6, 4), rows(*kernel, seed=1) / 6, policy=policy, dots={"low": 1})


@both
def test_pooling_and_images(policy: str) -> None:
    def f(x: Any, k: Any) -> Any:
        h = jax.nn.relu(lax.conv(x, k, (1, 1), "SAME"))
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
        "inv": lambda a, x: jnp.linalg.inv(a),
        "eigh": lambda a, x: jnp.linalg.eigh(a)[0],
        "svd": lambda a, x: jnp.linalg.svd(x, compute_uv=False),
        "qr": lambda a, x: jnp.abs(jnp.linalg.qr(x.T)[1]),
        "det": lambda a, x: jnp.linalg.slogdet(a)[1],
        "lstsq": lambda a, x: jnp.linalg.lstsq(a, x.T)[0],
        "cho_solve": lambda a, x: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), x.T),
        "triangular": lambda a, x: jax.scipy.linalg.solve_triangular(a, x.T, lower=True),
        "expm": lambda a, x: jax.scipy.linalg.expm(a / 10),
        "pinv": lambda a, x: jnp.linalg.pinv(x),
    }
    for name, fun in same.items():
        got, want = jaxmp.autocast(fun, BF16)(good, X), jax.jit(fun)(good, X)
        assert error(got, want) < 1e-3, name  # as exact as without autocast
    for name in ("solve", "cholesky", "det", "inv"):
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


@both
def test_shapes_and_indices(policy: str) -> None:
    def f(x: Any, w: Any, p: Any) -> Any:
        h = x @ w
        token = jnp.zeros((1, 16)) + p[None]
        return (
            (jnp.concatenate([p[None], h]), jnp.concatenate([token, h]), jnp.stack([h[0], p])),
            (jnp.concatenate([h, jnp.broadcast_to(p, (2, 16))]), jnp.append(h, p)),
            (jnp.pad(h, 1), jnp.pad(h, ((0, 1), (0, 0)), constant_values=3.0), jnp.tril(h)),
            (h[::-1, 1:9:2], h[jnp.array([0, 0, 2])], h.at[1].set(p), h.at[:, 2].add(1.0)),
            (jnp.split(h, 4, 1)[1], jnp.repeat(h, 2, 0), jnp.tile(h, (2, 1)), jnp.flip(h)),
            (jnp.where(h > p[None], h, p[None]), jnp.select([h > 1, h < -1], [h, -h], 0.0)),
            (jnp.moveaxis(h.reshape(2, 2, 16), 1, 0), lax.dynamic_slice(h, (1, 2), (2, 3))),
            (jnp.maximum(h, p[None]), jnp.clip(h, p[None] - 1, p[None] + 1), h * p[None] + p[None]),
        )

    check(f, X, W, jnp.linspace(-1, 1, 16), policy=policy)


@both
def test_scatters_into_activations(policy: str) -> None:
    rows_ = jnp.array([0, 0, 2], jnp.int32)

    def f(x: Any, w: Any) -> Any:
        h = x @ w
        values = jnp.tanh(h[:3])
        return (
            (h.at[rows_].max(values), h.at[rows_].min(values)),
            (h.at[rows_].add(values), h.at[rows_].subtract(values)),
            (h.at[1].set(values[0]), h.at[1].divide(2.0), h.at[jnp.array([0, 3])].set(0.5)),
        )

    check(f, X, W, policy=policy, dots={"low": 1})

    def multiplied(x: Any, w: Any) -> Any:
        h = x @ w
        return h.at[rows_].multiply(jnp.tanh(h[:3]))  # has no gradient

    check(multiplied, X, W, policy=policy, argnums=())


def test_class_token_in_front_of_patches() -> None:
    def f(token: Any, x: Any, w: Any) -> Any:
        h = x @ w
        tokens = jnp.broadcast_to(token, (h.shape[0], 1, 16))
        return jnp.concatenate([tokens, h], 1) @ w

    check(f, rows(1, 1, 16), rows(2, 3, 16), W, dots={"low": 2})


def test_padding_with_a_parameter() -> None:
    def f(x: Any, w: Any, p: Any) -> Any:
        h = x @ w
        return lax.pad(h, p[0], ((1, 1, 0), (0, 0, 0))), lax.pad(p, h[0, 0], ((2, 2, 0),))

    check(f, X, W, jnp.linspace(-1, 1, 16))


@both
def test_embeddings(policy: str) -> None:
    def f(table: Any, positions: Any, w: Any, tokens: Any) -> Any:
        h = table[tokens] * 4.0 + positions[None]
        one_hot = jax.nn.one_hot(tokens, 8) @ table
        return h @ w, one_hot, jnp.tanh(h @ w) @ table.T

    tokens = jnp.array([[1, 2, 2], [7, 0, 1]], jnp.int32)
    check(f, rows(8, 16), rows(3, 16, seed=3), W, tokens, policy=policy, dots={"low": 4},
          roundings=12)  # fmt: skip


def test_attention_of_jax() -> None:
    def f(x: Any, w: Any) -> Any:
        q = (x @ w).reshape(1, 4, 2, 8)
        return jax.nn.dot_product_attention(q, q, q, is_causal=True, scale=0.3)

    check(f, X, W, dots={"low": 3})
