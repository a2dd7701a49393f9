"""Functions with derivatives of their own: `jax.custom_jvp` and `jax.custom_vjp`."""

import functools
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend import core

from jaxmp._autocast.kinds import FLOAT32, State
from jaxmp._autocast.plan import Call, ResultsIn, plan
from jaxmp._autocast.regions import Region
from jaxmp._autocast.run import run_plan
from jaxmp._autocast.steps import States, Step, alone, in_dtypes
from jaxmp._numerics.dtypes import is_inexact
from jaxmp._program import compat
from jaxmp._program.derivatives import Run, with_derivative, with_passes
from jaxmp._program.op_classes import CONTRACTIONS, KERNELS
from jaxmp._program.program import Op, equations_in


def plan_custom_jvp(
    op: Op, states: States, context: Call, region: Region, results_in: ResultsIn = "low"
) -> Step:
    """Rewrites both the function and its derivative: `relu` is 16-bit for 16-bit operands."""
    body = op.params["call_jaxpr"]
    inside = context.inside(op)
    inner = context.keep(op, body, plan(body, states, inside, results_in=results_in))
    each = zip(op.out_avals, inner.results, strict=True)
    states_of_results = [*inner.results, *(state for aval, state in each if is_inexact(aval))]

    def derivative(program: Any, by: Sequence[int], arguments: list[Any]) -> list[Any]:
        known = [*states, *(states[i] for i in by)]
        results = run_plan(plan(program, known, inside, results_in=results_in), arguments)
        return list(map(as_state, results, states_of_results))

    call = with_derivative(op.equation, functools.partial(run_plan, inner), derivative)
    # A relu of 16-bit operands is no more exact in float32.
    low = any(state is not None and state.dtype != FLOAT32 for state in states)
    again = functools.partial(plan_custom_jvp, op, states, context, region, "float32")
    widened = None if low else again
    return Step(op, in_dtypes(states), inner.results, run=call, widened=widened)


def as_state(value: Any, state: State | None) -> Any:
    return value if state is None else lax.convert_element_type(value, state.dtype)


def plan_custom_vjp(op: Op, states: States, context: Call, region: Region) -> Step:
    """Leaves the function as it was traced, since its gradient belongs to that computation."""
    # In float32 parts no dtype changes, only what its products ask for.
    asks = region.exact and region.precision is not None and _multiplies_itself(op.equation)
    if context.enter_custom_vjp or asks:
        return _enter_custom_vjp(op, states, context)
    step = alone(op, states)
    if region.products is not None and _multiplies_itself(op.equation):
        step.not_float8 = "inside of a jax.custom_vjp"
    return step


def _multiplies_itself(equation: core.JaxprEqn) -> bool:
    """Whether there is a product in a function, outside of the kernels that it calls."""
    programs = compat.sub_jaxprs(equation)
    inside = equations_in(programs, lambda each: each.primitive.name not in KERNELS)
    return any(each.primitive.name in CONTRACTIONS for each in inside)


def _enter_custom_vjp(op: Op, states: States, context: Call) -> Step:
    """Rewrites the forward and the backward pass, which meet in the residuals."""
    inside = context.inside(op)
    body = op.params["call_jaxpr"]
    primal = context.keep(op, body, plan(body, states, inside))
    count = len(primal.results)
    each = zip(op.out_avals, primal.results, strict=True)
    cotangents = [state for aval, state in each if is_inexact(aval)]

    def ahead(jaxpr: Any, arrays: list[Any]) -> tuple[list[Any], Run]:
        forward = plan(jaxpr, states, inside)
        known = [*forward.results[count:], *cotangents]

        def behind(program: Any, by: Sequence[int], arguments: list[Any]) -> list[Any]:
            gradients = run_plan(plan(program, known, inside), arguments)
            return [as_state(x, states[i]) for i, x in zip(by, gradients, strict=True)]

        results = run_plan(forward, arrays)
        return [*map(as_state, results, primal.results), *results[count:]], behind

    call = with_passes(op.equation, functools.partial(run_plan, primal), ahead)
    return Step(op, in_dtypes(states), primal.results, run=call)
