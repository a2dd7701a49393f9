"""Compilers for devices that are not here: TPUs through libtpu, GPUs through the CUDA plugin.

`make aot` installs them and sets JAXMP_AOT. Without it these tests are skipped, and say so: other
tests run with compiler flags of their own, which these compilers would read.
"""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import pytest

from benchmarks.lab.compilers import compiler_options
from jaxmp._tools.planning.absent_devices import absent_gpus, absent_pod, gpu_target

# What the second stack compiles for, too.
GPU = pytest.param("gpu", marks=pytest.mark.jax)


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles for one device of a platform: `compiler(fun, *abstract_args, donate=())`.

    With `quickly`, at the lowest effort: for what is compared with another program made so. With
    the compiler's own `options`, if there are any.
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
        self,
        fun: Any,
        *args: Any,
        donate: tuple[int, ...] = (),
        quickly: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        sharding = jax.sharding.SingleDeviceSharding(self.devices[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
        )
        effort = compiler_options(self.platform, "least" if quickly else "default")
        return jax.jit(fun, donate_argnums=donate).lower(*abstract).compile({**effort, **options})


def _have(*modules: str) -> bool:
    return any(importlib.util.find_spec(module) for module in modules)


def _required(platform: str, installed: bool) -> None:
    if "JAXMP_AOT" not in os.environ:
        pytest.skip(f"compiles for a {platform} that is not here: run `make aot`")
    if not installed:
        pytest.fail(f"no compiler for {platform}: install jaxmp[aot]")


def compiler_for_gpus(target: str) -> Compiler:
    """Compiles for GPUs that are as `target` says, one or a mesh of up to eight."""
    _required("CUDA", _have("jax_cuda12_plugin", "jax_cuda13_plugin"))
    return Compiler("gpu", tuple(absent_gpus(target)))


def compiler_for_tpus(topology: str, slices: int = 1) -> Compiler:
    """Compiles for one TPU of a topology, or for a mesh of them."""
    _required("TPU", _have("libtpu"))
    return Compiler("tpu", tuple(absent_pod(topology, slices)))


@pytest.fixture(scope="session")
def gpu() -> Compiler:
    """Compiles for one H100, or for a mesh of up to eight."""
    return compiler_for_gpus(gpu_target("h100"))


@pytest.fixture(scope="session")
def b200() -> Compiler:
    """Compiles for one B200, or for a mesh of up to eight."""
    return compiler_for_gpus(gpu_target("b200"))


@pytest.fixture(scope="session")
def tpu() -> Compiler:
    """Compiles for one TPU v5e, or for a mesh of up to eight."""
    return compiler_for_tpus("v5e:2x4")


@pytest.fixture(scope="session")
def tpu7x() -> Compiler:
    """Compiles for one TPU 7x, or for a mesh of up to eight: each of the four chips is two."""
    return compiler_for_tpus("tpu7x:2x2x1")


@pytest.fixture(scope="session")
def pod() -> Compiler:
    """Compiles for a mesh of up to 128 TPUs v5e."""
    return compiler_for_tpus("v5e:8x16")


@pytest.fixture(scope="session")
def two_slices() -> Compiler:
    """Compiles for two slices of eight TPUs v5e; the compiler may abort for a part of them."""
    return compiler_for_tpus("v5e:2x4", slices=2)


@pytest.fixture(scope="session")
def four_slices() -> Compiler:
    """Compiles for four slices of eight TPUs v5e."""
    return compiler_for_tpus("v5e:2x4", slices=4)


@pytest.fixture(params=[GPU, "tpu"])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """Each of the two."""
    return request.getfixturevalue(request.param)
