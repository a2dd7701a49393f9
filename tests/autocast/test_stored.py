"""What only float32 operations read: 16 bits where it is stored, float32 where it is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, BOTH, LOW, W, X, check, rows, weights
from tests.support.dots import equations

pytestmark = pytest.mark.usefixtures("standard_promotion")
both = pytest.mark.parametrize("policy", BOTH)
EYE = jnp.eye(16)


def made_by(fun: Any, name: str, *args: Any, policy: str = BF16) -> list[str]:
    """The dtypes of what an operation makes, wherever it is in a program under autocast."""
    closed = jax.make_jaxpr(jaxmp.autocast(fun, policy))(*args)
    return [
        str(eqn.outvars[0].aval.dtype) for eqn in equations(closed) if eqn.primitive.name == name
    ]


@both
def test_scores_are_stored_in_16_bits(policy: str) -> None:
    """Otherwise GPUs and TPUs store scores of twice the size: they scale while they multiply."""

    def attention(x: Any, w: Any) -> Any:
        q, k = x @ w, x @ w.T
        scores = (q @ k.T) * 0.25
        scores = jnp.where(jnp.tri(4, dtype=bool), scores, -1e4)
        return jax.nn.softmax(scores) @ q

    assert made_by(attention, "mul", X, W, policy=policy) == [LOW[policy]]
    assert set(made_by(attention, "select_n", X, W, policy=policy)) == {LOW[policy]}
    assert set(made_by(attention, "exp", X, W, policy=policy)) == {"float32"}
    check(attention, X, W, policy=policy)


@both
def test_scores_of_grouped_heads(policy: str) -> None:
    def attention(x: Any, w: Any) -> Any:
        q, k = jnp.tanh(x @ w).reshape(4, 2, 8), jnp.tanh(x @ w.T)[:, :8]
        scores = jnp.einsum("tgd,sd->gts", q, k).reshape(8, 4) / 3
        return jax.nn.softmax(scores)

    assert made_by(attention, "div", X, W, policy=policy)[0] == LOW[policy]


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
    labels = jnp.array([0, 0, 0, 0])

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

    confident = jnp.zeros((4, 16)).at[:, 0].set(8.0)
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
    assert np.any(out != out.astype(LOW[policy]).astype(jnp.float32))
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
