"""Under `jit`: splits a batch into one part for each device, and sums gradients over the parts.

With a leading axis of parts, sharded over the devices, a program sees what each device holds. The
partitioner turns a sum over this axis into a collective, in the dtype of the sum.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jaxtyping import Array, PyTree

from jaxmp._mesh.device_sums import Axis, Wire
from jaxmp._mesh.specs import axes_of_spec, without_axes
from jaxmp._numerics.dtypes import is_key
from jaxmp._numerics.tree import leaf_names, widen
from jaxmp._program.mesh_axes import automatic, check_mesh, named_axes

_ANY = jax.P.UNCONSTRAINED


@dataclasses.dataclass(frozen=True)
class Shards:
    """The devices over which a batch is split.

    Attributes:
      mesh: their mesh.
      axes: the mesh axes over which the batch is split.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of parts."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    def check_auto(self) -> None:
        """Raises in a `shard_map`, where the axes do not belong to the partitioner."""
        if manual := set(self.axes) & set(jax.sharding.get_abstract_mesh().manual_axes):
            raise ValueError(
                f"per_shard is for jit with sharded arrays, but this is inside of a shard_map over "
                f"{sorted(manual)}, where each device has its own part already. Use "
                "jaxmp.sharding.gather_params or reduce_gradients here"
            )

    def constrain(self, x: Array, entries: Sequence[Any]) -> Array:
        """Constrains the sharding of an array; leaves trailing dimensions to the partitioner."""
        spec = jax.P(*entries, *[_ANY] * (x.ndim - len(entries)))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def vmap(self, local: Callable[..., Any], in_axes: Sequence[int | None]) -> Callable[..., Any]:
        """Maps a function over all parts, each on its devices."""
        mapped = functools.partial(jax.vmap, in_axes=tuple(in_axes), spmd_axis_name=self.axes)
        return mapped(local, axis_name=self.axes[0]) if len(self.axes) == 1 else mapped(local)

    def split(self, batch: dict[int, PyTree], whole: dict[str, Any]) -> dict[int, PyTree]:
        """Gives arguments a leading axis of parts; each device keeps the examples it has."""
        sizes = _check_divides(batch, self)
        for name, x in zip(leaf_names(whole), jax.tree.leaves(whole), strict=True):
            if jnp.ndim(x) and jnp.shape(x)[0] in sizes:
                raise ValueError(
                    f"keyword argument {name!r} has {jnp.shape(x)[0]} examples like the batch, but "
                    "keyword arguments are not split over the devices. Pass it by position, or "
                    "let the loss function close over it if it is no part of the batch"
                )

        def split_leaf(x: Any) -> Array:
            if _is_single_key(x):
                return self.constrain(jax.random.split(x, self.size), [self.axes])
            shape = jnp.shape(x)
            parts = jnp.reshape(x, (self.size, shape[0] // self.size, *shape[1:]))
            return self.constrain(parts, [self.axes])

        return {i: jax.tree.map(split_leaf, tree) for i, tree in batch.items()}

    def gather(self, x: Any, spec: Any) -> Array:
        """Gathers a param along the axes of the batch."""
        if spec is None or not axes_of_spec(spec) & set(self.axes):
            return x
        entries = _padded(spec, jnp.ndim(x))
        # Constrained before and after, or the preceding cast would move behind the gather.
        return self.constrain(self.constrain(x, entries), without_axes(entries, self.axes))

    def sum(self, parts: Array, spec: Any, wire: Wire | None) -> Array:
        """Sums a gradient over the leading axis of parts, in float32 or wider."""
        shape = parts.shape[1:]
        end = None if spec is None else _padded(spec, len(shape))
        local = without_axes(end or [_ANY] * len(shape), self.axes)
        low = wire is not None and parts.dtype.itemsize <= 4
        dim = _dimension_to_split(shape, end, self) if low else None
        if wire is None or dim is None:
            total = jnp.sum(self.constrain(widen(parts), [self.axes, *local]), 0)
            return total if end is None else self.constrain(total, end)
        missing = [a for a in self.axes if a not in axes_of_spec(end or ())]
        split = list(end or [None] * len(shape))
        split[dim] = (*named_axes(split[dim]), *missing)
        if excess := -shape[dim] % self.size:
            parts = jnp.pad(
                parts, [(0, 0)] * (1 + dim) + [(0, excess)] + [(0, 0)] * (len(shape) - dim - 1)
            )
        # From the whole gradient of one part to one piece of all gradients: an all-to-all.
        sent = self.constrain(wire.send(parts), [self.axes, *local])
        total = jnp.sum(wire.receive(self.constrain(sent, [None, *split])), 0)
        if not missing:
            return self.constrain(total, split)
        sent = self.constrain(wire.send(total), split)
        back = self.constrain(sent, end or [None] * len(shape))
        return lax.slice_in_dim(wire.receive(back), 0, shape[dim], axis=dim)


def _dimension_to_split(
    shape: tuple[int, ...], end: list[Any] | None, shards: Shards
) -> int | None:
    """Returns the dimension along which to split a sum over the devices; None for no split."""
    if math.prod(shape) < shards.size:
        return None
    entries = end or [None] * len(shape)
    for dim, entry in enumerate(entries):
        if set(named_axes(entry)) & set(shards.axes):
            return dim
    free = [dim for dim, entry in enumerate(entries) if not named_axes(entry)]
    even = [dim for dim in free if shape[dim] % shards.size == 0]
    return max(even or free, key=lambda dim: shape[dim], default=None)


def _padded(spec: Any, ndim: int) -> list[Any]:
    return [*spec, *[None] * (ndim - len(spec))]


def shards_of(mesh: Any, axis: Axis) -> Shards:
    check_mesh(mesh)
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(types):
        raise ValueError(
            f"axis must be one or more different axes of the mesh, which has "
            f"{list(mesh.axis_names)}; got {axis!r}"
        )
    if manual := [name for name in axes if types[name] is AxisType.Manual]:
        raise ValueError(
            f"per_shard needs automatic or explicit mesh axes, got manual ones ({manual}). In a "
            "jax.shard_map use jaxmp.sharding.gather_params or reduce_gradients"
        )
    return Shards(automatic(mesh), axes)


def _is_single_key(x: Any) -> bool:
    """Whether this is one typed PRNG key, not a batch of keys."""
    return is_key(x) and x.shape == ()


def _check_divides(batch: PyTree, shards: Shards) -> set[int]:
    """Returns the number of examples as a set, which is empty if there are only keys."""
    examples: dict[int, str] = {}
    for name, x in zip(leaf_names(batch), jax.tree.leaves(batch), strict=True):
        if _is_single_key(x):
            continue
        if jnp.ndim(x) == 0:
            raise ValueError(
                f"batch leaf {name!r} is a scalar and has no examples to split over the devices. "
                "Give each example its own, jnp.full(examples, x), or leave its argument out of "
                "batch_argnums"
            )
        size = jnp.shape(x)[0]
        if size % shards.size:
            raise ValueError(
                f"batch leaf {name!r} has {size} examples, which the {shards.size} devices along "
                f"{shards.axes} do not divide. Use a batch size that is a multiple of "
                f"{shards.size}, or leave its argument out of batch_argnums if it is no part of "
                "the batch"
            )
        examples.setdefault(size, name)
    if len(examples) > 1:
        (size, name), (other_size, other), *_ = examples.items()
        raise ValueError(
            f"batch leaves {name!r} and {other!r} have {size} and {other_size} examples: only "
            "arrays with one and the same leading batch axis can be split over the devices. Give "
            "each example its own copy of the others, or leave their argument out of "
            "batch_argnums (a PRNG key must be a typed one, jax.random.key)"
        )
    return set(examples)
