"""Storages for the float32 master of one narrower param.

A storage says what to store with one live param, and how to reconstruct its float32 master from
both. The master follows its param: if the stored master does not round to the param, the param was
set from outside, and its value is the new master. To add a storage, write its three functions, a
row of `STORAGES`, and its name in `master=` of `mixed_precision`; the rest of the optimizer does
not change.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Float32, UInt32

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.rounding import BFLOAT16, round_finite, widen_rounded
from jaxmp._numerics.split import merge_float32, split_float32
from jaxmp._numerics.stochastic import hashed_words, round_by_words, round_mantissa
from jaxmp._numerics.tree import widen

Wide = Float32[Array, "..."]  # the value of a master
Narrow = Float[Array, "..."]


class StoredParam(NamedTuple):
    """A live param, and what is stored with it."""

    param: Narrow
    master: Any


class MasterStorage(NamedTuple):
    """A way to store the float32 master of a param narrower than float32.

    Attributes:
      dtype: of the stored array, which no other storage has; `""` if nothing is stored.
      first: of the value of a first master and the dtype of the param: the param, and what is
        stored.
      load: of the param and the stored array: the master.
      store: of a new value, the dtype, the stored array, the index of the param among all params,
        and how many steps were taken (both for random words): the param, and what is stored.
    """

    dtype: str
    first: Callable[[Wide, DType], StoredParam]
    load: Callable[[Narrow, Any], Wide]
    store: Callable[[Wide, DType, Any, int, Any], StoredParam]


def _rounded_param(value: Wide, dtype: DType, stored: Any, *_: Any) -> StoredParam:
    return StoredParam(round_finite(value, dtype), stored)


def _copied_master(value: Wide, dtype: DType, *_: Any) -> StoredParam:
    return StoredParam(round_finite(value, dtype), value)


def _first_remainder(low_bits: int) -> Callable[[Wide, DType], StoredParam]:
    def first(value: Wide, dtype: DType) -> StoredParam:
        if dtype != jnp.bfloat16:
            raise TypeError(
                f"is {dtype}, and a remainder completes bfloat16 alone, which has the exponents of "
                "float32. Use master='float32' or 'kahan', or a policy with bfloat16 params"
            )
        return StoredParam(*split_float32(value, low_bits=low_bits))

    return first


def _merged(param: Narrow, stored: Any) -> Wide:
    # No bit shows that a param was set: every remainder rounds to the param, and one that was set
    # keeps the remainder of the old. The exceptions are zero and infinity, where it counts as set.
    master = merge_float32(param, stored)
    return jnp.where(same_bits(split_float32(master).high, param), master, widen(param))


def _split(value: Wide, *_: Any) -> StoredParam:
    return StoredParam(*split_float32(value))


def _split_at_random(value: Wide, dtype: DType, stored: Any, number: int, step: Any) -> StoredParam:
    # To nearest, updates below half of the last bit never add up.
    value = round_mantissa(value, 15, _words(value, number, step))
    return StoredParam(*split_float32(value, low_bits=8))


def _with_error(value: Wide, dtype: DType) -> StoredParam:
    param = round_finite(value, dtype)
    return StoredParam(param, value - widen_rounded(param))


def _first_error(value: Wide, dtype: DType) -> StoredParam:
    param, error = _with_error(value, dtype)
    return StoredParam(param, error.astype(jnp.bfloat16))


def _corrected(param: Narrow, stored: Any) -> Wide:
    value, error = widen(param), widen(stored)
    # Rounding makes no larger error: it belongs to another param, and this one was set.
    return jnp.where(jnp.abs(error) <= half_unit(param), value + error, value)


def _error_at_random(value: Wide, dtype: DType, stored: Any, number: int, step: Any) -> StoredParam:
    param, error = _with_error(value, dtype)
    # bfloat16 for float16 params too: their errors would often be too small for float16. At random:
    # to nearest, updates below half of its last bit never add up.
    return StoredParam(param, round_by_words(error, BFLOAT16, _words(value, number, step)))


def _rounded_at_random(value: Wide, dtype: DType, count: Any, number: int, _: Any) -> StoredParam:
    words = _words(value, number, count)
    return StoredParam(round_by_words(value, dtype, words), count + jnp.uint32(1))


def _words(value: Wide, number: int, step: Any) -> UInt32[Array, "..."]:
    # Params of one shape need other words, or all would round the same way.
    return hashed_words(value.shape, [jnp.uint32(number), step])


def _widened_param(param: Narrow, stored: Any) -> Wide:
    return widen(param)


STORAGES: dict[str, MasterStorage] = {
    # The master itself: 4 bytes, and 2 of the param.
    "float32": MasterStorage(
        "float32", _copied_master, lambda param, stored: follow(stored, param), _copied_master
    ),
    # The bits of the master that its bfloat16 param lacks. With 16 bits, training is the same to
    # the bit as with a float32 master whose param rounds ties away from zero.
    "remainder": MasterStorage("int16", _first_remainder(16), _merged, _split),
    # With 8 bits, the master has 24 bits in all, to which a step rounds it at random.
    "remainder8": MasterStorage("int8", _first_remainder(8), _merged, _split_at_random),
    # The param's rounding error, in bfloat16, to be added before the next update: Kahan, "Further
    # remarks on reducing truncation errors" (1965).
    "kahan": MasterStorage("bfloat16", _first_error, _corrected, _error_at_random),
    # The count of steps alone: updates too small for the param add up in the mean.
    "stochastic": MasterStorage(
        "uint32",
        lambda value, dtype: _rounded_param(value, dtype, jnp.uint32(0)),
        _widened_param,
        _rounded_at_random,
    ),
    # Nothing: updates smaller than half a unit in the param's last place are lost.
    "none": MasterStorage(
        "",
        lambda value, dtype: _rounded_param(value, dtype, optax.MaskedNode()),
        _widened_param,
        _rounded_param,
    ),
}
_BY_DTYPE = {storage.dtype: storage for storage in STORAGES.values()}


def storage_of(stored: Any) -> MasterStorage:
    return _BY_DTYPE["" if isinstance(stored, optax.MaskedNode) else stored.dtype.name]


def half_unit(param: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns half a unit in the last place: the largest error of rounding to a narrow float.

    >>> half_unit(jnp.bfloat16([1.0, 1.99, 2.0]))
    Array([0.00390625, 0.00390625, 0.0078125 ], dtype=float32)
    """
    info = jnp.finfo(param.dtype)
    # With its exponent bits alone, a float32 is the power of two at or below it. Subnormal numbers
    # have the unit of the smallest normal number.
    bits = jax.lax.bitcast_convert_type(widen(param), jnp.int32)
    power = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    return jnp.maximum(power, float(info.tiny)) * 2.0 ** -(info.nmant + 1)


def follow(
    master: Float32[Array, "*shape"], param: Float[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Returns the master where it rounds to the param, and the widened param elsewhere.

    >>> follow(jnp.float32([1.001, 1.001]), jnp.bfloat16([1.0, 7.0]))
    Array([1.001, 7.   ], dtype=float32)
    """
    # Users set params: pretrained weights, a clip after the step, an average, a restored file. An
    # update of the old master would silently undo that.
    return jnp.where(same_bits(round_finite(master, param.dtype), param), master, widen(param))


def same_bits(x: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether two narrow floats are the same number; the sign of zero is ignored."""
    # Integers are compared. Floats may be compared in float32, and GPU compilers delete the
    # rounding of a value that is widened again (openxla/xla issue 41605): each master would seem to
    # differ.
    info = jnp.finfo(x.dtype)
    a, b = (jax.lax.bitcast_convert_type(v, f"uint{info.bits}") for v in (x, y))
    if "fnuz" in info.dtype.name:  # these have no negative zero
        return a == b
    magnitude = jnp.asarray(2 ** (info.bits - 1) - 1, a.dtype)
    return (a == b) | (((a | b) & magnitude) == 0)
