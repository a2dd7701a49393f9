"""Makes a train step with abstract arguments, placed on a mesh: its memory is planned."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from jaxtyping import PyTree

from jaxmp._mesh.fsdp import FSDP, fully_sharded
from jaxmp._mesh.specs import axes_of_spec
from jaxmp._numerics.tree import leaf_names
from jaxmp._training.jitted_step import TrainStep
from jaxmp._training.optimizer import MixedPrecision
from jaxmp._training.state_shardings import state_shardings
from jaxmp._training.train_state import TrainState
from jaxmp._training.train_step import make_train_step


class Placement(NamedTuple):
    """The sharding of each param, None on one device, and how params are gathered, if they are."""

    shardings: PyTree | None = None
    fsdp: FSDP | None = None

    @property
    def mesh(self) -> Any:
        """The mesh of the shardings; None on one device."""
        leaves = jax.tree.leaves(self.shardings)
        return leaves[0].mesh if leaves else None

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else int(self.mesh.size)

    def without_devices(self) -> "Placement":
        """Returns it on an abstract mesh, so that a step can be compiled for other devices."""

        def without_devices(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: NamedSharding(x.mesh.abstract_mesh, x.spec), tree)

        fsdp = self.fsdp and dataclasses.replace(
            self.fsdp, shardings=without_devices(self.fsdp.shardings)
        )
        return Placement(without_devices(self.shardings), fsdp)


class PlannedStep(NamedTuple):
    """A jitted step and its abstract arguments, which have shardings on a mesh."""

    step: TrainStep
    state: TrainState
    batch: PyTree


def placement_of(params: PyTree, shardings: Any, fsdp: FSDP | None, devices: int) -> Placement:
    """Returns the shardings of params: as given, as they have them, or split over `devices`.

    Where some params have a sharding, the others are whole on each device.

    Raises:
      ValueError: if both shardings and several devices are given, or something else than a
        `NamedSharding`.
    """
    if shardings is None and fsdp is not None:
        shardings = fsdp.shardings
    if shardings is None:
        own = jax.tree.map(lambda x: getattr(x, "sharding", None), params)
        if any(isinstance(x, NamedSharding) for x in jax.tree.leaves(own)):
            shardings = own
    if shardings is not None:
        if devices != 1:
            raise ValueError(
                f"the shardings name their devices; leave out devices={devices}, or the shardings"
            )
        return Placement(_full_shardings(params, shardings), fsdp)
    if devices == 1:
        return Placement()
    mesh: Any = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    split = fully_sharded(params, mesh, "data")
    # Params that are all too small to split are whole on each device, and nothing is gathered.
    if not any(axes_of_spec(x.spec) for x in jax.tree.leaves(split)):
        return Placement(split)
    return Placement(split, FSDP(shardings=split, axis="data"))


def _full_shardings(params: PyTree, shardings: PyTree) -> PyTree:
    """Returns a `NamedSharding` for each param: where none is given, it is whole on each device."""
    full = jax.tree.broadcast(shardings, params, is_leaf=lambda x: x is None)
    # An array that was never placed has a sharding of one device: it counts as none.
    leaves = [x for x in jax.tree.leaves(full) if not isinstance(x, SingleDeviceSharding)]
    wrong = next((x for x in leaves if not isinstance(x, NamedSharding)), None)
    if wrong is not None or not leaves:
        raise ValueError(
            f"shardings must be a NamedSharding for each param, or None for what is whole on each "
            f"device, got {wrong!r}. Write NamedSharding(mesh, spec)"
        )
    whole = NamedSharding(leaves[0].mesh, jax.P())
    return jax.tree.map(
        lambda x: x if isinstance(x, NamedSharding) else whole, full, is_leaf=lambda x: x is None
    )


def abstract_state(
    params: PyTree, tx: MixedPrecision, collections: Mapping[str, PyTree], placement: Placement
) -> TrainState:
    """Returns the state that training starts with, from shapes alone: with shardings on a mesh."""
    create = functools.partial(TrainState.create, tx=tx)
    state = jax.eval_shape(
        create, params=_abstract_tree(params), **_abstract_tree(dict(collections))
    )
    if placement.mesh is None:
        return state
    placed = state_shardings(state, state.params, placement.shardings)
    return jax.tree.map(_with_sharding, state, placed)


def planned_step(
    loss_fn: Callable[..., Any],
    state: TrainState,
    batch: PyTree,
    placement: Placement,
    options: Mapping[str, Any],
) -> PlannedStep:
    """Makes a train step for an abstract state, and places the whole batch, abstract or not.

    The options are those of `make_train_step`, but `fsdp` is that of the placement.

    Raises:
      ValueError: if the batch cannot be split over the mesh.
    """
    shardings = None
    if placement.mesh is not None:
        shardings = jax.tree.map(lambda x: x.sharding, state)
    options = {**options, "fsdp": placement.fsdp, "shardings": shardings}
    step = make_train_step(loss_fn, **options)
    mesh = placement.mesh
    if mesh is None:
        return PlannedStep(step, state, _abstract_tree(batch))

    # A scalar, such as a temperature, is whole on each device.
    def place(name: str, x: Any) -> Any:
        shape, sharding = _abstract(x), getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return _with_sharding(shape, sharding)
        spec = jax.P(_batch_axes(name, shape, placement)) if shape.shape else jax.P()
        return _with_sharding(shape, NamedSharding(mesh, spec))

    names = jax.tree.unflatten(jax.tree.structure(batch), leaf_names(batch))
    return PlannedStep(step, state, jax.tree.map(place, names, batch))


def _batch_axes(name: str, x: Any, placement: Placement) -> tuple[str, ...]:
    """Returns the mesh axes that split the batch: those of FSDP, and those that split no param."""
    leaves = jax.tree.leaves(placement.shardings)
    used = set[str]().union(*(axes_of_spec(x.spec) for x in leaves))
    # An axis over which params are gathered splits the batch too. Others that split params, as in
    # tensor parallelism, have the same examples.
    gathered = placement.fsdp.axes if placement.fsdp is not None else ()
    axes = tuple(x for x in placement.mesh.axis_names if x not in used or x in gathered)
    if not axes:
        raise ValueError(
            "every mesh axis splits a param, so that none is left for the batch. Give fsdp= with "
            "the axis over which params are gathered, or a batch whose leaves have a sharding"
        )
    parts = math.prod(placement.mesh.shape[axis] for axis in axes)
    if x.shape[0] % parts:
        raise ValueError(
            f"batch leaf {name!r} has {x.shape[0]} examples, which the {parts} devices along "
            f"{', '.join(map(repr, axes))} do not divide. Give the batch of all devices, or "
            "jax.ShapeDtypeStruct with a sharding"
        )
    return axes


def _abstract_tree(tree: PyTree) -> PyTree:
    return jax.tree.map(_abstract, tree)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.eval_shape(lambda: jnp.asarray(x))


def _with_sharding(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
