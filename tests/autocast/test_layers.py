"""Autocast and what models are made of: attention, experts, recurrent cells, losses, optimizers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, BOTH, W, X, check, gradient_inside, rows, weights
from tests.support.dots import count_dots

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

both = pytest.mark.parametrize("policy", BOTH)


@both
@pytest.mark.parametrize("masking", ["where", "add", "none"])
def test_attention_by_hand(masking: str, policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        q, k, v = (jnp.einsum("btd,df->btf", x, w * s).reshape(2, 6, 2, 8) for s in (1.0, 0.5, 2.0))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8).astype(np.float32)
        causal = jnp.tril(jnp.ones((6, 6), bool))[None, None]
        if masking == "where":
            scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
        elif masking == "add":
            scores = scores + jnp.where(causal, 0.0, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)

    check(f, rows(2, 6, 16), W, policy=policy, dots={"low": 5}, roundings=12)


def test_ragged_dot() -> None:
    def f(x: Any, ws: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, ws, sizes)

    args = (X, jnp.stack([W, W * 2]), jnp.array([1, 3], jnp.int32))
    check(f, *args, argnums=(0, 1))
    jaxpr = str(jax.make_jaxpr(jaxmp.autocast(f, BF16))(*args))
    assert "preferred_element_type=bfloat16" in jaxpr


def test_mixture_of_experts() -> None:
    def f(x: Any, gate: Any, ws: Any) -> Any:
        p = jax.nn.softmax(x @ gate)
        top, which = lax.top_k(p, 2)
        place = jax.nn.one_hot(which, 4)
        order = jnp.cumsum(place.reshape(-1, 4), 0) * place.reshape(-1, 4)
        combine = jnp.einsum("bk,bke->be", top / top.sum(-1, keepdims=True), place)
        out = jnp.einsum("bd,edf->bef", x, ws)
        return jnp.einsum("be,bef->bf", combine, jax.nn.silu(out)), order.max()

    check(f, X, weights(16, 4), weights(4, 16, 16), roundings=12, grad_roundings=32)


@both
def test_recurrent_cells(policy: str) -> None:
    def lstm(x: Any, w: Any, u: Any, b: Any) -> Any:
        def cell(carry: Any, row: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ w + h @ u + b[None], 4, -1)
            c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[1], 4))
        return lax.scan(cell, (zeros, zeros), x)

    def gru(x: Any, w: Any, u: Any, b: Any) -> Any:
        def cell(h: Any, row: Any) -> Any:
            a, c = row @ w + b[None], h @ u
            r, z = jax.nn.sigmoid(a[:, :4] + c[:, :4]), jax.nn.sigmoid(a[:, 4:8] + c[:, 4:8])
            n = jnp.tanh(a[:, 8:12] + r * c[:, 8:12])
            return (1 - z) * n + z * h, h

        return lax.scan(cell, jnp.zeros((x.shape[1], 4)), x)

    args = (rows(5, 3, 16), weights(16, 16), weights(4, 16), jnp.linspace(-1, 1, 16))
    for cell in (lstm, gru):
        check(cell, *args, policy=policy, dots={"low": 2}, roundings=12, grad_roundings=32)


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


@both
@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "adafactor"])
def test_an_optimizer_within(name: str, policy: str) -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), getattr(optax, name)(1e-4))

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = {"w": W, "b": jnp.full(16, 0.1)}
        plain = jax.jit(step)
        fast = jaxmp.autocast(step, policy)
        a = b = (params, tx.init(params))
        with gradient_inside(policy):
            for _ in range(3):
                a, b = fast(*a, X), plain(*b, X)
        assert "float32" not in count_dots(fast, params, tx.init(params), X)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]
    moved = jax.tree.map(lambda x, y: x - y, b[0], params)
    # Whose update is the sign of a gradient turns around where that is nearly nothing.
    for key in params:
        away = np.abs(a[0][key] - b[0][key])
        assert np.mean(away > 0.05 * np.abs(moved[key]).max()) <= 0.02
