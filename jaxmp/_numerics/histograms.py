"""Histograms of the magnitudes in arrays, by power of two, counted on the device."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, PyTree

from jaxmp._numerics.dtypes import is_floating, is_inexact
from jaxmp._numerics.tree import check_flag, leaf_names

# Each power of two between these has a bin.
_LOWEST, _HIGHEST = -80, 40
# The first bin holds zeros. Three more hold numbers below the lowest power of two: they part where
# bfloat16 becomes zero, and where float32 and bfloat16 lose bits. The last three hold numbers above
# the highest, infinities, and NaN.
LOWER_EDGES = np.array(
    [2.0**-149, 2.0**-134, 2.0**-126, *np.exp2(np.arange(_LOWEST, _HIGHEST + 2.0))]
)
ZEROS, INFINITE, NAN = 0, len(LOWER_EDGES) + 1, len(LOWER_EDGES) + 2
FINITE = slice(1, INFINITE)  # of numbers that are not zero
BINS = NAN + 1  # 128, as many as a TPU has lanes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts", "largest"],
    meta_fields=["names", "dtypes"],
)
@dataclasses.dataclass(frozen=True)
class Histograms:
    """How many numbers of each array have a magnitude between two powers of two.

    It is a pytree, and passes through `jit`, `scan` and `cond`; sums over devices or steps are sums
    of `counts` and maxima of `largest`.

    Attributes:
      counts: float32 of shape (..., arrays, 128), numbers per array and bin. The bins: zeros; three
        below 2**-80, which part at 2**-134 and 2**-126; one for each power of two from 2**-80 to
        2**40; one beyond; infinities; NaN. Counts are exact up to 2**24, then to seven digits.
      largest: float32 of shape (..., arrays), the largest finite magnitude of each array.
      names: the names of the arrays.
      dtypes: the dtypes that they had.
    """

    counts: Any
    largest: Any
    names: tuple[str, ...]
    dtypes: tuple[str, ...]


def histograms(tree: PyTree, *, when: Any = None) -> Histograms:
    """Counts the numbers of each array by their power of two.

    One histogram answers for every format and every scale how much of an array would be lost, and
    is small enough to leave the device with the metrics. Numbers in 16 bits have lost already what
    their dtype cannot hold: count gradients that are float32, as `jaxmp.value_and_grad` returns
    them.

    Under `jit` nothing waits for the host. Sharded arrays are counted in place, and one sum
    over devices follows. In a `shard_map`, each device counts its own numbers.

    Args:
      tree: gradients, params, or any tree of arrays. Leaves that are not floats are left out. A
        complex number counts as two. float64 counts as the nearest float32 that is not zero or
        infinite.
      when: a boolean scalar, such as `step % 100 == 0`, of the program. Where it is false nothing
        is counted, and the histograms are all zero.

    Returns:
      The histograms, in the order of the leaves.

    Raises:
      TypeError: if `when` is not a boolean scalar.

    >>> found = histograms({"w": jnp.array([1.0, 1.5, -4.0, 0.0]), "step": jnp.int32(3)})
    >>> found.names, found.counts[0, 84:87], float(found.largest[0])
    (('w',), Array([2., 0., 1.], dtype=float32), 4.0)
    """
    leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    floats = {name: x for name, x in leaves if is_inexact(x)}
    if when is None:
        counts, largest = _counted(list(floats.values()))
    else:
        counts, largest = counted_when(when, _counted, list(floats.values()))
    return Histograms(counts, largest, tuple(floats), tuple(x.dtype.name for x in floats.values()))


@jax.jit
def _counted(arrays: list[Any]) -> tuple[Any, Any]:
    if not arrays:
        return jnp.zeros((0, BINS)), jnp.zeros(0)
    counts, largest = zip(*map(histogram_of, arrays), strict=True)
    return jnp.stack(counts), jnp.stack(largest)


def counted_when(when: Any, count: Callable[[Any], Any], tree: Any) -> Any:
    """Returns `count(tree)` where a flag of the program is true; elsewhere, zeros like it."""
    check_flag(when, "when")
    return jax.lax.cond(when, count, lambda tree: zeros_as(count, tree), tree)


def zeros_as(count: Callable[..., Any], *trees: Any) -> Any:
    """Returns zeros like the results of a function, which vary over devices as those do."""
    return jax.tree.map(jnp.zeros_like, jax.eval_shape(count, *trees))


def histogram_of(x: Any) -> tuple[Float32[Array, "128"], Float32[Array, ""]]:
    """Returns the counts and the largest magnitude of one array of floats."""
    bits = _bits_of(x)
    counts = jax.lax.platform_dependent(
        _bin_of(bits), cpu=_count_by_scatter, default=_count_by_comparison
    )
    finite = jnp.where(bits < _INFINITY, bits, 0)
    largest = jnp.max(finite, initial=jnp.uint32(0))
    return counts, jax.lax.bitcast_convert_type(largest, jnp.float32)


@jax.jit
def counts_below(arrays: list[Any], limits: Float32[Array, " n"]) -> Float32[Array, "arrays n"]:
    """Counts the numbers of each array that are not zero, and smaller than some magnitudes."""
    ends = jax.lax.bitcast_convert_type(limits, jnp.uint32)

    def below(x: Any) -> Any:
        bits = _bits_of(x)
        axes = _axes_of_count(bits)
        counts = [jnp.sum((bits > 0) & (bits < end), axes, dtype=jnp.uint32) for end in ends]
        return jnp.stack([jnp.sum(count.astype(jnp.float32)) for count in counts])

    return jnp.stack([below(x) for x in arrays]) if arrays else jnp.zeros((0, len(limits)))


def _bits_of(x: Any) -> Any:
    # The bits of nonnegative floats have the order of the floats.
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if is_floating(x) and jnp.dtype(x.dtype).itemsize >= 8:
        # float64 beyond the range of float32 must not count as zero or infinite: it is clipped.
        info = jnp.finfo(jnp.float32)
        clipped = jnp.clip(jnp.abs(x), float(info.smallest_normal), float(info.max))
        x = jnp.where(jnp.isfinite(x) & (x != 0), clipped, x)
    x = jnp.asarray(x, jnp.float32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)


_INFINITY = np.uint32(0x7F800000)
_SMALLEST_NORMAL = np.uint32(0x00800000)  # 2**-126
_HALF_OF_BFLOAT16 = np.uint32(0x00008000)  # 2**-134, half of its smallest number


def _bin_of(bits: Any) -> Any:
    """Returns the number of the bin of each magnitude, given the bits of a float32."""
    exponent = (bits >> 23).astype(jnp.int32) - 127
    number = jnp.clip(exponent, _LOWEST - 1, _HIGHEST + 1) + (4 - _LOWEST)
    for edge in (np.uint32(1), _HALF_OF_BFLOAT16, _SMALLEST_NORMAL):
        number -= (bits < edge).astype(jnp.int32)
    for edge in (_INFINITY, _INFINITY + np.uint32(1)):
        number += (bits >= edge).astype(jnp.int32)
    return number


# Sums that are taken together: XLA makes one loop over the array of them, which reads it once.
_TOGETHER = 16


def _count_by_comparison(number: Any) -> Float32[Array, "128"]:
    # TPUs and GPUs compare each number with each bin in registers; a scatter would add one number
    # after the other there. Comparisons with all bins at once take a TPU v5e six times as long, by
    # the estimates of its compiler.
    # A sum over min(number, k) grows from one k to the next by the numbers that are above: two
    # operations for each bin, and exact where uint32 overflows.
    axes = _axes_of_count(number)
    small = number.astype(jnp.uint8)

    def sums_from(first: Any) -> Any:
        numbers = small.astype(jnp.uint32)
        bins = [first + np.uint32(i) for i in range(_TOGETHER)]
        return jnp.stack([jnp.sum(jnp.minimum(numbers, k), axes, dtype=jnp.uint32) for k in bins])

    sums = jax.lax.map(sums_from, jnp.arange(0, BINS, _TOGETHER, dtype=jnp.uint32))
    sums = sums.reshape(BINS, *sums.shape[2:])
    above = sums[1:] - sums[:-1]  # how many are in a bin above each
    whole = np.uint32(math.prod(number.shape[i] for i in axes) % 2**32)
    first, last = jnp.full_like(above[:1], whole), jnp.zeros_like(above[:1])
    counts = jnp.concatenate([first, above]) - jnp.concatenate([above, last])
    return jnp.sum(counts.astype(jnp.float32), tuple(range(1, counts.ndim)))


def _axes_of_count(x: Any) -> tuple[int, ...]:
    """Returns the axes over which a count fits into uint32: all but the first of large arrays."""
    return tuple(range(x.size >= 2**32, x.ndim))


def _count_by_scatter(number: Any) -> Float32[Array, "128"]:
    # A CPU does best to count one number after the other.
    mesh = jax.typeof(number).sharding.mesh
    whole = jax.NamedSharding(mesh, jax.P(None)) if mesh.explicit_axes else None
    counts = jnp.zeros(BINS, jnp.uint32).at[number].add(jnp.uint32(1), out_sharding=whole)
    return counts.astype(jnp.float32)
