"""The rules: what each class of operations does with operands of each kind."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp import _compat
from jaxmp._autocast._kinds import (
    ACTIVATIONS,
    FLOAT32,
    SOURCES,
    Kind,
    State,
    Stored,
    combined,
    fits,
    in_float32,
    overflows,
    spread,
    summed,
)
from jaxmp._autocast._scopes import Region
from jaxmp._autocast._steps import (
    HALVES,
    States,
    Step,
    alone,
    is_ours,
    kinds_of,
    results,
    results_of,
    wanting,
)
from jaxmp._float32_sums import gather
from jaxmp._op_lists import ARRANGEMENTS, CONTRACTIONS, KEEPS_FLOAT32, OpClass
from jaxmp._program import Op


def convert(op: Op, states: States) -> Step:
    """A cast of the program's own, which is respected."""
    (state,), (given,) = states, op.in_avals
    target = op.params["new_dtype"]
    made = op.out_avals[0]
    if state is None or not is_ours(made):
        step = alone(op, states)
        if is_ours(made) and made.dtype == FLOAT32:
            step.results = [_of_numbers(op.inputs[0], given)]
        return step
    if target != FLOAT32:
        return Step(op, [target], [State(Kind.LOW, jnp.dtype(target))], run=_pass_on)
    if given.dtype != FLOAT32 and state.kind is Kind.LOW:
        return Step(op, [FLOAT32], [State(Kind.WIDE, FLOAT32)], run=_pass_on)
    return Step(op, [None], [state], run=_pass_on)


def _of_numbers(atom: int | core.Literal, aval: Any) -> State:
    """What is known of integers, truth values or foreign floats that were made float32."""
    if aval.dtype == jnp.bool_:
        return State(Kind.LITERAL, FLOAT32, 1.0)
    if not jnp.issubdtype(aval.dtype, jnp.integer):
        return State(Kind.WIDE, FLOAT32)
    if isinstance(atom, core.Literal) and not aval.shape:
        return State(Kind.LITERAL, FLOAT32, float(atom.val))  # jnp.where(mask, h, 0)
    return State(Kind.TABLE, FLOAT32)


def _pass_on(op: Op, values: list[Any]) -> list[Any]:
    return values


def _float32(op: Op, states: States, region: Region) -> Step:
    return Step(op, wanting(states, FLOAT32), results(op, in_float32(kinds_of(states))))


def _sum(op: Op, states: States, region: Region) -> Step:
    kind = summed(kinds_of(states))
    if op.name.startswith(("psum", "reduce_scatter", "unreduced")) and kind is not Kind.WIDE:
        kind = combined(kinds_of(states), affine=True)
        kind = Kind.BRIEF if kind is Kind.LOW else kind
    return Step(op, wanting(states, FLOAT32), results(op, kind))


def _range(op: Op, states: States, region: Region) -> Step:
    step = promote(op, states, region)
    result = step.results[0]
    if result is not None and result.dtype == jnp.float16:
        return Step(op, wanting(states, FLOAT32), results(op, Kind.BRIEF))
    return step


def promote(op: Op, states: States, region: Region) -> Step:
    if op.params.get("out_dtype") is not None:
        return alone(op, states)
    if op.name in ARRANGEMENTS:
        return _in_kind(op, states, combined(kinds_of(states), affine=False), region)
    shape = op.out_avals[0].shape
    states = [
        state and state._replace(kind=spread(state.kind)) if aval.shape != shape else state
        for state, aval in zip(states, op.in_avals, strict=True)
    ]
    kinds = kinds_of(states)
    if _is_reciprocal(op, states):
        return _float32(op, states, region)
    if Kind.SPREAD in kinds and op.name in ("add", "sub") and _may_be_masked(states, region):
        kind = combined({*kinds, Kind.FACTOR}, affine=True)
        return Step(op, wanting(states, FLOAT32), results(op, kind))
    if not any(map(is_ours, op.out_avals)):
        soft = {Kind.LOW, Kind.LITERAL, Kind.SPREAD}
        kind = Kind.LOW if Kind.LOW in kinds and kinds <= soft else Kind.BRIEF
    else:
        kind = combined(kinds, affine=op.name in KEEPS_FLOAT32)
        if kind is Kind.PLACED and Kind.PLACED not in kinds and _is_scaled(op, states):
            kind = Kind.BRIEF  # positions and masks that only scale it add no place of their own
    step = _in_kind(op, states, kind, region)
    step.lays_out = tuple(state is not None and state.kind is Kind.SPREAD for state in states)
    return step


