"""Reads the `PartitionSpec`s of params: trees of specs, and the mesh axes that specs name."""

from collections.abc import Collection, Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from jaxmp._program.mesh_axes import named_axes


def flat_specs(specs: PyTree, params: PyTree, name: str = "specs") -> list[Any]:
    """Returns the spec of each leaf, from a tree of specs or shardings or a prefix of one.

    Error messages call this tree `name`.

    Raises:
      ValueError: if the trees do not fit, or `specs` holds anything else.

    >>> flat_specs({"a": jax.P("data"), "b": None}, {"a": [1, None, 2], "b": 3})
    [P('data',), P('data',), P()]
    """

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, (jax.P, NamedSharding))

    leaf_specs: list[Any] = []

    def spread(spec: Any, part: PyTree) -> None:
        leaf_specs.extend([spec] * len(jax.tree.leaves(part)))

    # A spec stands for the whole part of the params at its place: trees of specs may be prefixes.
    try:
        jax.tree.map(spread, specs, params, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"{name} must be a tree of PartitionSpec like the params, or a prefix of it: {error}"
        ) from None
    partition_specs = [getattr(spec, "spec", spec) for spec in leaf_specs]
    if others := [s for s in partition_specs if not isinstance(s, jax.P | None)]:
        raise ValueError(f"{name} must be PartitionSpecs, got a {type(others[0]).__name__}")
    return [jax.P() if spec is None else spec for spec in partition_specs]


def axes_of_spec(spec: Iterable[Any]) -> set[str]:
    """Returns all mesh axes that a spec names."""
    return {name for entry in spec for name in named_axes(entry)}


def without_axes(spec: Iterable[Any], axes: Collection[str]) -> list[Any]:
    """Returns the entries of a spec after a gather over some of its axes.

    >>> without_axes(jax.P(("model", "data"), None, "data"), ["data"])
    ['model', None, None]
    """

    def strip(entry: Any) -> Any:
        if not set(named_axes(entry)) & set(axes):
            return entry
        names = tuple(a for a in named_axes(entry) if a not in axes)
        return names[0] if len(names) == 1 else names or None

    return [strip(entry) for entry in spec]


def check_rank(name: str, ndim: int, spec: Any) -> None:
    """Raises ValueError if a spec has more entries than the param has dimensions."""
    if len(spec) > ndim:
        raise ValueError(f"params leaf {name!r} has {ndim} dimensions, too few for its {spec}")
