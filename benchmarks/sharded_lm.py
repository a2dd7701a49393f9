"""A transformer of plain JAX functions, and the ways to spread it over eight devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from jaxmp.sharding import fully_sharded

Mode = Literal["dp", "fsdp", "tp", "fsdp+tp", "hsdp"]
MODES: tuple[Mode, ...] = ("dp", "fsdp", "tp", "fsdp+tp", "hsdp")

_MESHES: dict[Mode, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "dp": ((8,), ("data",)),
    "fsdp": ((8,), ("data",)),
    "tp": ((2, 4), ("data", "model")),
    "fsdp+tp": ((4, 2), ("data", "model")),
    "hsdp": ((2, 4), ("replica", "data")),
}
# What tensor parallelism splits: heads, hidden units, and the vocabulary of the logits.
_SPLIT = {
    "qkv": P(None, None, None, "model"),
    "out": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
    "head": P(None, "model"),
}


def _as_it_is(name: str, x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class ShardedLM:
    """The size of the model.

    Attributes:
      layers: how many blocks.
      width: of the residual stream; the hidden layer of a block is four times as wide.
      heads: attention heads, which share the width.
      vocab: how many tokens there are.
      context: how many tokens a sequence has.
      remat: recompute each block in the backward pass rather than keep its activations.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    remat: bool = False

    def params(self) -> PyTree:
        """Abstract float32 params; the blocks are stacked along a leading axis."""
        n, d, head = self.layers, self.width, self.width // self.heads
        shapes = {
            "tokens": (self.vocab, d),
            "positions": (self.context, d),
            "layers": {
                "norm_attention": (n, d),
                "qkv": (n, d, 3, self.heads, head),
                "out": (n, self.heads, head, d),
                "norm_mlp": (n, d),
                "up": (n, d, 4 * d),
                "down": (n, 4 * d, d),
            },
            "norm": (d,),
            "head": (d, self.vocab),
        }
        array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        return jax.tree.map(array, shapes, is_leaf=lambda x: isinstance(x, tuple))

    def loss(
        self,
        params: PyTree,
        batch: tuple[Array, Array],
        *,
        dtype: Any = None,
        use: Callable[[str, PyTree], PyTree] = _as_it_is,
        pin: Callable[[Array], Array] = lambda x: x,
    ) -> Float[Array, ""]:
        """The mean cross-entropy of each target.

        Args:
          params: the params.
          batch: tokens and targets.
          dtype: what the params are cast to first, as jmp does; None for no cast.
          use: is given the params of a layer, with its name, right before they are used.
          pin: is given the activations between the blocks.
        """
        if dtype is not None:
            params = jax.tree.map(lambda w: w.astype(dtype), params)
        tokens, targets = batch
        table, positions = (use(name, params[name]) for name in ("tokens", "positions"))

        def block(x: Array, weights: PyTree) -> tuple[Array, None]:
            w = use("layers", weights)
            x = x + _attention(_rms_norm(x, w["norm_attention"]), w["qkv"], w["out"])
            hidden = jax.nn.gelu(_rms_norm(x, w["norm_mlp"]) @ w["up"])
            return pin(x + hidden @ w["down"]), None

        x = pin(table[tokens] + positions)
        x, _ = jax.lax.scan(jax.checkpoint(block) if self.remat else block, x, params["layers"])
        x = _rms_norm(x, use("norm", params["norm"]))
        logits = (x @ use("head", params["head"])).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _rms_norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (normal * scale.astype(jnp.float32)).astype(x.dtype)


def _attention(x: Array, into: Array, out: Array) -> Array:
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhk->btnhk", x, into), 2, 0)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores).astype(x.dtype)
    return jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", weights, v), out)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the model lies on a mesh.

    Attributes:
      mesh: the mesh.
      stored: the sharding of each param.
      used: the sharding of each param where it is used, without the axis of layers.
      batch: the sharding of each array of the batch.
    """

    mesh: Mesh
    stored: Any
    used: Any
    batch: NamedSharding

    @property
    def gathers(self) -> bool:
        """Whether params are split to save memory."""
        return self.stored["tokens"].spec != self.used["tokens"].spec

    @property
    def specs(self) -> Any:
        """The spec of each param, for a `shard_map`."""
        return jax.tree.map(lambda sharding: sharding.spec, self.stored)


def place(mode: Mode, params: PyTree, devices: Any, min_size: int) -> Placement:
    """The placement of a model's params in a mode.

    Args:
      mode: how it is spread.
      params: the abstract params.
      devices: eight of them.
      min_size: params with fewer elements are on all devices.
    """
    shape, names = _MESHES[mode]
    mesh = jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices)
    return place_on(mesh, mode, params, min_size)


def place_on(mesh: Mesh, mode: str, params: PyTree, min_size: int) -> Placement:
    """The placement of a model's params on a mesh; arguments as for `place`."""
    split = _SPLIT if "tp" in mode else {}

    def base(path: Any, _: Any) -> NamedSharding:
        return NamedSharding(mesh, split.get(path[-1].key, P()))

    def without_layers(path: Any, sharding: NamedSharding) -> NamedSharding:
        spec = sharding.spec[1:] if path[0].key == "layers" else sharding.spec
        return NamedSharding(mesh, P(*spec))

    stored = tensor_parallel = jax.tree.map_with_path(base, params)
    if mode in ("fsdp", "fsdp+tp", "hsdp"):
        stored = fully_sharded(params, mesh, "data", base=tensor_parallel, min_size=min_size)
    used = jax.tree.map_with_path(without_layers, tensor_parallel)
    over = ("replica", "data") if "replica" in mesh.shape else "data"
    return Placement(mesh, stored, used, NamedSharding(mesh, P(over)))
