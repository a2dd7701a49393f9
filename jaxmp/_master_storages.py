"""How the float32 master of one param of fewer bits is kept.

A storage says what is kept beside one live param, and how to have its float32 master from both.
The master follows its param: where the master that is kept would not round to the param, the param
was set from outside, and its value is the master from now on. Another storage is another class
with these methods, and an entry in `STORAGES`; the rest of the optimizer does not change.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Float32

from jaxmp._dtypes import DType
from jaxmp._rounding import round_finite, widen_rounded
from jaxmp._split import merge_float32, split_float32
from jaxmp._stochastic import hashed_words, round_by_words
from jaxmp._tree import widen


class Stored(NamedTuple):
    """A live param, and what is kept beside it."""

    param: Float[Array, "..."]
    master: Any


@runtime_checkable
class MasterStorage(Protocol):
    """A way to keep the float32 master of a param narrower than float32.

    What is kept is an array, whose dtype no other storage has.
    """

    def first(self, value: Float32[Array, "..."], dtype: DType) -> Stored:
        """The param of this dtype and what is kept, for a master that starts as `value`."""
        ...

    def load(self, param: Float[Array, "..."], kept: Any) -> Float32[Array, "..."]:
        """The master."""
        ...

    def store(self, value: Float32[Array, "..."], dtype: DType, kept: Any, number: int) -> Stored:
        """The param and what is kept for a new master.

        Args:
          value: the new master.
          dtype: that of the param.
          kept: what was kept before.
          number: that of the param, among all.
        """
        ...


class NoMaster:
    """Keeps nothing: updates smaller than half a unit in the param's last place are lost."""

    def first(self, value: Float32[Array, "..."], dtype: DType) -> Stored:
        """The rounded value."""
        return Stored(round_finite(value, dtype), optax.MaskedNode())

    def load(self, param: Float[Array, "..."], kept: Any) -> Float32[Array, "..."]:
        """The widened param."""
        return widen(param)

    def store(self, value: Float32[Array, "..."], dtype: DType, kept: Any, number: int) -> Stored:
        """The rounded value."""
        return Stored(round_finite(value, dtype), kept)


class Float32Copy:
    """Keeps the master itself: 4 bytes beside the 2 of the param."""

    def first(self, value: Float32[Array, "..."], dtype: DType) -> Stored:
        """The rounded value, and the value."""
        return Stored(round_finite(value, dtype), value)

    def load(self, param: Float[Array, "..."], kept: Any) -> Float32[Array, "..."]:
        """The copy where it rounds to the param, the widened param elsewhere."""
        return follow(kept, param)

    def store(self, value: Float32[Array, "..."], dtype: DType, kept: Any, number: int) -> Stored:
        """The rounded value, and the value."""
        return Stored(round_finite(value, dtype), value)


@dataclasses.dataclass(frozen=True)
class Remainders:
    """Keeps the bits of the master that its bfloat16 param does not have.

    With 16 bits training is the same to the bit as with a float32 master whose param is rounded
    in this way, ties away from zero. With 8 bits the master has 24 in all.

    Args:
      low_bits: 16 or 8.
    """

    low_bits: int

    def first(self, value: Float32[Array, "..."], dtype: DType) -> Stored:
        """The value, split."""
        if dtype != jnp.bfloat16:
            raise TypeError(
                f"is {dtype}, and a remainder completes bfloat16 alone, which has the exponents of "
                "float32. Use master='float32' or 'kahan', or a policy with bfloat16 params"
            )
        return self._split(value)

    def load(self, param: Float[Array, "..."], kept: Any) -> Float32[Array, "..."]:
        """The two, merged. A param set from outside keeps the remainder of the one before it.

        There is no bit in which to see that it was set: every remainder rounds to the param, but
        at zero and infinity, where it counts as set.
        """
        master = merge_float32(param, kept)
        return jnp.where(same_bits(split_float32(master).high, param), master, widen(param))

    def store(self, value: Float32[Array, "..."], dtype: DType, kept: Any, number: int) -> Stored:
        """The value, split."""
        return self._split(value)

    def _split(self, value: Float32[Array, "..."]) -> Stored:
        return Stored(*split_float32(value, low_bits=self.low_bits))


