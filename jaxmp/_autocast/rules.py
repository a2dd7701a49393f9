"""The rules: what each class of operations does with operands of each kind."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._autocast.kinds import (
    FLOAT32,
    Kind,
    State,
    Stored,
    combined,
    fits,
    in_float32,
    is_weight,
    literal_state,
    overflows,
)
from jaxmp._autocast.regions import Region
from jaxmp._autocast.steps import (
    States,
    Step,
    alone,
    in_dtypes,
    known,
    literal,
    results,
    wanting,
)
from jaxmp._numerics.dtypes import HALVES, DType, is_half_or_float32
from jaxmp._numerics.precision import as_param, is_own
from jaxmp._primitives.float8_dot import why_not_float8
from jaxmp._primitives.float32_sums import gather
from jaxmp._program import compat
from jaxmp._program.op_classes import (
    ACCUMULATES,
    ADDS,
    ARITHMETIC,
    ARRANGEMENTS,
    CLASSES,
    CONTRACTIONS,
    MASKS,
    REPEATS,
    RESHAPES,
    SCALES,
    WIDENED,
    WITHOUT_ALGORITHMS,
    OpClass,
)
from jaxmp._program.program import Op


def convert(op: Op, states: States) -> Step:
    """Plans a cast that the program itself makes; autocast respects it."""
    (state,), (aval,), target = states, op.in_avals, op.params["new_dtype"]
    if state is None or not is_half_or_float32(op.out_avals[0]):
        step = alone(op, states)
        if target == FLOAT32:
            step.results = [_of_numbers(op.inputs[0], aval)]
        return step
    if target != FLOAT32:
        return Step(op, [target], [State(Kind.LOW, jnp.dtype(target))], run=list)
    # The program asks for float32, perhaps to add steps that are too small for 16 bits.
    if aval.dtype != FLOAT32 and state.kind is Kind.LOW:
        return Step(op, [FLOAT32], [State(Kind.FIRM, FLOAT32)], run=list)
    return Step(op, [None], [state], run=list)


def _of_numbers(atom: int | core.Literal, aval: Any) -> State:
    """Returns the state of integers, booleans or foreign floats after a cast to float32."""
    if not (aval.dtype == jnp.bool_ or jnp.issubdtype(aval.dtype, jnp.integer)):
        return State(Kind.HIGH, FLOAT32)
    if isinstance(atom, core.Literal) and not aval.shape:
        return literal_state(float(atom.val))._replace(smaller=True)  # jnp.where(mask, h, 0)
    return State(Kind.WEAK, FLOAT32, fixed=True)


def _float32(op: Op, states: States, region: Region) -> Step:
    return Step(op, wanting(states, FLOAT32), results(op, in_float32(known(states))))


def _range(op: Op, states: States, region: Region) -> Step:
    step = promote(op, states, region)
    result = step.results[0]
    # Squares leave the range of float16 at 256. bfloat16 has the range of float32.
    if result is not None and result.dtype == jnp.float16:
        return _float32(op, states, region)
    return step


def promote(op: Op, states: States, region: Region) -> Step:
    """Plans an elementwise operation: the kinds of its operands decide."""
    if op.params.get("out_dtype") is not None:
        return alone(op, states)
    if not any(map(is_half_or_float32, op.out_avals)):
        run = functools.partial(_compare, op)
        return Step(op, [None] * len(states), [None] * len(op.out_avals), run=run)
    shape = op.out_avals[0].shape
    smaller = [aval.shape != shape for aval in op.in_avals]
    operands = [
        state
        and state._replace(smaller=op.name not in ARRANGEMENTS and (state.smaller or is_smaller))
        for state, is_smaller in zip(states, smaller, strict=True)
    ]
    made = combined(
        known(operands),
        region.low,
        adds=op.name in ADDS,
        chooses=op.name == "select_n",
        scales=op.name in ARITHMETIC or op.name in ARRANGEMENTS,
    )
    if made.dtype != FLOAT32:
        made = made._replace(stored=_stored_of(op, states, made.dtype))
    step = _in_dtype(op, states, made, region)
    if CLASSES.get(op.name) not in (OpClass.PROMOTE, OpClass.RANGE):
        step.may_widen = False  # the user listed this operation
    elif op.name not in ARRANGEMENTS:
        # The bias is laid out first and then cast: the sum of its gradient over the batch is then
        # in float32. In bfloat16 that sum stops at 256 equal terms.
        step.lays_out = tuple(
            is_smaller and state is not None and not state.fixed
            for state, is_smaller in zip(states, smaller, strict=True)
        )
    return step


def _stored_of(op: Op, states: States, dtype: DType) -> Stored:
    """Returns how compilers store the result of a 16-bit operation."""
    # Compilers for GPUs and TPUs write these values to memory. If they were float32, a GPT would
    # take 1.28 times the temporaries on a TPU v5e.
    low = [state for state in known(states) if state.kind is Kind.LOW]
    adds = op.name in ADDS and op.name != "sub"  # a difference cancels: computed in float32
    if len(low) > 1:
        return Stored.AS_IT_IS if adds else Stored.NOT
    (state,) = low
    if adds:
        # A fixed operand may be a mask of -1e9, or a number, and not a bias. A bias of scores may
        # reach 1,000 (ALiBi at 2,048 tokens), where 16 bits keep only whole numbers.
        is_bias = dtype != jnp.float16 and not any(each.fixed for each in known(states))
        return state.stored if is_bias and state.stored is Stored.AS_IT_IS else Stored.NOT
    scales = op.name in SCALES or op.name == "select_n"
    return state.stored if scales and state.stored is Stored.AS_SCORES else Stored.NOT


def _compare(op: Op, values: list[Any]) -> list[Any]:
    """Compares operands of one 16-bit dtype in that dtype, and other operands in float32."""
    pairs = zip(op.inputs, values, strict=True)
    arrays = (value for atom, value in pairs if isinstance(atom, int))
    dtypes = {value.dtype for value in filter(is_half_or_float32, arrays)}
    (dtype,) = dtypes if len(dtypes) == 1 else (FLOAT32,)
    numbers = known([literal(atom) for atom in op.inputs if isinstance(atom, core.Literal)])
    # In bfloat16, 1 - 1e-6 is 1, and a comparison with it can have the other result.
    if not all(fits(state.value, dtype) for state in numbers):
        dtype = FLOAT32
    values = [lax.convert_element_type(x, dtype) if is_half_or_float32(x) else x for x in values]
    return compat.bind(op.equation, values)


def _in_dtype(op: Op, states: States, made: State, region: Region) -> Step:
    """Plans an operation with result `made`, or a firm one if a cast would lose a literal."""
    values = [state.value for state in known(states)]
    if made.dtype != FLOAT32:
        lost = not all(fits(value, made.dtype) for value in values)
    else:  # such as a mask of -1e9 that is added to 16 bits later
        lost = op.name in MASKS and any(overflows(value, region.low) for value in values)
    if lost:
        made = State(Kind.FIRM, FLOAT32)
    may_widen = made.dtype != FLOAT32 and made.stored is Stored.NOT
    return Step(op, wanting(states, made.dtype), results(op, made), may_widen=may_widen)


def _rule_move(op: Op, states: States, region: Region) -> Step:
    floats, are_floats = known(states), list(map(is_half_or_float32, op.out_avals))
    count = sum(are_floats)
    sources = iter(floats if len(floats) == count else floats[:1] * count)
    moved = [_state_moved(op, next(sources)) if is_float else None for is_float in are_floats]
    # The transpose of a gather adds up in the dtype of the array. In bfloat16, a node of a graph
    # with 4,096 edges lost 88 % of its gradient.
    sums = op.name == "gather" and states[0] is not None
    run = functools.partial(gather, op.equation) if sums else None
    low = all(each.dtype != FLOAT32 and each.stored is Stored.NOT for each in known(moved))
    return Step(op, in_dtypes(states), moved, may_widen=low and op.name in WIDENED, run=run)


def _state_moved(op: Op, state: State) -> State:
    if state.value is not None:  # zeros that begin a sum count as full-size
        return state._replace(smaller=False)
    before, after = op.in_avals[0].shape, op.out_avals[0].shape
    # A new axis counts even if its size is 1: positions `pos[None]` are laid out at batch 1 as at
    # batch 8. A row of a table is laid out too. Else `table[i] + f(x)` is an update, and firm.
    grows = math.prod(after) > math.prod(before) or len(after) > len(before)
    smaller = op.name == "gather" or (op.name in REPEATS | RESHAPES and grows)
    whole = state.stored is Stored.AS_SCORES and math.prod(after) == math.prod(before)
    stored = Stored.AS_SCORES if whole else Stored.NOT
    return state._replace(smaller=state.smaller or smaller, stored=stored)


# How a scatter combines old and new values. Its params hold this as a jaxpr for one dtype.
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": lambda old, new: new,
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}


def _update(op: Op, states: States, region: Region) -> Step:
    array = states[0]
    if array is None:
        return alone(op, states)
    floats = known(states)
    accumulates = op.name in ACCUMULATES
    # Zeros to write into are float32 only because the function was traced in float32.
    if not accumulates and (array.kind is Kind.LOW or array.value is not None):
        made = combined([state._replace(smaller=False) for state in floats], region.low)
        step = _in_dtype(op, states, made, region)
        step.may_widen = False
        return step
    made = State(max(array.kind, in_float32(floats).kind), FLOAT32)
    return Step(op, wanting(states, FLOAT32), results(op, made))


def has_own_program(op: Op) -> bool:
    """Whether an operation is `x.at[i].apply(f)`, a scatter with its own function."""
    program = op.params.get("update_jaxpr") if op.name == "scatter" else None
    return program is not None and bool(program.eqns)


def adapted(step: Step) -> Step:
    """Traces the program in the params of a scatter again, in the scatter's new dtype."""
    op = step.op
    if op.name not in _COMBINE or op.params["update_jaxpr"] is None or step.wants[0] is None:
        return step
    number = jax.ShapeDtypeStruct((), step.wants[0])
    program = compat.trace(_COMBINE[op.name], [number, number])
    step.params["update_jaxpr"] = compat.without_consts(program)
    return step


