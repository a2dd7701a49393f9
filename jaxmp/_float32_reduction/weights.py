"""Tells weights from activations.

The gradient of a weight is a sum over the batch, the gradient of an activation is not. A program
does not say which is which. Here a value made of params alone counts as a weight. It stays a weight
where data is laid over it without changing its shape: a mask, noise, frozen numbers. Any other
operation of a weight with data gives activations.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jaxmp._float32_reduction.values import Laid, Value, is_float
from jaxmp._jaxpr import compat
from jaxmp._jaxpr.op_classes import ARRANGEMENTS, CLASSES, OpClass

_SCALES = frozenset({"mul", "div", "pow", "clamp", "select_n"})
_ADDS = frozenset({"add", "add_any", "sub", "max", "min"})


def aval_of(equation: core.JaxprEqn) -> Any:
    """Returns the aval of the first result; None if there is no result."""
    return equation.outvars[0].aval if equation.outvars else None


def is_arrangement(equation: core.JaxprEqn) -> bool:
    """Whether an equation puts arrays together, or writes one into another."""
    name = equation.primitive.name
    return name in ARRANGEMENTS or CLASSES.get(name) is OpClass.UPDATE


def of_params_only(values: Sequence[Value]) -> bool:
    """Whether all values are params or numbers of the program; data may be laid over them."""
    return all(
        not value.rows if value.of_params else value.fixed or not is_float(value.array)
        for value in values
    )


def without_data(operands: Sequence[Value]) -> bool:
    """Whether a product of these operands is like a param.

    It is not if data was laid over an operand, which may be the activations of one example.
    """
    return of_params_only(operands) and not any(value.laid for value in operands)


def adjusts(equation: core.JaxprEqn, values: Sequence[Value]) -> bool:
    """Whether an equation lays data over a param that stays a param: nothing is summed yet.

    Examples: a pruned weight, a weight divided by its spectral norm, a frozen weight plus a trained
    difference, a weight with some frozen rows. But a param to which data was added before, and
    which now meets activations of its shape, is a stream of activations.
    """
    shape = getattr(aval_of(equation), "shape", None)
    own = [value for value in values if value.of_params and not (value.rows or value.repeated)]
    streams = [np.shape(value.array) for value in values if value.met and is_float(value.array)]
    if is_arrangement(equation):
        return not streams and any(np.size(value.array) > 1 for value in own)
    if equation.primitive.name not in _SCALES | _ADDS:
        return False
    if shape in streams and any(value.laid is Laid.ADDED for value in values):
        return False
    return any(value.array.shape == shape for value in own)


def known_of(equation: core.JaxprEqn, values: Sequence[Value]) -> dict[str, Any]:
    """Returns the fields of results that are weights, apart from their arrays."""
    params = [value for value in values if value.of_params]
    laid = [value.laid for value in params]
    rows = any(value.rows for value in params)
    data = [value for value in values if not (value.of_params or value.fixed)]
    if is_arrangement(equation):  # integers say where to write, and choose nothing
        data = [value for value in data if is_float(value.array)]
    if data:
        if adjusts(equation, values):
            laid.append(Laid.SCALED if equation.primitive.name in _SCALES else Laid.ADDED)
        else:
            rows = True
    return {
        "layout": _common_layout(equation, values),
        "rows": rows,
        "laid": max(laid),
        "repeated": all(value.repeated or not np.shape(value.array) for value in params),
    }


def compared(x: Any, values: Sequence[Value]) -> Value:
    """Wraps a result without a gradient: which params are large, or how they are ordered."""
    data = any(value.rows or value.laid if value.of_params else not value.fixed for value in values)
    return Value(x, fixed=not (data or is_float(x)))


def without_params(x: Any, equation: core.JaxprEqn, values: Sequence[Value]) -> Value:
    """Wraps the result of an operation without params.

    A mutable reference counts as an activation: its contents are unknown.
    """
    if compat.is_ref(x):
        return Value(x, met=True)
    fixed = all(value.fixed for value in values) and not _calls_back(equation)
    return Value(x, fixed=fixed, met=any(value.met for value in values))


def _calls_back(equation: core.JaxprEqn) -> bool:
    """Whether an equation asks Python for numbers, which are data even without operands."""
    return "callback" in equation.primitive.name or any(
        _calls_back(inner) for program in compat.sub_jaxprs(equation) for inner in program.eqns
    )


def _common_layout(equation: core.JaxprEqn, values: Sequence[Value]) -> Any:
    """Returns the layout of results that have the shape of their operands, or None."""
    layouts = {value.layout for value in values if value.of_params and np.shape(value.array)}
    shapes = {np.shape(value.array) for value in values if is_float(value.array)} - {()}
    results = {var.aval.shape for var in equation.outvars if hasattr(var.aval, "shape")}
    return layouts.pop() if len(layouts) == 1 and shapes == results else None