class KahanSum:
    """Keeps what rounding took from the param, in bfloat16, and adds it before the next update.

    Source: Kahan, "Further remarks on reducing truncation errors" (1965).
    """

    def first(self, value: Float32[Array, "..."], dtype: DType) -> Stored:
        """The rounded value, and the error of that."""
        param = round_finite(value, dtype)
        # bfloat16 for float16 params too, whose own errors would often be too small for a float16.
        return Stored(param, (value - widen_rounded(param)).astype(jnp.bfloat16))

    def load(self, param: Float[Array, "..."], kept: Any) -> Float32[Array, "..."]:
        """Param and error; the param alone if rounding cannot have made such an error."""
        value, error = widen(param), widen(kept)
        return jnp.where(jnp.abs(error) <= half_unit(param), value + error, value)

    def store(self, value: Float32[Array, "..."], dtype: DType, kept: Any, number: int) -> Stored:
        """The rounded value, and the error of that."""
        return self.first(value, dtype)


def half_unit(param: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Half a unit in the last place: the largest error of rounding to a narrow float.

    >>> half_unit(jnp.bfloat16([1.0, 1.99, 2.0]))
    Array([0.00390625, 0.00390625, 0.0078125 ], dtype=float32)
    """
    info = jnp.finfo(param.dtype)
    bits = jax.lax.bitcast_convert_type(widen(param), jnp.int32)
    power = jax.lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    return jnp.maximum(power, float(info.tiny)) * 2.0 ** -(info.nmant + 1)


class StochasticRounding:
    """Keeps the number of steps alone: updates too small for the param add up in the mean."""

    def first(self, value: Float32[Array, "..."], dtype: DType) -> Stored:
        """The value rounded to nearest, and zero."""
        return Stored(round_finite(value, dtype), jnp.uint32(0))

    def load(self, param: Float[Array, "..."], kept: Any) -> Float32[Array, "..."]:
        """The widened param."""
        return widen(param)

    def store(self, value: Float32[Array, "..."], dtype: DType, kept: Any, number: int) -> Stored:
        """The value, rounded up or down by random words of this param and step."""
        words = hashed_words(value.shape, [jnp.uint32(number), kept])
        return Stored(round_by_words(value, dtype, words), kept + jnp.uint32(1))


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


def storage_of(kept: Any) -> MasterStorage:
    """The storage that keeps this beside a param."""
    if isinstance(kept, optax.MaskedNode):
        return STORAGES["none"]
    return STORAGES[_BY_DTYPE[kept.dtype.name]]


def follow(
    master: Float32[Array, "*shape"], param: Float[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """The master where it rounds to the param, and the widened param where it does not.

    People set params: pretrained weights, a clip after the step, an average, a restored file. An
    update made from the old master would undo that without a word.

    Args:
      master: the float32 master.
      param: the live param, of fewer bits.

    Returns:
      The master from which the next update is made. Bit for bit the old one where nothing was set.

    >>> follow(jnp.float32([1.001, 1.001]), jnp.bfloat16([1.0, 7.0]))
    Array([1.001, 7.   ], dtype=float32)
    """
    return jnp.where(same_bits(round_finite(master, param.dtype), param), master, widen(param))


def same_bits(x: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether two narrow floats are the same number; zero is, whatever its sign.

    As integers: floats may be compared in float32, and compilers for GPUs delete the rounding of a
    value that is widened again (openxla/xla issue 41605). Each master would seem to differ.
    """
    info = jnp.finfo(x.dtype)
    a, b = (jax.lax.bitcast_convert_type(v, f"uint{info.bits}") for v in (x, y))
    if "fnuz" in info.dtype.name:  # these have no negative zero
        return a == b
    magnitude = jnp.asarray(2 ** (info.bits - 1) - 1, a.dtype)
    return (a == b) | (((a | b) & magnitude) == 0)
