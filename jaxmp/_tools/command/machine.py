"""Reads the facts of a machine: versions, devices, and the settings that decide dtypes."""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jaxmp._program.compat import may_sum_bfloat16_wrongly
from jaxmp._program.cpu_compiler import WRONG_SUMS, sums_wrongly

_PACKAGES = ("jaxmp", "jax", "jaxlib", "optax", "jmp", "numpy", "ml_dtypes")
# The libraries of the adapters, and the compilers and drivers of devices: listed if installed.
_ADAPTED = ("flax", "equinox", "dm-haiku")
_PLUGINS = (
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu"),
    *("nvidia-cublas-cu12", "nvidia-cublas", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices that JAX has on a machine.

    Attributes:
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      kind: JAX's name of the device, such as `"NVIDIA H100 80GB HBM3"`.
      devices: how many there are, those of other processes included.
      processes: how many processes share them.
      memory: the bytes that programs can have on one of them; 0 if not known.
      compute_capability: of an NVIDIA GPU, such as `"9.0"`; of an AMD GPU, such as `"gfx942"`.
      runtime: the version of the backend.
      sums_wrongly: whether it is a CPU whose compiler computes bfloat16 wrongly.
    """

    platform: str
    kind: str
    devices: int
    processes: int
    memory: int
    compute_capability: str
    runtime: str
    sums_wrongly: bool = False


def this_machine() -> Machine:
    """Returns the devices of this process.

    Raises:
      RuntimeError: if JAX cannot start its backend.
    """
    first = jax.local_devices()[0]  # of this process: others answer no questions
    try:
        memory = (first.memory_stats() or {}).get("bytes_limit", 0)
    except RuntimeError:  # not every backend has statistics
        memory = 0
    return Machine(
        platform=first.platform,
        kind=first.device_kind,
        devices=jax.device_count(),
        processes=jax.process_count(),
        memory=int(memory),
        compute_capability=str(getattr(first, "compute_capability", "") or ""),
        runtime=str(first.client.platform_version).strip().partition("\n")[0],
        # Compiles a program, and so only where the version is one that may.
        sums_wrongly=first.platform == "cpu" and may_sum_bfloat16_wrongly() and sums_wrongly(),
    )


def versions() -> dict[str, str]:
    """Returns the version of Python and of each package that decides how programs compute."""
    installed = {"python": platform.python_version()}
    for name in (*_PACKAGES, *_ADAPTED, *_PLUGINS):
        version = version_of(name)
        if version or name in _PACKAGES:
            installed[name] = version or "not installed as a package"
    return installed


def version_of(package: str) -> str:
    """Returns the version of an installed package; `""` if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# The settings that change dtypes, or how fast and how exactly a program runs.
_OPTIONS = (
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_enable_x64"),
    *("jax_debug_nans", "jax_disable_jit"),
)
_VARIABLES = (
    *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "TF_CUDNN_DETERMINISTIC"),
    "JAX_PLATFORMS",
)


def settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the settings of JAX, and the variables that are set, which decide dtypes."""
    # `getattr`: options come and go with versions of JAX.
    options = {name: getattr(jax.config, name, None) for name in _OPTIONS}
    values = {name: str(value) for name, value in options.items() if value is not None}
    return values | {name: environment[name] for name in _VARIABLES if environment.get(name)}


def remarks(
    values: Mapping[str, str], machine: Machine | None, installed: Collection[str] = ()
) -> list[str]:
    """Returns a sentence for each setting that changes dtypes, results or speed."""
    texts = [
        text
        for name, (usual, text) in _REMARKS.items()
        if name in values and values[name] not in usual
    ]
    flags = values.get("XLA_FLAGS", "") + " " + values.get("LIBTPU_INIT_ARGS", "")
    texts += [f"{flag} in XLA_FLAGS: {text}" for flag, text in _FLAGS.items() if flag in flags]
    if machine is not None and machine.sums_wrongly:
        texts.append(WRONG_SUMS)
    # JAX falls back to the CPU, and only warns of it.
    if machine is not None and machine.platform == "cpu":
        texts += [text for file, text in _UNUSED.items() if os.path.exists(file)]
        texts += [
            f"{name} is installed, and JAX runs on the CPU: the device or its driver is missing "
            "(JAX says more on stderr as it starts), or JAX_PLATFORMS is set."
            for name in _PLUGINS
            if name in installed and not name.startswith("nvidia-")
        ]
    return texts


# Files of devices that JAX does not use although they are there.
_UNUSED = {
    "/dev/nvidia0": "There is an NVIDIA GPU (/dev/nvidia0), and JAX runs on the CPU: install "
    "jax[cuda13] or jax[cuda12], or look at JAX_PLATFORMS.",
    "/dev/accel0": "There is an accelerator (/dev/accel0), and JAX runs on the CPU: install "
    "jax[tpu], or look at JAX_PLATFORMS.",
    "/dev/kfd": "There is an AMD GPU (/dev/kfd), and JAX runs on the CPU: install the ROCm plugin "
    "of jax, or look at JAX_PLATFORMS.",
}
# For each setting: the values that need no remark, and the remark.
_REMARKS: dict[str, tuple[tuple[Any, ...], str]] = {
    "jax_default_matmul_precision": (
        ("None", "default"),
        "jax_default_matmul_precision is set: products of float32 operands that ask for nothing "
        "use it, in the parts that you left in float32 too. Products of 16 bits stay as they are.",
    ),
    "jax_numpy_dtype_promotion": (
        ("standard",),
        "jax_numpy_dtype_promotion is strict: bfloat16 + float32 raises in your code. jaxmp itself "
        "works with it; casts have to be written out.",
    ),
    "jax_enable_x64": (
        ("False",),
        "jax_enable_x64 is on: new arrays are float64 unless they are given a dtype, and TPUs "
        "emulate float64. Look for float64 in `jaxmp audit`.",
    ),
    "jax_debug_nans": (
        ("False",),
        "jax_debug_nans is on: it raises at the first NaN, while a loss scale expects overflows "
        "and skips them. Use jaxmp.diagnostics.find_overflow in its place.",
    ),
    "jax_disable_jit": (
        ("False",),
        "jax_disable_jit is on: each operation is compiled by itself, so that casts and products "
        "are not fused. Measure nothing like this.",
    ),
    "NVIDIA_TF32_OVERRIDE": (
        (),
        "NVIDIA_TF32_OVERRIDE is set: with 0, cuBLAS multiplies float32 exactly, whatever a "
        "program asks for, and several times slower.",
    ),
}
# Parts of XLA_FLAGS and LIBTPU_INIT_ARGS, with the remark.
_FLAGS = {
    "xla_force_host_platform_device_count": "the CPU counts as several devices.",
    "xla_gpu_autotune_level=0": "kernels are not tried out: slow ones may run, and whether a "
    "fusion multiplies float8 is chosen blindly.",
    "xla_gpu_enable_triton_gemm=false": "products go to cuBLAS, so that float8 shows as calls.",
    "xla_allow_excess_precision=false": "roundings between fused operations are kept: closer to "
    "what is written, and slower.",
    "xla_disable_hlo_passes": "the compiler leaves passes out, and with them perhaps the float8 or "
    "16-bit products.",
    "xla_backend_optimization_level=0": "nothing is optimized. Measure nothing like this.",
    "xla_cpu_enable_fast_math=true": "the CPU compiler takes NaN and infinity as impossible: "
    "overflows may pass unseen.",
}