def _is_scaled(op: Op, states: States) -> bool:
    divisor = states[-1]
    divides = op.name == "div" and divisor is not None and divisor.kind is Kind.TABLE
    return op.name == "mul" or divides


def _may_be_masked(states: States, region: Region) -> bool:
    """Whether what is added may be a mask of -1e9, which float16 cannot hold, and no bias."""
    low = [state for state in states if state and state.kind is Kind.LOW]
    is_float16 = jnp.float16 in ([state.dtype for state in low] or [region.low])
    return is_float16 and not any(state.projected for state in low)


def _is_reciprocal(op: Op, states: States) -> bool:
    first = states[0]
    if op.name == "div" and first is not None and first.kind is Kind.LITERAL:
        return kinds_of(states) != {Kind.LITERAL}
    return op.name == "integer_pow" and op.params["y"] < 0


# In float32, but not for ever.
_MAY_BECOME_LOW = frozenset({Kind.PARAM, Kind.SPREAD, Kind.ROWS, Kind.TABLE, Kind.FACTOR})


def _in_kind(op: Op, states: States, kind: Kind, region: Region) -> Step:
    """An operation whose result has a kind, in 16 bits if that can be."""
    low = {state.dtype for state in states if state and state.kind is Kind.LOW}
    if kind is Kind.LOW and len(low) > 1:
        kind = Kind.BRIEF
    if kind is not Kind.LOW:
        large = any(overflows(state.value, region.low) for state in states if state)
        if large and kind in _MAY_BECOME_LOW and op.name in ("add", "sub", "mul", "select_n"):
            kind = Kind.WIDE  # a mask of -1e9
        return Step(op, wanting(states, FLOAT32), results(op, kind))
    dtype = low.pop() if low else region.low
    if not all(fits(state.value, dtype) for state in states if state):
        return Step(op, wanting(states, FLOAT32), results(op, Kind.WIDE))
    stored, projected = _storage(op, states)
    made = State(Kind.LOW, dtype, projected=projected, stored=stored)
    may_widen = stored is not Stored.AS_LOW
    return Step(op, wanting(states, dtype), results_of(op, made), may_widen=may_widen)


# These leave a relative error as it is, which squares do not.
_LINEAR = frozenset({"abs", "clamp", "max", "min", "neg", "sub", *ARRANGEMENTS})
# So do these, which is how scores are scaled and masked before a softmax.
_OF_SCORES = frozenset({"add", "div", "mul", "select_n"})


def _storage(op: Op, states: States) -> tuple[Stored, bool]:
    """How the result of an operation in 16 bits is stored, and whether it is a projection still."""
    activations = [state for state in states if state and state.kind in ACTIVATIONS]
    kept = {state.stored for state in activations}
    if len(activations) > 1 and op.name in ("add", "add_any"):
        stream = Stored.AS_LOW in kept or Stored.EITHER not in kept
        return Stored.AS_LOW if stream else Stored.EITHER, False
    if not activations or Stored.EITHER in kept:
        return Stored.EITHER, False
    if len(activations) > 1:
        scaled = op.name in _LINEAR or op.name == "select_n"
        return Stored.SCALED if scaled else Stored.EITHER, False
    if op.name not in _LINEAR | _OF_SCORES:
        return Stored.EITHER, False
    state = activations[0]
    bias = op.name == "add" and Kind.SPREAD in kinds_of(states) and state.dtype != jnp.float16
    stays = bias or (op.name in _OF_SCORES and not state.projected)
    return state.stored if stays else Stored.SCALED, state.projected


def _move(op: Op, states: States, region: Region) -> Step:
    floats = [state for state in states if state is not None]
    made = [aval for aval in op.out_avals if is_ours(aval)]
    pairs = floats if len(floats) == len(made) else floats[:1] * len(made)
    moved = iter([_moved(op, state) for state in pairs])
    found = [next(moved) if is_ours(aval) else None for aval in op.out_avals]
    may_widen = all(state.kind is Kind.LOW for state in floats) and not any(
        state is not None and state.stored is Stored.AS_LOW for state in found
    )
    run = _gather if op.name == "gather" and states[0] is not None else None
    wants = [state and state.dtype for state in states]
    return Step(op, wants, found, may_widen=may_widen, run=run)


def _gather(op: Op, values: list[Any]) -> list[Any]:
    return gather(op.equation, values)


