"""The programs of functions with derivatives of their own: `jax.custom_jvp`, `jax.custom_vjp`.

The float32 products of a derivative ask for the precision that those of its function ask for,
unless they say one themselves, as JAX has it for transposes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmp._numerics.precision import is_own, name_of_param
from jaxmp._program.compat import (
    bind,
    bodies_of,
    consts_of,
    open_jaxpr,
    programs_of,
    sub_jaxprs,
    trace_on_mesh,
    with_programs,
)
from jaxmp._program.op_classes import CONTRACTIONS, OPAQUE
from jaxmp._program.program import equations_in

_SymbolicZero = jax.custom_derivatives.SymbolicZero


def has_tangent(value: Any) -> bool:
    """Whether a value can be differentiated: float64 and complex numbers too."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)


def differentiable(equation: core.JaxprEqn) -> list[int]:
    """Returns the arguments with tangents of a function with its own derivative rule.

    Arrays that the function holds are not among them; these come first in the operands.
    """
    held = equation.params["num_consts"]
    avals = [atom.aval for atom in equation.invars]
    return [i for i, aval in enumerate(avals) if i >= held and has_tangent(aval)]


def _multiplies_float32(equation: core.JaxprEqn) -> bool:
    operands: list[Any] = [atom.aval for atom in equation.invars[:2]]
    return equation.primitive.name in CONTRACTIONS and any(
        aval.dtype == jnp.float32 for aval in operands
    )


def _asked_in(equation: core.JaxprEqn) -> Iterator[Any]:
    """Yields what the float32 products in a function ask for, outside of opaque kernels."""
    for each in equations_in(sub_jaxprs(equation), lambda each: each.primitive.name not in OPAQUE):
        if _multiplies_float32(each):
            asked = each.params["precision"]
            yield from asked if isinstance(asked, tuple) else (asked,)


def _trace(
    equation: core.JaxprEqn, fun: Callable[..., Any], avals: Sequence[Any]
) -> core.ClosedJaxpr:
    """Traces a derivative of a call; its float32 products ask for what all those of it ask for."""
    program = trace_on_mesh(fun, avals)
    asked = set(_asked_in(equation))
    one = asked.pop() if len(asked) == 1 else None
    if not is_own(one):
        return program
    levels = jax.lax.Precision.__members__
    level = levels.get(name_of_param(one).upper(), jax.lax.Precision.HIGHEST)  # for an algorithm
    return _asking(program, level, {})


def _asking(program: Any, level: jax.lax.Precision, known: dict[int, Any]) -> core.ClosedJaxpr:
    """Returns a program whose float32 products ask for a level, unless they say one themselves."""

    def told(equation: core.JaxprEqn) -> core.JaxprEqn:
        if _multiplies_float32(equation) and not is_own(equation.params["precision"]):
            return equation.replace(params=equation.params | {"precision": (level, level)})
        if equation.primitive.name in OPAQUE or not bodies_of(equation):
            return equation
        programs = iter([_asking(body, level, known) for body in bodies_of(equation)])
        params = {
            name: with_programs(param, programs)
            for name, param in equation.params.items()
            if programs_of(param)
        }
        return equation.replace(params=equation.params | params)

    if id(program) not in known:  # calls of one function share its program still
        jaxpr = open_jaxpr(program, as_traced=True)
        again = jaxpr.replace(eqns=list(map(told, jaxpr.eqns)))
        known[id(program)] = core.ClosedJaxpr(again, consts_of(program))
    return known[id(program)]


def derivative_of(equation: core.JaxprEqn, by: Sequence[int] | None = None) -> core.ClosedJaxpr:
    """Traces the derivative rule of a `jax.custom_jvp` call.

    Args:
      equation: the call.
      by: the operands that have a tangent; by default all that may have one.

    Returns:
      A jaxpr that takes the operands, and the tangents of some. It returns the results, and the
      tangents of float results.
    """
    avals = [atom.aval for atom in equation.invars]
    floats = differentiable(equation) if by is None else by

    def derivative(*args: Any) -> list[Any]:
        primals, tangents = list(args[: len(avals)]), args[len(avals) :]

        def of_floats(*given: Any) -> list[Any]:
            values = list(primals)
            for i, value in zip(floats, given, strict=True):
                values[i] = value
            return bind(equation, values)

        out, dots = jax.jvp(of_floats, [primals[i] for i in floats], list(tangents))
        made = zip(dots, equation.outvars, strict=True)
        return [*out, *(dot for dot, result in made if has_tangent(result.aval))]

    return _trace(equation, derivative, [*avals, *(avals[i] for i in floats)])


def zero_tangent(primal: Any) -> Any:
    """Returns the tangent of a value that has none: integers."""
    return np.zeros(primal.shape, jax.dtypes.float0)


# Runs a derivative: from its program, the operands that have a tangent, the arrays of the call and
# these tangents, to the results and the tangents of float results.
Derivative = Callable[
    [core.ClosedJaxpr, Sequence[int], Sequence[Any], list[Any]],
    tuple[Sequence[Any], Sequence[Any]],
]


