"""Rounding to narrow floats, without overflow, in a way that the compiler keeps."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxmp._numerics.dtypes import DType

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def round_finite(x: Float[Array, "*shape"], dtype: DType) -> Float[Array, "*shape"]:
    """Rounds to a narrower dtype; finite values beyond its range become its largest value.

    >>> float(round_finite(jnp.float32(7e4), jnp.dtype("float16")))
    65504.0
    """
    # A float32 master of 70,000 is beyond float16. As an infinite param it would make the next loss
    # NaN, and no update added to it could bring it back.
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)


def open_cast(x: Array, dtype: Any) -> Array:
    """Casts an array that may be a sum over devices, or whose gradient may be one.

    A cast to bfloat16 rounds in the open first. So does the transpose of a cast from bfloat16.

    >>> jax.make_jaxpr(lambda x: open_cast(x, "bfloat16"))(1.0)  # doctest: +NORMALIZE_WHITESPACE
    { lambda ; a:f32[]. let
        b:f32[] = reduce_precision[exponent_bits=8 mantissa_bits=7] a
        c:bf16[] = convert_element_type[new_dtype=bfloat16 weak_type=False] b
      in (c,) }
    """
    # XLA runs a float32 sum over TPUs in bfloat16 if only a cast to bfloat16 reads it, or a product
    # that multiplies bfloat16. Moves and barriers in between do not stop it (libtpu of jax 0.10.2
    # and 0.12.0.1, compiled for v5e, v6e and 7x).
    before, after = x.dtype, jnp.dtype(dtype)
    if (before, after) == (FLOAT32, BFLOAT16):
        x = rounded_to_bfloat16(x)
    x = jax.lax.convert_element_type(x, after)
    # This changes no number; its transpose rounds.
    return rounded_to_bfloat16(x) if (before, after) == (BFLOAT16, FLOAT32) else x


def rounded_to_bfloat16(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Rounds to bfloat16 numbers, in float32."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def widen_rounded(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Widens a narrow array to float32, for arithmetic that relies on its rounding.

    The values are rounded whatever the compiler does with the casts.

    >>> widen_rounded(jnp.bfloat16(1.001))
    Array(1., dtype=float32)
    """
    # XLA on GPUs deletes the pair of casts in `float32(bfloat16(y))` wherever it fuses them, and
    # uses the unrounded `y` (openxla/xla issue 41605). CPU tests cannot see it.
    info = jnp.finfo(x.dtype)
    if info.nexp == jnp.finfo(jnp.float32).nexp:
        return jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
    # reduce_precision flushes numbers that are subnormal in the narrow format, as float16 weights
    # near zero are. A barrier keeps them, and costs a write and a read of the narrow array.
    return jax.lax.optimization_barrier(x).astype(jnp.float32)
