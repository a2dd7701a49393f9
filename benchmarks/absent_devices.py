"""TPUs and GPUs that are not here, to compile for.

Install the extra `aot` for the compilers: libtpu, and the CUDA plugin of the jax in use.
"""

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
_H100 = pathlib.Path(__file__).parents[1] / "tests" / "aot" / "h100.txtpb"


def absent_devices(platform: Platform) -> Any:
    """Eight devices of a platform: TPUs v5e in two rows of four, or H100s of one machine."""
    return absent_pod("v5e:2x4" if platform == "tpu" else "1x1x8")


def absent_pod(topology: str, slices: int = 1) -> Any:
    """The devices of a pod: TPUs like "v5e:8x16", in slices; or hosts of H100s like "1x8x8"."""
    if ":" not in topology:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name="h100",
            topology=topology,
            target_config=_H100.read_text(),
        ).devices
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    several = {"num_slices": slices} if slices > 1 else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **several).devices


def compiler_options(platform: str, effort: str) -> dict[str, Any]:
    """Compiler options for one of `EFFORTS`; compilers for other platforms than TPUs have none."""
    if platform != "tpu" or effort == "default":
        return {}
    # jax 0.12 replaced the scale from -1 to 1 by levels, and refuses the old name.
    if hasattr(jax.config, "jax_exec_time_optimization_effort"):
        return {"exec_time_optimization_effort": -1.0}
    return {"optimization_level": "O0"}
