"""The programs of functions with derivatives of their own: `jax.custom_jvp`, `jax.custom_vjp`.

The float32 products of a derivative get the precision of those of its function, unless they name
one themselves, as JAX does for transposes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmp._numerics.dtypes import is_inexact
from jaxmp._numerics.precision import is_own, name_of_param
from jaxmp._program import compat
from jaxmp._program.op_classes import CONTRACTIONS, OPAQUE
from jaxmp._program.program import equations_in

_SymbolicZero = jax.custom_derivatives.SymbolicZero


def _differentiable_operands(equation: core.JaxprEqn) -> list[int]:
    """Returns the operands that may have a tangent: not the arrays that the function holds."""
    consts = equation.params["num_consts"]  # these come first
    return [i for i, atom in enumerate(equation.invars) if i >= consts and is_inexact(atom.aval)]


def _multiplies_float32(equation: core.JaxprEqn) -> bool:
    operands: list[Any] = [atom.aval for atom in equation.invars[:2]]
    return equation.primitive.name in CONTRACTIONS and any(
        aval.dtype == jnp.float32 for aval in operands
    )


def _trace(
    equation: core.JaxprEqn, fun: Callable[..., Any], avals: Sequence[Any]
) -> core.ClosedJaxpr:
    """Traces a derivative of a call, with the one precision of all float32 products of the call."""
    with compat.to_be_read():
        program = compat.trace_on_mesh(fun, avals)
    precisions: set[Any] = set()
    # Nobody looks into opaque kernels.
    inside = equations_in(compat.sub_jaxprs(equation), lambda eqn: eqn.primitive.name not in OPAQUE)
    for product in filter(_multiplies_float32, inside):
        param = product.params["precision"]
        precisions.update(param if isinstance(param, tuple) else (param,))
    precision = precisions.pop() if len(precisions) == 1 else None
    if not is_own(precision):
        return program
    levels = jax.lax.Precision.__members__
    name = name_of_param(precision).upper()  # of a level; HIGHEST stands for an algorithm
    return _with_precision(program, levels.get(name, jax.lax.Precision.HIGHEST), {})


def _with_precision(program: Any, level: jax.lax.Precision, programs: dict[int, Any]) -> Any:
    """Returns a program whose float32 products have a precision, unless they name one."""

    def with_level(equation: core.JaxprEqn) -> core.JaxprEqn:
        if _multiplies_float32(equation) and not is_own(equation.params["precision"]):
            return equation.replace(params=equation.params | {"precision": (level, level)})
        bodies = compat.bodies_of(equation)
        if equation.primitive.name in OPAQUE or not bodies:
            return equation
        replacements = [_with_precision(body, level, programs) for body in bodies]
        params = compat.params_with(equation, replacements)
        return equation.replace(params=equation.params | params)

    if id(program) not in programs:  # calls of one function share its program still
        jaxpr = compat.open_jaxpr(program, as_traced=True)
        jaxpr = jaxpr.replace(eqns=list(map(with_level, jaxpr.eqns)))
        is_closed = isinstance(program, core.ClosedJaxpr)
        programs[id(program)] = core.ClosedJaxpr(jaxpr, program.consts) if is_closed else jaxpr
    return programs[id(program)]


def _as_function_of(
    run: Callable[[list[Any]], Any], by: Sequence[int], operands: Sequence[Any]
) -> Callable[..., Any]:
    """Returns a call as a function of some of its operands; the others stay."""

    def call(*values: Any) -> Any:
        arrays = dict(enumerate(operands)) | dict(zip(by, values, strict=True))
        return run(list(arrays.values()))

    return call


def in_standard_form(plain: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of trees by JAX's primitives, with the derivatives of `ours`.

    Exporters inline a `jax.custom_jvp`. What jaxmp reads, or JAX transposes, is `ours` at once.
    """
    if compat.IS_READ.value:
        return ours

    @jax.custom_jvp
    def call(*trees: Any) -> Any:
        return (ours if compat.is_transposed(trees) else plain)(*trees)

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def rule(primals: Any, tangents: Any) -> Any:
        (arrays, tree), leaves = jax.tree.flatten(primals), jax.tree.leaves(tangents)
        by = [i for i, tangent in enumerate(leaves) if not isinstance(tangent, _SymbolicZero)]
        of_some = _as_function_of(lambda x: ours(*jax.tree.unflatten(tree, x)), by, arrays)
        return jax.jvp(of_some, [arrays[i] for i in by], [leaves[i] for i in by])

    return call


def derivative_of(equation: core.JaxprEqn, by: Sequence[int] | None = None) -> core.ClosedJaxpr:
    """Traces the derivative rule of a `jax.custom_jvp` call, by all floats or by these operands.

    The program takes the operands, and the tangents of those that it is by. It returns the results,
    and the tangents of float results.
    """
    avals = [atom.aval for atom in equation.invars]
    floats = _differentiable_operands(equation) if by is None else by

    def derivative(*args: Any) -> list[Any]:
        primals, tangents = args[: len(avals)], args[len(avals) :]
        call = _as_function_of(functools.partial(compat.bind, equation), floats, primals)
        results, dots = jax.jvp(call, [primals[i] for i in floats], list(tangents))
        pairs = zip(dots, equation.outvars, strict=True)
        return [*results, *(dot for dot, result in pairs if is_inexact(result.aval))]

    return _trace(equation, derivative, [*avals, *(avals[i] for i in floats)])


