"""What ran on a device, by JAX's profiler."""

import collections
import pathlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax

Profile = dict[str, collections.Counter[str]]


def profile(run: Callable[[], Any], folder: pathlib.Path) -> Profile:
    """Profiles one call, of a program that has run before.

    Returns:
      How often each kernel ran, by the instruction of the program that it belongs to. On a CPU a
      kernel has the name of its instruction.
    """
    jax.block_until_ready(run())
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(run())
    (file,) = folder.rglob("*.xplane.pb")
    return read_profile(jax.profiler.ProfileData.from_file(str(file)).planes)


def read_profile(planes: Iterable[Any]) -> Profile:
    """Reads the planes of the devices. On a GPU the host's have only what it launches."""
    prefix = "/device:GPU" if jax.default_backend() == "gpu" else "/host:CPU"
    kernels: Profile = collections.defaultdict(collections.Counter)
    for plane in planes:
        for line in plane.lines if plane.name.startswith(prefix) else ():
            for event in line.events:
                if instruction := _instruction(event):
                    kernels[instruction][event.name] += 1
    return dict(kernels)


def _instruction(event: Any) -> str:
    with warnings.catch_warnings():
        # Of a type without a module, in jax 0.12 and Python 3.12.
        warnings.simplefilter("ignore", DeprecationWarning)
        return str(dict(event.stats).get("hlo_op", ""))
