"""A small GPT over characters, and the text that it learns: Python's own manual.

The model mentions no dtypes: `precision_rules` set them for all of its layers. Arrays are named by
their axes: B sequences of T characters, D features, H heads, V characters in the vocabulary.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import jaxmp


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as numbers, with the last tenth held out."""

    train: np.ndarray
    valid: np.ndarray
    vocab_size: int
    digest: str

    @classmethod
    def load(cls) -> "Corpus":
        """Python's own manual, character by character; its text depends on the Python version.

        The last tenth, mostly code and tables of methods, is easier than the rest: a validation
        loss below the train loss is expected.
        """
        text = "".join(topics[name] for name in sorted(topics))
        index = {char: i for i, char in enumerate(sorted(set(text)))}
        tokens = np.array([index[char] for char in text], np.int32)
        split = len(tokens) * 9 // 10
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(tokens[:split], tokens[split:], len(index), digest)

    def batch(self, seed: int, iteration: int, *, size: int, context: int) -> np.ndarray:
        """Random windows, a pure function of seed and iteration.

        Not of `state.step`, which does not advance when a step is skipped: the same batch would
        come again, and a resumed run could not find its place in the data.
        """
        rng = np.random.default_rng((seed, iteration))
        starts = rng.integers(len(self.train) - context, size=size)
        return self.train[starts[:, None] + np.arange(context + 1)]  # (B, T + 1)

    def validation(self, *, windows: int, context: int) -> np.ndarray:
        """The same windows at each call, spread evenly over the held-out text."""
        starts = np.linspace(0, len(self.valid) - context - 1, windows).astype(int)
        return self.valid[starts[:, None] + np.arange(context + 1)]  # (N, T + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model."""

    vocab: int
    context: int
    layers: int
    width: int
    heads: int


class Block(nnx.Module):
    """Causal attention and a two-layer network, each after a norm and around a residual."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        width, self.heads = size.width, size.heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.query_key_value = nnx.Linear(width, 3 * width, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_in = nnx.Linear(width, 4 * width, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.attention_norm(x))  # (B, T, D)
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x))))  # (B, T, D)

    def attention(self, x: Array) -> Array:
        """Each position attends to itself and those before it."""
        b, t, d = x.shape
        size = d // self.heads
        qkv = self.query_key_value(x).reshape(b, t, 3, self.heads, size)
        q, k, v = (qkv[:, :, i] for i in range(3))  # (B, T, H, D / H) each
        # Scaled before the product, not after it: float16 scores then stay far from 65504.
        q = q * jnp.asarray(1 / math.sqrt(size), q.dtype)
        # A softmax sums exponentials over all positions: float32, as is usual in mixed precision.
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)  # (B, H, T, T)
        past = jnp.tril(jnp.ones((1, 1, t, t), bool))
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf)).astype(v.dtype)
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v)  # (B, T, H, D / H)
        return self.attention_out(mixed.reshape(b, t, d))


class GPT(nnx.Module):
    """A decoder-only transformer over characters, in plain Flax."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(size.vocab, size.width, rngs=rngs)
        self.positions = nnx.Embed(size.context, size.width, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.head = nnx.Linear(size.width, size.vocab, rngs=rngs)

    def __call__(self, ids: Array) -> Array:
        positions = jnp.arange(ids.shape[1])[None]  # (1, T)
        x = self.tokens(ids) + self.positions(positions)  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, V)


def precision_rules(policy: jaxmp.Policy) -> jaxmp.PolicyRules:
    """Norms and the head compute in float32, everything else under the policy.

    Params stay float32 under every policy, so all start from the same values: `TrainState.create`
    makes the live params in `policy.param_dtype` and keeps these as masters. Logits also stay
    float32 under policies with 16-bit outputs.
    """
    layers = jaxmp.Policy("float32", policy.compute_dtype, "float32", products=policy.products)
    kept = {
        # A variance is a sum of squares: it overflows in float16 and loses digits in bfloat16.
        "*norm*": "float32",
        # The loss depends on logits, and a bfloat16 logit between 16 and 32 is off by up to 0.06.
        "head": "float32",
    }
    return jaxmp.PolicyRules(kept, default=layers)


def make_loss(graphdef: Any) -> Callable[[Any, Array], Array]:
    """The mean cross entropy of the next character, as a function of plain params."""

    def loss_fn(params: Any, tokens: Array) -> Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])  # (B, T, V)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn
