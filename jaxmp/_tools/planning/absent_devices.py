"""Compiles steps for TPUs and GPUs that are not here.

Install the extra `aot` for the compilers: libtpu, and the CUDA plugin of the jax in use.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from jaxmp._tools.planning.devices import DEVICES, Device, find_device, is_of_kind

# Without these, libtpu asks the metadata server of the cloud.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Slices of each kind of TPU that the compiler knows, by the devices that JAX sees in them.
_TOPOLOGIES = {
    "v3": {8: "v3:2x2", 32: "v3:4x4", 128: "v3:8x8", 512: "v3:16x16"},
    "v5e": {8: "v5e:2x4", 16: "v5e:4x4", 64: "v5e:8x8", 128: "v5e:8x16", 256: "v5e:16x16"},
    "v5p": {4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4", 64: "v5p:4x4x4", 256: "v5p:4x8x8"},
    "v6e": {8: "v6e:2x4", 16: "v6e:4x4", 64: "v6e:8x8", 128: "v6e:8x16", 256: "v6e:16x16"},
    "7x": {8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2", 32: "tpu7x:2x2x4", 128: "tpu7x:4x4x4"},
}


class _Chip(NamedTuple):
    """The data of a GPU that a compiler needs, and that the table of devices does not have.

    Attributes:
      capability: CUDA's compute capability.
      cores: streaming multiprocessors.
      shared: bytes of shared memory of each of them; a block gets 1 KiB less.
      cache: bytes of the second level.
      clock: GHz.
      threads: that one multiprocessor holds.
      fpus: lanes for float32 of each of them.
    """

    capability: str
    cores: int
    shared: int
    cache: int
    clock: float
    threads: int = 2048
    fpus: int = 128


# From NVIDIA's tuning guides, and from the driver of such devices.
_CHIPS = {
    "t4": _Chip("7.5", 40, 65536, 4194304, 1.59, threads=1024, fpus=64),
    "a100-40gb": _Chip("8.0", 108, 167936, 41943040, 1.41, fpus=64),
    "a100": _Chip("8.0", 108, 167936, 41943040, 1.41, fpus=64),
    "a10g": _Chip("8.6", 80, 102400, 6291456, 1.71, threads=1536),
    "a10": _Chip("8.6", 72, 102400, 6291456, 1.695, threads=1536),
    "l4": _Chip("8.9", 58, 102400, 50331648, 2.04, threads=1536),
    "l40s": _Chip("8.9", 142, 102400, 100663296, 2.52, threads=1536),
    "rtx4090": _Chip("8.9", 128, 102400, 75497472, 2.52, threads=1536),
    "h100-pcie": _Chip("9.0", 114, 233472, 52428800, 1.755),
    "h100-nvl": _Chip("9.0", 132, 233472, 62914560, 1.785),
    "h100": _Chip("9.0", 132, 233472, 52428800, 1.98),
    "gh200": _Chip("9.0", 132, 233472, 62914560, 1.98),
    "h200": _Chip("9.0", 132, 233472, 62914560, 1.98),
    "b200": _Chip("10.0", 148, 233472, 132644864, 1.965),
}
_TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "{cuda}"
  runtime_version: "{cuda}"
  compile_time_toolkit_version: "{cuda}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "NVIDIA {name}"
"""


def absent_pod(topology: str, slices: int = 1) -> Any:
    """Returns the devices of a pod: TPUs like "v5e:8x16", in slices; or H100s like "1x8x8"."""
    if ":" not in topology:
        return absent_gpus(gpu_target("h100"), topology)
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    options = {"num_slices": slices} if slices > 1 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def absent_gpus(target: str, topology: str = "1x1x8") -> Any:
    """Returns GPUs as in `target`: eight of one machine, or as in the topology."""

    def describe() -> Any:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="gpus", topology=topology, target_config=target
        )

    # Only once in a process: then the plugin is there.
    try:
        return describe().devices
    except NotImplementedError:
        # JAX leaves the CUDA plugin out where it finds no CUDA to run programs.
        jax.devices()  # those that are here come first, so that JAX does not try to run CUDA
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
            if importlib.util.find_spec(name):
                importlib.import_module(name).initialize()
        return describe().devices


def gpu_target(name: str) -> str:
    """Returns the description of a GPU for its compiler."""
    device, chip = DEVICES[name], _CHIPS[name]
    major, _, minor = chip.capability.partition(".")
    return _TARGET.format(
        **chip._asdict(),
        # A number: as text, the 10 of a B200 would be less than 8.
        optin=chip.shared - 1024 if int(major) >= 8 else chip.shared,
        bandwidth=int(device.bandwidth),
        memory=device.memory,
        major=major,
        minor=minor,
        # Of the plugin in use. Without a version, the compiler takes CUDA for too old for float8:
        # it multiplies 16-bit copies of float8 operands, and says nothing.
        cuda="13.0.0" if importlib.util.find_spec("jax_cuda13_plugin") else "12.8.0",
        name=name.upper(),
    )


