"""Plans an operation by its class: what each does with operands of each strength."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._autocast.op_plans import (
    OpPlan,
    States,
    float_states,
    literal_state,
    plan_as_traced,
    state_dtypes,
    uniform_plan,
)
from jaxmp._autocast.regions import Region
from jaxmp._autocast.strengths import (
    FLOAT32,
    Extent,
    Materialized,
    State,
    Strength,
    combined_state,
    fits,
    float32_state,
    is_weight,
    number_state,
    overflows,
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
    DOT,
    MASKS,
    REPEATS,
    RESHAPES,
    SCALES,
    WIDENED,
    WITHOUT_ALGORITHMS,
    OpClass,
)
from jaxmp._program.program import Op


def convert(op: Op, states: States, *, is_undone: bool = False) -> OpPlan:
    """Plans a cast that the program itself makes; autocast respects it, if it is not undone."""
    (state,), (aval,), target = states, op.in_avals, op.params["new_dtype"]
    if state is None or not is_half_or_float32(op.out_avals[0]):
        op_plan = plan_as_traced(op, states)
        if target == FLOAT32:
            op_plan.results = [_state_of_numbers(op.inputs[0], aval)]
        return op_plan
    # A number is one in any dtype: JAX casts it, as the NaN of `jnp.var`, to those that it meets.
    if is_undone or (state.value is not None and fits(state.value, jnp.dtype(target))):
        return OpPlan(op, [None], [state], run=list)
    if target != FLOAT32:
        return OpPlan(op, [target], [State(Strength.LOW, jnp.dtype(target))], run=list)
    # The program asks for float32, perhaps to add steps that are too small for 16 bits.
    if aval.dtype != FLOAT32 and state.strength is Strength.LOW:
        return OpPlan(op, [FLOAT32], [State(Strength.FIRM, FLOAT32)], run=list)
    return OpPlan(op, [None], [state], run=list)


def _state_of_numbers(atom: int | core.Literal, aval: Any) -> State:
    """Returns the state of integers, booleans or foreign floats after a cast to float32."""
    if not (aval.dtype == jnp.bool_ or jnp.issubdtype(aval.dtype, jnp.integer)):
        return State(Strength.HIGH, FLOAT32)
    if isinstance(atom, core.Literal) and not aval.shape:
        # jnp.where(mask, h, 0)
        return number_state(float(atom.val))._replace(broadcast=Extent.LAID_OUT)
    return State(Strength.WEAK, FLOAT32, input_independent=True)


def _float32(op: Op, states: States, region: Region) -> OpPlan:
    return uniform_plan(op, states, float32_state(float_states(states)))


def _range(op: Op, states: States, region: Region) -> OpPlan:
    op_plan = promote(op, states, region)
    result = op_plan.results[0]
    # Squares leave the range of float16 at 256. bfloat16 has the range of float32.
    if result is not None and result.dtype == jnp.float16:
        return _float32(op, states, region)
    return op_plan


def promote(op: Op, states: States, region: Region) -> OpPlan:
    """Plans an elementwise operation: the strengths of its operands decide."""
    if op.params.get("out_dtype") is not None:
        return plan_as_traced(op, states)
    if not any(map(is_half_or_float32, op.out_avals)):
        run = functools.partial(_compare, op)
        return OpPlan(op, [None] * len(states), [None] * len(op.out_avals), run=run, plan_key=())
    shape = op.out_avals[0].shape
    are_smaller = [aval.shape != shape for aval in op.in_avals]
    # The parts of a concatenation have other shapes than the whole, and are broadcast to nothing.
    lays_out = op.name not in ARRANGEMENTS
    operands = [
        state
        and state._replace(
            broadcast=max(state.broadcast, Extent(is_smaller)) if lays_out else Extent.WHOLE
        )
        for state, is_smaller in zip(states, are_smaller, strict=True)
    ]
    result = combined_state(
        float_states(operands),
        region.low,
        adds=op.name in ADDS,
        chooses=op.name == "select_n",
        scales=op.name in ARITHMETIC or op.name in ARRANGEMENTS,
    )
    if result.dtype != FLOAT32:
        result = result._replace(materialized=_materialization(op, states, result.dtype))
    op_plan = _plan_with_result(op, states, result, region)
    if CLASSES.get(op.name) not in (OpClass.PROMOTE, OpClass.RANGE):
        op_plan.may_widen = False  # the user listed this operation
    elif lays_out:
        # The bias is laid out first and then cast: the sum of its gradient over the batch is then
        # in float32. In bfloat16 that sum stops at 256 equal terms.
        op_plan.broadcasts = tuple(
            is_smaller and state is not None and not state.input_independent
            for state, is_smaller in zip(states, are_smaller, strict=True)
        )
    return op_plan


def _materialization(op: Op, states: States, dtype: DType) -> Materialized:
    """Returns whether compilers write the result of a 16-bit operation to memory."""
    # If these values were float32, a GPT would take 1.28 times the temporaries on a TPU v5e.
    floats = float_states(states)
    low = [state for state in floats if state.strength is Strength.LOW]
    adds = op.name in ADDS and op.name != "sub"  # a difference cancels: computed in float32
    if len(low) > 1:
        return Materialized.YES if adds else Materialized.NO
    before = low[0].materialized
    if adds:
        # A fixed operand may be a mask of -1e9, or a number, and not a bias. A bias of scores may
        # reach 1,000 (ALiBi at 2,048 tokens), where 16 bits keep only whole numbers.
        is_bias = dtype != jnp.float16 and not any(state.input_independent for state in floats)
        return before if is_bias and before is Materialized.YES else Materialized.NO
    scales = op.name in SCALES or op.name == "select_n"
    return before if scales and before is Materialized.SCORES else Materialized.NO


def _compare(op: Op, values: list[Any]) -> list[Any]:
    """Compares operands of one 16-bit dtype in that dtype, and other operands in float32."""
    pairs = zip(op.inputs, values, strict=True)
    arrays = (value for atom, value in pairs if isinstance(atom, int))
    dtypes = {value.dtype for value in filter(is_half_or_float32, arrays)}
    (dtype,) = dtypes if len(dtypes) == 1 else (FLOAT32,)
    literals = [atom for atom in op.inputs if isinstance(atom, core.Literal)]
    numbers = float_states(list(map(literal_state, literals)))
    # In bfloat16, 1 - 1e-6 is 1, and a comparison with it can have the other result.
    if not all(fits(state.value, dtype) for state in numbers):
        dtype = FLOAT32
    values = [lax.convert_element_type(x, dtype) if is_half_or_float32(x) else x for x in values]
    return compat.bind(op.equation, values)


def _plan_with_result(op: Op, states: States, result: State, region: Region) -> OpPlan:
    """Plans an operation with this result, or a firm one if a cast would lose a literal."""
    values = [state.value for state in float_states(states)]
    if result.dtype != FLOAT32:
        loses_literal = not all(fits(value, result.dtype) for value in values)
    else:  # such as a mask of -1e9 that is added to 16 bits later
        loses_literal = op.name in MASKS and any(overflows(value, region.low) for value in values)
    if loses_literal:
        result = State(Strength.FIRM, FLOAT32)
    return uniform_plan(op, states, result, may_widen=result.dtype != FLOAT32)


def _rule_move(op: Op, states: States, region: Region) -> OpPlan:
    floats, are_floats = float_states(states), list(map(is_half_or_float32, op.out_avals))
    count = sum(are_floats)
    sources = iter(floats if len(floats) == count else floats[:1] * count)
    results = [_state_of_move(op, next(sources)) if is_float else None for is_float in are_floats]
    # The transpose of a gather adds up in the dtype of the array. In bfloat16, a node of a graph
    # with 4,096 edges lost 88 % of its gradient.
    sums = op.name == "gather" and states[0] is not None
    run = functools.partial(gather, op.equation) if sums else None
    may_widen = op.name in WIDENED and all(x.dtype != FLOAT32 for x in results if x)
    return OpPlan(op, state_dtypes(states), results, may_widen=may_widen, run=run, plan_key=())


def _state_of_move(op: Op, state: State) -> State:
    if state.value is not None:  # zeros that begin a sum count as full-size
        return state.whole()
    before, after = op.in_avals[0].shape, op.out_avals[0].shape
    # A new axis counts even if its size is 1: positions `pos[None]` are laid out at batch 1 as at
    # batch 8. A row of a table is laid out too. Else `table[i] + f(x)` is an update, and firm.
    grows = math.prod(after) > math.prod(before) or len(after) > len(before)
    extent = Extent.LOOKED_UP if op.name == "gather" else Extent.WHOLE
    if op.name in REPEATS | RESHAPES and grows:
        extent = Extent.LAID_OUT
    whole = state.materialized is Materialized.SCORES and math.prod(after) == math.prod(before)
    materialized = Materialized.SCORES if whole else Materialized.NO
    return state._replace(broadcast=max(state.broadcast, extent), materialized=materialized)


# How a scatter combines old and new values. Its params hold this as a jaxpr for one dtype.
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": lambda old, new: new,
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}


def _update(op: Op, states: States, region: Region) -> OpPlan:
    array = states[0]
    if array is None:
        return plan_as_traced(op, states)
    floats = float_states(states)
    accumulates = op.name in ACCUMULATES
    # Zeros to write into are float32 only because the function was traced in float32.
    if not accumulates and (array.strength is Strength.LOW or array.value is not None):
        result = combined_state([state.whole() for state in floats], region.low)
        op_plan = _plan_with_result(op, states, result, region)
        op_plan.may_widen = False
        return op_plan
    result = State(max(array.strength, float32_state(floats).strength), FLOAT32)
    return uniform_plan(op, states, result)


def has_own_program(op: Op) -> bool:
    """Whether an operation is `x.at[i].apply(f)`, a scatter with its own function."""
    program = op.params.get("update_jaxpr") if op.name == "scatter" else None
    return program is not None and bool(program.eqns)


def adapt_scatter(op_plan: OpPlan) -> OpPlan:
    """Traces the program in the params of a scatter again, in the scatter's new dtype."""
    op = op_plan.op
    if op.name not in _COMBINE or op.params["update_jaxpr"] is None or op_plan.in_dtypes[0] is None:
        return op_plan
    number = jax.ShapeDtypeStruct((), op_plan.in_dtypes[0])
    program = compat.trace(_COMBINE[op.name], [number, number])
    op_plan.params["update_jaxpr"] = compat.without_consts(program)
    return op_plan


