"""What only float32 operations read: 16 bits where it is stored, float32 where it is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, FP16, LOW, W, X, both, check, error, rows, weights
from tests.support.dots import count_dots, equations, program_of
from tests.support.ways import both_ways, rounded

pytestmark = pytest.mark.usefixtures("standard_promotion")
EYE = jax.device_put(np.eye(16, dtype=np.float32))
SCORES = {BF16: "bfloat16", FP16: "float32"}


def made_by(fun: Any, name: str, *args: Any, policy: str = BF16) -> list[str]:
    """The dtypes of what an operation makes, wherever it is in a program under autocast."""
    closed = program_of(jaxmp.autocast(fun, policy), *args)
    return [
        str(eqn.outvars[0].aval.dtype) for eqn in equations(closed) if eqn.primitive.name == name
    ]


@both
def test_scores_are_stored_in_16_bits(policy: str) -> None:
    """Otherwise GPUs and TPUs store scores of twice the size: they scale while they multiply.

    In float16 they are float32: scores above 65,504 are infinite there.
    """

    def attention(x: Any, w: Any) -> Any:
        q, k = x @ w, x @ w.T
        scores = (q @ k.T) * 0.25
        scores = jnp.where(jnp.tri(4, dtype=bool), scores, -1e4)
        return jax.nn.softmax(scores) @ q

    assert made_by(attention, "mul", X, W, policy=policy) == [SCORES[policy]]
    assert set(made_by(attention, "select_n", X, W, policy=policy)) == {SCORES[policy]}
    assert set(made_by(attention, "exp", X, W, policy=policy)) == {"float32"}
    check(attention, X, W, policy=policy)


@both
def test_scores_of_grouped_heads(policy: str) -> None:
    def attention(x: Any, w: Any) -> Any:
        q, k = jnp.tanh(x @ w).reshape(4, 2, 8), jnp.tanh(x @ w.T)[:, :8]
        scores = jnp.einsum("tgd,sd->gts", q, k).reshape(8, 4) / 3
        return jax.nn.softmax(scores)

    assert made_by(attention, "div", X, W, policy=policy)[0] == SCORES[policy]


@pytest.mark.parametrize("dropped", [False, True])
def test_a_stream_of_residuals_is_16_bits_to_its_end(dropped: bool) -> None:
    """The last sum is read by a norm alone, the one before by that sum and a norm, and so on."""

    def net(x: Any, w: Any) -> Any:
        x = x @ w
        for i in range(3):
            h = x - x.mean(-1, keepdims=True)
            h = h @ w
            if dropped:
                h = jnp.where(jnp.tri(*h.shape, k=i, dtype=bool), h / 0.5, 0.0)
            x = x + h
        return jnp.sum((x - x.mean(-1, keepdims=True)) ** 2)

    sums = made_by(net, "add", X, W)
    assert [dtype for dtype in sums if "int" not in dtype] == ["bfloat16"] * 3
    assert set(made_by(net, "square", X, W) + made_by(net, "integer_pow", X, W)) == {"float32"}


def test_logits_with_a_bias_are_stored_in_16_bits() -> None:
    def net(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.log_softmax(jnp.tanh(x @ w) @ w + b).sum()

    assert made_by(net, "add", X, W, W[0])[0] == "bfloat16"


@both
def test_losses_are_computed_in_float32(policy: str) -> None:
    """What a loss does to logits: its gradient is a small difference of large numbers."""
    labels = jax.device_put(np.zeros(4, np.int32))

    def picked(x: Any, w: Any) -> Any:
        h = x @ w
        return jax.nn.logsumexp(h, -1) - jnp.take_along_axis(h, labels[:, None], 1)[:, 0]

    def largest(x: Any, w: Any) -> Any:
        h = x @ w
        return jax.nn.logsumexp(h, -1) - jnp.max(h, -1)

    def moved(x: Any, w: Any) -> Any:
        h = x @ w
        return jax.nn.logsumexp(h, -1) - h.T[0]

    def hinted(x: Any, w: Any) -> Any:
        h = 2 * (x @ w)
        return jax.nn.logsumexp(h, -1) - h[:, 0]

    confident = np.repeat(8 * np.asarray(EYE)[:1], 4, axis=0)
    for loss in (picked, largest, moved):
        check(loss, confident, EYE, policy=policy, roundings=1, grad_roundings=8)
    check(hinted, confident / 2, EYE, policy=policy, roundings=1, grad_roundings=16)


@both
def test_differences_before_a_square(policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.mean((x @ w - 0.5) ** 2)

    assert made_by(f, "sub", X, W, policy=policy) == ["float32"]
    check(f, rows(8, 16), weights(16, 16), policy=policy)


def test_a_norm_a_relu_and_a_mean_are_float32_all_along() -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        h = (h - h.mean(-1, keepdims=True)) * 2.0
        return jax.nn.relu(h).mean()

    def multiplied(x: Any, w: Any) -> Any:
        h = x @ w
        h = (h - h.mean(-1, keepdims=True)) * 2.0
        return jax.nn.relu(h) @ w

    assert made_by(f, "max", X, W) == ["float32"]
    assert made_by(multiplied, "max", X, W) == ["bfloat16"]  # positive control
    check(f, X, W)


@jax.custom_vjp
def cross_entropy(logits: Any) -> Any:
    return jax.nn.logsumexp(logits, -1) - logits[..., 0]


cross_entropy.defvjp(
    lambda z: (cross_entropy(z), z),
    lambda z, g: (g[..., None] * (jax.nn.softmax(z) - jnp.eye(z.shape[-1])[:1]),),
)


@both
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "checkpoint"])
def test_losses_by_a_custom_vjp_are_stored_in_float32(policy: str, wrap: Any) -> None:
    """Stacked by a scan, and handed to a checkpoint."""

    def f(xs: Any, w: Any) -> Any:
        losses = lax.map(lambda x: cross_entropy(x @ w), xs)
        return wrap(lambda losses: 2 * losses)(losses)

    out = jaxmp.autocast(f, policy, output="computed")(X[None], W)
    assert out.dtype == jnp.float32
    assert np.any(out != rounded(out, policy))
    check(f, X[None], W, policy=policy)


def test_a_loss_by_a_custom_vjp_with_weights() -> None:
    @jax.custom_vjp
    def loss(logits: Any, weight: Any) -> Any:
        return cross_entropy(logits) * weight

    loss.defvjp(lambda z, s: (loss(z, s), (z, s)), lambda r, g: (0 * r[0], 0 * r[1]))
    f = lambda xs, w: lax.map(lambda x: loss(x @ w, x @ w[:, 0]), xs)  # noqa: E731
    assert jaxmp.autocast(f, BF16, output="computed")(X[None], W).dtype == jnp.float32


def test_what_a_custom_vjp_reshapes_is_an_activation_still() -> None:
    @jax.custom_vjp
    def flattened(x: Any) -> Any:
        return x.reshape(-1, 16)

    flattened.defvjp(lambda x: (flattened(x), x.shape), lambda shape, g: (g.reshape(shape),))
    f = lambda x, w: flattened((x @ w).reshape(2, 2, 16)) + x @ w  # noqa: E731
    assert jaxmp.autocast(f, BF16, output="computed")(X, W).dtype == jnp.bfloat16


# --- products that only float32 operations read -------------------


def distances(w: Any, x: Any) -> Any:
    h = x @ w + 3
    squares = (h * h).sum(-1)
    return jnp.sqrt(squares[:, None] + squares - 2 * h @ h.T + 0.1)


def distances_of_two(w: Any, x: Any) -> Any:
    a, b = x @ w + 3, x[::-1] @ w + 3
    return jnp.sqrt(
        (a**2).sum(-1)[:, None] + (b**2).sum(-1) - 2 * jnp.einsum("id,jd->ij", a, b) + 0.1
    )


def covariance(w: Any, x: Any) -> Any:
    h = x @ w
    return h.T @ h / len(x) + 0.01 * jnp.eye(8)


def log_determinant(w: Any, x: Any) -> Any:
    return jnp.linalg.slogdet(covariance(w, x))[1]


def in_a_function(w: Any, x: Any) -> Any:
    return jnp.log(jax.jit(jnp.linalg.eigvalsh)(covariance(w, x)))


def of_two_sums(w: Any, x: Any) -> Any:
    h, g = x @ w, jnp.tanh(x @ w)
    return jnp.log(jnp.diag(jnp.linalg.cholesky(h.T @ h + g.T @ g + 0.1 * jnp.eye(8))))


def moments(w: Any, x: Any) -> Any:
    h = x @ w + 10
    ones = jnp.full((1, len(x)), 1 / len(x)) + 0 * h[:1, 0]
    return jnp.sqrt(ones @ (h * h) - (ones @ h) ** 2)


CANCEL = [distances, distances_of_two, log_determinant, in_a_function, of_two_sums, moments]


@both
@pytest.mark.parametrize("fun", CANCEL)
def test_products_that_cancel_or_are_decomposed(fun: Any, policy: str) -> None:
    """Rounded to 16 bits they give NaN, or a matrix with eigenvalues below zero."""
    w, x = np.asarray(weights(16, 8)), rows(8 if fun in CANCEL[:2] else 64, 16)
    if fun not in CANCEL[:2]:  # of almost rank one
        w = np.asarray(weights(16, 2)).sum(1, keepdims=True) + np.float32(0.02) * w
    assert error(*both_ways(fun, w, x, policy=policy)) < 0.03
    grads = jax.jit(jax.grad(lambda w: jaxmp.autocast(fun, policy)(w, x).mean()))(w)
    assert np.isfinite(grads).all()


def test_they_multiply_16_bits_forward_and_backward() -> None:
    def f(w: Any) -> Any:
        return jnp.sum(jnp.sin(covariance(w, rows(64, 16))))

    fast = jaxmp.autocast(f, BF16)
    assert set(count_dots(jax.grad(fast), weights(16, 8))) == {"bfloat16"}


@both
def test_what_a_norm_reads_is_stored_in_16_bits(policy: str) -> None:
    """Else batch norms, norms of queries and of the results of layers keep twice the bytes."""

    def rms(h: Any) -> Any:
        return h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True))

    def layer(h: Any) -> Any:
        return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)

    for norm in (rms, layer, lambda h: rms(jax.nn.gelu(h)), lambda h: layer(h + W[0])):
        got = made_by(
            lambda x, w, norm=norm: jnp.mean(norm(x @ w)), "dot_general", X, W, policy=policy
        )
        assert got == [LOW[policy]]
    # Positive control: a variance that divides nothing.
    of_variance = made_by(lambda x, w: jnp.var(x @ w), "low_precision_product", X, W, policy=policy)
    assert of_variance == ["float32"]


@both
def test_a_root_is_no_activation(policy: str) -> None:
    """Float16 does not hold a squared norm of 90,000, and the slope of a root has no bound."""

    def f(h: Any) -> Any:
        return jnp.mean(jnp.sqrt(jnp.einsum("bi,bi->b", h, h)))

    np.testing.assert_allclose(jaxmp.autocast(f, policy)(jnp.full((4, 16), 75.0)), 300.0)
    assert made_by(f, "low_precision_product", X, policy=policy) == ["float32"]


@pytest.mark.parametrize("swapped", [False, True])
def test_parts_of_a_product_with_two_readers(swapped: bool) -> None:
    """Stored, since a softmax reads a half of it, whichever."""

    def f(x: Any, w: Any) -> Any:
        halves = jnp.split(x @ w, 2, axis=-1)
        scores, moved = halves[::-1] if swapped else halves
        return jnp.sum(jax.nn.softmax(scores)[:, 0]) + jnp.sum(jnp.log1p(moved**2))

    assert made_by(f, "dot_general", X, W) == ["bfloat16"]


def test_indices_are_those_of_float32_sums() -> None:
    """A code of 12 bits is a number that bfloat16 does not hold."""
    bits = jax.device_put(np.float32(np.random.default_rng(3).random((64, 12)) < 0.5))

    def codes(w: Any) -> Any:
        return ((bits @ w) @ (2.0 ** jnp.arange(12))).astype(jnp.int32)

    np.testing.assert_array_equal(*both_ways(codes, np.eye(12, dtype=np.float32)))
