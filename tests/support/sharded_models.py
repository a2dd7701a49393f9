"""A small transformer written three ways, and the ways to spread it over eight devices.

`plain` says nothing of dtypes and runs under autocast, `linen` is annotated by hand, `nnx` is put
under rules. All have their layers in a scan. What they compute in is an argument, so that the same
program in float32 says what mixed precision should have left as it was.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from jaxmp.sharding import FSDP, fully_sharded

Author = Literal["plain", "linen", "nnx"]
Mode = Literal["dp", "fsdp", "tp", "fsdp+tp", "hsdp"]
AUTHORS: tuple[Author, ...] = ("plain", "linen", "nnx")
MODES: tuple[Mode, ...] = ("dp", "fsdp", "tp", "fsdp+tp", "hsdp")

LAYERS, WIDTH, HIDDEN, HEADS, VOCAB, CONTEXT, BATCH = 3, 64, 256, 8, 128, 32, 16
HEAD = WIDTH // HEADS


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with abstract params, as JAX traces it; `grads` takes options of value_and_grad."""

    params: Any
    grads: Callable[..., Any]
    loss: Callable[[Any, Any], Any]


def model(author: Author, dtype: str, *, remat: bool = False) -> Model:
    """The model of an author, computing in a dtype, float32 or 16 bits."""
    return {"plain": _plain, "linen": _linen, "nnx": _nnx}[author](dtype, remat)