def _with_zeros(floats: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Returns the tangents of values, given those of floats: integers have none."""
    tangents = iter(floats)
    return [
        next(tangents) if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in values
    ]


# Runs a function on its arrays, without its derivative.
Primal = Callable[[Sequence[Any]], list[Any]]
# Runs a program of a derivative, given the operands that are differentiated by, and its arguments.
Run = Callable[[core.ClosedJaxpr, Sequence[int], list[Any]], Sequence[Any]]


def with_derivative(
    equation: core.JaxprEqn, primal: Primal, run: Run, places: Sequence[int] = ()
) -> Primal:
    """Returns a call of a `jax.custom_jvp` function that runs in another way than traced.

    Args:
      equation: the call.
      primal: runs the function.
      run: runs its derivative, which is as `derivative_of` says.
      places: for each operand, the number of the array that has its tangent; by default its own.
    """

    @jax.custom_jvp
    def call(*arrays: Any) -> list[Any]:
        return primal(arrays)

    # The rule may ask which arguments have a tangent, and refuse some.
    @functools.partial(call.defjvp, symbolic_zeros=True)
    def rule(arrays: Sequence[Any], tangents: Sequence[Any]) -> Any:
        operand_tangents = [tangents[place] for place in places or range(len(arrays))]
        floats = _differentiable_operands(equation)
        by = [i for i in floats if not isinstance(operand_tangents[i], _SymbolicZero)]
        program = derivative_of(equation, by)
        with compat.to_be_read():  # JAX transposes what is linear in tangents
            outputs = run(program, by, [*arrays, *(operand_tangents[i] for i in by)])
        results = list(outputs[: len(equation.outvars)])
        return results, _with_zeros(outputs[len(results) :], results)

    return lambda arrays: list(call(*arrays))


# Runs a forward pass: from its program and the arrays of the call, to its results and residuals,
# and what runs the backward pass, to the gradients by the operands.
RunForward = Callable[[core.ClosedJaxpr, list[Any]], tuple[list[Any], Run]]


def with_passes(
    equation: core.JaxprEqn, primal: Primal, run_forward: RunForward, places: Sequence[int] = ()
) -> Primal:
    """Returns a call of a `jax.custom_vjp` function that runs in another way than traced.

    Args:
      equation: the call.
      primal: runs the function without its derivative.
      run_forward: runs its forward pass.
      places: for each operand, the number of the array that takes its gradient; by default its own.
    """
    count = len(equation.outvars)
    floats = [i for i, var in enumerate(equation.outvars) if is_inexact(var.aval)]

    @jax.custom_vjp
    def call(*arrays: Any) -> list[Any]:
        return primal(arrays)

    def forward(*arrays: Any) -> Any:
        operands = range(len(arrays))
        array_of = places or operands
        # The function may ask which arguments are differentiated, and refuse some: loops do.
        by = [i for i in _differentiable_operands(equation) if arrays[array_of[i]].perturbed]
        jaxpr, backward, residuals = _trace_passes(equation, by)
        results, run = run_forward(jaxpr, [array.value for array in arrays])
        avals = [*residuals, *(equation.outvars[i].aval for i in floats)]
        program = _trace(equation, backward, avals)

        def run_backward(arguments: list[Any]) -> tuple[Any, ...]:  # it may not hold arrays
            gradients = zip((array_of[i] for i in by), run(program, by, arguments), strict=True)
            return tuple(map(dict(gradients).get, operands))

        return results[:count], (jax.tree_util.Partial(run_backward), results[count:])

    def back(saved: tuple[Any, list[Any]], cotangents: list[Any]) -> tuple[Any, ...]:
        run_backward, residuals = saved
        # JAX may give a symbol for zeros.
        arrays = [
            jnp.zeros(x.shape, x.dtype) if isinstance(x, _SymbolicZero) else x
            for x in map(cotangents.__getitem__, floats)
        ]
        return run_backward([*residuals, *arrays])

    # `perturbed` needs symbolic zeros. Without it all floats are differentiated, and loops of
    # Equinox raise an AssertionError without a text.
    call.defvjp(forward, back, symbolic_zeros=True)
    return lambda arrays: list(call(*arrays))


def _trace_passes(
    equation: core.JaxprEqn, by: list[int]
) -> tuple[Any, Callable[..., list[Any]], list[Any]]:
    """Traces both passes of a call of a `jax.custom_vjp` function, by these operands.

    Returns the program of the forward pass, from the operands to the results and residuals;
    the backward pass, from residuals and the cotangents of float results to gradients; and the
    types of the residuals.
    """
    trees: list[Any] = []

    def forward(*operands: Any) -> Any:
        call = _as_function_of(functools.partial(compat.bind, equation), by, operands)
        results, pullback = jax.vjp(call, *(operands[i] for i in by))
        residuals, tree = jax.tree.flatten(pullback)
        trees[:] = [tree, [jax.typeof(x) for x in residuals]]
        return [*results, *residuals]

    jaxpr = _trace(equation, forward, [atom.aval for atom in equation.invars])
    tree, residuals = trees

    def backward(*arrays: Any) -> list[Any]:
        pullback = jax.tree.unflatten(tree, arrays[: len(residuals)])
        avals = [var.aval for var in equation.outvars]
        return list(pullback(_with_zeros(arrays[len(residuals) :], avals)))

    return jaxpr, backward, residuals
