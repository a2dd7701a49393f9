"""Splits a float32 into a bfloat16 and the bits that rounding removed: 4 bytes, or 3."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int, Int32

_LOW_BITS = {16: jnp.int16, 8: jnp.int8}
_HIGH = -(2**16)  # as an int32, the mask of the bits that a bfloat16 keeps
_INFINITY = 0x7F800000
_QUIET = 0x00400000


class SplitFloat32(NamedTuple):
    """A float32 in two parts, as `split_float32` returns it.

    Attributes:
      high: the float32, rounded to the nearest bfloat16, ties away from zero.
      low: the int16 to add to the bits of `high`; or its upper half, int8.
    """

    high: BFloat16[Array, "*shape"]
    low: Int[Array, "*shape"]


def split_float32(x: Float32[Array, "*shape"], *, low_bits: int = 16) -> SplitFloat32:
    """Splits float32 into a bfloat16 that a model can use, and the rest.

    A float32 master and a bfloat16 param take 6 bytes, 2 of them redundant. With 16 low bits,
    both take 4 bytes and nothing is lost: `merge_float32` restores every word. With 8 low bits, the
    master has 24 bits and both take 3 bytes.

    Ties round away from zero. So `high` differs from `x.astype(bfloat16)` for 1 in 131,072 of all
    words. Values from 0x7f7f8000 on (3.396e38) are infinite in `high`, as after a cast, and finite
    again when merged. A NaN keeps its sign and the upper bits of its payload, so that `high` is a
    NaN too.

    Args:
      x: float32.
      low_bits: 16; or 8, which first rounds `x` to 24 bits, with a relative error of at most
        2**-16. Values from 3.4027977e38 on, near the largest float32, then become infinite.

    Returns:
      The rounded values, and the rest as integers.

    Raises:
      TypeError: if `x` is not float32.
      ValueError: for another number of low bits.

    >>> high, low = split_float32(jnp.float32([1.0, 1.001, -3.14159274]))
    >>> high, low
    (Array([1, 1, -3.14062], dtype=bfloat16), Array([   0, 8389, 4059], dtype=int16))
    >>> merge_float32(high, low)
    Array([ 1.       ,  1.001    , -3.1415927], dtype=float32)
    """
    x = jnp.asarray(x)
    if x.dtype != jnp.float32:
        raise TypeError(
            f"split_float32 splits float32, got {x.dtype}. Cast narrower floats to float32 first"
        )
    if low_bits not in _LOW_BITS:
        raise ValueError(f"low_bits must be 16 or 8, got {low_bits!r}")
    bits = _bits(x)
    if low_bits == 8:
        bits = jnp.where(_is_nan(bits), bits, (bits + 0x80) & -0x100)
    # Ties cannot round to even, as an even bfloat16 would stand for 65,537 floats, one more than 16
    # low bits tell apart. For the largest NaNs the sum would wrap around to zero.
    rounded = jnp.where(_is_nan(bits), bits | _QUIET, bits + 0x8000) & _HIGH
    # The cast is exact. So would a bit cast to 16 bits be, but TPUs do not fuse it with the
    # operations that read it, which costs a copy.
    high = _float(rounded).astype(jnp.bfloat16)
    # Computed from `high`, not in parallel, so that a TPU's compiler makes one loop for both,
    # which reads each input once.
    low = jnp.where(_is_nan(bits), 0, bits - _bits(high.astype(jnp.float32)))
    # A compiler may compute x twice, with different last bits: clip, lest the low bits wrap around.
    low = jnp.clip(low, -0x8000, 0x7FFF)
    return SplitFloat32(high, (low >> (16 - low_bits)).astype(_LOW_BITS[low_bits]))


def merge_float32(
    high: BFloat16[Array, "*shape"], low: Int[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Returns the float32 that `split_float32` split.

    Args:
      high: bfloat16.
      low: int16 or int8.

    Returns:
      float32. With 16 low bits it is bit for bit the float32 that was split.

    Raises:
      TypeError: for other dtypes.

    >>> merge_float32(jnp.bfloat16(1.0), jnp.int16(1)) == jnp.nextafter(jnp.float32(1), 2)
    Array(True, dtype=bool)
    """
    high, low = jnp.asarray(high), jnp.asarray(low)
    if high.dtype != jnp.bfloat16 or low.dtype not in (jnp.int16, jnp.int8):
        raise TypeError(
            "merge_float32 takes the bfloat16 and the int16 or int8 that split_float32 returned, "
            f"got {high.dtype} and {low.dtype}"
        )
    offset = low.astype(jnp.int32) << (16 - 8 * low.dtype.itemsize)
    return _float(_bits(high.astype(jnp.float32)) + offset)


def _bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _is_nan(bits: Int32[Array, "*shape"]) -> Array:
    return (bits & 0x7FFFFFFF) > _INFINITY
