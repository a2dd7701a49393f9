"""Platforms that benchmarks compile for, and how much time the compilers take."""

from typing import Any, Literal

import jax

from jaxmp._tools.planning.absent_devices import absent_pod

Platform = Literal["gpu", "tpu"]
PLATFORMS: tuple[Platform, ...] = ("gpu", "tpu")
# How much time a TPU's compiler takes for a good program.
EFFORTS = ("default", "least")


def eight_devices(platform: Platform) -> Any:
    """Eight devices of a platform: TPUs v5e in two rows of four, or H100s of one machine."""
    return absent_pod("v5e:2x4" if platform == "tpu" else "1x1x8")


def compiler_options(platform: str, effort: str) -> dict[str, Any]:
    """Compiler options for one of `EFFORTS`; compilers for other platforms than TPUs have none."""
    if platform != "tpu" or effort == "default":
        return {}
    # jax 0.12 replaced the scale from -1 to 1 by levels, and refuses the old name.
    if hasattr(jax.config, "jax_exec_time_optimization_effort"):
        return {"exec_time_optimization_effort": -1.0}
    return {"optimization_level": "O0"}