def _rule_lower(op: Op, states: States, region: Region) -> OpPlan:
    if op.name in CONTRACTIONS:
        return plan_product(op, states, region)
    return uniform_plan(op, states, State(Strength.LOW, region.low))


_OWN_16_BITS = "operands have 16 bits in the function itself"


def plan_product(op: Op, states: States, region: Region) -> OpPlan:
    """Plans a product: low operands and a low result, unless the program asks for more."""
    params = op.params
    operands = float_states(states[:2])
    traced = [aval.dtype for aval in op.in_avals[:2]]
    if len(operands) < 2 or asks_for_precision(params.get("precision")):
        return plan_as_traced(op, states)
    returned = op.out_avals[0].dtype
    if all(dtype in HALVES for dtype in traced):  # the user's own dtypes
        op_plan = plan_as_traced(op, states)
        op_plan.not_float8 = _OWN_16_BITS if region.products is not None else None
        return op_plan
    # The program asked for another dtype by `preferred_element_type`.
    if not {*traced, returned} <= {FLOAT32, region.low}:
        return plan_as_traced(op, states)
    if all(state.input_independent for state in operands):
        return plan_as_traced(op, states)  # counts, positions times frequencies
    if not all(fits(state.value, region.low) for state in operands):
        return plan_as_traced(op, states)
    sources = tuple(region.float32_gradients and is_weight(state) for state in operands)
    materialized = Materialized.YES if any(map(is_weight, operands)) else Materialized.SCORES
    op_plan = OpPlan(
        op,
        [region.low, region.low, *[None] * (len(states) - 2)],
        [State(Strength.LOW, region.low, materialized=materialized)],
        params={"preferred_element_type": region.low},
        sources=sources,
        # GPUs have no convolutions of 16 bits that return float32, nor ragged products.
        may_widen=op.name == DOT,
    )
    return _plan_float8(op_plan, operands, region)