def _rule_lower(op: Op, states: States, region: Region) -> Step:
    if op.name in CONTRACTIONS:
        return plan_product(op, states, region)
    return Step(op, wanting(states, region.low), results(op, State(Kind.LOW, region.low)))


_OWN_16_BITS = "operands have 16 bits in the function itself"


def plan_product(op: Op, states: States, region: Region) -> Step:
    """Plans a product: low operands and a low result, unless the program asks for more."""
    params = op.params
    operands = known(states[:2])
    traced = [aval.dtype for aval in op.in_avals[:2]]
    if len(operands) < 2 or asks_for_precision(params.get("precision")):
        return alone(op, states)
    returned = op.out_avals[0].dtype
    if all(dtype in HALVES for dtype in traced):  # the user's own dtypes
        step = alone(op, states)
        step.not_float8 = _OWN_16_BITS if region.products is not None else None
        return step
    # The program asked for another dtype by `preferred_element_type`.
    if not {*traced, returned} <= {FLOAT32, region.low}:
        return alone(op, states)
    if all(state.fixed for state in operands):
        return alone(op, states)  # counts, positions times frequencies
    if not all(fits(state.value, region.low) for state in operands):
        return alone(op, states)
    # `einsum("i,j->ij", positions, rates)` multiplies elements. In 16 bits the phases of a rotary
    # embedding would be wrong by radians.
    if op.name == "dot_general" and _adds_nothing_up(op, operands):
        made = combined([s._replace(smaller=False) for s in operands], region.low, scales=True)
        step = _in_dtype(op, states, made, region)
        result = step.results[0]
        if params.get("preferred_element_type") is not None and result is not None:
            step.params["preferred_element_type"] = result.dtype
        step.may_widen = False
        return step
    sources = tuple(region.float32_gradients and is_weight(state) for state in operands)
    stored = Stored.AS_IT_IS if any(map(is_weight, operands)) else Stored.AS_SCORES
    step = Step(
        op,
        [region.low, region.low, *[None] * (len(states) - 2)],
        [State(Kind.LOW, region.low, stored=stored)],
        params={"preferred_element_type": region.low},
        sources=sources,
    )
    return _in_float8(step, operands, region)


