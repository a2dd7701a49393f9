"""Stochastic rounding: unbiased, so that updates too small for one step add up over many."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray, UInt32

from jaxmp._numerics.dtypes import DType, is_key, is_narrow, parse_dtype

Randomness = Literal["counter", "threefry"]


def stochastic_round(
    x: Float[Array, "*shape"],
    dtype: Any,
    key: PRNGKeyArray,
    *,
    randomness: Randomness = "counter",
) -> Float[Array, "*shape"]:
    """Rounds up or down at random, with probabilities that make the mean right.

    Rounding to nearest loses every update smaller than half a unit in the last place. This keeps
    such updates in the mean: `x` becomes one of its two neighbours `lo <= x <= hi`, `hi` with
    probability `(x - lo) / (hi - lo)`, to the last bit of a random 32-bit word.

    Values that the dtype can hold stay unchanged. Finite values beyond its range become its largest
    value. Infinity and NaN stay if the dtype has them (in float8_e4m3fn, infinity becomes NaN).

    Args:
      x: float32, or narrower.
      dtype: bfloat16, float16, or an 8-bit float.
      key: a JAX random key. Under data parallelism, use the same key on each device, or replicas
        drift apart. A key rounds in the same way on every mesh.
      randomness: where the random words come from. `"counter"` hashes the position of each value
        with the key (MurmurHash3's finalizer), which costs about as much as a cast and no memory;
        `"threefry"` uses JAX's own random words, which are better and cost about ten times as much.

    Returns:
      The rounded values, of the dtype.

    Raises:
      TypeError: if `x` is not a float of at most 32 bits, or `key` is not a random key.
      ValueError: if the dtype is not narrower than float32, or `randomness` is unknown.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications"
    (2022).

    >>> x = jnp.full(100_000, 1.001, jnp.float32)
    >>> rounded = stochastic_round(x, "bfloat16", jax.random.key(0))
    >>> sorted(set(rounded.tolist())), round(float(jnp.mean(rounded.astype(jnp.float32))), 4)
    ([1.0, 1.0078125], 1.001)
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise TypeError(
            f"stochastic_round takes floats of at most 32 bits, got {x.dtype}: a random word has "
            "32. Cast float64 to float32 first"
        )
    target = parse_dtype(dtype)
    if not is_narrow(target):
        raise ValueError(f"stochastic_round rounds to fewer than 32 bits, not to {target}")
    if randomness not in get_args(Randomness):
        raise ValueError(
            f"randomness must be one of {', '.join(map(repr, get_args(Randomness)))}, "
            f"got {randomness!r}"
        )
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(
            f"stochastic_round takes a random key, such as jax.random.key(0), got "
            f"{type(key).__name__}"
        )
    return _rounded(x, target, key, randomness)


@functools.partial(jax.jit, static_argnums=(1, 3), inline=True)
def _rounded(x: Any, dtype: DType, key: Any, randomness: Randomness) -> Any:
    if randomness == "counter":
        words = hashed_words(x.shape, _key_words(key))
    else:
        words = jax.random.bits(key, x.shape, jnp.uint32)
    return round_by_words(x.astype(jnp.float32), dtype, words)


def round_by_words(
    x: Float32[Array, "*shape"], dtype: DType, words: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Rounds up where the fraction and a uniform random word together reach one.

    The fraction is the part of `x` below the dtype's last place, in 32 bits. These hold it exactly
    down to 2**-9 of the smallest subnormal number.

    >>> words = jnp.uint32([0, 2**31 - 1, 2**31, 2**32 - 1])
    >>> round_by_words(jnp.full(4, 1.00390625, jnp.float32), jnp.dtype("bfloat16"), words)
    Array([1, 1, 1.00781, 1.00781], dtype=bfloat16)
    """
    info = jnp.finfo(dtype)
    if info.nexp == 8:
        return round_mantissa(x, info.nmant, words).astype(dtype)
    # On integers: compilers may round floats in other ways, and devices may flush them to zero.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = bits & _SIGN, bits & ~_SIGN
    exponent = magnitude >> 23
    mantissa = magnitude & 0x7FFFFF
    significand = jnp.where(exponent > 0, mantissa | 0x800000, mantissa)
    # The exponent of the result, with float32's bias: at least that of subnormal numbers.
    scale = jnp.maximum(exponent, max(int(info.minexp) + 127, 1))
    drop = scale - jnp.maximum(exponent, 1) + (23 - info.nmant)
    rounded = significand >> jnp.minimum(drop, 31)
    # The lowest `drop` bits as a fraction of 2**32, cut off below the last bit.
    upper = significand << jnp.minimum(32 - drop, 31)  # where this shift wraps around: `lower`
    lower = significand >> jnp.minimum(drop - 32, 31)
    fraction = jnp.where(drop <= 32, upper, lower)
    rounded = rounded + (fraction + words < words).astype(jnp.uint32)
    unit = _as_float((scale - info.nmant) << 23)
    value = jax.lax.bitcast_convert_type(rounded.astype(jnp.float32) * unit, jnp.uint32)
    value = jnp.minimum(value, np.float32(info.max).view(np.uint32))
    return jnp.where(jnp.isfinite(x), _as_float(value | sign), x).astype(dtype)


def round_mantissa(
    x: Float32[Array, "*shape"], mantissa_bits: int, words: UInt32[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Rounds as `round_by_words` does to a format with the exponents of float32, in float32."""
    # The carry of the sum reaches the exponent where a number rounds up to a power of two.
    drop = 23 - mantissa_bits
    bits, kept = jax.lax.bitcast_convert_type(x, jnp.uint32), np.uint32(2**32 - 2**drop)
    magnitude = ((bits & ~_SIGN) + (words >> (32 - drop))) & kept
    magnitude = jnp.minimum(magnitude, np.uint32(0x7F7FFFFF) & kept)  # below infinity
    return jnp.where(jnp.isfinite(x), _as_float(magnitude | (bits & _SIGN)), x)


_SIGN = np.uint32(2**31)


def _as_float(bits: UInt32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _key_words(key: Any) -> list[Array]:
    """Returns the words of a random key, typed or raw."""
    if not is_key(key):
        key = jax.random.wrap_key_data(jnp.asarray(key))
    if key.ndim:
        raise ValueError(f"stochastic_round takes one key, got keys of shape {key.shape}")
    return list(jax.random.key_data(key))


def hashed_words(shape: tuple[int, ...], seeds: Sequence[Any]) -> UInt32[Array, "..."]:
    """Returns random words that depend on the position in an array and on a few uint32 seeds.

    Applies the finalizer of MurmurHash3 (Appleby, 2011) to a sequence whose step and start depend
    on the seeds. Positions are counted in 32 bits. In an array that is sharded under `jit`, they
    are positions in the whole array.

    >>> hashed_words((2,), [jnp.uint32(0)])
    Array([ 815897290, 3523111331], dtype=uint32)
    """
    flip, shift = jnp.uint32(0x9E3779B9), jnp.uint32(0x7F4A7C15)
    for seed in seeds:
        flip = _mix(flip ^ jnp.asarray(seed, jnp.uint32))
        shift = _mix(shift + flip)
    # Multiply by the step first. Plain positions would be equal in all arrays of a shape. The GPU
    # compiler would compute such rows once, and all that reads them, such as the moments of 11 of
    # 16 equal params, in one kernel, apart from the params.
    stride = flip | 1
    for axis, size in reversed(list(enumerate(shape))):
        shift = shift + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
        stride = stride * jnp.uint32(size)
    return jnp.broadcast_to(_mix(shift), shape)


def _mix(word: Any) -> Any:
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
