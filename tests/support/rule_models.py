"""A GPT and a ResNet, in linen and in nnx, that can be annotated by hand or put under rules.

Each has one definition: `dtype`, `norm_dtype` and `head_dtype` annotate it by hand; without them it
is what an author writes who never thinks of precision. The residual stream has the dtype of the
layers that add to it, since the norms stand on the branches.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmp
import jaxmp.linen
import jaxmp.nnx

# Half the time of compiling, for programs that run once.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

Stack = Literal["loop", "remat", "scan"]
Flax = Literal["linen", "nnx"]
Kind = Literal["gpt", "gpt with Flax's attention", "resnet"]
Author = Literal["by hand", "by hand, head too", "under rules", "plain"]

WIDTH, HEADS, VOCAB, CONTEXT, STAGES = 16, 2, 24, 8, (8, 16)
BY_HAND: dict[str, Any] = {
    "dtype": jnp.bfloat16,
    "norm_dtype": jnp.float32,
    "head_dtype": jnp.float32,
}
RULES = {
    "gpt": jaxmp.PolicyRules([("*norm*", "float32"), ("head", "float32")], "mixed_bfloat16"),
    "gpt with Flax's attention": jaxmp.PolicyRules(
        {"type:LayerNorm": "float32", "head": "float32"}, "mixed_bfloat16"
    ),
    "resnet": jaxmp.PolicyRules({"type:BatchNorm": "float32", "head": "float32"}, "mixed_bfloat16"),
}


def head_precision(dtype: Any) -> Any:
    """What an author asks for whose head is float32 on every device."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linen_head(dtype: Any) -> Any:
    return nn.Dense(VOCAB, dtype=dtype, precision=head_precision(dtype), name="head")


def nnx_head(width: int, dtype: Any, rngs: nnx.Rngs) -> Any:
    precision = head_precision(dtype)
    return nnx.Linear(width, VOCAB, dtype=dtype, precision=precision, rngs=rngs)


def attend(qkv: jax.Array) -> jax.Array:
    """Causal attention; the softmax in float32, as one has it in every precision."""
    q, k, v = jnp.moveaxis(qkv, -3, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool)[None, None], scores, -1e4)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


