"""What autocast knows about a float: where it comes from, and so which dtype it may have.

A low-precision program is not made by treating each operation on its own: a bias that is float32
would widen every activation after it, and a layer norm the whole residual stream. What decides is
where a value comes from.
"""

import enum
from collections.abc import Collection, Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp._dtypes import DType

FLOAT32 = jnp.dtype(jnp.float32)


class Kind(enum.Enum):
    """Where a float comes from. All but LOW are held in float32."""

    LITERAL = "a number that is written in the program, or an array of it"
    TABLE = "made of literals, integers and random bits only: positions, masks, noise"
    PARAM = "an argument of the function, or a part of it"
    SPREAD = "a parameter laid out along an activation: a bias, a scale"
    ROWS = "rows of a parameter: an embedding"
    FACTOR = "a statistic of activations, or of parameters: a mean, a norm"
    BRIEF = "an activation that is float32 for the moment, such as one being normalized"
    PLACED = "an activation with positions or noise added: float32 until it meets one without"
    LOW = "an activation in 16 bits"
    WIDE = "float32 that has to stay float32: exponentials, logarithms, updated parameters"


class Stored(enum.IntEnum):
    """What becomes of an activation in 16 bits that only float32 operations read.

    What a product gives is stored, and compilers scale, shift and mask it on the way. In float32
    it would be twice as large. The steps of a loss and of a norm are not stored.
    """

    EITHER = 0  # computed in float32: a square before a sum, a difference before an exponential
    SCALED = 1  # so too, unless it is added to another: the stream of a network stays in 16 bits
    AS_LOW = 2  # kept in 16 bits


class State(NamedTuple):
    """What is known about a value.

    Attributes:
      kind: where it comes from.
      dtype: the dtype that it has in the new program.
      value: the number, for a literal.
      projected: whether it is a product with a parameter: what is added to it is a bias.
      stored: what becomes of an activation in 16 bits that only float32 operations read.
    """

    kind: Kind
    dtype: DType
    value: float | None = None
    projected: bool = False
    stored: Stored = Stored.AS_LOW


ACTIVATIONS = frozenset({Kind.LOW, Kind.BRIEF, Kind.PLACED})
# What a gradient may be float32 for: their 16-bit copies are made for one product only.
SOURCES = frozenset({Kind.PARAM, Kind.SPREAD, Kind.ROWS})
_UNTOUCHED = (Kind.ROWS, Kind.FACTOR, Kind.SPREAD, Kind.PARAM, Kind.TABLE)


def combined(kinds: Collection[Kind], *, affine: bool) -> Kind:
    """The kind of what an operation makes of its operands: LOW means that it runs in 16 bits.

    >>> combined({Kind.LOW, Kind.SPREAD}, affine=True).name
    'LOW'
    >>> combined({Kind.LOW, Kind.FACTOR}, affine=True).name
    'BRIEF'
    """
    if Kind.WIDE in kinds:
        return Kind.WIDE
    if ACTIVATIONS & set(kinds):
        if Kind.PARAM in kinds:
            # w - learning_rate * gradient: 16 bits would lose the update.
            return Kind.WIDE
        if Kind.TABLE in kinds:
            return Kind.PLACED
        if Kind.FACTOR in kinds:
            return Kind.PLACED if Kind.PLACED in kinds else Kind.BRIEF
        if Kind.LOW in kinds:
            return Kind.LOW
        if Kind.PLACED in kinds:
            return Kind.PLACED
        return Kind.BRIEF if affine else Kind.LOW
    if Kind.ROWS in kinds and Kind.FACTOR in kinds:
        return Kind.BRIEF  # an embedding that was normalized is an activation
    for kind in _UNTOUCHED:
        if kind in kinds:
            return kind
    return Kind.TABLE


def in_float32(kinds: Collection[Kind]) -> Kind:
    """The kind of what an operation gives that runs in float32, whatever its operands are."""
    if not kinds or set(kinds) <= {Kind.LITERAL, Kind.TABLE}:
        return Kind.TABLE
    if {Kind.WIDE, Kind.ROWS} & set(kinds) or ACTIVATIONS & set(kinds):
        return Kind.WIDE
    return Kind.FACTOR


def summed(kinds: Collection[Kind]) -> Kind:
    """The kind of a sum."""
    if Kind.WIDE in kinds:
        return Kind.WIDE
    return Kind.TABLE if set(kinds) <= {Kind.LITERAL, Kind.TABLE} else Kind.FACTOR


def spread(kind: Kind) -> Kind:
    """The kind of a value that was laid out along new dimensions."""
    return Kind.SPREAD if kind is Kind.PARAM else kind


def joined(states: Iterable[State]) -> State:
    """What is known of a value that is one of several: of branches, of turns of a loop."""
    states = list(states)
    kinds = {state.kind for state in states}
    low = {state.dtype for state in states if state.kind is Kind.LOW}
    if len(kinds) == 1 and len({state.dtype for state in states}) == 1:
        first = states[0]
        values = {state.value for state in states}
        return first if len(values) == 1 else State(Kind.TABLE, first.dtype)
    if len(low) == 1 and not {Kind.WIDE, Kind.PARAM, Kind.FACTOR, Kind.TABLE} & kinds:
        return State(Kind.LOW, low.pop())
    kind = combined(kinds, affine=True)
    return State(Kind.BRIEF if kind is Kind.LOW else kind, FLOAT32)


def entering(state: State) -> State:
    """What a program knows of an argument: not how it was made, or each call had its own plan."""
    return State(state.kind, state.dtype, state.value)


def fits(value: float | None, dtype: DType) -> bool:
    """Whether a literal survives a cast: it becomes neither infinite nor zero, subnormal or one.

    >>> fits(1e-8, jnp.dtype(jnp.float16)), fits(-1e30, jnp.dtype(jnp.bfloat16))
    (False, True)
    """
    if value is None or value == 0 or not np.isfinite(value):
        return True
    if abs(value) < float(jnp.finfo(dtype).tiny) or overflows(value, dtype):
        return False
    # 1 - 1e-6 is a bound that keeps a logarithm finite, and 0.9999 a decay: neither is 1.
    return abs(value) == 1 or abs(float(np.asarray(value).astype(dtype))) != 1


def overflows(value: float | None, dtype: DType) -> bool:
    """Whether a finite literal becomes infinite by a cast.

    >>> overflows(-1e9, jnp.dtype(jnp.float16)), overflows(-1e9, jnp.dtype(jnp.bfloat16))
    (True, False)
    """
    if value is None or not np.isfinite(value):
        return False
    with np.errstate(over="ignore"):
        return not np.isfinite(np.asarray(value).astype(dtype))
