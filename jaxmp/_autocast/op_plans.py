"""How one operation runs."""

import dataclasses
import enum
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax.extend import core

from jaxmp._autocast.strengths import (
    FLOAT32,
    Extent,
    State,
    Strength,
    float32_state,
    is_weight,
    number_state,
)
from jaxmp._numerics.dtypes import DType, is_half_or_float32, is_inexact
from jaxmp._policies.recipe import Recipe
from jaxmp._program.op_classes import CONTRACTIONS, KERNELS
from jaxmp._program.program import Op

States = Sequence[State | None]


class Reading(enum.IntEnum):
    """How operations read a value. Of several readings, the least decides."""

    LOW = 0  # in 16 bits
    NORMED = 1  # in float32: a norm, a softmax or an activation
    FLOAT32 = 2  # in float32
    EITHER = 3  # in any dtype


AllIn = tuple[Reading, ...]  # how results are read; those that are left out, in 16 bits


@dataclasses.dataclass
class OpPlan:
    """The plan of one operation.

    Attributes:
      op: the operation.
      in_dtypes: the dtype in which it reads each input; None leaves it.
      results: the states of its results; None for values that autocast does not cast.
      params: the changed params of its equation.
      may_widen: whether it may give float32, if no operation reads it in 16 bits.
      reads: for an operation with programs inside, how these read its operands.
      replan: plans such an operation anew, for how its results are read (`AllIn`), and for other
        states of its operands.
      run: runs it instead of its own primitive, on the values that it reads.
      sources: for a product of operands that are cast to 16 bits, which of these are roundings of
        a float32 source.
      broadcasts: which inputs are broadcast to the shape of the result before they are cast, so
        that their gradients are added up in float32.
      float8: for a product in float8, the recipe and which operand is the weight.
      not_float8: why a product with a weight, or the products inside, are left out of float8.
      plan_key: with `run`, what decides how it runs besides all this, such as the plans
        of the programs inside; None for what nothing else is like.
    """

    op: Op
    in_dtypes: list[DType | None]
    results: list[State | None]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    may_widen: bool = False
    reads: Sequence[Reading] = ()
    replan: "Callable[..., OpPlan] | None" = None
    run: Callable[[list[Any]], list[Any]] | None = None
    sources: tuple[bool, ...] = ()
    broadcasts: tuple[bool, ...] = ()
    float8: tuple[Recipe, int] | None = None
    not_float8: str | None = None
    plan_key: Hashable = None

    @property
    def is_cast(self) -> bool:
        """Whether it is a cast that the program makes: its operand, once cast, is its result."""
        return self.run is list

    @property
    def keeps_dtype(self) -> bool:
        """Whether it is a cast that the program makes, and that leaves the dtype of autocast."""
        return self.is_cast and None in self.in_dtypes

    @property
    def is_low_product(self) -> bool:
        """Whether it is a product of operands that are cast to 16 bits."""
        return bool(self.sources)

    def widen(self) -> None:
        """Gives float32: a product its sums as they come, others of float32 operands."""
        if self.is_low_product:
            self.params["preferred_element_type"] = FLOAT32
        else:
            self.in_dtypes = [dtype and FLOAT32 for dtype in self.in_dtypes]
        self.results = [state and State(Strength.HIGH, FLOAT32) for state in self.results]


def argument_state(aval: Any) -> State | None:
    """Returns the state of an argument."""
    if not is_half_or_float32(aval):
        return None
    return State(Strength.WEAK if aval.dtype == FLOAT32 else Strength.LOW, aval.dtype)


def literal_state(atom: core.Literal) -> State | None:
    """Returns the state of a literal."""
    aval: Any = atom.aval
    if not is_half_or_float32(aval):
        return None
    value = None if aval.shape else float(atom.val)
    return number_state(value)._replace(broadcast=Extent(not aval.shape))


def has_foreign_floats(op: Op) -> bool:
    """Whether an operation has floats that autocast leaves alone: float64, complex, float8."""
    avals = (*op.in_avals, *op.out_avals)
    return any(is_inexact(aval) and not is_half_or_float32(aval) for aval in avals)


def float_states(states: States) -> list[State]:
    return [state for state in states if state is not None]


def uniform_plan(op: Op, states: States, result: State, *, may_widen: bool = False) -> OpPlan:
    """Plans an operation whose floats, operands and results, all have the dtype of `result`."""
    in_dtypes = [None if state is None else result.dtype for state in states]
    results = [result if is_half_or_float32(aval) else None for aval in op.out_avals]
    return OpPlan(op, in_dtypes, results, may_widen=may_widen)


def state_dtypes(states: States) -> list[DType | None]:
    """Returns the present dtypes of values, as `in_dtypes` of a plan."""
    return [state and state.dtype for state in states]


def plan_as_traced(op: Op, states: States, exact: Strength = Strength.HIGH) -> OpPlan:
    """Plans an operation as it was traced; results are `exact`, and of weak values weak or firm."""
    result = float32_state(float_states(states))
    # The result of a kernel is not an argument. If it were WEAK, a sum with it would be an update,
    # and the stream after a first kernel would be float32.
    multiplies = op.name in CONTRACTIONS | KERNELS and not result.input_independent
    if (
        multiplies
        or exact is Strength.FIRM
        or has_foreign_floats(op)
        or op.name.endswith("_callback")
    ):
        result = State(exact, FLOAT32)
    pairs = zip(states, op.in_avals, strict=True)
    in_dtypes = [None if state is None else aval.dtype for state, aval in pairs]
    results = (argument_state(aval) for aval in op.out_avals)
    return OpPlan(op, in_dtypes, [result if x and x.dtype == FLOAT32 else x for x in results])


def adds_gradients(op_plan: OpPlan) -> list[int]:
    """Returns the operands that are read in float32, and whose gradients the transpose sums.

    These are operands of products, rows that are looked up, parts of a weight, and what is laid
    out.
    """
    op = op_plan.op
    is_part = any(x and x.strength is Strength.FIRM and is_weight(x) for x in op_plan.results)
    largest = max((math.prod(getattr(aval, "shape", ())) for aval in op.out_avals), default=0)
    is_lookup = op.name == "gather" and not op.params["dimension_numbers"].operand_batching_dims
    adds_all = (
        is_part
        or op.name in CONTRACTIONS
        or (is_lookup and any(size > 1 for size in op.params["slice_sizes"]))
    )
    return [
        atom
        for atom, aval, dtype in zip(op.inputs, op.in_avals, op_plan.in_dtypes, strict=True)
        if isinstance(atom, int)
        and dtype == FLOAT32
        and (adds_all or math.prod(aval.shape) < largest)
    ]