def absent_devices(kind: Any, count: int) -> list[Any]:
    """Returns devices of one kind that are not here, to compile for.

    Args:
      kind: a name such as `"h100"`, or a `Device`.
      count: how many: TPUs of one slice, or GPUs of machines with eight.

    Returns:
      The devices.

    Raises:
      ImportError: if the compiler is not installed.
      ValueError: if no compiler knows such a device, or so many.

    >>> absent_devices("mi300x", 8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: no compiler for mi300x comes with jaxmp[aot]. It has those of TPUs and of ...
    """
    device = find_device(kind)
    if device.platform == "tpu":
        slices = _TOPOLOGIES.get(device.name, {})
        fitting = [name for size, name in slices.items() if size >= count]
        if not slices:
            raise ValueError(
                f"no compiler for {device.name} as JAX sees it comes with jaxmp[aot]. It has those "
                f"of {', '.join(_TOPOLOGIES)}, and of GPUs"
            )
        _check_installed(device, "libtpu")
        if not fitting:
            raise ValueError(
                f"{count} devices are more than a slice of {device.name} that the compiler knows: "
                f"it has up to {max(slices)}"
            )
        return list(absent_pod(fitting[0]))[:count]
    if device.name not in _CHIPS:
        raise ValueError(
            f"no compiler for {device.name} comes with jaxmp[aot]. It has those of TPUs and of "
            f"{', '.join(_CHIPS)}"
        )
    _check_installed(device, "jax_cuda12_plugin", "jax_cuda13_plugin")
    machines = -(-count // 8)  # with eight GPUs each
    return list(absent_gpus(gpu_target(device.name), f"1x{machines}x8"))[:count]


def _check_installed(device: Device, *modules: str) -> None:
    if not any(importlib.util.find_spec(module) for module in modules):
        raise ImportError(
            f"the compiler for {device.name} is not installed. Install it with: "
            "pip install 'jaxmp[aot]'"
        )


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
    "The compiler for {device} made no program, since it would not fit: {error} Use more devices, "
    "or smaller batches"
)
# The advice, by words of the error with which JAX refuses to compile for absent devices.
_ADVICE = {
    "incompatible devices": _OTHER_MESH,
    "should match the mesh": _OTHER_MESH,
    "Unknown backend": _CALLBACK,
}


def compile_for(device: Device, step: Any, args: Sequence[Any]) -> Any:
    """Compiles a jitted step for a device, or for as many as its arguments are sharded over.

    Arguments may be abstract. Their shardings are kept, on a mesh of the same shape.

    Raises:
      NoCompiler: if there is none for the device, or not installed.
      DoesNotFit: if a TPU's compiler finds that it does not fit.
      ValueError: if arguments are on meshes of several shapes, or the function has a mesh of its
        own devices or calls back to Python.
    """
    mesh = _mesh_of_kind(device, jax.tree.leaves(args))
    one = None if mesh is not None else SingleDeviceSharding(_devices(device, 1)[0])

    def abstract(x: Any) -> Any:
        target: Any = one  # None lets the compiler choose
        if mesh is not None and _is_several(x.sharding):
            target = NamedSharding(mesh, x.sharding.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)

    # The caller may have set a mesh of devices that are here.
    context = jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()
    try:
        with context:
            return step.lower(*jax.tree.map(abstract, tuple(args))).compile()
    except (ValueError, RuntimeError) as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise DoesNotFit(_TOO_LARGE.format(device=device.name, error=error)) from error
        for words, advice in _ADVICE.items():
            if words in str(error):
                raise ValueError(advice.format(device=device.name)) from error
        raise


def _devices(device: Device, count: int) -> list[Any]:
    # Those that are here need no extra compiler.
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
    # By shape: arrays of one step may have meshes that differ in their devices alone.
    meshes: dict[Any, Mesh | AbstractMesh] = {}
    for x in leaves:
        if _is_several(x.sharding):
            shape = tuple(x.sharding.mesh.shape.items())
            meshes.setdefault((shape, x.sharding.mesh.axis_types), x.sharding.mesh)
    # XLA compiles a program for one assignment of devices.
    if len(meshes) > 1:
        shapes = " and ".join(str(dict(shape)) for shape, _ in meshes)
        raise ValueError(f"the arguments lie on several meshes, {shapes}. Give them one")
    for (shape, types), mesh in meshes.items():
        if isinstance(mesh, Mesh):
            return mesh
        names, sizes = zip(*shape, strict=True)
        return jax.make_mesh(sizes, names, axis_types=types, devices=_devices(device, mesh.size))
    return None
