"""Fully sharded data parallelism: params that are split where they are stored, whole where used."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxmp._dtypes import parse_dtype
from jaxmp._reduction import Layout, layout_of
from jaxmp._specs import axes_of_spec, check_rank, flat_specs, named_axes
from jaxmp._tree import leaf_names
from jaxmp._warnings import warn

_LARGE = 2**12  # elements of a param that is worth splitting


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FSDP:
    """How params lie on the devices, and over which mesh axes they are gathered for use.

    Under `jit` a function cannot see how its arguments are sharded, and left alone the
    partitioner may gather a float32 master where the model uses its bfloat16 copy, or move the
    activations instead. With this, each param is cast, gathered where it is used (in a loop over
    layers one layer at a time) and let go; for its gradient it is gathered again, and the gradient
    is scattered in float32 as it is summed.

    Attributes:
      shardings: a tree of `NamedSharding`, one for each param, of meshes whose axes are
        `AxisType.Auto`. The dimension that a `lax.scan` runs over should not be split.
      axis: the mesh axis, or axes, over which the params are split to save memory. Axes for
        tensor parallelism are not among them: what they split stays split.
      gather_dtype: the widest dtype in which a param is gathered: what the model uses in a wider
        one is cast before (FSDP2's `param_dtype`). By default the dtype in which the model uses it.

    Raises:
      TypeError: if a leaf of `shardings` is no `NamedSharding`.
      ValueError: if no param is split over `axis`, the mesh has other axis types, or the dtype is
        none to gather in.

    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    >>> fsdp = FSDP(shardings={"w": NamedSharding(mesh, PartitionSpec("data"))}, axis="data")
    >>> fsdp.axes
    ('data',)
    """

    shardings: PyTree
    axis: str | Sequence[str] = "data"
    gather_dtype: Any = None

    def __post_init__(self) -> None:
        split: set[str] = set()
        for name, sharding in zip(leaf_names(self.shardings), self._leaves, strict=True):
            _check_sharding(name, sharding)
            split |= axes_of_spec(sharding.spec)
        if missing := [axis for axis in self.axes if axis not in split]:
            raise ValueError(
                f"no param is split over the mesh axis {missing[0]!r}; the shardings use "
                f"{sorted(split) or 'none'}. Give the axis that saves memory. fully_sharded leaves "
                "params of fewer than min_size elements whole. Or leave fsdp out: without it "
                "gradients are reduced in float32 too"
            )
        if self.gather_dtype is not None:
            dtype = parse_dtype(self.gather_dtype)
            if dtype.itemsize not in (2, 4):
                raise ValueError(
                    "gather_dtype must be bfloat16, float16 or float32, as params are cast to it "
                    f"without a scale; got {dtype.name}"
                )
            object.__setattr__(self, "gather_dtype", dtype)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which params are gathered."""
        return _axes(self.axis)

    @property
    def _leaves(self) -> list[Any]:
        return jax.tree.leaves(self.shardings)

    def layouts(self, params: PyTree) -> list[Layout]:
        """The layout of each leaf of the params.

        Args:
          params: a tree of the structure of the shardings.

        Returns:
          One layout for each leaf.

        Raises:
          ValueError: if the structures differ, or a sharding does not fit its param.
        """
        given: Any = jax.tree.structure(self.shardings)
        if given != jax.tree.structure(params):
            raise ValueError(
                "fsdp.shardings must have the structure of the params, one NamedSharding for each: "
                f"{_difference(self.shardings, params)}"
            )
        found = []
        leaves = zip(leaf_names(params), jax.tree.leaves(params), self._leaves, strict=True)
        for name, leaf, sharding in leaves:
            _check_fits(name, jnp.shape(leaf), sharding)
            found.append(
                layout_of(sharding, jnp.ndim(leaf), frozenset(self.axes), self.gather_dtype)
            )
        return found

    def constrain(self, tree: PyTree) -> PyTree:
        """Gradients, or params, laid out as the params are stored."""
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, self.shardings)


def _axes(axis: str | Sequence[str]) -> tuple[str, ...]:
    axes = named_axes(axis) if isinstance(axis, (str, tuple, list)) else ()
    if not (axes and all(isinstance(name, str) and name for name in axes)):
        got = "none" if axis in ((), []) else repr(axis)
        raise ValueError(f"axis must name a mesh axis or several, got {got}")
    return axes


def _check_sharding(name: str, sharding: Any) -> None:
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"fsdp.shardings must be NamedShardings, got a {type(sharding).__name__} for {name!r}. "
            "jaxmp.sharding.fully_sharded(params, mesh) makes them"
        )
    kinds = getattr(sharding.mesh, "axis_types", ())
    if any(kind is not AxisType.Auto for kind in kinds):
        raise ValueError(
            f"fsdp needs a mesh whose axes are AxisType.Auto, got {sharding.mesh.axis_types}: "
            "jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))"
        )


