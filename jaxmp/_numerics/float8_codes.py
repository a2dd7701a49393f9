"""Numbers in float8: codes of 8 bits, and scales that bring arrays or blocks into their range.

float8 has two or three bits of mantissa and a range of 2**-9 to 448 (e4m3fn), or 2**-16 to 57344
(e5m2). Gradients of 1e-6 would become zero. So an array is multiplied by a scale before it is
rounded, and a product of such arrays is divided by both scales.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Num

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.rounding import widen_rounded

# As in torchao. An array of zeros gets a finite scale, and codes that are zero.
_LEAST_AMAX = 1e-12
_EXPONENT = np.int32(-(2**23))  # the sign and the exponent of a float32
BLOCK = 32  # numbers that share a scale in MX formats


class Coded(NamedTuple):
    """An array in float8.

    Attributes:
      codes: `round(x * scale)`, in a float8 dtype and the shape of `x`.
      scale: float32; 1 along the axes that share a scale.
    """

    codes: Array
    scale: Float32[Array, "..."]


def largest_code(dtype: DType) -> float:
    """Returns the largest number of a format; of int8 127, so that codes have both signs alike.

    >>> largest_code(jnp.dtype("int8")), largest_code(jnp.dtype("float8_e5m2"))
    (127.0, 57344.0)
    """
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return float(info.max)


def scale_of(
    amax: Float32[Array, "*shape"], dtype: DType, *, power_of_two: bool = True
) -> Float32[Array, "*shape"]:
    """Returns the float32 scale that brings numbers up to `amax` into the range of a float8 dtype.

    Scales are rounded down to powers of two, unless `power_of_two` is false. They are NaN where
    `amax` is not finite.

    >>> scale_of(jnp.float32([448, 100, jnp.inf]), jnp.dtype("float8_e4m3fn"))
    Array([ 1.,  4., nan], dtype=float32)
    """
    largest = largest_code(dtype)
    # A power of two moves the exponent only: then rounding to float8 is the one rounding, and a
    # product is scaled back exactly in bfloat16.
    if power_of_two:
        # GPUs divide float32 with an error of up to two units in the last place, which next to a
        # power of two would change the scale by a factor of two. So subtract the bits: exponents
        # subtract, and a larger mantissa of `amax` borrows one.
        clamped = jnp.maximum(amax, np.float32(_LEAST_AMAX))
        amax_bits = lax.bitcast_convert_type(clamped, jnp.int32)
        largest_bits, one_bits = (np.float32(x).view(np.int32) for x in (largest, 1))
        bits = (largest_bits - amax_bits + one_bits) & _EXPONENT
        scale = lax.bitcast_convert_type(bits, jnp.float32)
    else:
        # The constant is the quotient in float64, rounded once: 1e-12 itself is not a float32.
        scale = jnp.where(amax > _LEAST_AMAX, largest / amax, np.float32(largest / _LEAST_AMAX))
    # All of a product becomes NaN, so that a loss scale or `grads_finite` sees the overflow.
    return jnp.where(jnp.isfinite(amax), scale, jnp.float32(jnp.nan))


def _largest_magnitude(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float32[Array, "..."]:
    """Returns the largest magnitude along some axes, which stay with size 1.

    >>> _largest_magnitude(jnp.array([[1, -3], [2, 0]], jnp.bfloat16), (1,))
    Array([[3.],
           [2.]], dtype=float32)
    """
    return jnp.max(jnp.abs(_exact_float32(x)), axis=axes, keepdims=True, initial=0)


def _exact_float32(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    # Codes must not depend on what a compiler fuses. Else an activation could be rounded from
    # float32 in the forward pass, and from bfloat16 where a checkpoint computes it again: 6 % of
    # difference where that moves a code. This costs nothing for bfloat16 only; small float16
    # numbers would become zero.
    return widen_rounded(x) if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)


def round_to_codes(
    x: Float[Array, "*shape"], scale: Float32[Array, "..."], dtype: DType
) -> Num[Array, "*shape"]:
    """Rounds numbers, of any float dtype up to float32, times their scale to the nearest code.

    >>> x, e4m3 = jnp.float32([0.3, 500, jnp.nan]), jnp.dtype("float8_e4m3fn")
    >>> round_to_codes(x, jnp.float32(1), e4m3)
    Array([0.3125, 448, nan], dtype=float8_e4m3fn)
    """
    largest = largest_code(dtype)
    scaled = _exact_float32(x) * scale
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)  # to even; a cast cuts off
    # As in torchao. A cast makes NaN or infinity of numbers out of range, and -128 in int8.
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def encode_float8(
    x: Float[Array, "*shape"], dtype: DType, axes: tuple[int, ...], *, power_of_two: bool = True
) -> Coded:
    """Returns an array in float8, with one scale for all numbers along some axes.

    >>> x, e4m3 = jnp.float32([[1, 2], [30, 40]]), jnp.dtype("float8_e4m3fn")
    >>> encode_float8(x, e4m3, (1,)).scale.ravel()
    Array([128.,   8.], dtype=float32)
    """
    scale = scale_of(_largest_magnitude(x, axes), dtype, power_of_two=power_of_two)
    return Coded(round_to_codes(x, scale, dtype), scale)


def decode_float8(coded: Coded, dtype: Any) -> Array:
    """Returns the numbers that codes stand for: exact in bfloat16 if scales are powers of two.

    >>> coded = encode_float8(jnp.float32([0.3, 5]), jnp.dtype("float8_e4m3fn"), (0,))
    >>> decode_float8(coded, jnp.bfloat16)
    Array([0.3125, 5], dtype=bfloat16)
    """
    return coded.codes.astype(dtype) * (1 / coded.scale).astype(dtype)


def encode_blocks(x: Float[Array, "*shape"], dtype: DType) -> tuple[Array, Array]:
    """Returns an array in MXFP8: codes, and a scale for each 32 numbers along the last axis.

    The codes are the numbers divided by the scale, `amax / largest code` rounded up to a power of
    two, in float8_e8m0fnu (OCP, "Microscaling Formats (MX) Specification 1.0", 2023). The rule of
    the OCP's section 6.3 rounds down and clips up to an eighth off the largest number of a block.
    Rounding up is as in cuBLAS, and as Mishra et al. advise ("Recipes for Pre-training LLMs with
    MXFP8", 2025). A block with an infinity or NaN has the scale NaN, and so have results that read
    it.

    >>> codes, scales = encode_blocks(jnp.full((1, 64), 3.0), jnp.dtype("float8_e4m3fn"))
    >>> codes[0, 0], scales[0]
    (Array(384, dtype=float8_e4m3fn), Array([0.0078125, 0.0078125], dtype=float8_e8m0fnu))
    """
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = _largest_magnitude(blocks, (blocks.ndim - 1,))
    # By bits, as in `scale_of`: of a quotient, the exponent, and one more for what is left over.
    largest_bits = np.float32(largest_code(dtype)).view(np.int32)
    over = lax.bitcast_convert_type(amax, jnp.int32) - largest_bits
    exponent = jnp.maximum(((over - 1) >> 23) + 128, 0)  # from -127, as e8m0 counts
    exponent = jnp.where(jnp.isfinite(amax), exponent, 255)  # NaN
    # Through 8 bits, so that a compiler keeps them alone between its two passes over the array.
    scale_bits = exponent.astype(jnp.uint8)
    inverse = lax.bitcast_convert_type((254 - scale_bits.astype(jnp.int32)) << 23, jnp.float32)
    codes = round_to_codes(blocks, inverse, dtype).reshape(x.shape)
    return codes, lax.bitcast_convert_type(scale_bits[..., 0], jnp.float8_e8m0fnu)