class LinenAttention(nn.Module):
    """Two projections, and two products between them."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (3, HEADS, WIDTH // HEADS)
        mixed = attend(nn.DenseGeneral(shape, dtype=self.dtype, name="qkv")(x))
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), dtype=self.dtype, name="out")(mixed)


class LinenBlock(nn.Module):
    """A pre-norm block, with the signature that `nn.scan` wants."""

    flax_attention: bool = False
    dtype: Any = None
    norm_dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        h = nn.LayerNorm(dtype=self.norm_dtype, name="norm_attention")(x)
        if self.flax_attention:
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            layer = nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype, name="attention")
            x = x + layer(h, mask=mask)
        else:
            x = x + LinenAttention(dtype=self.dtype, name="attention")(h)
        h = nn.LayerNorm(dtype=self.norm_dtype, name="norm_mlp")(x)
        h = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype, name="up")(h))
        return x + nn.Dense(WIDTH, dtype=self.dtype, name="down")(h), None


class LinenGPT(nn.Module):
    """Embeddings, blocks, a norm and a head."""

    layers: int
    stack: Stack = "loop"
    flax_attention: bool = False
    dtype: Any = None
    norm_dtype: Any = None
    head_dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH, dtype=self.dtype, name="tokens")(tokens)
        positions = jnp.arange(tokens.shape[1])[None]
        x = x + nn.Embed(CONTEXT, WIDTH, dtype=self.dtype, name="positions")(positions)
        Block: Any = LinenBlock if self.stack == "loop" else nn.remat(LinenBlock)
        block = functools.partial(
            Block, self.flax_attention, dtype=self.dtype, norm_dtype=self.norm_dtype
        )
        if self.stack == "scan":
            rngs, axes = {"params": True}, {"params": 0}
            Blocks = nn.scan(Block, variable_axes=axes, split_rngs=rngs, length=self.layers)
            x, _ = Blocks(*block.args, **block.keywords, name="blocks")(x, None)
        else:
            for i in range(self.layers):
                x, _ = block(name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.norm_dtype, name="norm_out")(x)
        return linen_head(self.head_dtype)(x)


class LinenResidual(nn.Module):
    """Norms and convolutions on a branch; where the width changes, also on the way around it."""

    width: int
    dtype: Any = None
    norm_dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.norm_dtype
        )
        h = nn.relu(norm()(x))
        if x.shape[-1] != self.width:
            x = nn.Conv(self.width, (1, 1), dtype=self.dtype, name="around")(h)
        h = nn.Conv(self.width, (3, 3), dtype=self.dtype)(h)
        return x + nn.Conv(self.width, (3, 3), dtype=self.dtype)(nn.relu(norm()(h)))


class LinenResNet(nn.Module):
    """A pre-activation ResNet: what adds to the stream is convolutions."""

    stack: Stack = "loop"
    dtype: Any = None
    norm_dtype: Any = None
    head_dtype: Any = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        Residual: Any = LinenResidual if self.stack == "loop" else nn.remat(LinenResidual)
        x = nn.Conv(STAGES[0], (3, 3), dtype=self.dtype, name="stem")(images)
        for i, width in enumerate(_widths()):
            x = Residual(width, self.dtype, self.norm_dtype, name=f"residual_{i}")(x)
        norm = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.norm_dtype)
        x = nn.relu(norm(x)).mean((1, 2))
        return linen_head(self.head_dtype)(x)


class NnxAttention(nnx.Module):
    """Two projections, and two products between them."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        shape = (3, HEADS, WIDTH // HEADS)
        self.qkv = nnx.LinearGeneral(WIDTH, shape, dtype=dtype, rngs=rngs)
        self.out = nnx.LinearGeneral(shape[1:], WIDTH, axis=(-2, -1), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(attend(self.qkv(x)))


class NnxBlock(nnx.Module):
    """A pre-norm block."""

    def __init__(self, flax_attention: bool, dtype: Any, norm_dtype: Any, rngs: nnx.Rngs) -> None:
        self.flax_attention = flax_attention
        self.norm_attention = nnx.LayerNorm(WIDTH, dtype=norm_dtype, rngs=rngs)
        self.attention: Any = (
            nnx.MultiHeadAttention(HEADS, WIDTH, dtype=dtype, decode=False, rngs=rngs)
            if flax_attention
            else NnxAttention(dtype, rngs)
        )
        self.norm_mlp = nnx.LayerNorm(WIDTH, dtype=norm_dtype, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        more = {"mask": mask} if self.flax_attention else {}
        x = x + self.attention(self.norm_attention(x), **more)
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class NnxGPT(nnx.Module):
    """Embeddings, blocks (one by one, or stacked), a norm and a head."""

    def __init__(
        self,
        layers: int,
        stack: Stack = "loop",
        flax_attention: bool = False,
        dtype: Any = None,
        norm_dtype: Any = None,
        head_dtype: Any = None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        make = functools.partial(NnxBlock, flax_attention, dtype, norm_dtype)
        self.stack = stack
        self.tokens = nnx.Embed(VOCAB, WIDTH, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, dtype=dtype, rngs=rngs)
        if stack == "scan":
            self.blocks = nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs)
        else:
            self.blocks = nnx.List([make(rngs) for _ in range(layers)])
        self.norm_out = nnx.LayerNorm(WIDTH, dtype=norm_dtype, rngs=rngs)
        self.head = nnx_head(WIDTH, head_dtype, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        if self.stack == "scan":
            scan = nnx.scan(_call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            x = scan(self.blocks, x)
        else:
            for block in self.blocks:
                x = _caller(self.stack)(block, x)
        return self.head(self.norm_out(x))


class NnxResidual(nnx.Module):
    """Norms and convolutions on a branch; where the width changes, also on the way around it."""

    def __init__(
        self, width_in: int, width: int, dtype: Any, norm_dtype: Any, rngs: nnx.Rngs
    ) -> None:
        norm = functools.partial(nnx.BatchNorm, momentum=0.9, dtype=norm_dtype, rngs=rngs)
        conv = functools.partial(nnx.Conv, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([norm(width_in), norm(width)])
        self.convs = nnx.List([conv(width_in, width, (3, 3)), conv(width, width, (3, 3))])
        self.around = None if width_in == width else conv(width_in, width, (1, 1))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.norms[0](x))
        x = x if self.around is None else self.around(h)
        return x + self.convs[1](nnx.relu(self.norms[1](self.convs[0](h))))


class NnxResNet(nnx.Module):
    """A pre-activation ResNet: what adds to the stream is convolutions."""

    def __init__(
        self,
        stack: Stack = "loop",
        dtype: Any = None,
        norm_dtype: Any = None,
        head_dtype: Any = None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.stack = stack
        self.stem = nnx.Conv(3, STAGES[0], (3, 3), dtype=dtype, rngs=rngs)
        widths = [STAGES[0], *_widths()]
        self.residuals = nnx.List(
            [NnxResidual(*pair, dtype, norm_dtype, rngs) for pair in itertools.pairwise(widths)]
        )
        self.norm = nnx.BatchNorm(STAGES[-1], momentum=0.9, dtype=norm_dtype, rngs=rngs)
        self.head = nnx_head(STAGES[-1], head_dtype, rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(images)
        for residual in self.residuals:
            x = _caller(self.stack)(residual, x)
        return self.head(nnx.relu(self.norm(x)).mean((1, 2)))


def _widths() -> list[int]:
    return [width for width in STAGES for _ in range(2)]


def _call(module: Any, x: jax.Array) -> jax.Array:
    return module(x)


def _caller(stack: Stack) -> Callable[[Any, jax.Array], jax.Array]:
    return nnx.remat(_call) if stack == "remat" else _call


def batch(kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    random = np.random.default_rng(1)
    if kind == "resnet":
        images = random.standard_normal((8, 6, 6, 3)).astype(np.float32)
        return images, random.integers(VOCAB, size=8)
    tokens = random.integers(VOCAB, size=(8, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def make(flax: Flax, kind: Kind, author: Author, *, layers: int = 2, stack: Stack = "loop") -> Any:
    """A module, by the author who decided about its precision; those of nnx are abstract."""
    dtypes = BY_HAND if author.startswith("by hand") else {}
    if author == "by hand, head too":
        dtypes = {**dtypes, "head_dtype": jnp.bfloat16}
    sizes: dict[str, Any] = {"stack": stack}
    if kind != "resnet":
        sizes |= {"layers": layers, "flax_attention": kind != "gpt"}
    if flax == "linen":
        module = (LinenResNet if kind == "resnet" else LinenGPT)(**sizes, **dtypes)
        return jaxmp.linen.apply_policy(module, RULES[kind]) if author == "under rules" else module
    cls = NnxResNet if kind == "resnet" else NnxGPT
    model: Any = nnx.eval_shape(lambda: cls(**sizes, **dtypes, rngs=nnx.Rngs(0)))
    return jaxmp.nnx.apply_policy(model, RULES[kind]) if author == "under rules" else model


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss, in float32."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return losses.mean()


@dataclasses.dataclass(frozen=True)
class Functions:
    """A model as functions of its params and a batch, which is what JAX can trace.

    Attributes:
      params: random ones, the same whoever wrote the model; no bias of them is zero.
      forward: the logits.
      loss: the loss.
      value_and_grad: loss, gradients and the new batch statistics, by jax.value_and_grad for linen
        and nnx.value_and_grad for nnx.
    """

    params: Any
    forward: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], Any]
    value_and_grad: Callable[[Any, Any], Any]


def functions(model: Any, kind: Kind) -> Functions:
    """The functions of a model from `make`."""
    return _of_nnx(model) if isinstance(model, nnx.Module) else _of_linen(model, batch(kind)[0])


def _of_linen(module: nn.Module, inputs: np.ndarray) -> Functions:
    rest = linen_variables(module, inputs)
    params = rest.pop("params")

    def apply(params: Any, inputs: Any) -> Any:
        return module.apply({"params": params, **rest}, inputs, mutable=list(rest))

    def loss(params: Any, batch: Any) -> Any:
        logits, changed = apply(params, batch[0])
        return cross_entropy(logits, batch[1]), changed

    def value_and_grad(params: Any, batch: Any) -> Any:
        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return value, grads, changed

    return Functions(
        params, lambda p, b: apply(p, b[0])[0], lambda p, b: loss(p, b)[0], value_and_grad
    )


def linen_variables(module: nn.Module, inputs: np.ndarray) -> dict[str, Any]:
    """Random params and statistics of a linen module, the same whoever wrote it."""
    abstract = jax.eval_shape(module.init, jax.random.key(0), inputs)
    rest = {name: jax.tree.map(_ones, tree) for name, tree in abstract.items() if name != "params"}
    return {"params": _drawn(abstract["params"]), **rest}


def _of_nnx(abstract: nnx.Module) -> Functions:
    graphdef, params, rest = nnx.split(real(abstract), nnx.Param, ...)

    def merge(params: Any) -> Any:
        return nnx.merge(graphdef, params, rest, copy=True)

    def value_and_grad(params: Any, batch: Any) -> Any:
        model = merge(params)
        value, grads = nnx.value_and_grad(loss)(model, batch)
        return value, grads, nnx.state(model, nnx.BatchStat)

    return Functions(
        params, lambda p, b: merge(p)(b[0]), lambda p, b: loss(merge(p), b), value_and_grad
    )


def real(abstract: Any) -> Any:
    """An abstract nnx model with random params, the same whoever wrote the model."""
    graphdef, params, rest = nnx.split(abstract, nnx.Param, ...)
    return nnx.merge(graphdef, _drawn(params), jax.tree.map(_ones, rest))


def loss(model: Any, batch: Any) -> jax.Array:
    """The loss of an nnx model."""
    return cross_entropy(model(batch[0]), batch[1])


def _drawn(abstract: Any) -> Any:
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: (0.3 * random.standard_normal(x.shape)).astype(x.dtype), abstract)


def _ones(x: Any) -> jax.Array:
    return jnp.ones(x.shape, x.dtype)
