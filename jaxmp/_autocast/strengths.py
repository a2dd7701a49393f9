"""The strengths of floats, which decide their dtypes.

Autocast cannot decide each operation on its own: a float32 bias would widen every activation after
it, and a layer norm the whole residual stream. The origin of a value decides. docs/autocast.md
begins with these rules, in words and a picture.
"""

import enum
from collections.abc import Collection
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp._numerics.dtypes import DType

FLOAT32 = jnp.dtype(jnp.float32)


class Strength(enum.IntEnum):
    """The origin of a float. All but LOW are float32."""

    WEAK = 0  # arguments, literals, and values made of these alone without products
    LOW = 1  # results of products, and values computed from them; float32 if a statistic lifts them
    HIGH = 2  # exponentials, logarithms, sums; with a 16-bit value of its shape it becomes 16-bit
    FIRM = 3  # updated arguments, loop carries, exact parts; widens every value that it meets


class Materialized(enum.Enum):
    """Whether compilers write an activation to memory, where float32 takes twice the bytes."""

    NO = "computed inside the kernel that reads it"
    YES = "the result of a product with a weight, with its bias, or the sum of a stream"
    SCORES = "the result of a product of activations, also if it is scaled or masked"


class Extent(enum.IntEnum):
    """Whether a value counts as smaller than the values that it meets, and why."""

    WHOLE = 0
    LAID_OUT = 1  # to meet them: a bias, a statistic
    LOOKED_UP = 2  # in a table: the rows of an embedding, which layers are added to


class State(NamedTuple):
    """The facts that are known about a value.

    Attributes:
      strength: its origin.
      dtype: its dtype in the new program.
      value: the number, for a literal.
      broadcast: whether it counts as smaller than the values that it meets, and why.
      input_independent: whether it depends on no float argument: positions, masks, noise.
      loop_carried: whether it is firm because a loop carries it, and so is not a weight.
      materialized: whether compilers write it to memory, if it has 16 bits.
      summed: of float32, whether it may be a sum over devices, up to what rounds alike; of 16 bits,
        whether its gradient may be one.
    """

    strength: Strength
    dtype: DType
    value: float | None = None
    broadcast: Extent = Extent.WHOLE
    input_independent: bool = False
    loop_carried: bool = False
    materialized: Materialized = Materialized.NO
    summed: bool = False

    def whole(self) -> "State":
        """Returns the state of the value as one that is no smaller than others."""
        return self._replace(broadcast=Extent.WHOLE)


def is_weight(state: State) -> bool:
    """Whether products may return its gradient in float32: params, and merges of them."""
    return state.strength in (Strength.WEAK, Strength.FIRM) and not state.loop_carried


def number_state(value: float | None) -> State:
    """Returns the state of a number in the program, or of an array filled with it."""
    return State(Strength.WEAK, FLOAT32, value, input_independent=True)


