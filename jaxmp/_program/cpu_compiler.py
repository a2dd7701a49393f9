"""Warns of a jaxlib whose CPU compiler computes bfloat16 wrongly."""

import functools
import importlib.metadata
import importlib.util
import os
import threading
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.user_warnings import warn_once
from jaxmp._program.compat import is_traced, may_sum_bfloat16_wrongly

_FLAG = "--xla_cpu_experimental_ynn_fusion_type="
WRONG_SUMS = (
    f"the CPU compiler of jaxlib {jaxlib.version.__version__} sums bfloat16 wrongly: "
    "jax.jit(lambda a, b: (relu(a) * relu(b)).sum(1)) returns NaN and other numbers that are not "
    f"the sums. On this CPU set XLA_FLAGS={_FLAG} before JAX "
    "starts, train in float32, or install jax and jaxlib 0.11.1 or earlier. GPUs and TPUs have "
    "other compilers"
)


def warn_of_cpu_compiler(dtypes: Iterable[DType], result: Any, *, in_jit: bool = False) -> None:
    """Warns once if a CPU computes in bfloat16, and its compiler does so wrongly.

    Args:
      dtypes: in which it computes.
      result: what it returned.
      in_jit: whether a result that is being traced counts, too, where JAX knows CPUs alone.
    """
    # No error shows it: sums over rows are wrong and change from call to call, some to NaN, which
    # overflow detection takes for the user's own.
    if jnp.dtype(jnp.bfloat16) not in dtypes or not may_sum_bfloat16_wrongly():
        return
    # Only results on a CPU count, so that no backend starts that the user has not started. In a
    # trace, which names no device, no program runs to find out either.
    arrays = [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]
    done = [x for x in arrays if not is_traced(x)]
    on_cpu = any(device.platform == "cpu" for x in done for device in x.devices())
    will_be = in_jit and len(done) < len(arrays) and _knows_cpus_alone()
    avoids = _FLAG in os.environ.get("XLA_FLAGS", "").split()
    if (on_cpu and sums_wrongly()) or (will_be and not avoids):
        warn_once(WRONG_SUMS, threading.Thread)


@functools.cache
def _knows_cpus_alone() -> bool:
    """Whether JAX is told to use CPUs alone, or nothing for another device is installed."""
    if getattr(jax.config, "jax_platforms", None):
        return jax.config.jax_platforms == "cpu"  # type: ignore[attr-defined]
    if {"PJRT_NAMES_AND_LIBRARY_PATHS", "TPU_LIBRARY_PATH"} & os.environ.keys():
        return False
    try:
        installed = any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    except ValueError:  # of one that stands in for another
        return False
    return not installed and not importlib.metadata.entry_points(group="jax_plugins")


@functools.cache
def sums_wrongly() -> bool:
    """Whether the CPU compiler fails on a small program with a known result."""
    results: list[bool] = []
    # In a separate thread, no mesh, trace or guard of the user is in force.
    thread = threading.Thread(target=lambda: results.append(_probe()))
    thread.start()
    thread.join()
    return any(results)


def _probe() -> bool:
    numbers = np.arange(64 * 64).reshape(64, 64)
    a, b = numbers % 3 - 1, numbers % 2
    expected = (np.maximum(a, 0) * np.maximum(b, 0)).sum(1)  # integers up to 64: exact in bfloat16
    with jax.debug_nans(False), jax.default_device(jax.local_devices(backend="cpu")[0]):
        rows = [jnp.asarray(x, jnp.bfloat16) for x in (a, b)]
        zero = jnp.zeros((), jnp.bfloat16)
        sums = jax.jit(lambda a, b: (jnp.maximum(a, zero) * jnp.maximum(b, zero)).sum(1))(*rows)
        return not np.array_equal(np.asarray(sums, np.float64), expected)
