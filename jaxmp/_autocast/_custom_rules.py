"""Functions with derivatives of their own: `jax.custom_jvp` and `jax.custom_vjp`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp import _compat
from jaxmp._autocast._flow import Context, Plan, ResultsIn, plan
from jaxmp._autocast._interpreter import run
from jaxmp._autocast._kinds import ACTIVATIONS, Kind, State
from jaxmp._autocast._program import Op, read
from jaxmp._autocast._scopes import Region
from jaxmp._autocast._steps import States, Step, alone, kinds_of


def custom_jvp(
    op: Op, states: States, context: Context, region: Region, *, widened: bool = False
) -> Step:
    """Both the function and its derivative are rewritten: `relu` is 16-bit for 16-bit operands."""
    body = op.params["call_jaxpr"]
    inside = context.inside(op)
    results_in: ResultsIn = "float32" if widened else "low"
    inner = context.keep(op, body, plan(read(body), states, inside, results_in=results_in))
    wants = [state and state.dtype for state in states]

    @jax.custom_jvp
    def call(*args: Any) -> list[Any]:
        return run(inner, args)

    @call.defjvp
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        floats = _differentiable(op)
        derivative = plan(
            read(_jvp_jaxpr(op, floats)),
            [*states, *(states[i] for i in floats)],
            inside,
            results_in=results_in,
        )
        made = run(derivative, [*primals, *(tangents[i] for i in floats)])
        count = len(inner.results)
        out = [_as(x, state) for x, state in zip(made[:count], inner.results, strict=True)]
        dots = iter(made[count:])
        tangents_out = []
        for primal, state in zip(out, inner.results, strict=True):
            dot = next(dots) if has_tangent(primal) else _zero_tangent(primal)
            tangents_out.append(_as(dot, state))
        return out, tangents_out

    def bind(op: Op, values: list[Any]) -> list[Any]:
        return list(call(*values))

    # A norm, a relu and a mean are float32 all along.
    keep = widened or Kind.LOW in kinds_of(states)
    again = None if keep else lambda: custom_jvp(op, states, context, region, widened=True)
    return Step(op, wants, inner.results, run=bind, widened=again)


def has_tangent(value: Any) -> bool:
    """Whether a value can be differentiated: float64 and complex numbers too."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)


def _as(value: Any, state: State | None) -> Any:
    return value if state is None else lax.convert_element_type(value, state.dtype)


def _zero_tangent(primal: Any) -> Any:
    return np.zeros(primal.shape, jax.dtypes.float0)


def _differentiable(op: Op) -> list[int]:
    """Which arguments have tangents: not the arrays that the function holds, which come first."""
    held = op.params["num_consts"]
    return [i for i, aval in enumerate(op.in_avals) if i >= held and has_tangent(aval)]


def _jvp_jaxpr(op: Op, floats: list[int]) -> Any:
    """The derivative as it was traced: of the primals and the tangents of floats, to both."""
    avals = op.in_avals
    rest = [i for i in range(len(avals)) if i not in floats]

    def derivative(*args: Any) -> list[Any]:
        primals, tangents = list(args[: len(avals)]), args[len(avals) :]

        def of_floats(*given: Any) -> list[Any]:
            values: list[Any] = [None] * len(avals)
            for i, value in zip(floats, given, strict=True):
                values[i] = value
            for i in rest:
                values[i] = primals[i]
            return _compat.bind(op.equation, values)

        out, dots = jax.jvp(of_floats, [primals[i] for i in floats], list(tangents))
        made = zip(dots, op.out_avals, strict=True)
        return [*out, *(dot for dot, aval in made if has_tangent(aval))]

    return _compat.trace(derivative, [*avals, *(avals[i] for i in floats)])


def custom_vjp(op: Op, states: States, context: Context, region: Region) -> Step:
    """The function runs as it was traced, since its gradient belongs to what it computes."""
    if context.enter_custom_vjp:
        return _entered(op, states, context)
    if not ACTIVATIONS & kinds_of(states):
        return alone(op, states)
    step = alone(op, states, exact=Kind.BRIEF)
    activations = [
        aval
        for state, aval in zip(states, op.in_avals, strict=True)
        if state is not None and state.kind in ACTIVATIONS
    ]
    step.results = [
        state._replace(kind=Kind.FACTOR)
        if state is not None and state.kind is Kind.BRIEF and _is_statistic(aval, activations)
        else state
        for state, aval in zip(step.results, op.out_avals, strict=True)
    ]
    return step


def _is_statistic(aval: Any, activations: list[Any]) -> bool:
    """Whether a result sums up activations: a loss, the logarithm of a sum of exponentials."""
    largest = max(activations, key=lambda given: given.size)
    return bool(aval.size < largest.size and aval.ndim < largest.ndim)


def _entered(op: Op, states: States, context: Context) -> Step:
    """Rewrites the forward and the backward pass, which meet in the residuals."""
    avals = op.in_avals
    inside = context.inside(op)
    floats = _differentiable(op)
    body = op.params["call_jaxpr"]
    primal = context.keep(op, body, plan(read(body), states, inside))
    backward: list[Plan] = []

    def original(*args: Any) -> list[Any]:
        return _compat.bind(op.equation, args)

    @jax.custom_vjp
    def call(*args: Any) -> list[Any]:
        return run(primal, args)

    def forward(*args: Any) -> Any:
        found: list[Any] = []

        def of_floats(*all_args: Any) -> Any:
            def only(*given: Any) -> list[Any]:
                values = list(all_args)
                for i, value in zip(floats, given, strict=True):
                    values[i] = value
                return original(*values)

            out, pull = jax.vjp(only, *(all_args[i] for i in floats))
            residuals, tree = jax.tree.flatten(pull)
            found[:] = [tree, [jax.typeof(r) for r in residuals]]
            return [*out, *residuals]

        jaxpr = _compat.trace(of_floats, avals)
        tree, residual_avals = found
        ahead = plan(read(jaxpr), states, inside)
        made = run(ahead, args)
        count = len(primal.results)
        out = [_as(x, state) for x, state in zip(made[:count], primal.results, strict=True)]
        residual_states = ahead.results[count:]

        def pulled(*flat: Any) -> list[Any]:
            pull = jax.tree.unflatten(tree, flat[: len(residual_avals)])
            return list(pull(list(flat[len(residual_avals) :])))

        back = _compat.trace(pulled, [*residual_avals, *op.out_avals])
        backward[:] = [plan(read(back), [*residual_states, *primal.results], inside)]
        return out, made[count:]

    def back(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        made = iter(run(backward[0], [*residuals, *cotangents]))
        given: list[Any] = [None] * len(avals)
        for i in floats:
            state = states[i]
            given[i] = _as(next(made), state)
        return tuple(given)

    call.defvjp(forward, back)

    def bind(op: Op, values: list[Any]) -> list[Any]:
        return list(call(*values))

    return Step(op, [state and state.dtype for state in states], primal.results, run=bind)
