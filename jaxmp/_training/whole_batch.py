"""A warning for a batch that every device computes whole, where it could compute a part."""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxmp._mesh.fsdp import FSDP
from jaxmp._mesh.specs import axes_of_spec
from jaxmp._numerics.user_warnings import warn
from jaxmp._program.op_classes import PLACINGS
from jaxmp._program.program import equations_in


def warn_of_whole_batch(
    params: PyTree, batch: PyTree, fsdp: FSDP | None, trace: Callable[[], Any]
) -> None:
    """Warns if params lie on several devices, and each of these computes the whole batch.

    Args:
      params: the params.
      batch: the batch.
      fsdp: how params are split to save memory. Over these axes a batch is split, too; over others
        that split params, as of tensor parallelism, it need not be.
      trace: traces the step, which may place values by itself. It is called where a batch lies
        whole.
    """
    placed = _named_shardings(params)
    if len({sharding.mesh for sharding in placed}) != 1:
        return
    mesh, kept = placed[0].mesh, set(() if fsdp is None else fsdp.axes)
    busy = set().union(*(axes_of_spec(sharding.spec) for sharding in placed)) - kept
    free = [name for name, size in mesh.shape.items() if size > 1 and name not in busy]
    used = set().union(*(axes_of_spec(sharding.spec) for sharding in _named_shardings(batch)))
    lengths = [n for x in jax.tree.leaves(batch) for n in getattr(x, "shape", ())]
    splits = bool(free) and any(n % mesh.shape[free[0]] == 0 for n in lengths)
    if not splits or not used.isdisjoint(free) or _splits_inside(trace(), params, free):
        return
    warn(
        f"each device computes the whole batch: the params lie on {mesh.size} devices, and neither "
        "a sharding of the batch nor the loss splits it. Place it: jax.device_put(batch, "
        f"NamedSharding(mesh, PartitionSpec({free[0]!r}))), or "
        "jax.make_array_from_process_local_data on several hosts"
    )


def _named_shardings(tree: PyTree) -> list[NamedSharding]:
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(tree))
    return [sharding for sharding in shardings if isinstance(sharding, NamedSharding)]


def _splits_inside(traced: Any, params: PyTree, axes: Collection[str]) -> bool:
    """Whether a program splits other arrays than params, and layers of these, over some axes."""
    shapes = {shape for x in jax.tree.leaves(params) for shape in (x.shape, x.shape[1:])}
    for equation in equations_in([traced.jaxpr]):
        if equation.primitive.name == "shard_map":
            return True
        if equation.primitive.name in PLACINGS and equation.outvars[0].aval.shape not in shapes:
            sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
            if not axes_of_spec(getattr(sharding, "spec", ())).isdisjoint(axes):
                return True
    return False
