"""Compilers for devices that are not here: TPU v5e through libtpu, H100 through the CUDA plugin.

`make aot` installs them and sets JAXMP_AOT. Without it these tests are skipped, and say so: other
tests run with compiler flags of their own, which these compilers would read.
"""

import dataclasses
import importlib.util
import math
import os
import pathlib
from typing import Any

import jax
import pytest
from jax.experimental import topologies

# libtpu asks the cloud's metadata server unless it is told what it would answer.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # one process of pytest-xdist each

# What the second stack compiles for, too.
GPU = pytest.param("gpu", marks=pytest.mark.jax)
# Newer versions of JAX know levels alone.
_LEAST_EFFORT: dict[str, Any] = (
    {"exec_time_optimization_effort": -1.0}
    if hasattr(jax.config, "jax_exec_time_optimization_effort")
    else {"optimization_level": "O0"}
)
H100 = (pathlib.Path(__file__).parent / "h100.txtpb").read_text()


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles for one device of a platform: `compiler(fun, *abstract_args, donate=())`.

    With `quickly`, at the lowest effort: for what is compared with another program made so.
    For several devices: `lower(fun, *abstract_args)` with shardings on a `mesh`.
    """

    platform: str
    devices: tuple[Any, ...]

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
        """A mesh of the first devices, in the order that `jax.make_mesh` finds best for them."""
        types = (jax.sharding.AxisType.Auto,) * len(shape)
        devices = self.devices[: math.prod(shape)]
        return jax.make_mesh(shape, names, axis_types=types, devices=devices)

    def lower(self, fun: Any, *args: Any, **jit_options: Any) -> Any:
        """Lowers for the mesh of abstract arguments that have shardings."""
        return jax.jit(fun, **jit_options).lower(*args)

    def __call__(
        self, fun: Any, *args: Any, donate: tuple[int, ...] = (), quickly: bool = False
    ) -> Any:
        sharding = jax.sharding.SingleDeviceSharding(self.devices[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
        )
        options = _LEAST_EFFORT if quickly and self.platform == "tpu" else {}
        return jax.jit(fun, donate_argnums=donate).lower(*abstract).compile(options)


def _have(*modules: str) -> bool:
    return any(importlib.util.find_spec(module) for module in modules)


def _required(platform: str, installed: bool) -> None:
    if "JAXMP_AOT" not in os.environ:
        pytest.skip(f"compiles for a {platform} that is not here: run `make aot`")
    if not installed:
        pytest.fail(f"no compiler for {platform}: install jaxmp[aot]")


@pytest.fixture(scope="session")
def gpu() -> Compiler:
    """Compiles for one H100, or for a mesh of up to eight."""
    _required("CUDA", _have("jax_cuda12_plugin", "jax_cuda13_plugin"))
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x8", target_config=H100
    )
    return Compiler("gpu", tuple(topology.devices))


@pytest.fixture(scope="session")
def tpu() -> Compiler:
    """Compiles for one TPU v5e, or for a mesh of up to eight."""
    return _tpu("v5e:2x4")


@pytest.fixture(scope="session")
def pod() -> Compiler:
    """Compiles for a mesh of up to 128 TPUs v5e."""
    return _tpu("v5e:8x16")


@pytest.fixture(scope="session")
def two_slices() -> Compiler:
    """Compiles for two slices of eight TPUs v5e; the compiler may abort for a part of them."""
    return _tpu("v5e:2x4", num_slices=2)


@pytest.fixture(scope="session")
def four_slices() -> Compiler:
    """Compiles for four slices of eight TPUs v5e."""
    return _tpu("v5e:2x4", num_slices=4)


def _tpu(topology_name: str, **options: Any) -> Compiler:
    _required("TPU", _have("libtpu"))
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name, **options)
    return Compiler("tpu", tuple(topology.devices))


@pytest.fixture(params=[GPU, "tpu"])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """Each of the two."""
    return request.getfixturevalue(request.param)
