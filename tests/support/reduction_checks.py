"""Checks of gradients that are to be summed in float32, and of the programs that sum them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jaxmp._tools.inspect.collective_report import Collectives

HALVES = ("bfloat16", "float16")
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def compiled(fun: Callable[..., Any], quick: bool = True) -> Callable[..., Any]:
    """A jitted function; quickly compiled, if its speed and its last bit do not matter."""
    options = {"xla_backend_optimization_level": 0} if quick else {}
    return jax.jit(fun, compiler_options=options)


def split_over(tree: Any, *spec: Any, mesh: Any = MESH) -> Any:
    """A tree of arrays on the devices of a mesh, all with one spec."""
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def relative_error(tree: Any, reference: Any) -> float:
    """The norm of the difference of two trees over that of the second, in float64."""

    def flat(tree: Any) -> Any:
        return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])

    wanted = flat(reference)
    return float(np.linalg.norm(flat(tree) - wanted) / np.linalg.norm(wanted))


def ones(*shape: int) -> jax.Array:
    return jax.device_put(np.ones(shape, np.float32))


def representable(x: Any, dtype: Any) -> float:
    """The part of the elements, zeros apart, that a narrower dtype has too."""
    x = np.asarray(x)
    x = x[x != 0]
    return float(np.mean(x.astype(dtype).astype(x.dtype) == x))


def narrow_sums(report: Collectives) -> int:
    """The bytes of what is summed over devices in 16 bits."""
    return report.bytes(reducer="add", dtype=HALVES)


def reshards(report: Collectives) -> int:
    """The bytes of what moves from device to device, and is neither a sum nor a gather."""
    return report.bytes(kind=("all-to-all", "collective-permute"))


def gathers(report: Collectives, dtype: Any) -> int:
    """The bytes of what is gathered in one dtype."""
    return report.bytes(kind="all-gather", dtype=dtype)
