"""Plans operations that contain programs: each is bound again around rewritten programs.

First functions with derivatives of their own (`jax.custom_jvp`, `jax.custom_vjp`), then loops,
branches and calls.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend import core

from jaxmp._autocast.layers import through_layers
from jaxmp._autocast.op_plans import (
    AllIn,
    OpPlan,
    Reading,
    States,
    argument_state,
    plan_as_traced,
    state_dtypes,
)
from jaxmp._autocast.plan import Plan, PlanContext, plan
from jaxmp._autocast.reading import WRITTEN
from jaxmp._autocast.regions import Region
from jaxmp._autocast.run import run_plan
from jaxmp._autocast.strengths import (
    FLOAT32,
    State,
    Strength,
    combined_state,
    entry_state,
    joined_state,
)
from jaxmp._numerics.dtypes import DType, is_half, is_inexact
from jaxmp._primitives.float32_sums import accumulator
from jaxmp._primitives.gradient_of import gradient_of
from jaxmp._program import compat
from jaxmp._program.control_flow import is_call, rebind, scan_again
from jaxmp._program.derivatives import Run, in_standard_form, with_derivative, with_passes
from jaxmp._program.op_classes import CONTRACTIONS, CONTROL_FLOW, JITS, KERNELS
from jaxmp._program.program import Op, equations_in
from jaxmp._program.wiring import argument_types


def plan_custom_jvp(
    op: Op, states: States, context: PlanContext, region: Region, results_in: AllIn = ()
) -> OpPlan:
    """Rewrites both the function and its derivative: `relu` is 16-bit for 16-bit operands."""
    body = op.params["call_jaxpr"]
    inside = context.inside(op)
    inner = context.keep(op, body, plan(body, states, inside, results_in=results_in))
    pairs = zip(op.out_avals, inner.results, strict=True)
    result_states = [*inner.results, *(state for aval, state in pairs if is_inexact(aval))]
    reads = zip(op.out_avals, results_in, strict=False)  # the tangents are read as the results are
    of_both = (*results_in, *(reading for aval, reading in reads if is_inexact(aval)))

    def derivative(program: Any, by: Sequence[int], arguments: list[Any]) -> list[Any]:
        operands = [*states, *(states[i] for i in by)]
        results = run_plan(plan(program, operands, inside, results_in=of_both), arguments)
        return list(map(cast_to_state, results, result_states))

    call = with_derivative(op.equation, functools.partial(run_plan, inner), derivative)
    return OpPlan(op, state_dtypes(states), inner.results, run=call, reads=inner.reads)


def cast_to_state(value: Any, state: State | None) -> Any:
    return value if state is None else lax.convert_element_type(value, state.dtype)


def plan_custom_vjp(op: Op, states: States, context: PlanContext, region: Region) -> OpPlan:
    """Leaves the function as it was traced, since its gradient belongs to that computation."""
    # In float32 parts no dtype changes, only the precision of its products.
    enters = region.exact and region.precision is not None and _multiplies_itself(op.equation)
    if context.enter_custom_vjp or enters:
        return _enter_custom_vjp(op, states, context)
    op_plan = plan_as_traced(op, states)
    if region.products is not None and _multiplies_itself(op.equation):
        op_plan.not_float8 = "inside of a jax.custom_vjp"
    return op_plan


def _multiplies_itself(equation: core.JaxprEqn) -> bool:
    """Whether there is a product in a function, outside of the kernels that it calls."""
    programs = compat.sub_jaxprs(equation)
    inside = equations_in(programs, lambda equation: equation.primitive.name not in KERNELS)
    return any(equation.primitive.name in CONTRACTIONS for equation in inside)


def _enter_custom_vjp(op: Op, states: States, context: PlanContext) -> OpPlan:
    """Rewrites the forward and the backward pass, which meet in the residuals."""
    inside = context.inside(op)
    body = op.params["call_jaxpr"]
    primal = context.keep(op, body, plan(body, states, inside))
    count = len(primal.results)
    pairs = zip(op.out_avals, primal.results, strict=True)
    cotangents = [state for aval, state in pairs if is_inexact(aval)]

    def forward_pass(jaxpr: Any, arrays: list[Any]) -> tuple[list[Any], Run]:
        forward = plan(jaxpr, states, inside)
        backward_states = [*forward.results[count:], *cotangents]

        def backward_pass(program: Any, by: Sequence[int], arguments: list[Any]) -> list[Any]:
            gradients = run_plan(plan(program, backward_states, inside), arguments)
            return [cast_to_state(x, states[i]) for i, x in zip(by, gradients, strict=True)]

        results = run_plan(forward, arrays)
        return [*map(cast_to_state, results, primal.results), *results[count:]], backward_pass

    call = with_passes(op.equation, functools.partial(run_plan, primal), forward_pass)
    return OpPlan(op, state_dtypes(states), primal.results, run=call)


def plan_control(
    op: Op, states: States, context: PlanContext, region: Region, results_in: AllIn = ()
) -> OpPlan:
    """Plans an operation that contains programs; once more, for how its results are read."""
    planner = {"custom_jvp_call": plan_custom_jvp, "custom_vjp_call": plan_custom_vjp}.get(op.name)
    if planner is None and op.name in CONTROL_FLOW:
        wiring = op.wiring
        planner = _plan_choice if wiring.chooses else _plan_loop if wiring.loops else _plan_once
    if planner is None and is_call(op.equation):
        planner = _plan_call
    if planner is None:
        return plan_as_traced(op, states)
    op_plan = planner(op, states, context, region, *([results_in] if results_in else []))
    inside = equations_in(compat.bodies_of(op.equation)) if context.kernels else ()
    if not any(id(equation) in context.kernels for equation in inside):
        op_plan.plan_key = context.inside(op).plan_key(states, results_in)
    if planner in (plan_custom_jvp, _plan_once, _plan_choice) and op_plan.run is not None:
        op_plan.replan = functools.partial(
            plan_control, op, states=states, context=context, region=region
        )
    return op_plan


def plan_inside(
    jaxpr: Any, states: States, context: PlanContext, op: Op, results_in: AllIn = ()
) -> Plan:
    """Returns the plan of a program inside an operation, made once for each way of calling it."""
    inside = context.inside(op)
    states = [state and entry_state(state) for state in states]
    key = "plan", id(jaxpr), inside.plan_key(states, results_in)
    new = functools.partial(plan, jaxpr, states, inside, results_in=results_in)
    return context.keep(op, jaxpr, context.shared.once(key, jaxpr, new))


def changes(plan: Plan) -> bool:
    """Whether a plan differs from the program as it was traced."""
    for op_plan in plan.op_plans:
        pairs = zip(op_plan.op.in_avals, op_plan.in_dtypes, strict=True)
        casts = any(want is not None and want != aval.dtype for aval, want in pairs)
        casts = casts or WRITTEN in op_plan.op.functions
        runs = op_plan.run is not None and not op_plan.is_cast and any(op_plan.results)
        if casts or runs or op_plan.params or any(op_plan.sources):
            return True
    return False


def _plan_once(
    op: Op, states: States, context: PlanContext, region: Region, results_in: AllIn = ()
) -> OpPlan:
    """Plans a jit, a checkpoint or a `shard_map`, which run one program once."""
    inner = plan_inside(op.params["jaxpr"], states, context, op, results_in)
    # The dtypes of results count too: an argument that is passed through may have another one.
    pairs = zip(inner.results, op.out_avals, strict=True)
    same = all(state is None or state.dtype == aval.dtype for state, aval in pairs)
    if op.name in JITS and not changes(inner) and same:
        op_plan = plan_as_traced(op, states)
        op_plan.results = inner.results
        return op_plan
    run = _runner(op, context, [inner])
    return OpPlan(op, state_dtypes(states), inner.results, run=run, reads=inner.reads)


def _runner(
    op: Op, context: PlanContext, plans: Sequence[Plan], outs: Sequence[States | None] = (None,)
) -> Callable[[list[Any]], list[Any]]:
    """Returns a function that runs an operation again around planned programs.

    Args:
      op: the operation.
      context: the context of the whole call.
      plans: the plans of its programs.
      outs: for each program the states of its results, if these are cast to them, so that none is
        weakly typed.
    """
    pairs = zip(plans, outs, strict=True)
    makers = [functools.partial(_jaxpr_of, context, inner, out) for inner, out in pairs]
    return lambda values: rebind(op.equation, values, makers)


def _jaxpr_of(context: PlanContext, inner: Plan, out: States | None, avals: list[Any]) -> Any:
    """Returns the jaxpr of a plan. Calls that are alike share it, so that it is compiled once."""

    def body(*args: Any) -> list[Any]:
        results = run_plan(inner, args)
        return results if out is None else list(map(cast_to_state, results, out))

    key = ("jaxpr", id(inner), tuple(avals), None if out is None else tuple(out))
    return context.shared.once(key, inner, lambda: compat.trace(body, avals))


def _plan_loop(op: Op, states: States, context: PlanContext, region: Region) -> OpPlan:
    wiring = op.wiring
    carry, tests = wiring.carry, compat.bodies_of(op.equation)[: wiring.tests]
    inner, inside = _fixed_point(op, states, context, region)
    last, stacked = inside[carry.start : carry.stop], inner.results[len(carry) :]
    # What a recurrence returns is high, and joins 16 bits.
    out = [
        State(Strength.HIGH, FLOAT32)
        if state and state.loop_carried
        else state and entry_state(state)
        for state in (*last, *stacked)
    ]
    conditions = [
        plan_inside(test, [inside[i] for i in arguments], context, op)
        for test, arguments in zip(tests, wiring.arguments, strict=False)
    ]
    around = _runner(op, context, [*conditions, inner], [*(x.results for x in conditions), out])

    def run(values: list[Any]) -> list[Any]:
        # The transpose of a scan adds the gradients of its constants turn by turn, in their dtype.
        # In bfloat16 the sum of equal terms stops at 256 of them. A part that keeps its dtypes
        # keeps such sums. A loop whose turns are not counted has no transpose.
        sums = wiring.counted and not region.sealed
        if not sums or not any(map(is_half, values[: carry.start])):
            return around(values)
        (avals,) = argument_types(op.equation, list(map(compat.type_of, values)))
        body = _jaxpr_of(context, inner, out, avals)
        return _summing_scan(op.equation, carry.start, body, values)

    return OpPlan(op, state_dtypes(inside), out, run=run)


def _summing_scan(equation: core.JaxprEqn, consts: int, body: Any, values: list[Any]) -> list[Any]:
    """Runs a scan whose turns all read the same 16-bit arrays; sums their gradients in float32."""
    sums = [accumulator(x) if is_half(x) else None for x in values[:consts]]
    run_body = core.jaxpr_as_fun(body)
    with_gradient = in_standard_form(lambda x, total: x, gradient_of)

    def turn(arguments: list[Any], _: Any) -> tuple[list[Any], Any]:
        pairs = zip(arguments, sums, strict=False)
        shared = [x if total is None else with_gradient(x, total) for x, total in pairs]
        return run_body(*shared, *arguments[consts:]), ()

    return scan_again(equation, values, turn)[0]


def _fixed_point(
    op: Op, states: States, context: PlanContext, region: Region
) -> tuple[Plan, list[State | None]]:
    """Returns the plan of a loop's body, and the operands' states, which a turn leaves as they are.

    A carry that no product touches keeps its state. A carry that goes through layers, that is,
    products with different weights in each turn, is 16 bits as without a loop. All other carries
    are firm: a recurrence adds up terms that 16 bits would lose.
    """
    body, wiring = compat.bodies_of(op.equation)[-1], op.wiring
    layers = frozenset() if region.exact else through_layers(op, states)
    inside = [state and entry_state(state) for state in states]
    for i in wiring.carry:
        # A scan keeps the dtype of its carry, and here the program chose 16 bits.
        if inside[i] is not None and op.in_avals[i].dtype != FLOAT32:
            inside[i] = State(Strength.LOW, op.in_avals[i].dtype)
    while True:
        carry = inside[wiring.carry.start : wiring.carry.stop]
        firm = (state is not None and state.strength is Strength.FIRM for state in carry)
        results_in = tuple(Reading.FLOAT32 if x else Reading.LOW for x in firm)
        arguments = [inside[i] for i in wiring.arguments[-1]]
        inner = plan_inside(body, arguments, context, op, results_in)
        after = list(inside)
        for i, begin, end in zip(wiring.carry, carry, inner.results, strict=False):
            if begin is not None and end is not None and op.in_avals[i].dtype == FLOAT32:
                after[i] = _next_carry(begin, end, region.low, i in layers)
        if after == inside:
            return inner, inside
        inside = after


def _next_carry(begin: State, end: State, low: DType, through_layers: bool) -> State:
    """Joins the states of a carry before and after a turn. A firm one stays firm."""
    strengths = {begin.strength, end.strength}
    if strengths == {Strength.WEAK}:
        return combined_state([begin, end], low)
    if through_layers and Strength.FIRM not in strengths:
        return (
            State(Strength.HIGH, FLOAT32)
            if strengths == {Strength.HIGH}
            else State(Strength.LOW, low)
        )
    # In 16 bits, 300 small steps of an ODE solver add up to nothing.
    return State(Strength.FIRM, FLOAT32, loop_carried=not through_layers)


def _plan_choice(
    op: Op, states: States, context: PlanContext, region: Region, results_in: AllIn = ()
) -> OpPlan:
    branches = compat.bodies_of(op.equation)
    plans = [plan_inside(branch, states[1:], context, op, results_in) for branch in branches]
    out: list[State | None] = []
    for results in zip(*(branch.results for branch in plans), strict=True):
        floats = [state for state in results if state is not None]
        out.append(joined_state(floats, region.low) if len(floats) == len(results) else None)
    run = _runner(op, context, plans, [out] * len(plans))
    reads = [Reading.EITHER, *map(min, zip(*(branch.reads for branch in plans), strict=True))]
    return OpPlan(op, state_dtypes(states), out, run=run, reads=reads)


def _plan_call(op: Op, states: States, context: PlanContext, region: Region) -> OpPlan:
    """Plans a call that must keep the dtypes of its operands and results.

    The rule of a `custom_vmap` was written for the dtypes of the trace. Of calls that JAX may
    bring, nothing is known but their program.
    """
    (body,) = compat.bodies_of(op.equation)
    op_plan = plan_as_traced(op, states)
    pairs = zip(states, op.in_avals, strict=True)
    inside = [state and argument_state(aval) for state, aval in pairs]
    inner = plan_inside(body, inside, context, op)
    op_plan.results = [
        State(Strength.HIGH, FLOAT32)
        if state and result and result.strength is not Strength.WEAK
        else state
        for state, result in zip(op_plan.results, inner.results, strict=True)
    ]
    op_plan.run = _runner(op, context, [inner], [list(map(argument_state, op.out_avals))])
    return op_plan