def combined_state(
    states: Collection[State],
    low: DType,
    *,
    adds: bool = False,
    chooses: bool = False,
    scales: bool = False,
) -> State:
    """Returns the state of an elementwise operation's result, in whose dtype it runs.

    Args:
      states: the states of the operands. One with a smaller shape than the result is laid out.
      low: the 16-bit dtype.
      adds: whether it adds or subtracts.
      chooses: whether it selects one operand or the other.
      scales: whether it adds, subtracts, multiplies or divides, as a norm does.

    >>> low, weak = State(Strength.LOW, jnp.dtype("bfloat16")), State(Strength.WEAK, FLOAT32)
    >>> combined_state([low, weak], low.dtype).strength.name
    'LOW'
    >>> combined_state([low, weak], low.dtype, adds=True).strength.name
    'FIRM'
    >>> bias = weak._replace(broadcast=Extent.LAID_OUT)
    >>> combined_state([low, bias], low.dtype, adds=True).strength.name
    'LOW'
    """
    strengths = {state.strength for state in states}
    # Masks, noise and numbers say nothing about the size of the other operands.
    arrays = [state for state in states if not state.input_independent] or states
    is_smaller = all(state.broadcast for state in arrays)
    broadcast = max(state.broadcast for state in arrays) if is_smaller else Extent.WHOLE
    if strengths <= {Strength.WEAK}:
        independent = all(state.input_independent for state in states)
        return State(Strength.WEAK, FLOAT32, broadcast=broadcast, input_independent=independent)
    if Strength.FIRM in strengths:
        return State(
            Strength.FIRM, FLOAT32, loop_carried=any(state.loop_carried for state in states)
        )
    full_size = {state.strength for state in arrays if broadcast or not state.broadcast}
    weak = [state for state in states if state.strength is Strength.WEAK and not state.broadcast]
    if (adds and weak) or (chooses and any(not state.input_independent for state in weak)):
        return State(Strength.FIRM, FLOAT32)  # w - rate * gradient: 16 bits would lose the update
    if not broadcast and Strength.WEAK in full_size and Strength.LOW not in full_size:
        return State(Strength.FIRM, FLOAT32)  # w / sigma with sigma from a product, x * exp(s)
    if Strength.LOW not in full_size:
        return State(Strength.HIGH, FLOAT32, broadcast=broadcast)
    if any(state.strength is Strength.HIGH and state.broadcast for state in states):
        return State(Strength.LOW, FLOAT32)  # a statistic lifts the value that it scales
    # A norm stays lifted from its first to its last operation. Then `relu(norm(h))` is 16 bits, as
    # in models that cast by hand. float16 with bfloat16 gives float32, as in JAX.
    narrow = {state.dtype for state in states if state.strength is Strength.LOW} - {FLOAT32}
    is_stream = adds and any(state.broadcast is Extent.LOOKED_UP for state in states)
    if len(narrow) > 1 or (not narrow and scales and not is_stream):
        return State(Strength.LOW, FLOAT32)
    return State(Strength.LOW, narrow.pop() if narrow else low)


def float32_state(states: Collection[State]) -> State:
    """Returns the state of the result of a float32 operation, such as an exponential or a sum."""
    if all(state.strength is Strength.WEAK for state in states):
        independent = all(state.input_independent for state in states)
        return State(Strength.WEAK, FLOAT32, input_independent=independent)
    return State(Strength.HIGH, FLOAT32)


def joined_state(states: Collection[State], low: DType) -> State:
    """Returns the state of a value that is one of several, as the result of branches."""
    inner = [entry_state(state)._replace(summed=False) for state in states]
    joined = inner[0] if len(set(inner)) == 1 else combined_state(inner, low, chooses=True)
    # A branch may return a number that 16 bits lose, such as -1e9 in float16.
    loses = joined.strength is Strength.LOW and not all(
        fits(state.value, joined.dtype) for state in states
    )
    return State(Strength.FIRM, FLOAT32) if loses else joined


def entry_state(state: State) -> State:
    """Returns the state for an inner program."""
    # Without the number, calls with other numbers share a plan, and are compiled once.
    return state._replace(value=None, materialized=Materialized.NO)


def fits(value: float | None, dtype: DType) -> bool:
    """Whether a literal survives a cast: it becomes neither infinite nor zero, subnormal or one.

    >>> fits(1e-8, jnp.dtype(jnp.float16)), fits(-1e30, jnp.dtype(jnp.bfloat16))
    (False, True)
    """
    if value is None or value == 0 or not np.isfinite(value):
        return True
    if abs(value) < float(jnp.finfo(dtype).tiny) or overflows(value, dtype):
        return False
    # 1 - 1e-6 is a bound that keeps a logarithm finite, 0.9999 a decay: neither may become 1.
    return abs(value) == 1 or abs(float(np.asarray(value).astype(dtype))) != 1


def overflows(value: float | None, dtype: DType) -> bool:
    """Whether a cast makes a finite literal infinite.

    >>> overflows(-1e9, jnp.dtype(jnp.float16)), overflows(-1e9, jnp.dtype(jnp.bfloat16))
    (True, False)
    """
    if value is None or not np.isfinite(value):
        return False
    with np.errstate(over="ignore"):
        return not np.isfinite(np.asarray(value).astype(dtype))
