"""Storages for the float32 master of one narrower param.

A storage says what to store with one live param, and how to reconstruct its float32 master from
both. The master follows its param: if the stored master does not round to the param, the param was
set from outside, and its value is the new master. To add a storage, write a class with these
methods, an entry in `STORAGES`, one in `_BY_DTYPE` (its arrays need a dtype that no other storage
has), and its name in `master=` of `mixed_precision`; the rest of the optimizer does not change.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


class StoredParam(NamedTuple):
    """A live param, and what is stored with it."""

    param: Float[Array, "..."]
    master: Any


@runtime_checkable
class MasterStorage(Protocol):
    """A way to store the float32 master of a param narrower than float32.

    It stores an array in a dtype that no other storage uses, by which `storage_of` finds it, or
    nothing (`NoMaster`).
    """

    def first(self, value: Float32[Array, "..."], dtype: DType) -> StoredParam:
        """Returns a param of this dtype and what is stored, for a first master `value`."""
        ...

    def load(self, param: Float[Array, "..."], stored: Any) -> Float32[Array, "..."]:
        """Returns the master."""
        ...

    def store(self, value: Wide, dtype: DType, stored: Any, number: int, step: Any) -> StoredParam:
        """Returns the param and the stored array for a new master.

        Args:
          value: the new master.
          dtype: the dtype of the param.
          stored: the array that was stored before.
          number: the index of the param among all params.
          step: how many steps were taken, for random words.
        """
        ...


class NoMaster:
    """A storage of nothing: loses updates smaller than half a unit in the param's last place."""

    def first(self, value: Float32[Array, "..."], dtype: DType) -> StoredParam:
        """Returns the rounded value."""
        return StoredParam(round_finite(value, dtype), optax.MaskedNode())

    def load(self, param: Float[Array, "..."], stored: Any) -> Float32[Array, "..."]:
        """Returns the widened param."""
        return widen(param)

    def store(self, value: Wide, dtype: DType, stored: Any, number: int, step: Any) -> StoredParam:
        """Returns the rounded value."""
        return StoredParam(round_finite(value, dtype), stored)


class Float32Copy:
    """A storage of the master itself: 4 bytes, and 2 of the param."""

    def first(self, value: Float32[Array, "..."], dtype: DType) -> StoredParam:
        """Returns the rounded value, and the value."""
        return StoredParam(round_finite(value, dtype), value)

    def load(self, param: Float[Array, "..."], stored: Any) -> Float32[Array, "..."]:
        """Returns the copy where it rounds to the param, the widened param elsewhere."""
        return follow(stored, param)

    def store(self, value: Wide, dtype: DType, stored: Any, number: int, step: Any) -> StoredParam:
        """Returns the rounded value, and the value."""
        return StoredParam(round_finite(value, dtype), value)


@dataclasses.dataclass(frozen=True)
class Remainders:
    """A storage of the bits of the master that its bfloat16 param lacks.

    With 16 bits, training is the same to the bit as with a float32 master whose param rounds ties
    away from zero. With 8 bits, the master has 24 bits in all, to which a step rounds it at random.

    Args:
      low_bits: 16 or 8.
    """

    low_bits: int

    def first(self, value: Float32[Array, "..."], dtype: DType) -> StoredParam:
        """Splits the value."""
        if dtype != jnp.bfloat16:
            raise TypeError(
                f"is {dtype}, and a remainder completes bfloat16 alone, which has the exponents of "
                "float32. Use master='float32' or 'kahan', or a policy with bfloat16 params"
            )
        return self._split(value)

    def load(self, param: Float[Array, "..."], stored: Any) -> Float32[Array, "..."]:
        """Merges both. A param set from outside keeps the remainder of the old param."""
        # No bit shows that a param was set: every remainder rounds to the param. The exceptions are
        # zero and infinity, where the param counts as set.
        master = merge_float32(param, stored)
        return jnp.where(same_bits(split_float32(master).high, param), master, widen(param))

    def store(self, value: Wide, dtype: DType, stored: Any, number: int, step: Any) -> StoredParam:
        """Splits the value; to 24 bits, rounded at random."""
        if self.low_bits == 8:  # to nearest, updates below half of the last bit never add up
            value = round_mantissa(value, 15, _words(value, number, step))
        return self._split(value)

    def _split(self, value: Float32[Array, "..."]) -> StoredParam:
        return StoredParam(*split_float32(value, low_bits=self.low_bits))


