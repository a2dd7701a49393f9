"""The axes of meshes, explicit and automatic, and the arrays and types on them."""

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmp._program import compat

ANY = PartitionSpec.UNCONSTRAINED


def named_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a spec names, major to minor."""
    if entry is None or entry is ANY:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def entries_of(spec: PartitionSpec, ndim: int) -> list[Any]:
    """Returns the entries of a spec for all dimensions of an array."""
    return [*spec.partitions, *[None] * (ndim - len(spec.partitions))]


def check_mesh(mesh: Any) -> None:
    """Raises TypeError unless `mesh` is a mesh."""
    if not isinstance(mesh, jax.sharding.Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got a {type(mesh).__name__}")


def explicit_mesh(arrays: Iterable[Any]) -> AbstractMesh | None:
    """Returns the mesh of arrays or types, or of the context, if any axis of it is explicit."""
    types = [compat.type_or_given(x) for x in arrays if hasattr(x, "dtype")]
    meshes = [aval.sharding.mesh for aval in types if hasattr(aval, "sharding")]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if mesh.explicit_axes:
            return mesh
    return None


def automatic(mesh: Any) -> Any:
    """Returns the mesh with automatic axes in place of explicit ones."""
    types = mesh.axis_types
    if AxisType.Explicit not in types:
        return mesh
    free = tuple(AxisType.Auto if kind is AxisType.Explicit else kind for kind in types)
    return mesh.abstract_mesh.update(axis_types=free)


def free_sharding(sharding: Any) -> Any:
    """Returns a sharding on the mesh with automatic axes in place of explicit ones."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(automatic(sharding.mesh), sharding.spec)


def on_automatic_mesh(x: Any) -> Any:
    """Returns an array on its own mesh, with automatic axes in place of explicit ones."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not explicit_mesh([x]):
        return x
    return jax.device_put(x, NamedSharding(automatic_devices(sharding.mesh), sharding.spec))


def automatic_devices(mesh: Any) -> Any:
    """Returns the mesh, with its devices, with automatic axes in place of explicit ones."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return automatic(mesh)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=automatic(mesh).axis_types)


def on_automatic_axes_here(arrays: Iterable[Any]) -> Any:
    """Returns a context in which the explicit axes of arrays are automatic."""
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    for mesh in (*meshes, jax.sharding.get_mesh()):
        if mesh.explicit_axes and isinstance(mesh, jax.sharding.Mesh):
            return jax.set_mesh(automatic_devices(mesh))
    return contextlib.nullcontext()


def constrain_to(x: Any, sharding: NamedSharding) -> Any:
    """Constrains an array to a sharding, on axes of either kind."""
    axes = set(sharding.mesh.explicit_axes)
    if not axes:
        return lax.with_sharding_constraint(x, sharding)
    free = only_axes(sharding.spec, set(sharding.mesh.axis_names) - axes)
    if any(free):
        x = lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, PartitionSpec(*free)))
    return jax.reshard(
        x, NamedSharding(sharding.mesh, PartitionSpec(*only_axes(sharding.spec, axes)))
    )


def only_axes(spec: PartitionSpec, axes: set[str], other: Any = None) -> list[Any]:
    """Returns the entries of a spec with these axes alone, and `other` where none is left."""
    entries = [tuple(a for a in named_axes(entry) if a in axes) for entry in spec.partitions]
    return [names[0] if len(names) == 1 else names or other for names in entries]


def on_current_axes(x: Any) -> Any:
    """Returns an array that a function holds, on automatic axes if the function runs on them."""
    mesh = jax.sharding.get_abstract_mesh()
    on_automatic = mesh.auto_axes and not mesh.explicit_axes
    if (
        not on_automatic
        or not isinstance(x, jax.Array)
        or not jax.typeof(x).sharding.mesh.explicit_axes
    ):
        return x
    return jax.reshard(x, free_spec(jax.typeof(x).sharding.spec, mesh))


def on_axes_of(x: Any, like: Any) -> Any:
    """Returns an array in the sharding of another one, if that is on explicit axes."""
    sharding = jax.typeof(like).sharding
    if not sharding.mesh.explicit_axes or jax.typeof(x).sharding == sharding:
        return x
    return jax.reshard(x, sharding)


def free_spec(spec: Any, mesh: AbstractMesh) -> PartitionSpec:
    """Returns what a spec says about the explicit axes of a mesh alone."""
    return PartitionSpec(*only_axes(spec, set(mesh.explicit_axes)))
