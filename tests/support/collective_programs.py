"""Programs whose collectives can be counted by hand, for CPUs and for compilers without devices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

BF16, F32 = jnp.bfloat16, jnp.float32
LAYERS, WIDTH, HEAD = 5, 256, 512
LAYER, LAST = WIDTH * WIDTH, WIDTH * HEAD  # numbers in a layer, and in the head


def array(mesh: Any, shape: tuple[int, ...], *spec: Any, dtype: Any = F32) -> Any:
    """An abstract array with a sharding."""
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def arguments(mesh: Any, layer: Any = (), head: Any = (), batch: Any = "data") -> tuple[Any, Any]:
    """Params of a scan over layers and a head, and a batch of eight examples per device."""
    params = {
        "layers": array(mesh, (LAYERS, WIDTH, WIDTH), None, *layer),
        "head": array(mesh, (WIDTH, HEAD), *head),
    }
    return params, array(mesh, (8 * mesh.size, WIDTH), batch)


def loss(params: Any, x: Any, dtype: Any = BF16, gather: Callable[[Any], Any] = lambda w: w) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ gather(w.astype(dtype))), None

    x, _ = lax.scan(layer, x.astype(dtype), params["layers"])
    return jnp.sum((x @ gather(params["head"].astype(dtype))).astype(F32) ** 2)


def step(dtype: Any = BF16) -> Any:
    """The loss and its gradients, computed in `dtype`."""
    return jax.value_and_grad(lambda params, x: loss(params, x, dtype))


def fully_sharded(mesh: Any, dtype: Any = BF16) -> tuple[Any, Any]:
    """A step that gathers each layer in `dtype`, with its arguments; sharded over `data`."""
    args = arguments(mesh, ("data",), ("data",))

    def pinned(x: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def gather(w: Any) -> Any:
        return pinned(pinned(w, "data", None), None, None)

    def run(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss(p, x, dtype, gather))(params)
        shardings = jax.tree.map(lambda p: p.sharding, args[0])
        return value, jax.tree.map(lax.with_sharding_constraint, grads, shardings)

    return run, args


def every_kind(mesh: Any) -> tuple[Any, Any]:
    """One collective of each kind over a mesh of `data` and `model`; each device has 128 x 512."""
    shifted = [(i, (i + 1) % mesh.shape["data"]) for i in range(mesh.shape["data"])]

    def body(x: Any, count: Any) -> Any:
        is_finite = jnp.all(jnp.isfinite(x)).astype(jnp.int32)
        return (
            lax.psum(x, "data"),
            lax.pmax(x, "model"),
            lax.psum_scatter(x, "model", tiled=True),
            lax.all_gather(x.astype(BF16), "data", tiled=True),
            lax.all_to_all(x, "model", 0, 1, tiled=True),
            lax.ppermute(x, "data", shifted),
            lax.psum(count, "data"),
            lax.psum(is_finite, ("data", "model")),
        )

    specs = PartitionSpec("data", "model"), PartitionSpec("data")
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    x = array(mesh, (128 * mesh.shape["data"], 512 * mesh.shape["model"]), "data", "model")
    return run, (x, array(mesh, (128 * mesh.shape["data"],), "data", dtype=jnp.int32))


def every_kind_carries(mesh: Any) -> dict[tuple[str, str, str, tuple[str, ...]], int]:
    """What `every_kind` carries: bytes by kind, reducer, dtype and axes."""
    own = 128 * 512 * 4
    return {
        ("all-reduce", "add", "float32", ("data",)): own,
        ("all-reduce", "max", "float32", ("model",)): own,
        ("reduce-scatter", "add", "float32", ("model",)): own,
        ("all-gather", "", "bfloat16", ("data",)): own // 2 * mesh.shape["data"],
        ("all-to-all", "", "float32", ("model",)): own,
        ("collective-permute", "", "float32", ("data",)): own,
        ("all-reduce", "add", "int32", ("data",)): 128 * 4,
        ("all-reduce", "add", "int32", ("data", "model")): 4,
    }


def carried(report: Any) -> dict[tuple[str, str, str, tuple[str, ...]], int]:
    """The bytes of a report by kind, reducer, dtype and axes."""
    totals: dict[Any, int] = {}
    for row in report:
        key = (row.kind, row.reducer, row.dtype, row.axes)
        totals[key] = totals.get(key, 0) + row.bytes
    return totals


def size(*shape: int, dtype: Any = BF16) -> int:
    """The bytes of an array."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize
