"""The GPT of `stacked_models`, with the layers of linen and of nnx, under a policy of jaxmp.

Layers of Flax decide what they keep for the backward pass, so a way to keep less must be tried on
them as well.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, nnx
from jaxtyping import Array, PyTree
from stacked_models import Sizes

import jaxmp
import jaxmp.linen
import jaxmp.nnx

Program = tuple[Callable[..., Array], PyTree]  # a loss, and its abstract params

_POLICY = "mixed_bfloat16"


def linen_module(sizes: Sizes, scan: bool, policy: Any = _POLICY) -> nn.Module:
    """The module under a policy; as it is, for None."""
    module = LinenGPT(sizes, scan)
    return module if policy is None else jaxmp.linen.apply_policy(module, policy)


def linen_program(sizes: Sizes, scan: bool, policy: Any = _POLICY) -> Program:
    """The loss as a function of linen's params."""
    model = linen_module(sizes, scan, policy)
    inputs = jax.ShapeDtypeStruct((sizes.batch, sizes.length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)

    def loss(params: PyTree, tokens: Array) -> Array:
        return cross_entropy(cast(Array, model.apply(params, tokens[:, :-1])), tokens)

    return loss, params


def nnx_program(sizes: Sizes, scan: bool, policy: Any = _POLICY) -> Program:
    """The loss as a function of the state of an nnx module."""
    model = nnx.eval_shape(lambda: NnxGPT(sizes, scan))
    under = model if policy is None else jaxmp.nnx.apply_policy(model, policy)
    graphdef, params = nnx.split(under)

    def loss(params: PyTree, tokens: Array) -> Array:
        return cross_entropy(nnx.merge(graphdef, params)(tokens[:, :-1]), tokens)

    return loss, params


PROGRAMS: dict[str, Callable[..., Program]] = {
    "linen": linen_program,
    "nnx": nnx_program,
}


class _LinenBlock(nn.Module):
    sizes: Sizes
    dtype: Any = None
    norm_dtype: Any = None

    @nn.compact
    def __call__(self, x: Array, _: None = None) -> tuple[Array, None]:
        width, heads = self.sizes.width, self.sizes.heads
        bare: dict[str, Any] = {"use_bias": False, "dtype": self.dtype}
        h = nn.LayerNorm(use_bias=False, dtype=self.norm_dtype)(x)
        qkv = nn.DenseGeneral((3, heads, width // heads), **bare)(h)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), **bare)(_attend(qkv))
        h = nn.LayerNorm(use_bias=False, dtype=self.norm_dtype)(x)
        h = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(h))
        return x + nn.Dense(width, **bare)(h), None


class LinenGPT(nn.Module):
    """The module, without a policy; by hand, dtypes of its layers and of its norms."""

    sizes: Sizes
    scan: bool
    dtype: Any = None
    norm_dtype: Any = None

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        s, dtypes = self.sizes, (self.dtype, self.norm_dtype)
        embed = nn.Embed(s.classes, s.width, dtype=self.dtype)
        positions = nn.Embed(s.length, s.width, dtype=self.dtype)
        x = embed(tokens) + positions(jnp.arange(s.length)[None])
        if self.scan:
            axes: dict[Any, Any] = {"params": 0}
            rngs: dict[Any, bool] = {"params": True}
            blocks = nn.scan(_LinenBlock, variable_axes=axes, split_rngs=rngs, length=s.layers)
            x, _ = blocks(s, *dtypes)(x, None)
        else:
            for _ in range(s.layers):
                x, _ = _LinenBlock(s, *dtypes)(x)
        return embed.attend(nn.LayerNorm(use_bias=False, dtype=self.norm_dtype)(x))


class _NnxBlock(nnx.Module):
    def __init__(self, sizes: Sizes, dtype: Any, norm_dtype: Any, rngs: nnx.Rngs) -> None:
        width, shape = sizes.width, (3, sizes.heads, sizes.width // sizes.heads)
        bare: dict[str, Any] = {"use_bias": False, "dtype": dtype, "rngs": rngs}
        norm: dict[str, Any] = {"use_bias": False, "dtype": norm_dtype, "rngs": rngs}
        self.norm_attention = nnx.LayerNorm(width, **norm)
        self.qkv = nnx.LinearGeneral(width, shape, **bare)
        self.out = nnx.LinearGeneral(shape[1:], width, axis=(-2, -1), **bare)
        self.norm_mlp = nnx.LayerNorm(width, **norm)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, **bare)

    def __call__(self, x: Array) -> Array:
        x = x + self.out(_attend(self.qkv(self.norm_attention(x))))
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class NnxGPT(nnx.Module):
    """As `LinenGPT`."""

    def __init__(self, sizes: Sizes, scan: bool, dtype: Any = None, norm_dtype: Any = None) -> None:
        rngs, self.scan = nnx.Rngs(0), scan
        make = functools.partial(_NnxBlock, sizes, dtype, norm_dtype)
        self.tokens = nnx.Embed(sizes.classes, sizes.width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(sizes.length, sizes.width, dtype=dtype, rngs=rngs)
        self.blocks: Any = (
            nnx.split_rngs(splits=sizes.layers)(nnx.vmap(make))(rngs)
            if scan
            else nnx.List([make(rngs) for _ in range(sizes.layers)])
        )
        self.norm = nnx.LayerNorm(sizes.width, use_bias=False, dtype=norm_dtype, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        if self.scan:
            step: Any = lambda block, x: block(x)  # noqa: E731
            x = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.tokens.attend(self.norm(x))


def _attend(qkv: Array) -> Array:
    q, k, v = jnp.moveaxis(qkv, -3, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


def cross_entropy(logits: Array, tokens: Array) -> Array:
    """The mean over each next token, in float32."""
    wide = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, tokens[:, 1:]).mean()
