"""Shardings of the language model over devices, for each way to spread it.

Arrays are split along the axes of a mesh: `data` and `replica` split the batch, `model` the
features of a layer. From this the compiler derives what the devices send each other.
"""

from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jaxmp.sharding import FSDP, fully_sharded

MODES = ("ddp", "fsdp", "tp", "fsdp+tp", "hsdp", "per-shard")
# Tensor parallelism: of two layers, the first has its outputs split and the second its inputs, so
# the activations between them stay on their device. All other params are whole.
TENSOR_PARALLEL = {
    "query_key_value/kernel": P(None, "model"),
    "query_key_value/bias": P("model"),
    "attention_out/kernel": P("model", None),
    "mlp_in/kernel": P(None, "model"),
    "mlp_in/bias": P("model"),
    "mlp_out/kernel": P("model", None),
}


class Placement(NamedTuple):
    """The shardings of everything.

    Attributes:
      mesh: the devices.
      batch_axes: the mesh axes that split the batch, over which gradients are summed.
      batch: the sharding of a batch, whose first dimension counts examples.
      params: the sharding of each param.
      fsdp: the part of it that only saves memory, or None.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    batch: NamedSharding
    params: Any
    fsdp: FSDP | None


def place(mode: str, params: Any) -> Placement:
    """Spreads the model over all devices.

    Args:
      mode: one of `MODES`.
      params: the params, or their shapes.
    """
    mesh = make_mesh(mode)
    batch_axes = tuple(axis for axis in mesh.axis_names if axis != "model")
    batch = NamedSharding(mesh, P(batch_axes))

    def spec(path: Any, _: Any) -> P:
        name = jax.tree_util.keystr(path[-2:], simple=True, separator="/")
        return TENSOR_PARALLEL.get(name, P()) if "model" in mesh.shape else P()

    specs = jax.tree_util.tree_map_with_path(spec, params)
    if mode in ("fsdp", "fsdp+tp", "hsdp"):
        shardings = fully_sharded(params, mesh, "data", base=specs)
        return Placement(mesh, batch_axes, batch, shardings, FSDP(shardings=shardings, axis="data"))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return Placement(mesh, batch_axes, batch, shardings, None)


def make_mesh(mode: str) -> Mesh:
    """All devices, arranged for one mode."""
    devices = jax.device_count()
    sizes = {
        "tp": {"model": devices},
        "fsdp+tp": {"data": devices // 2, "model": 2},
        "hsdp": {"replica": 2, "data": devices // 2},
    }.get(mode, {"data": devices})
    # For --plain: plain JAX has no rule for a token lookup on explicit axes. jaxmp needs none.
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
