"""TPUs and GPUs that are not here, to compile for.

Install the extra `aot` for the compilers: libtpu, and the CUDA plugin of the jax in use.
"""

import importlib.util
import os
import pathlib
from typing import Any, Literal

import jax
from jax.experimental import topologies

Platform = Literal["gpu", "tpu"]
PLATFORMS: tuple[Platform, ...] = ("gpu", "tpu")
# How much time a TPU's compiler takes for a good program.
EFFORTS = ("default", "least")

# libtpu asks the cloud's metadata server unless it is told what it would answer.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_TARGETS = pathlib.Path(__file__).parents[1] / "tests" / "aot"


def absent_devices(platform: Platform) -> Any:
    """Eight devices of a platform: TPUs v5e in two rows of four, or H100s of one machine."""
    return absent_pod("v5e:2x4" if platform == "tpu" else "1x1x8")


def absent_pod(topology: str, slices: int = 1) -> Any:
    """The devices of a pod: TPUs like "v5e:8x16", in slices; or hosts of H100s like "1x8x8"."""
    if ":" not in topology:
        return absent_gpus(gpu_target("h100"), topology)
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    several = {"num_slices": slices} if slices > 1 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **several).devices


def absent_gpus(target: str, topology: str = "1x1x8") -> Any:
    """GPUs that are as `target` says, eight of one machine unless the topology says otherwise."""
    return topologies.get_topology_desc(
        platform="cuda", topology_name="gpus", topology=topology, target_config=target
    ).devices


def gpu_target(name: str) -> str:
    """What a compiler is told of an "h100" or a "b200", with the CUDA version of the plugin in use.

    Where no version is named, the compiler takes CUDA for too old for float8. It then multiplies
    16-bit copies of float8 operands, and says nothing.
    """
    newer = importlib.util.find_spec("jax_cuda13_plugin") is not None
    text = (_TARGETS / f"{name}.txtpb").read_text()
    return text.replace("12.8.0", "13.0.0") if newer else text


def compiler_options(platform: str, effort: str) -> dict[str, Any]:
    """Compiler options for one of `EFFORTS`; compilers for other platforms than TPUs have none."""
    if platform != "tpu" or effort == "default":
        return {}
    # jax 0.12 replaced the scale from -1 to 1 by levels, and refuses the old name.
    if hasattr(jax.config, "jax_exec_time_optimization_effort"):
        return {"exec_time_optimization_effort": -1.0}
    return {"optimization_level": "O0"}
