"""Rounding to narrow floats, without overflow, in a way that the compiler keeps."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxmp._numerics.dtypes import DType


def round_finite(x: Float[Array, "*shape"], dtype: DType) -> Float[Array, "*shape"]:
    """Rounds to a narrower dtype; finite values beyond its range become its largest value.

    >>> float(round_finite(jnp.float32(7e4), jnp.dtype("float16")))
    65504.0
    """
    # A float32 master of 70,000 is beyond float16. As an infinite param it would make the next loss
    # NaN, and no update added to it could bring it back.
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)


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
