"""Functions with derivatives of their own: `jax.custom_jvp` and `jax.custom_vjp`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._autocast.kinds import FLOAT32, State
from jaxmp._autocast.plan import Call, Plan, ResultsIn, plan
from jaxmp._autocast.regions import Region
from jaxmp._autocast.run import run_plan
from jaxmp._autocast.steps import States, Step, alone
from jaxmp._jaxpr import compat
from jaxmp._jaxpr.program import Op, derivative_of, differentiable, has_tangent, read


def custom_jvp(
    op: Op, states: States, context: Call, region: Region, results_in: ResultsIn = "low"
) -> Step:
    """Rewrites both the function and its derivative: `relu` is 16-bit for 16-bit operands."""
    body = op.params["call_jaxpr"]
    inside = context.inside(op)
    inner = context.keep(op, body, plan(read(body), states, inside, results_in=results_in))
    wants = [state and state.dtype for state in states]

    @jax.custom_jvp
    def call(*args: Any) -> list[Any]:
        return run_plan(inner, args)

    @call.defjvp
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        floats = differentiable(op.equation)
        derivative = plan(
            read(derivative_of(op.equation)),
            [*states, *(states[i] for i in floats)],
            inside,
            results_in=results_in,
        )
        made = run_plan(derivative, [*primals, *(tangents[i] for i in floats)])
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

    # A relu of 16-bit operands is no more exact in float32.
    low = any(state is not None and state.dtype != FLOAT32 for state in states)
    again = functools.partial(custom_jvp, op, states, context, region, "float32")
    return Step(op, wants, inner.results, run=bind, widened=None if low else again)


def _as(value: Any, state: State | None) -> Any:
    return value if state is None else lax.convert_element_type(value, state.dtype)


def _zero_tangent(primal: Any) -> Any:
    return np.zeros(primal.shape, jax.dtypes.float0)


def custom_vjp(op: Op, states: States, context: Call, region: Region) -> Step:
    """Leaves the function as it was traced, since its gradient belongs to that computation."""
    if context.enter_custom_vjp:
        return _enter_custom_vjp(op, states, context)
    return alone(op, states)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Backward:
    """The plan of a backward pass; the forward pass hands it on with the residuals.

    Attributes:
      plan: computes the gradients from the residuals and the cotangents.
      by: the arguments to differentiate by.
    """

    plan: Plan
    by: list[int]


def _enter_custom_vjp(op: Op, states: States, context: Call) -> Step:
    """Rewrites the forward and the backward pass, which meet in the residuals."""
    inside = context.inside(op)
    floats = differentiable(op.equation)
    made_floats = [i for i, aval in enumerate(op.out_avals) if has_tangent(aval)]
    body = op.params["call_jaxpr"]
    primal = context.keep(op, body, plan(read(body), states, inside))

    @jax.custom_vjp
    def call(*args: Any) -> list[Any]:
        return run_plan(primal, args)

    def forward(*given: Any) -> Any:
        # The function may ask which arguments are differentiated, and refuse some: loops do.
        by = [i for i in floats if given[i].perturbed]
        args = [each.value for each in given]
        jaxpr, pulled, residual_avals = _pulled_back(op, by)
        ahead = plan(read(jaxpr), states, inside)
        made = run_plan(ahead, args)
        count = len(primal.results)
        out = [_as(x, state) for x, state in zip(made[:count], primal.results, strict=True)]
        back = compat.trace(pulled, [*residual_avals, *(op.out_avals[i] for i in made_floats)])
        known = [*ahead.results[count:], *(primal.results[i] for i in made_floats)]
        backward = plan(read(back), known, inside)
        return out, (_Backward(backward, by), made[count:])

    def back(kept: tuple[_Backward, list[Any]], cotangents: list[Any]) -> tuple[Any, ...]:
        backward, residuals = kept
        dots = [_instantiated(cotangents[i]) for i in made_floats]
        made = run_plan(backward.plan, [*residuals, *dots])
        found = dict(zip(backward.by, made, strict=True))
        return tuple(_as(found[i], state) if i in found else None for i, state in enumerate(states))

    call.defvjp(forward, back, symbolic_zeros=True)

    def bind(op: Op, values: list[Any]) -> list[Any]:
        return list(call(*values))

    return Step(op, [state and state.dtype for state in states], primal.results, run=bind)


def _pulled_back(op: Op, by: list[int]) -> tuple[Any, Callable[..., list[Any]], list[Any]]:
    """Returns the traced forward pass, the backward pass, and the avals of the residuals."""
    found: list[Any] = []

    def of_floats(*args: Any) -> Any:
        def only(*given: Any) -> list[Any]:
            values = list(args)
            for i, value in zip(by, given, strict=True):
                values[i] = value
            return compat.bind(op.equation, values)

        out, pull = jax.vjp(only, *(args[i] for i in by))
        residuals, tree = jax.tree.flatten(pull)
        found[:] = [tree, [jax.typeof(r) for r in residuals]]
        return [*out, *residuals]

    jaxpr = compat.trace(of_floats, op.in_avals)
    tree, residual_avals = found

    def pulled(*flat: Any) -> list[Any]:
        pull = jax.tree.unflatten(tree, flat[: len(residual_avals)])
        dots = iter(flat[len(residual_avals) :])
        each = [next(dots) if has_tangent(aval) else _zero_tangent(aval) for aval in op.out_avals]
        return list(pull(each))

    return jaxpr, pulled, residual_avals


def _instantiated(cotangent: Any) -> Any:
    zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if zero else cotangent
