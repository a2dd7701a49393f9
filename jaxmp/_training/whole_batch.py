"""A warning for a batch that every device computes whole, where it could compute a part."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxmp._mesh.fsdp import FSDP
from jaxmp._mesh.specs import axes_of_spec
from jaxmp._numerics.user_warnings import warn
from jaxmp._program.compat import bodies_of, consts_of, is_traced
from jaxmp._program.program import equations_in
from jaxmp._training.train_state import TrainState


def warn_of_whole_batch(
    loss_fn: Callable[..., Any], state: TrainState, batch: PyTree, fsdp: FSDP | None
) -> None:
    """Warns if a step on several devices is of data parallelism, and its batch is not split.

    It is, with an `fsdp`, or if all that it reads is whole on each device. Whoever splits
    anything else, an array or in the loss, has another plan. The loss is traced if all else speaks
    for a warning, as it may split the batch by itself.
    """
    placed = jax.tree.leaves(fsdp.shardings if fsdp else state.params)
    shardings = [getattr(x, "sharding", x) for x in placed]
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    given = batch if fsdp else (batch, state.params, state.collections)
    if mesh is None or mesh.size == 1 or not all(map(_is_whole, jax.tree.leaves(given))):
        return
    axes = fsdp.axes if fsdp else tuple(name for name, size in mesh.shape.items() if size > 1)
    parts = math.prod(mesh.shape[name] for name in axes)
    # A vector may be a key, and a single sequence is not to be split.
    examples = [np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x) > 1]
    if (
        not examples
        or any(n % parts or not n for n in examples)
        or _places_arrays(loss_fn, state, batch)
    ):
        return
    warn(
        f"each of {mesh.size} devices computes the whole batch: neither its sharding nor the loss "
        "splits it. Place its examples: jax.device_put(batch, "
        f"NamedSharding(mesh, PartitionSpec({axes if len(axes) > 1 else axes[0]!r}))), or "
        "jax.make_array_from_process_local_data on several hosts"
    )


def _is_whole(x: Any) -> bool:
    """Whether each device has all of an array; what is traced is not known to be so."""
    if isinstance(x, jax.Array):
        return not is_traced(x) and x.sharding.is_fully_replicated
    return not isinstance(x, jax.ShapeDtypeStruct)


def _places_arrays(loss_fn: Callable[..., Any], state: TrainState, batch: PyTree) -> bool:
    """Whether a loss splits arrays, or closes over some that are split."""
    try:
        closed = jax.make_jaxpr(loss_fn)(state.params, batch, **state.collections)
    except Exception:  # any exception: the loss is the user's, and may need the policy of the step
        return True
    equations = list(equations_in([closed]))
    if any(equation.primitive.name == "shard_map" for equation in equations):
        return True
    programs = [closed, *(program for equation in equations for program in bodies_of(equation))]
    # Of constraints, of `device_put`, of `jit`, and of what takes an `out_sharding`.
    params = (value for equation in equations for value in equation.params.values())
    named = (leaf for value in params for leaf in (value if type(value) is tuple else (value,)))
    return not all(_is_whole(x) for program in programs for x in consts_of(program)) or any(
        isinstance(sharding, NamedSharding) and axes_of_spec(sharding.spec) for sharding in named
    )