class KahanSum:
    """A storage of the param's rounding error, in bfloat16, to be added before the next update.

    A step rounds the error at random: to nearest, updates below half of its last bit never add up.

    Source: Kahan, "Further remarks on reducing truncation errors" (1965).
    """

    def first(self, value: Float32[Array, "..."], dtype: DType) -> StoredParam:
        """Returns the rounded value, and its rounding error."""
        param, error = self._split(value, dtype)
        return StoredParam(param, error.astype(jnp.bfloat16))

    def load(self, param: Float[Array, "..."], stored: Any) -> Float32[Array, "..."]:
        """Adds the error to the param, unless rounding cannot have made such an error."""
        value, error = widen(param), widen(stored)
        # A larger error belongs to another param: this one was set from outside.
        return jnp.where(jnp.abs(error) <= half_unit(param), value + error, value)

    def store(self, value: Wide, dtype: DType, stored: Any, number: int, step: Any) -> StoredParam:
        """Returns the rounded value, and its rounding error, rounded at random."""
        param, error = self._split(value, dtype)
        # bfloat16 for float16 params too: their errors would often be too small for float16.
        return StoredParam(param, round_by_words(error, BFLOAT16, _words(value, number, step)))

    def _split(self, value: Float32[Array, "..."], dtype: DType) -> StoredParam:
        param = round_finite(value, dtype)
        return StoredParam(param, value - widen_rounded(param))


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


class StochasticRounding:
    """A storage of the step count alone: updates too small for the param add up in the mean."""

    def first(self, value: Float32[Array, "..."], dtype: DType) -> StoredParam:
        """Returns the value rounded to nearest, and zero."""
        return StoredParam(round_finite(value, dtype), jnp.uint32(0))

    def load(self, param: Float[Array, "..."], stored: Any) -> Float32[Array, "..."]:
        """Returns the widened param."""
        return widen(param)

    def store(self, value: Wide, dtype: DType, stored: Any, number: int, step: Any) -> StoredParam:
        """Rounds the value up or down by random words of this param and step."""
        words = _words(value, number, stored)
        return StoredParam(round_by_words(value, dtype, words), stored + jnp.uint32(1))


def _words(value: Float32[Array, "..."], number: int, step: Any) -> UInt32[Array, "..."]:
    # Params of one shape need other words, or all would round the same way.
    return hashed_words(value.shape, [jnp.uint32(number), step])


STORAGES: dict[str, MasterStorage] = {
    "float32": Float32Copy(),
    "remainder": Remainders(16),
    "remainder8": Remainders(8),
    "kahan": KahanSum(),
    "stochastic": StochasticRounding(),
    "none": NoMaster(),
}
_BY_DTYPE = {
    "float32": "float32",
    "int16": "remainder",
    "int8": "remainder8",
    "bfloat16": "kahan",
    "uint32": "stochastic",
}


def storage_of(stored: Any) -> MasterStorage:
    if isinstance(stored, optax.MaskedNode):
        return STORAGES["none"]
    return STORAGES[_BY_DTYPE[stored.dtype.name]]


def follow(
    master: Float32[Array, "*shape"], param: Float[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Returns the master where it rounds to the param, and the widened param elsewhere.

    Args:
      master: the float32 master.
      param: the live param, of fewer bits.

    Returns:
      The master for the next update, bit for bit the old one where no param was set.

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
