"""A float32 as a bfloat16 and the bits that rounding took from it: 4 bytes, or 3."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int, Int32

_LOW_BITS = {16: jnp.int16, 8: jnp.int8}
_HIGH = -(2**16)  # as an int32, the mask of the bits that a bfloat16 keeps
_INFINITY = 0x7F800000
_QUIET = 0x00400000


class SplitFloat32(NamedTuple):
    """What `split_float32` returns.

    Attributes:
      high: the float32, rounded to the nearest bfloat16, ties away from zero.
      low: what to add to the bits of `high`, int16; or the upper half of that, int8.
    """

    high: BFloat16[Array, "*shape"]
    low: Int[Array, "*shape"]


def split_float32(x: Float32[Array, "*shape"], *, low_bits: int = 16) -> SplitFloat32:
    """Splits float32 into a bfloat16 that a model can use, and the rest.

    A float32 master beside a bfloat16 param costs 6 bytes, and 2 of them say the same twice. With
    16 low bits nothing is lost in 4: `merge_float32` gives back every word. With 8, a master of 24
    bits takes 3.

    Ties round away from zero. To even they could not: an even bfloat16 would stand for 65,537
    floats. So `high` differs from `x.astype(bfloat16)` for 1 in 131,072 of all words. Values from
    0x7f7f8000 on (3.396e38) show as infinite, as they do in a cast, and come back finite. Of a NaN
    sign and upper bits of the payload are kept, so that `high` is one too.

    Args:
      x: float32.
      low_bits: 16, or 8 to round to 24 bits in all first, with a relative error of at most 2**-16;
        from 3.4027977e38 on, near the largest float32, values become infinite.

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
            f"split_float32 splits float32, got {x.dtype}. A float16 has other exponents than a "
            "float32, so that no 16 bits complete it; widen narrower floats first"
        )
    if low_bits not in _LOW_BITS:
        raise ValueError(f"low_bits must be 16 or 8, got {low_bits!r}")
    bits = _bits(x)
    if low_bits == 8:
        bits = jnp.where(_is_nan(bits), bits, (bits + 0x80) & -0x100)
    # Of the largest NaNs the sum would wrap around to zero.
    rounded = jnp.where(_is_nan(bits), bits | _QUIET, bits + 0x8000) & _HIGH
    # The cast is exact. A bit cast to 16 bits would be too, but on TPUs it is not fused with what
    # is computed from it, and then costs a copy.
    high = _float(rounded).astype(jnp.bfloat16)
    # Computed from the rounded value rather than beside it: so a TPU's compiler makes one loop of
    # both, which reads each input once.
    rest = jnp.where(_is_nan(bits), 0, bits - _bits(high.astype(jnp.float32)))
    # A compiler may compute x twice, and round it apart in the last place: no wrapping around then.
    rest = jnp.clip(rest, -0x8000, 0x7FFF)
    return SplitFloat32(high, (rest >> (16 - low_bits)).astype(_LOW_BITS[low_bits]))


def merge_float32(
    high: BFloat16[Array, "*shape"], low: Int[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """The float32 that `split_float32` split.

    Args:
      high: bfloat16.
      low: int16 or int8.

    Returns:
      float32. What was split into 16 low bits comes back to the bit.

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
    rest = low.astype(jnp.int32) << (16 - 8 * low.dtype.itemsize)
    return _float(_bits(high.astype(jnp.float32)) + rest)


def _bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _is_nan(bits: Int32[Array, "*shape"]) -> Array:
    return (bits & 0x7FFFFFFF) > _INFINITY
