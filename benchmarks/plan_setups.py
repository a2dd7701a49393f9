"""Models for the memory planner, and how each is spread: on one device, FSDP, FSDP and TP.

The planner was designed on four models. The others were not looked at before it was done.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from convolution_models import convnext_program, unet_program
from flax_gpt import linen_program, nnx_program
from gpt import GPT
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import PyTree
from stacked_models import MODELS, Model, Sizes

from jaxmp.sharding import fully_sharded

SPREADS = {"single": (1, 1), "fsdp": (8, 1), "fsdp+tp": (4, 2)}
_MIN_SIZE = 2**16


class Setup(NamedTuple):
    """A loss with abstract params, and the batch of one device.

    Attributes:
      loss: `loss(params, batch)`.
      params: abstract float32 params.
      batch: makes the abstract batch of so many times the examples of one device.
      options: further arguments of `memory_plan`.
    """

    loss: Callable[..., Any]
    params: PyTree
    batch: Callable[[int], PyTree]
    options: Mapping[str, Any] = MappingProxyType({})


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _tokens(batch: int, length: int) -> Callable[[int], PyTree]:
    return lambda times: jax.ShapeDtypeStruct((times * batch, length + 1), jnp.int32)


def _mlp(width: int = 2048, layers: int = 6, batch: int = 4096, **options: Any) -> Setup:
    params = {
        f"layer_{i}": {"up": _floats(width, 4 * width), "down": _floats(4 * width, width)}
        for i in range(layers)
    }

    def loss(params: PyTree, examples: Any) -> Any:
        x, y = examples
        for layer in params.values():
            x = jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - y) ** 2)

    return Setup(loss, params, lambda times: (_floats(times * batch, width),) * 2, options)


def _gpt(remat: bool = False, microbatches: int = 1) -> Setup:
    model = GPT(layers=6, width=1024, heads=16, vocab=32768, context=1024, remat=remat)
    params, batch = jax.eval_shape(model.init), _tokens(4 * microbatches, model.context)
    return Setup(model.loss, params, batch, {"microbatches": microbatches})


_TEXT = Sizes(layers=6, width=1024, batch=4, length=1024, heads=16, classes=32768)


def _flax(program: Any, scan: bool) -> Setup:
    loss, params = program(_TEXT, scan)
    return Setup(loss, params, _tokens(_TEXT.batch, _TEXT.length), {"cast": "none"})


def _stacked(name: str, sizes: Sizes, scan: bool) -> Setup:
    model: Model = MODELS[name](sizes, scan=scan)
    one = jax.eval_shape(model.batch)

    def batch(times: int) -> PyTree:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((times * x.shape[0], *x.shape[1:]), x.dtype), one
        )

    return Setup(model.loss, jax.eval_shape(model.params), batch)


def _unet() -> Setup:
    loss, params = unet_program()
    return Setup(loss, params, lambda times: (_floats(times * 16, 64, 64, 3),) * 2)


def _convnext() -> Setup:
    loss, params = convnext_program()

    def batch(times: int) -> PyTree:
        kinds = jax.ShapeDtypeStruct((times * 32,), jnp.int32)
        return _floats(times * 32, 128, 128, 3), kinds

    return Setup(loss, params, batch)


_IMAGES = Sizes(layers=8, width=128, batch=64, length=56)
DESIGNED_ON: dict[str, Callable[[], Setup]] = {
    "mlp": _mlp,
    "gpt, scan": _gpt,
    "linen gpt": functools.partial(_flax, linen_program, False),
    "resnet": functools.partial(_stacked, "resnet", _IMAGES, False),
}
HELD_OUT: dict[str, Callable[[], Setup]] = {
    "gpt, scan, checkpoints": functools.partial(_gpt, remat=True),
    "gpt, scan, 4 microbatches": functools.partial(_gpt, microbatches=4),
    "nnx gpt, scan": functools.partial(_flax, nnx_program, True),
    "gemma, scan": functools.partial(_stacked, "gemma", _TEXT, True),
    "vit": functools.partial(
        _stacked, "vit", Sizes(layers=6, width=768, batch=32, length=256), False
    ),
    "u-net": _unet,
    "convnext": _convnext,
    "moe, scan": functools.partial(
        _stacked, "moe", Sizes(layers=4, width=512, batch=8, length=512, classes=8192), True
    ),
}
SETUPS = DESIGNED_ON | HELD_OUT

# Storages and options of an MLP of 25 million params.
_OPTIONS: dict[str, dict[str, Any]] = {
    "mixed_bfloat16": {},
    "float32": {"policy": "float32"},
    "bfloat16": {"policy": "bfloat16"},
    "mixed_float16": {"policy": "mixed_float16"},
    "mixed_float8": {"policy": "mixed_float8"},
    **{
        f"master={name}": {"policy": "bfloat16", "master": name}
        for name in ("remainder", "remainder8", "kahan", "stochastic")
    },
    "moments=int8": {"moments": "int8"},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
    "MultiSteps": {"optimizer": optax.MultiSteps(optax.adamw(1e-3), 4)},
    "microbatches=4": {"microbatches": 4},
    "recompute=always": {"recompute": "always"},
    "donate=False": {"donate": False},
}
# Of 512 examples, where gradients and state fill memory, and of 4,096, where activations do.
OPTIONS: dict[str, Callable[[], Setup]] = {
    f"{name}, {batch}": functools.partial(_mlp, 1024, 3, batch, **options)
    for name, options in _OPTIONS.items()
    for batch in (512, 4096)
}

# What tensor parallelism splits by the ends of a param's path: the dimension, from the end.
_SPLIT = {
    **dict.fromkeys(["qkv", "q", "kv", "up", "gate", "kernels", "in", "state", "head"], -1),
    **dict.fromkeys(["down", "out", "attention_out"], -2),
    **{"DenseGeneral_0/kernel": -2, "DenseGeneral_1/kernel": -3},
    **{"Dense_0/kernel": -1, "Dense_1/kernel": -2},
    **{"qkv/kernel": -2, "out/kernel": -3, "up/kernel": -1, "down/kernel": -2},
}


def mesh_of(spread: str, devices: Any) -> Mesh:
    """The mesh of a spread, on the first of these devices."""
    shape = SPREADS[spread]
    kinds = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("data", "model"), kinds, devices=devices[: math.prod(shape)])


def shardings_of(params: PyTree, mesh: Any) -> PyTree:
    """The sharding of each param on a mesh."""

    def split(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        found = [d for end, d in _SPLIT.items() if f"/{name}".endswith(f"/{end}")]
        entries: list[Any] = [None] * x.ndim
        if found and mesh.shape["model"] > 1:
            entries[found[0]] = "model"
        return NamedSharding(mesh, P(*entries))

    base = jax.tree.map_with_path(split, params)
    return fully_sharded(params, mesh, "data", base=base, min_size=_MIN_SIZE)