def attend(qkv: jax.Array) -> jax.Array:
    """Attention in one's own dtype, the softmax in float32."""
    q, k, v = (qkv[:, :, i] for i in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return losses.mean()


def _plain(dtype: str, remat: bool) -> Model:
    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale

    def block(x: Any, w: Any) -> Any:
        qkv = jnp.einsum("btd,dnhk->btnhk", norm(x, w["norm_attention"]), w["qkv"])
        x = x + jnp.einsum("bthk,hkd->btd", attend(qkv), w["out"])
        hidden = jax.nn.relu(norm(x, w["norm_mlp"]) @ w["up"] + w["bias"])
        return x + hidden @ w["down"], None

    def loss(params: Any, batch: Any) -> Any:
        tokens, targets = batch
        x = params["tokens"][tokens] + params["positions"]
        body = jax.checkpoint(block) if remat else block
        x, _ = jax.lax.scan(body, x, params["layers"])
        return cross_entropy(norm(x, params["norm"]) @ params["head"], targets)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = {
        "norm_attention": array(LAYERS, WIDTH),
        "qkv": array(LAYERS, WIDTH, 3, HEADS, HEAD),
        "out": array(LAYERS, HEADS, HEAD, WIDTH),
        "norm_mlp": array(LAYERS, WIDTH),
        "up": array(LAYERS, WIDTH, HIDDEN),
        "bias": array(LAYERS, HIDDEN),
        "down": array(LAYERS, HIDDEN, WIDTH),
    }
    params = {
        "tokens": array(VOCAB, WIDTH),
        "positions": array(CONTEXT, WIDTH),
        "layers": layers,
        "norm": array(WIDTH),
        "head": array(WIDTH, VOCAB),
    }
    fast = jaxmp.autocast(loss, f"params=float32,compute={dtype},output=float32")

    def grads(params: Any, batch: Any, **options: Any) -> Any:
        return jaxmp.grad(fast, **options)(params, batch)

    return Model(params, grads, fast)


class LinenBlock(nn.Module):
    """A pre-norm block, every layer told its dtype."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        heads = nn.DenseGeneral((3, HEADS, HEAD), dtype=self.dtype, name="qkv")
        y = attend(heads(nn.LayerNorm(dtype=self.dtype)(x)))
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), dtype=self.dtype, name="out")(y)
        y = nn.relu(
            nn.Dense(HIDDEN, dtype=self.dtype, name="up")(nn.LayerNorm(dtype=self.dtype)(x))
        )
        return x + nn.Dense(WIDTH, dtype=self.dtype, name="down")(y), None


class LinenLM(nn.Module):
    """Blocks in `nn.scan`, a tied embedding."""

    dtype: Any
    remat: bool

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCAB, WIDTH, dtype=self.dtype)
        block = nn.remat(LinenBlock, prevent_cse=False) if self.remat else LinenBlock
        stack = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = stack(self.dtype, name="layers")(embed(tokens), None)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def _linen(dtype: str, remat: bool) -> Model:
    module = LinenLM(jnp.dtype(dtype), remat)

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(module.apply(params, batch[0]), batch[1])

    def grads(params: Any, batch: Any, **options: Any) -> Any:
        return jaxmp.grad(loss, **options)(params, batch)

    tokens = jnp.zeros((1, CONTEXT), jnp.int32)
    return Model(jax.eval_shape(module.init, jax.random.key(0), tokens), grads, loss)


class NnxBlock(nnx.Module):
    """A pre-norm block that knows nothing of precision."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_attention = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, HEAD), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, HEAD), WIDTH, axis=(-2, -1), rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(attend(self.qkv(self.norm_attention(x))))
        return x + self.down(nnx.relu(self.up(self.norm_mlp(x))))


class NnxLM(nnx.Module):
    """Blocks in `nnx.scan`."""

    def __init__(self, remat: bool, *, rngs: nnx.Rngs) -> None:
        self.remat = remat
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda r: NnxBlock(rngs=r)))(rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def call(block: NnxBlock, x: jax.Array) -> jax.Array:
            return block(x)

        body = nnx.remat(call, prevent_cse=False) if self.remat else call
        scan = nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(scan(self.layers, self.tokens(tokens)))


def _nnx(dtype: str, remat: bool) -> Model:
    abstract: Any = nnx.eval_shape(lambda: NnxLM(remat, rngs=nnx.Rngs(0)))
    rules = jaxmp.PolicyRules(default=f"params=float32,compute={dtype},output={dtype}")
    graphdef, params, rest = nnx.split(jaxmp.nnx.apply_policy(abstract, rules), nnx.Param, ...)
    if jax.tree.leaves(rest):
        raise AssertionError("the model has state besides its params")

    def merge(params: Any) -> Any:
        return nnx.merge(graphdef, params, rest, copy=True)

    def of_module(module: Any, batch: Any) -> Any:
        return cross_entropy(module(batch[0]), batch[1])

    def grads(params: Any, batch: Any, **options: Any) -> Any:
        return jaxmp.nnx.value_and_grad(of_module, **options)(merge(params), batch)[1]

    return Model(params, grads, lambda params, batch: of_module(merge(params), batch))


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a model lies on a mesh, by shardings; gradients are summed over some of its axes."""

    mesh: Mesh
    params: Any
    batch: NamedSharding
    fsdp: FSDP | None
    reduces_over: tuple[str, ...]


_MESHES: dict[Mode, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "dp": ((8,), ("data",)),
    "fsdp": ((8,), ("data",)),
    "tp": ((2, 4), ("data", "model")),
    "fsdp+tp": ((4, 2), ("data", "model")),
    "hsdp": ((2, 4), ("replica", "data")),
}


def placement(
    mode: Mode,
    params: Any,
    make_mesh: Callable[[tuple[int, ...], tuple[str, ...]], Mesh],
    gather_dtype: Any = None,
) -> Placement:
    """The placement of params in a mode."""
    mesh = make_mesh(*_MESHES[mode])
    specs = jax.tree.map(lambda _: P(), params)
    if "tp" in mode:
        specs = jax.tree.map_with_path(_split, params)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    fsdp = None
    if mode in ("fsdp", "fsdp+tp", "hsdp"):
        # Norms and biases stay whole, as they would be in a real model.
        shardings = fully_sharded(params, mesh, "data", base=shardings, min_size=2048)
        fsdp = FSDP(shardings=shardings, axis="data", gather_dtype=gather_dtype)
    over = ("replica", "data") if mode == "hsdp" else ("data",)
    return Placement(mesh, shardings, NamedSharding(mesh, P(over)), fsdp, over)


def _split(path: Any, x: Any) -> P:
    name = re.sub(r"\W+", ".", jax.tree_util.keystr(path)).strip(".").removesuffix(".value")
    axis = _model_axis(name)
    return P() if axis is None else P(*[None] * (x.ndim + axis), "model")


def _model_axis(name: str) -> int | None:
    """Which dimension of a param tensor parallelism splits, counted from the end."""
    if "qkv" in name:
        return -2
    if "up" in name or name.endswith("layers.bias"):
        return -1
    if "bias" in name:
        return None
    if name.endswith(("out", "out.kernel")):
        return -3
    return -2 if "down" in name else None


def abstract(tree: Any, shardings: Any) -> Any:
    """Arrays that are not there, with shardings."""

    def place(x: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, tree, shardings)


def batch(sharding: NamedSharding) -> Any:
    """Tokens and targets, abstract."""
    tokens = jax.ShapeDtypeStruct((BATCH, CONTEXT), jnp.int32, sharding=sharding)
    return tokens, tokens
