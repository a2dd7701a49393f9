"""How one operation is to run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jaxmp._autocast._kinds import FLOAT32, Kind, State, in_float32, literal_state
from jaxmp._dtypes import DType
from jaxmp._op_lists import CONTRACTIONS, KERNELS
from jaxmp._program import Op

States = Sequence[State | None]
HALVES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclasses.dataclass
class Step:
    """How one operation is to run.

    Attributes:
      op: the operation.
      wants: the dtype that it takes each input in; None as it is.
      results: what is known of its results; None of those that are no floats of ours.
      params: what changes in the params of its equation.
      may_widen: whether it could run in float32 as well, to feed what does.
      widened: plans an operation with programs inside of it anew, whose results only float32
        operations read.
      run: what runs it, in place of its own primitive; `run(op, values)`.
      sources: for a product, which operands are roundings of a float32 source.
      lays_out: which numbers are laid out in the shape of the result before they are cast, so that
        their gradients are added up in float32.
    """

    op: Op
    wants: list[DType | None]
    results: list[State | None]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    may_widen: bool = False
    widened: "Callable[[], Step] | None" = None
    run: Callable[..., list[Any]] | None = None
    sources: tuple[bool, ...] = ()
    lays_out: tuple[bool, ...] = ()


def is_ours(aval: Any) -> bool:
    """Whether autocast decides about the dtype of a value: float32 and 16-bit floats."""
    dtype = getattr(aval, "dtype", None)
    return dtype == FLOAT32 or dtype in HALVES


def initial(aval: Any) -> State | None:
    """What is known of an argument."""
    if not is_ours(aval):
        return None
    return State(Kind.WEAK if aval.dtype == FLOAT32 else Kind.LOW, aval.dtype)


def literal(atom: core.Literal) -> State | None:
    """What is known of a literal."""
    aval: Any = atom.aval
    if not is_ours(aval):
        return None
    value = None if aval.shape else float(atom.val)
    return literal_state(value)._replace(laid=not aval.shape)


def is_foreign(op: Op) -> bool:
    """Whether floats take part that autocast leaves alone: float64, complex, float8."""
    return any(
        not is_ours(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)
        for aval in (*op.in_avals, *op.out_avals)
        if hasattr(aval, "dtype")
    )


def known(states: States) -> list[State]:
    """Those of floats."""
    return [state for state in states if state is not None]


def results(op: Op, state: State) -> list[State | None]:
    """The same state for every float that an operation makes."""
    return [state if is_ours(aval) else None for aval in op.out_avals]


def wanting(states: States, dtype: DType) -> list[DType | None]:
    return [None if state is None else dtype for state in states]


def alone(op: Op, states: States, exact: Kind = Kind.HIGH) -> Step:
    """An operation that runs as it was traced; what it makes of touched values is `exact`."""
    wide = in_float32(known(states))
    multiplies = op.name in CONTRACTIONS | KERNELS and not wide.fixed
    if multiplies or exact is Kind.FIRM or is_foreign(op) or op.name.endswith("_callback"):
        wide = State(exact, FLOAT32)
    wants = [
        None if state is None else aval.dtype
        for state, aval in zip(states, op.in_avals, strict=True)
    ]
    made = [
        (wide if aval.dtype == FLOAT32 else State(Kind.LOW, aval.dtype)) if is_ours(aval) else None
        for aval in op.out_avals
    ]
    return Step(op, wants, made)