def _difference(shardings: PyTree, params: PyTree) -> str:
    """Of two trees: which leaves only one of them has, or what they are."""
    given, wanted = leaf_names(shardings), leaf_names(params)
    parts = []
    if missing := [name for name in wanted if name not in given]:
        parts.append(f"there is none for {', '.join(map(repr, missing[:3]))}")
    if more := [name for name in given if name not in wanted]:
        parts.append(f"there is no param {', '.join(map(repr, more[:3]))}")
    if not parts:
        trees: list[Any] = [jax.tree.structure(tree) for tree in (params, shardings)]
        parts = [f"the params are {trees[0]}, the shardings {trees[1]}"]
    return ", and ".join(parts)


def _check_fits(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    problem = f"{sharding.spec} is for an array of at least {len(sharding.spec)} dimensions"
    if len(sharding.spec) <= len(shape):
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            problem = str(error)
        else:
            return
    raise ValueError(f"the sharding of {name!r} does not fit its shape {shape}: {problem}")


def fully_sharded(
    params: PyTree,
    mesh: Mesh,
    axis: str | Sequence[str] = "data",
    *,
    base: PyTree | None = None,
    min_size: int = _LARGE,
) -> PyTree:
    """Shardings that split every large param over one mesh axis, or over several as over one.

    Of each param the largest dimension that the axis divides is split. For arrays of three and
    more dimensions the first is the last choice, over which a loop over layers may run. (Of a
    matrix nobody can tell whether it is one, or the vectors of layers: see that the vectors are
    longer than there are layers, or under `min_size`.) A param without such a dimension is left
    whole; of large ones a warning says so.

    Args:
      params: a tree of arrays, or of `jax.ShapeDtypeStruct`.
      mesh: the mesh.
      axis: its axis to split over, or axes.
      base: shardings, or `PartitionSpec`s, that hold already, such as those of tensor parallelism,
        or a prefix of a tree of them; dimensions that they split are left as they are, and so are
        params that they split over `axis`.
      min_size: params with fewer elements are not split: their gathers would cost more time than
        they save memory.

    Returns:
      A tree of `NamedSharding`, for `jax.device_put`, `FSDP` and `state_shardings`.

    Raises:
      ValueError: if the mesh has no such axis, or a spec of the base does not fit its param.

    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    >>> params = {"w": jax.ShapeDtypeStruct((64, 128), "float32"), "b": jnp.zeros(128)}
    >>> {name: x.spec for name, x in fully_sharded(params, mesh).items()}
    {'b': P(), 'w': P(None, 'data')}
    """
    axes = _axes(axis)
    if missing := [name for name in axes if name not in mesh.shape]:
        raise ValueError(f"the mesh has no axis {missing[0]!r}; it has {', '.join(mesh.shape)}")
    parts = math.prod(mesh.shape[name] for name in axes)
    leaves, structure = jax.tree.flatten(params)
    found, whole = [], []
    specs = flat_specs(base, params, "base")
    for name, leaf, spec in zip(leaf_names(params), leaves, specs, strict=True):
        shape = np.shape(leaf)
        check_rank(name, len(shape), spec)
        if unknown := sorted(axes_of_spec(spec) - set(mesh.shape)):
            raise ValueError(
                f"base has {spec} for {name!r}, but the mesh has no axis {unknown[0]!r}; it has "
                f"{', '.join(mesh.shape)}. flax.linen.logical_to_mesh turns logical names into axes"
            )
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        if math.prod(shape) >= min_size and not axes_of_spec(spec).intersection(axes):
            chosen = _largest(shape, entries, parts)
            for i in chosen:
                entries[i] = axis if isinstance(axis, str) else axes
            split = math.prod(mesh.shape[name] for name in axes_of_spec(spec))
            if not chosen and parts > 1 and math.prod(shape) // split >= _LARGE:
                whole.append(f"{name!r} of shape {shape}")
        while entries and entries[-1] is None:
            entries.pop()
        found.append(NamedSharding(mesh, PartitionSpec(*entries)))
    if whole:
        warn(_left_whole(whole, axes, parts))
    return jax.tree.unflatten(structure, found)


def _left_whole(params: Sequence[str], axes: Sequence[str], parts: int) -> str:
    more = f" and {len(params) - 3} more" if len(params) > 3 else ""
    return (
        f"the {parts} devices along {' and '.join(map(repr, axes))} divide no free dimension of "
        f"{', '.join(params[:3])}{more}, so that it is not split over them, nor is its state. "
        "Pad a dimension to a multiple, or raise min_size if it is to stay so"
    )


def _largest(shape: tuple[int, ...], entries: list[Any], parts: int) -> list[int]:
    """The best dimension to split, in a list; an empty one if there is none."""
    free = [i for i, size in enumerate(shape) if entries[i] is None and size % parts == 0]
    return sorted(free, key=lambda i: (i == 0 and len(shape) > 2, -shape[i], -i))[:1]