def with_derivative(
    equation: core.JaxprEqn,
    places: Sequence[int],
    primal: Callable[..., list[Any]],
    derivative: Derivative,
) -> Callable[..., list[Any]]:
    """Returns a `jax.custom_jvp` function whose derivative runs in another way than traced.

    Args:
      equation: the call of a `jax.custom_jvp` function.
      places: for each operand, the number of the array that has its tangent.
      primal: runs the function without its derivative.
      derivative: runs the derivative.

    Returns:
      A function of arrays.
    """

    @jax.custom_jvp
    def call(*arrays: Any) -> list[Any]:
        return primal(*arrays)

    # The rule may ask which arguments have a tangent, and refuse some.
    @functools.partial(call.defjvp, symbolic_zeros=True)
    def rule(arrays: Sequence[Any], tangents: Sequence[Any]) -> Any:
        given = [tangents[place] for place in places]
        by = [i for i in differentiable(equation) if not isinstance(given[i], _SymbolicZero)]
        results, dots = derivative(derivative_of(equation, by), by, arrays, [given[i] for i in by])
        found = iter(dots)
        return results, [next(found) if has_tangent(x) else zero_tangent(x) for x in results]

    return lambda *arrays: list(call(*arrays))


# Runs a backward pass: from its program, the operands to differentiate by, and its arguments, to
# the gradients by these operands.
Behind = Callable[[core.ClosedJaxpr, Sequence[int], list[Any]], Sequence[Any]]
# Runs a forward pass: from its program and the arrays of the call, to its results and residuals,
# and what runs the backward pass.
Ahead = Callable[[core.ClosedJaxpr, list[Any]], tuple[list[Any], Behind]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Backward:
    """The backward pass; the forward pass hands it on with the residuals."""

    program: core.ClosedJaxpr
    by: Sequence[int]
    behind: Behind
    arrays: int


def with_passes(
    equation: core.JaxprEqn, places: Sequence[int], primal: Callable[..., list[Any]], ahead: Ahead
) -> Callable[..., list[Any]]:
    """Returns a `jax.custom_vjp` function whose two passes run in another way than traced.

    Args:
      equation: the call of a `jax.custom_vjp` function.
      places: for each operand, the number of the array that takes its gradient.
      primal: runs the function without its derivative.
      ahead: runs the forward pass.

    Returns:
      A function of arrays.
    """
    floats, count = differentiable(equation), len(equation.outvars)
    made_floats = [i for i, var in enumerate(equation.outvars) if has_tangent(var.aval)]

    @jax.custom_vjp
    def call(*arrays: Any) -> list[Any]:
        return primal(*arrays)

    def forward(*given: Any) -> Any:
        # The function may ask which arguments are differentiated, and refuse some: loops do.
        by = [i for i in floats if given[places[i]].perturbed]
        jaxpr, pulled, residuals = _pulled_back(equation, by)
        made, behind = ahead(jaxpr, [each.value for each in given])
        avals = [*residuals, *(equation.outvars[i].aval for i in made_floats)]
        backward = _Backward(_trace(equation, pulled, avals), by, behind, len(given))
        return made[:count], (backward, made[count:])

    def back(kept: tuple[_Backward, list[Any]], cotangents: list[Any]) -> tuple[Any, ...]:
        backward, residuals = kept
        given = [*residuals, *(_instantiated(cotangents[i]) for i in made_floats)]
        made = backward.behind(backward.program, backward.by, given)
        found = dict(zip((places[i] for i in backward.by), made, strict=True))
        return tuple(map(found.get, range(backward.arrays)))

    # `perturbed` needs symbolic zeros. Without it all floats are differentiated, and loops of
    # Equinox raise an AssertionError without a text.
    call.defvjp(forward, back, symbolic_zeros=True)
    return lambda *arrays: list(call(*arrays))


def _pulled_back(
    equation: core.JaxprEqn, by: list[int]
) -> tuple[Any, Callable[..., list[Any]], list[Any]]:
    """Traces both passes of a call of a `jax.custom_vjp` function.

    Args:
      equation: the call.
      by: the operands to differentiate by.

    Returns:
      The jaxpr of the forward pass, from the operands to the results and the residuals; the
      backward pass, from residuals and the cotangents of float results to gradients; and the types
      of the residuals.
    """
    found: list[Any] = []

    def of_floats(*args: Any) -> Any:
        def only(*given: Any) -> list[Any]:
            values = list(args)
            for i, value in zip(by, given, strict=True):
                values[i] = value
            return bind(equation, values)

        out, pull = jax.vjp(only, *(args[i] for i in by))
        residuals, tree = jax.tree.flatten(pull)
        found[:] = [tree, [jax.typeof(r) for r in residuals]]
        return [*out, *residuals]

    jaxpr = _trace(equation, of_floats, [atom.aval for atom in equation.invars])
    tree, residual_avals = found

    def pulled(*flat: Any) -> list[Any]:
        pull = jax.tree.unflatten(tree, flat[: len(residual_avals)])
        dots = iter(flat[len(residual_avals) :])
        avals = [var.aval for var in equation.outvars]
        return list(pull([next(dots) if has_tangent(x) else zero_tangent(x) for x in avals]))

    return jaxpr, pulled, residual_avals


def _instantiated(cotangent: Any) -> Any:
    """Returns a cotangent as an array; JAX may give a symbol for zeros."""
    zero = isinstance(cotangent, _SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if zero else cotangent
