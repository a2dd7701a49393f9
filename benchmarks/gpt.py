"""A GPT of plain JAX functions: pre-norm blocks in a `lax.scan`, tied embeddings.

It computes in the dtype of its params, except for what needs float32: normalization, softmax and
loss. It knows nothing of policies, so every kind of train step trains the same model.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

Attention = Literal["xla", "cudnn"]


@dataclasses.dataclass(frozen=True)
class GPT:
    """The size of the model, and how it computes.

    Attributes:
      layers: how many blocks.
      width: of the residual stream; the hidden layer of a block is four times as wide.
      heads: attention heads, which share the width.
      vocab: how many tokens there are.
      context: how many tokens a sequence has.
      remat: recompute each block in the backward pass rather than keep its activations.
      one_by_one: run the blocks without a loop.
      unroll: how many blocks each turn of the loop runs.
      attention: the implementation of attention. cuDNN's reads 16 bits, whatever the rest does.
      kernel_dtype: what it reads.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    remat: bool = False
    one_by_one: bool = False
    unroll: int = 1
    attention: Attention = "xla"
    kernel_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide the width {self.width}")

    def computing_in(self, dtype: str) -> "GPT":
        """The same model for a step that computes in `dtype`: cuDNN has no float32 attention."""
        if jnp.dtype(dtype).itemsize > 2:
            return dataclasses.replace(self, attention="xla")
        return dataclasses.replace(self, kernel_dtype=dtype)

    def init(self) -> PyTree:
        """float32 params; the blocks are stacked along a leading axis."""
        keys = iter(jax.random.split(jax.random.key(0), 6))
        n, d = self.layers, self.width

        def normal(*shape: int, scale: float = 0.02) -> Array:
            return scale * jax.random.normal(next(keys), shape)

        into_residual = 0.02 / (2 * n) ** 0.5
        return {
            "embedding": normal(self.vocab, d),
            "position": normal(self.context, d),
            "blocks": {
                "norm_attention": jnp.ones((n, d)),
                "qkv": normal(n, d, 3 * d),
                "attention_out": normal(n, d, d, scale=into_residual),
                "norm_mlp": jnp.ones((n, d)),
                "up": normal(n, d, 4 * d),
                "down": normal(n, 4 * d, d, scale=into_residual),
            },
            "norm_out": jnp.ones(d),
        }

    def loss(self, params: PyTree, tokens: Int[Array, "batch context+1"]) -> Float[Array, ""]:
        """The mean cross-entropy of each next token, in float32."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]

        def block(x: Array, weights: PyTree) -> tuple[Array, None]:
            return self._block(x, weights), None

        x = params["embedding"][inputs] + params["position"]
        run = jax.checkpoint(block) if self.remat else block
        if self.one_by_one:
            for i in range(self.layers):
                x, _ = run(x, jax.tree.map(lambda stack, i=i: stack[i], params["blocks"]))
        else:
            x, _ = jax.lax.scan(run, x, params["blocks"], unroll=self.unroll)
        x = _rms_norm(x, params["norm_out"])
        with jax.named_scope("head"):  # by this name, rules find it
            logits = (x @ params["embedding"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def _block(self, x: Array, weights: PyTree) -> Array:
        x = x + self._attend(_rms_norm(x, weights["norm_attention"]), weights)
        hidden = jax.nn.gelu(_rms_norm(x, weights["norm_mlp"]) @ weights["up"])
        return x + hidden @ weights["down"]

    def _attend(self, x: Array, weights: PyTree) -> Array:
        head = self.width // self.heads
        qkv = (x @ weights["qkv"]).reshape(*x.shape[:2], 3, self.heads, head)
        if self.attention == "cudnn":
            # Under autocast this is traced in float32, which the kernel does not take.
            qkv = qkv.astype(self.kernel_dtype)
        elif x.dtype == jnp.float16 and jax.default_backend() != "gpu":
            # JAX asks for a float16 product that only GPUs have; others compute in float32 anyway.
            qkv = qkv.astype(jnp.float32)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        return mixed.reshape(x.shape).astype(x.dtype) @ weights["attention_out"]

    def flops(self, batch: int) -> float:
        """Floating-point operations that a train step of so many sequences needs: `FLOPS`."""
        tokens = batch * self.context
        return tokens * (6 * self._multiplied() + 12 * self.layers * self.width * self.context)

    def _multiplied(self) -> int:
        """The params that take part in matrix products: not positions and norms."""
        return 12 * self.layers * self.width**2 + self.vocab * self.width


# Chowdhery et al. (2022), appendix B; forward and backward, recomputation not counted.
FLOPS = (
    "tokens x (6 N + 12 layers x width x context), with N = 12 layers x width^2 + vocab x width "
    "the params in matrix products (the tied embedding once, for the logits); attention counts "
    "in full although it is causal, and recomputation does not count"
)


def count(params: PyTree) -> int:
    """How many numbers there are in a tree."""
    return sum(x.size for x in jax.tree.leaves(params))


def _rms_norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (normal * scale.astype(jnp.float32)).astype(x.dtype)
