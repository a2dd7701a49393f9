"""Fully sharded data parallelism: stores params in shards, gathers them for use."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxmp._mesh.layout import Layout, layout_of
from jaxmp._mesh.specs import axes_of_spec, check_rank, flat_specs
from jaxmp._numerics.dtypes import parse_dtype
from jaxmp._numerics.tree import leaf_names
from jaxmp._numerics.user_warnings import first_few, warn
from jaxmp._policies.patterns import Pattern, check_pattern, is_about_paths, matches, pattern_text
from jaxmp._program.mesh_axes import check_mesh, constrain_to, entries_of, named_axes

_LARGE = 2**12  # elements; gathers of smaller params cost more time than they save memory


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FSDP:
    """The shardings of the params, and the mesh axes over which they are gathered for use.

    Under `jit` a function cannot see how its arguments are sharded. Left alone, the partitioner may
    gather a float32 master where the model uses its bfloat16 copy, or move the activations instead.
    With this, each param is cast, gathered where it is used (one layer at a time in a loop over
    layers) and freed. The backward pass gathers it again, and sums its gradient in a float32
    reduce-scatter.

    Attributes:
      shardings: a tree with one `NamedSharding` for each param. Do not split the dimension that a
        `lax.scan` runs over.
      axis: the mesh axis, or axes, over which params are split to save memory. Do not list axes of
        tensor parallelism: dimensions that these split stay split.
      gather_dtype: the widest dtype in which params are gathered (FSDP2's `param_dtype`). Params
        that the model uses in a wider dtype are cast to it first. By default, each param is
        gathered in the dtype in which the model uses it.
      gather: which params are gathered, as a dictionary such as `{"experts": False}`, or as pairs.
        By default all are. Of a param that is not, the partitioner chooses what moves, the param or
        the data that it multiplies: cheaper where a device has few examples for it, as of one
        expert among many, or none, as in `a @ b` of LoRA. Its gradient is summed in float32 all the
        same. Patterns are those of `PolicyRules` about paths, in the tree of params. The first one
        that matches the path of a param, or of a tree around it, decides.

    Raises:
      TypeError: if a leaf of `shardings` is not a `NamedSharding`, or `gather` is not such
        a dictionary.
      ValueError: if no param is split over `axis`, the mesh has other axis types, params cannot be
        gathered in `gather_dtype`, or a pattern of `gather` decides nothing.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> fsdp = FSDP(shardings={"w": NamedSharding(mesh, PartitionSpec("data"))}, axis="data")
    >>> fsdp.axes
    ('data',)
    """

    shardings: PyTree
    axis: str | Sequence[str] = "data"
    gather_dtype: Any = None
    gather: Any = ()

    def __post_init__(self) -> None:
        split: set[str] = set()
        for name, sharding in zip(leaf_names(self.shardings), self._leaves, strict=True):
            if not isinstance(sharding, NamedSharding):
                raise TypeError(
                    f"fsdp.shardings must be NamedShardings, got a {type(sharding).__name__} for "
                    f"{name!r}. jaxmp.sharding.fully_sharded(params, mesh) makes them"
                )
            if AxisType.Manual in sharding.mesh.axis_types:
                raise ValueError(
                    "fsdp needs a mesh of automatic or explicit axes, got "
                    f"{sharding.mesh.axis_types}. In a jax.shard_map params are gathered with "
                    "jaxmp.sharding.gather_params"
                )
            split |= axes_of_spec(sharding.spec)
        if missing := [axis for axis in self.axes if axis not in split]:
            raise ValueError(
                f"no param is split over the mesh axis {missing[0]!r}; the shardings use "
                f"{sorted(split) or 'none'}. Give the axis over which params are split to save "
                "memory. fully_sharded leaves params of fewer than min_size elements whole. Or "
                "leave fsdp out: without it gradients are reduced in float32 too"
            )
        if self.gather_dtype is not None:
            dtype = parse_dtype(self.gather_dtype)
            if dtype.itemsize not in (2, 4):
                raise ValueError(
                    "gather_dtype must be bfloat16, float16 or float32, as params are cast to it "
                    f"without a scale; got {dtype.name}"
                )
            object.__setattr__(self, "gather_dtype", dtype)
        object.__setattr__(self, "gather", _gather_rules(self.gather))
        _check_all_decide(self.gather, leaf_names(self.shardings))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which params are gathered."""
        return _axis_names(self.axis)

    @property
    def _leaves(self) -> list[Any]:
        return jax.tree.leaves(self.shardings)

    def layouts(self, params: PyTree) -> list[Layout | None]:
        """Returns the layout of each leaf of the params.

        Args:
          params: a tree with the structure of `shardings`.

        Returns:
          One layout for each leaf; None for a param that is not gathered.

        Raises:
          ValueError: if the structures differ, or a sharding does not fit its param.
        """
        structure: Any = jax.tree.structure(self.shardings)
        if structure != jax.tree.structure(params):
            raise ValueError(
                "fsdp.shardings must have the structure of the params, one NamedSharding for each: "
                f"{_differing_leaves(self.shardings, params)}"
            )
        layouts: list[Layout | None] = []
        leaves = zip(leaf_names(params), jax.tree.leaves(params), self._leaves, strict=True)
        for name, leaf, sharding in leaves:
            _check_fits(name, jnp.shape(leaf), sharding)
            rule = _deciding_rule(self.gather, name)
            # The partitioner chooses what moves: the param, or the data that it multiplies. With
            # few tokens the data is less: on eight H100, 16 experts of 1024 x 4096 take 5.6 GFLOP
            # for 256 tokens, and 43.2 if they are gathered (docs/distributed.md).
            if rule is not None and not self.gather[rule][1]:
                layouts.append(None)
            else:
                axes = frozenset(self.axes)
                layouts.append(layout_of(sharding, jnp.ndim(leaf), axes, self.gather_dtype))
        return layouts

    def constrain(self, tree: PyTree) -> PyTree:
        """Constrains gradients or params to the shardings in which params are stored."""
        return jax.tree.map(constrain_to, tree, self.shardings)


def _axis_names(axis: str | Sequence[str]) -> tuple[str, ...]:
    axes = named_axes(axis) if isinstance(axis, (str, tuple, list)) else ()
    if not (axes and all(isinstance(name, str) and name for name in axes)):
        got = "none" if axis in ((), []) else repr(axis)
        raise ValueError(f"axis must name a mesh axis or several, got {got}")
    return axes


def _gather_rules(gather: Any) -> tuple[tuple[Pattern, bool], ...]:
    """Returns the pairs of pattern and choice, if they are valid."""
    pairs = gather.items() if isinstance(gather, Mapping) else gather
    is_list = isinstance(pairs, Iterable) and not isinstance(pairs, str)
    rules: tuple[Any, ...] = tuple(pairs) if is_list else ()
    if not is_list or not all(
        isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], bool) for rule in rules
    ):
        raise TypeError(
            "gather must say by path which params are gathered, as in {'experts': False} or "
            f"[('experts', False)], got {gather!r}"
        )
    for pattern, _ in rules:
        if not is_about_paths(check_pattern(pattern)):
            raise TypeError(
                "gather takes patterns of paths, such as 'experts' or 're:.*/lora_[ab]', as params "
                f"are arrays without a class; got {pattern_text(pattern)!r}"
            )
    return rules


