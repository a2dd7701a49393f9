"""Compiles a function for devices that need not be here, for arguments that lie elsewhere."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from jaxmp._inspect.compiled import closed_over, is_array
from jaxmp._planning.absent_devices import absent_devices, is_absent
from jaxmp._planning.devices import Device, is_of_kind


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


def compile_for(
    device: Device,
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    donate: int | Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles a function for a device, or for as many as its arguments are sharded over.

    Args:
      device: what to compile for.
      fn: a function, jitted or not.
      args: its arguments: arrays, or abstract ones. Their shardings are kept, on a mesh of the same
        shape.
      kwargs: its keyword arguments.
      donate: positions of donated arguments, for a function that is not jitted.
      options: compiler options.

    Returns:
      What `jax.jit(fn).lower(...).compile()` returns.

    Raises:
      NoCompiler: if there is none for the device, or not installed.
      DoesNotFit: if a TPU's compiler finds that it does not fit.
      ValueError: if arguments lie on meshes of several shapes, or the function has a mesh of its
        own devices or calls back to Python.
    """
    leaves = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
    mesh = _absent_mesh(device, leaves)
    one = None if mesh is not None else SingleDeviceSharding(_devices(device, 1)[0])

    def abstract(x: Any) -> Any:
        if not is_array(x):
            return x
        sharding: Any = getattr(x, "sharding", None)
        if mesh is not None and _is_several(sharding):
            target: Any = NamedSharding(mesh, sharding.spec)
        else:  # None lets the compiler choose
            target = one
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=target, weak_type=getattr(x, "weak_type", False)
        )

    args, kwargs = jax.tree.map(abstract, (tuple(args), dict(kwargs)))
    # A mesh that is set would be one of the devices here.
    context = jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()
    try:
        with context:
            return _lower(fn, args, kwargs, donate, one).compile(dict(options or {}))
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


def _lower(fn: Any, args: Any, kwargs: Any, donate: Any, one: Any) -> Any:
    if not any(map(is_array, jax.tree.leaves((args, kwargs)))):
        # Without an argument nothing would say which device to compile for.
        unused = jax.ShapeDtypeStruct((), "float32", sharding=one)
        return jax.jit(lambda _: fn(*args, **kwargs)).lower(unused)
    if hasattr(fn, "lower") and not _donated(donate):
        return fn.lower(*args, **kwargs)
    if _donated(donate):
        return jax.jit(fn, donate_argnums=_donated(donate)).lower(*args, **kwargs)
    arrays, call = closed_over(fn, args, kwargs)
    return jax.jit(call).lower(arrays)


def _donated(donate: int | Sequence[int]) -> tuple[int, ...]:
    return (donate,) if isinstance(donate, int) else tuple(donate)


def _is_several(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def _absent_mesh(device: Device, leaves: Iterable[Any]) -> Mesh | None:
    """Returns a mesh like that of sharded arrays, of devices to compile for; None for one."""
    meshes: dict[Any, Mesh | AbstractMesh] = {}
    for x in leaves:
        sharding: Any = getattr(x, "sharding", None)
        if _is_several(sharding):
            shape = tuple(sharding.mesh.shape.items())
            meshes.setdefault((shape, sharding.mesh.axis_types), sharding.mesh)
        elif sharding is not None and len(getattr(sharding, "device_set", ())) > 1:
            raise ValueError(
                f"an argument has a {type(sharding).__name__} on several devices. Give arguments "
                "with a NamedSharding: its mesh is made of absent devices"
            )
    if len(meshes) > 1:
        shapes = " and ".join(str(dict(shape)) for shape, _ in meshes)
        raise ValueError(f"the arguments lie on several meshes, {shapes}. Give them one")
    for (shape, types), mesh in meshes.items():
        if isinstance(mesh, Mesh) and is_absent(mesh.devices.flat[0]):
            return mesh
        names, sizes = zip(*shape, strict=True)
        devices = _devices(device, mesh.size)
        return jax.make_mesh(sizes, names, axis_types=types, devices=devices)
    return None