def _in_float8(step: Step, operands: list[State], region: Region) -> Step:
    """Gives a product with a weight the recipe of its region, or the reason why it gets none."""
    weights = [i for i, state in enumerate(operands) if is_weight(state)]
    if not weights or (region.products is None and region.left_out is None):
        return step
    # An updated weight is firm, but so is a float32 stream: an argument comes before both.
    given = [i for i in weights if operands[i].kind is Kind.WEAK]
    op, parameter = step.op, (given or weights)[-1]
    if len(weights) == 2 and not given:
        step.not_float8 = "neither operand is made of arguments alone"
    elif region.products is None:
        step.not_float8 = region.left_out
    elif op.name != "dot_general":
        step.not_float8 = op.name
    else:
        reason = why_not_float8(op.params, op.in_avals, region.products, parameter)
        step.not_float8 = reason
        step.float8 = (region.products, parameter) if reason is None else None
    if step.float8 is not None:
        step.sources = ()
        # Weights are rounded to float8 once, and not to 16 bits before.
        step.wants = [FLOAT32 if i in weights else want for i, want in enumerate(step.wants)]
    return step


def _adds_nothing_up(op: Op, operands: list[State]) -> bool:
    """Whether a product sums nothing, also over axes of size 1: positions times frequencies."""
    (contracted, _), _ = op.params["dimension_numbers"]
    # Positions of shape (T, 1) @ rates of shape (1, D) are an outer product, too.
    if any(state.fixed for state in operands):
        return all(op.in_avals[0].shape[i] == 1 for i in contracted)
    return not contracted


def asks_for_precision(precision: Any) -> bool:
    """Whether a product was asked to be more precise than its operands' dtype implies."""
    if precision is None:
        return False
    if isinstance(precision, (tuple, list)):
        return any(asks_for_precision(each) for each in precision)
    return precision is not lax.Precision.DEFAULT


def asking_for(step: Step, precision: str | None) -> Step:
    """Lets a product that runs in float32 ask for a precision, unless it says one itself."""
    op = step.op
    if precision is None or op.name not in CONTRACTIONS or is_own(op.params.get("precision")):
        return step
    if step.float8 is not None:
        return step
    reads = zip(step.wants[:2], op.in_avals, strict=False)
    if any((want or aval.dtype) == FLOAT32 for want, aval in reads):
        each = as_param(precision, algorithms=op.name not in WITHOUT_ALGORITHMS)
        step.params["precision"] = (each, each) if isinstance(each, lax.Precision) else each
    return step


RULES: dict[OpClass, Callable[[Op, States, Region], Step]] = {
    OpClass.LOWER: _rule_lower,
    OpClass.FLOAT32: _float32,
    OpClass.SUM: _float32,
    OpClass.RANGE: _range,
    OpClass.PROMOTE: promote,
    OpClass.MOVE: _rule_move,
    OpClass.UPDATE: _update,
}
