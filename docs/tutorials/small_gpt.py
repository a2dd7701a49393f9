"""A small GPT over characters, for the tutorials. It says nothing about dtypes."""

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

text = "".join(topics[name] for name in sorted(topics))  # Python's own manual
index = {char: i for i, char in enumerate(sorted(set(text)))}
tokens = np.array([index[char] for char in text], np.int32)
VOCAB, LAYERS, WIDTH, HEADS, CONTEXT = len(index), 2, 64, 4, 32


def init(key):
    """Params: tables, a head, and a stack of two blocks."""
    k = jax.random.split(key, 7)

    def normal(key, *shape):
        return jax.random.normal(key, shape) / shape[-2] ** 0.5

    blocks = {
        "qkv": normal(k[0], LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(k[1], LAYERS, WIDTH, WIDTH),
        "up": normal(k[2], LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(k[3], LAYERS, 4 * WIDTH, WIDTH),
    }
    return {
        "tokens": 0.1 * jax.random.normal(k[4], (VOCAB, WIDTH)),
        "positions": 0.1 * jax.random.normal(k[5], (CONTEXT, WIDTH)),
        "blocks": blocks,
        "head": normal(k[6], WIDTH, VOCAB),
    }


def norm(x):
    """A layer norm without params."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def block(x, w, spike):
    """Attention, and two layers whose hidden numbers are `spike` times as large."""
    b, t, d = x.shape
    q, k, v = jnp.split((norm(x) @ w["qkv"]).reshape(b, t, HEADS, -1), 3, axis=-1)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(b, t, d) @ w["out"]
    hidden = jax.nn.gelu(norm(x) @ w["up"])
    if spike is None:
        return x + hidden @ w["down"], None
    return x + (spike * hidden) @ w["down"] / spike, None


def loss_fn(params, ids, spike=None):
    """The mean cross entropy of the next character."""
    x = params["tokens"][ids[:, :-1]] + params["positions"]
    x, _ = jax.lax.scan(lambda x, w: block(x, w, spike), x, params["blocks"])
    with jax.named_scope("head"):
        logits = norm(x) @ params["head"]
    labels = ids[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def batch(i, size=32):
    """Random windows of the text."""
    starts = np.random.default_rng(i).integers(len(tokens) - CONTEXT, size=size)
    return tokens[starts[:, None] + np.arange(CONTEXT + 1)]