def _plan_float8(op_plan: OpPlan, operands: list[State], region: Region) -> OpPlan:
    """Gives a product with a weight the recipe of its region, or the reason why it gets none."""
    weights = [i for i, state in enumerate(operands) if is_weight(state)]
    if not weights or (region.products is None and region.exclusion is None):
        return op_plan
    # An updated weight is firm, but so is a float32 stream: an argument comes before both.
    arguments = [i for i in weights if operands[i].strength is Strength.WEAK]
    op, parameter = op_plan.op, (arguments or weights)[-1]
    if len(weights) == 2 and not arguments:
        op_plan.not_float8 = "neither operand is made of arguments alone"
    elif region.products is None:
        op_plan.not_float8 = region.exclusion
    elif op.name != DOT:
        op_plan.not_float8 = op.name
    else:
        reason = why_not_float8(op.params, op.in_avals, region.products, parameter)
        op_plan.not_float8 = reason
        op_plan.float8 = (region.products, parameter) if reason is None else None
    if op_plan.float8 is not None:
        op_plan.sources, op_plan.may_widen = (), False
        # Weights are rounded to float8 once, and not to 16 bits before.
        pairs = enumerate(op_plan.in_dtypes)
        op_plan.in_dtypes = [FLOAT32 if i in weights else dtype for i, dtype in pairs]
    return op_plan


def asks_for_precision(precision: Any) -> bool:
    """Whether a product was asked to be more precise than its operands' dtype implies."""
    if precision is None:
        return False
    if isinstance(precision, (tuple, list)):
        return any(asks_for_precision(entry) for entry in precision)
    return precision is not lax.Precision.DEFAULT


def ask_for_precision(op_plan: OpPlan, precision: str | None) -> OpPlan:
    """Sets the precision of a product that runs in float32, unless it names one itself."""
    op = op_plan.op
    if precision is None or op.name not in CONTRACTIONS or is_own(op.params.get("precision")):
        return op_plan
    if op_plan.float8 is not None:
        return op_plan
    pairs = zip(op_plan.in_dtypes[:2], op.in_avals, strict=False)
    if any((dtype or aval.dtype) == FLOAT32 for dtype, aval in pairs):
        param = as_param(precision, algorithms=op.name not in WITHOUT_ALGORITHMS)
        op_plan.params["precision"] = (param, param) if isinstance(param, lax.Precision) else param
    return op_plan


PLANNERS: dict[OpClass, Callable[[Op, States, Region], OpPlan]] = {
    OpClass.LOWER: _rule_lower,
    OpClass.FLOAT32: _float32,
    OpClass.SUM: _float32,
    OpClass.RANGE: _range,
    OpClass.PROMOTE: promote,
    OpClass.MOVE: _rule_move,
    OpClass.UPDATE: _update,
}