def _moved(op: Op, state: State) -> State:
    if op.name == "gather" and state.kind is Kind.PARAM:
        return State(Kind.ROWS, state.dtype)
    before, after = op.in_avals[0].shape, op.out_avals[0].shape
    if state.kind is Kind.LOW and (state.projected or math.prod(after) != math.prod(before)):
        state = state._replace(stored=min(state.stored, Stored.SCALED))
    if op.name in ("broadcast_in_dim", "reshape", "expand_dims", "tile"):
        grows = op.name in ("broadcast_in_dim", "tile") and before != after
        if grows or len(after) > len(before):
            return state._replace(kind=spread(state.kind))
    return state


# How a scatter combines what is there with what comes: kept in its params as a program, by dtype.
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
    accumulates = op.name in ("scatter-add", "scatter-sub", "scatter-mul")
    if array.kind is Kind.LOW and not accumulates:
        step = _in_kind(op, states, Kind.LOW, region)
        step.may_widen = False
    else:
        kind = combined(kinds_of(states), affine=True)
        kind = Kind.BRIEF if kind is Kind.LOW else kind
        step = Step(op, wanting(states, FLOAT32), results(op, kind))
    return step


def has_own_program(op: Op) -> bool:
    """Whether this is `x.at[i].apply(f)`, a scatter with a function of its own."""
    program = op.params.get("update_jaxpr") if op.name == "scatter" else None
    return program is not None and bool(program.eqns)


def adapted(step: Step) -> Step:
    """With the program in the params of a scatter in the dtype that the scatter has now."""
    op = step.op
    if op.name not in _COMBINE or op.params["update_jaxpr"] is None or step.wants[0] is None:
        return step
    number = jax.ShapeDtypeStruct((), step.wants[0])
    program = _compat.trace(_COMBINE[op.name], [number, number])
    step.params["update_jaxpr"] = _compat.without_consts(program)
    return step


def _lower(op: Op, states: States, region: Region) -> Step:
    if op.name in CONTRACTIONS:
        return product(op, states, region)
    return Step(op, wanting(states, region.low), results(op, Kind.LOW, region.low))


def product(op: Op, states: States, region: Region) -> Step:
    """How a product runs: low operands, low result, unless somebody asked for more."""
    params = op.params
    operands = [state for state in states[:2] if state is not None]
    traced = [aval.dtype for aval in op.in_avals[:2]]
    asked = params.get("preferred_element_type")
    made = op.out_avals[0].dtype
    if len(operands) < 2 or asks_for_precision(params.get("precision")):
        return alone(op, states)
    if all(dtype in HALVES for dtype in traced) or made not in (FLOAT32, *HALVES):
        return alone(op, states)  # the user's own dtypes
    if any(dtype in HALVES and dtype != region.low for dtype in traced):
        return alone(op, states)
    if {state.kind for state in operands} <= {Kind.TABLE, Kind.LITERAL}:
        return alone(op, states)  # positions times frequencies
    if op.name == "dot_general" and _adds_nothing_up(op, kinds_of(operands)):
        step = _in_kind(op, states, combined(kinds_of(states), affine=True), region)
        result = step.results[0]
        if asked is not None and result is not None:
            step.params["preferred_element_type"] = result.dtype
        step.may_widen = False
        return step
    if not all(fits(state.value, region.low) for state in operands):
        return alone(op, states)
    wants = [region.low, region.low, *[None] * (len(states) - 2)]
    sources = tuple(
        region.float32_gradients and state.kind in SOURCES and state.dtype == FLOAT32
        for state in operands
    )
    projected = any(state.kind in SOURCES for state in operands)
    return Step(
        op,
        wants,
        [State(Kind.LOW, region.low, projected=projected)],
        params={"preferred_element_type": region.low},
        sources=sources,
    )


def _adds_nothing_up(op: Op, kinds: set[Kind]) -> bool:
    """Whether a product is an outer one, also if written as one: positions times frequencies."""
    (contracted, _), _ = op.params["dimension_numbers"]
    if Kind.TABLE in kinds and not ACTIVATIONS & kinds:
        return all(op.in_avals[0].shape[i] == 1 for i in contracted)
    return not contracted


def asks_for_precision(precision: Any) -> bool:
    """Whether a product was asked to be more precise than its operands' dtype implies."""
    if precision is None:
        return False
    if isinstance(precision, (tuple, list)):
        return any(asks_for_precision(each) for each in precision)
    return precision is not lax.Precision.DEFAULT


RULES: dict[OpClass, Callable[[Op, States, Region], Step]] = {
    OpClass.LOWER: _lower,
    OpClass.FLOAT32: _float32,
    OpClass.SUM: _sum,
    OpClass.RANGE: _range,
    OpClass.PROMOTE: promote,
    OpClass.MOVE: _move,
    OpClass.UPDATE: _update,
}
