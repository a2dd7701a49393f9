"""Arrays in a `shard_map` that vary over mesh axes: types, and casts that make them alike."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """Makes arrays in a `shard_map` vary over all mesh axes that any of them varies over.

    If that changes a float32 source, its gradient gets a float32 sum over devices.
    """
    return [functools.reduce(varying_as, arrays, x) for x in arrays]


def varying_as(x: Any, like: Any) -> Any:
    """Makes an array in a `shard_map` vary over the mesh axes of another array, too."""
    missing = varying_axes(like) - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array or abstract value varies in a `shard_map`."""
    mat = getattr(x, "mat", None) or getattr(jax.typeof(x), "mat", None)
    varying: frozenset[str] = frozenset() if mat is None else mat.varying
    return varying


def result_aval(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the type of an array that varies over the mesh axes of `like`."""
    if any(axis is not None for axis in like.sharding.spec):
        raise NotImplementedError(
            "products of operands with an explicit sharding cannot have float32 gradients by "
            "themselves: call what was rewritten on automatic axes, by jax.sharding.auto_axes"
        )
    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(like.sharding.mesh, spec)
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
