"""Compiles a step for devices that need not be here."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from jaxmp._tools.planning.absent_devices import absent_devices
from jaxmp._tools.planning.devices import Device, is_of_kind


class NoCompiler(Exception):
    """There is no compiler for a device here; the text says why."""


class DoesNotFit(Exception):
    """A compiler made no program, since it would not fit the device; the text says by how much."""


_OTHER_MESH = (
    "the function names a mesh of devices that are here. Make that mesh of "
    "jaxmp.diagnostics.absent_devices({device!r}, count), or use the specs of its sharding "
    "constraints alone"
)
_CALLBACK = (
    "the function calls back to Python, as jax.debug.print does, and JAX compiles that only where "
    "{device} is. Leave it out of what is compiled"
)
_TOO_LARGE = (
    "The compiler for {device} made no program, since it would not fit: {said} Use more devices, "
    "or smaller batches"
)
# What to do, by what JAX says of a function that it cannot compile for absent devices.
_ADVICE = {
    "incompatible devices": _OTHER_MESH,
    "should match the mesh": _OTHER_MESH,
    "Unknown backend": _CALLBACK,
}


def compile_for(device: Device, step: Any, args: Sequence[Any]) -> Any:
    """Compiles a step for a device, or for as many as its arguments are sharded over.

    Args:
      device: what to compile for.
      step: a jitted function.
      args: its arguments: arrays, or abstract ones. Their shardings are kept, on a mesh of the same
        shape.

    Returns:
      What `step.lower(...).compile()` returns.

    Raises:
      NoCompiler: if there is none for the device, or not installed.
      DoesNotFit: if a TPU's compiler finds that it does not fit.
      ValueError: if arguments lie on meshes of several shapes, or the function has a mesh of its
        own devices or calls back to Python.
    """
    mesh = _mesh_of_kind(device, jax.tree.leaves(args))
    one = None if mesh is not None else SingleDeviceSharding(_devices(device, 1)[0])

    def abstract(x: Any) -> Any:
        target: Any = one  # None lets the compiler choose
        if mesh is not None and _is_several(x.sharding):
            target = NamedSharding(mesh, x.sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)

    # A mesh that is set would be one of the devices here.
    context = jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()
    try:
        with context:
            return step.lower(*jax.tree.map(abstract, tuple(args))).compile()
    except (ValueError, RuntimeError) as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise DoesNotFit(_TOO_LARGE.format(device=device.name, said=error)) from error
        for words, advice in _ADVICE.items():
            if words in str(error):
                raise ValueError(advice.format(device=device.name)) from error
        raise


def _devices(device: Device, count: int) -> list[Any]:
    """Returns devices of a kind: those that are here, if they are enough, or absent ones."""
    here = [x for x in jax.devices() if is_of_kind(x, device)]
    if len(here) >= count:
        return here[:count]
    try:
        return absent_devices(device, count)
    except (ImportError, ValueError) as error:
        raise NoCompiler(str(error)) from error


def _is_several(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def _mesh_of_kind(device: Device, leaves: Iterable[Any]) -> Mesh | None:
    """Returns a mesh like that of sharded arrays, of devices to compile for; None for one."""
    meshes: dict[Any, Mesh | AbstractMesh] = {}
    for x in leaves:
        if _is_several(x.sharding):
            shape = tuple(x.sharding.mesh.shape.items())
            meshes.setdefault((shape, x.sharding.mesh.axis_types), x.sharding.mesh)
    if len(meshes) > 1:
        shapes = " and ".join(str(dict(shape)) for shape, _ in meshes)
        raise ValueError(f"the arguments lie on several meshes, {shapes}. Give them one")
    for (shape, types), mesh in meshes.items():
        if isinstance(mesh, Mesh):
            return mesh
        names, sizes = zip(*shape, strict=True)
        return jax.make_mesh(sizes, names, axis_types=types, devices=_devices(device, mesh.size))
    return None