def _deciding_rule(rules: Sequence[tuple[Pattern, bool]], name: str) -> int | None:
    """Returns which rule decides about a param: the first that matches it or a tree around it."""
    parts = name.split("/")
    paths = ["/".join(parts[:end]) for end in range(len(parts) + 1)]
    # All paths that lead to the param: "experts" means every param in the tree of that name.
    for i, (pattern, _) in enumerate(rules):
        if any(matches(pattern, path, None) for path in paths):
            return i
    return None


def _check_all_decide(rules: Sequence[tuple[Pattern, bool]], names: Sequence[str]) -> None:
    """Raises ValueError for a pattern that matches no param, or only those of earlier ones."""
    used = {_deciding_rule(rules, name) for name in names}
    if unused := [pattern_text(rule[0]) for i, rule in enumerate(rules) if i not in used]:
        dots = ", ..." if len(names) > 8 else ""
        raise ValueError(
            f"gather has patterns that decide nothing: {', '.join(map(repr, unused))}. The params "
            f"are {', '.join(map(repr, names[:8]))}{dots}. Correct the pattern, or remove it; of "
            "several that match a param, the first decides"
        )


def _differing_leaves(shardings: PyTree, params: PyTree) -> str:
    """Describes the leaves that only one of two trees has, or else both structures."""
    names, param_names = leaf_names(shardings), leaf_names(params)
    parts = []
    if missing := [name for name in param_names if name not in names]:
        parts.append(f"there is none for {', '.join(map(repr, missing[:3]))}")
    if surplus := [name for name in names if name not in param_names]:
        parts.append(f"there is no param {', '.join(map(repr, surplus[:3]))}")
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
    mesh: Mesh | AbstractMesh,
    axis: str | Sequence[str] = "data",
    *,
    base: PyTree | None = None,
    min_size: int = _LARGE,
) -> PyTree:
    """Returns shardings that split every large param over a mesh axis (several count as one).

    Splits the largest dimension of each param that the axis divides. In arrays of three or more
    dimensions, the first dimension is the last choice, as a loop over layers may run over it. (A
    matrix may also be a stack of vectors, one for each layer, and looks the same. Make sure that
    such vectors are longer than the number of layers, or the matrix smaller than `min_size`.) A
    param without such a dimension stays whole; a warning names the large ones.

    Args:
      params: a tree of arrays, or of `jax.ShapeDtypeStruct`.
      mesh: the mesh.
      axis: the mesh axis, or axes, to split over.
      base: existing shardings, or a `PartitionSpec` each, such as those of tensor parallelism: a
        tree like the params, or a prefix of it. Dimensions that they split are not split again, and
        params that they split over `axis` stay unchanged.
      min_size: params with fewer elements are not split: their gathers would cost more time than
        they save memory.

    Returns:
      A tree of `NamedSharding`, for `jax.device_put`, `FSDP` and `state_shardings`.

    Raises:
      TypeError: if `mesh` is not a mesh.
      ValueError: if the mesh has no such axis, or a spec of the base does not fit its param.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> params = {"w": jax.ShapeDtypeStruct((64, 128), "float32"), "b": jnp.zeros(128)}
    >>> {name: x.spec for name, x in fully_sharded(params, mesh).items()}
    {'b': P(), 'w': P(None, 'data')}
    """
    check_mesh(mesh)
    axes = _axis_names(axis)
    if missing := [name for name in axes if name not in mesh.shape]:
        raise ValueError(f"the mesh has no axis {missing[0]!r}; it has {', '.join(mesh.shape)}")
    parts = math.prod(mesh.shape[name] for name in axes)  # several axes count as one
    leaves, structure = jax.tree.flatten(params)
    shardings, whole = [], []
    specs = flat_specs(base, params, "base")
    for name, leaf, spec in zip(leaf_names(params), leaves, specs, strict=True):
        shape = np.shape(leaf)
        check_rank(name, len(shape), spec)
        if unknown := sorted(axes_of_spec(spec) - set(mesh.shape)):
            raise ValueError(
                f"base has {spec} for {name!r}, but the mesh has no axis {unknown[0]!r}; it has "
                f"{', '.join(mesh.shape)}. flax.linen.logical_to_mesh turns logical names into axes"
            )
        entries = entries_of(spec, len(shape))
        # What `base` splits over these axes already stays as it is.
        if math.prod(shape) >= min_size and not axes_of_spec(spec).intersection(axes):
            dimension = _largest_free_dimension(shape, entries, parts)
            if dimension is not None:
                entries[dimension] = axis if isinstance(axis, str) else axes
            split = math.prod(mesh.shape[name] for name in axes_of_spec(spec))
            # A large part that each device stores whole is worth a warning; a small one is not.
            if dimension is None and parts > 1 and math.prod(shape) // split >= _LARGE:
                whole.append(f"{name!r} of shape {shape}")
        while entries and entries[-1] is None:
            entries.pop()
        shardings.append(NamedSharding(mesh, PartitionSpec(*entries)))
    if whole:
        warn(
            f"the {parts} devices along {' and '.join(map(repr, axes))} divide no free dimension "
            f"of {first_few(whole)}, so that it is not split over them, and neither is its "
            f"state. Pad a dimension to a multiple of {parts}, or raise min_size to leave it whole"
        )
    return jax.tree.unflatten(structure, shardings)


def _largest_free_dimension(shape: tuple[int, ...], entries: list[Any], parts: int) -> int | None:
    free = [i for i, size in enumerate(shape) if entries[i] is None and size % parts == 0]
    # The largest dimension, the last one among equals. A scan over layers would gather all layers
    # at once if their dimension, the first, were split.
    return min(free, key=lambda i: (i == 0 and len(shape) > 2, -shape[i], -i), default=None)
