"""What is a weight, and what are activations.

The gradient of a weight is a sum over the batch, that of activations is not. Which is which, a
program does not say. Taken for a weight is what is made of params alone, and what data is laid
over while it keeps its shape: a mask, noise, frozen numbers. Where a weight meets data otherwise,
activations begin.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jaxmp import _compat
from jaxmp._op_lists import ARRANGEMENTS, CLASSES, OpClass
from jaxmp._reduction._values import Laid, Value, is_float

_SCALES = frozenset({"mul", "div", "pow", "clamp", "select_n"})
_ADDS = frozenset({"add", "add_any", "sub", "max", "min"})


def aval_of(equation: core.JaxprEqn) -> Any:
    """What its first result is like."""
    return equation.outvars[0].aval if equation.outvars else None


def is_arrangement(equation: core.JaxprEqn) -> bool:
    """Whether it puts arrays together, or writes one into another."""
    name = equation.primitive.name
    return name in ARRANGEMENTS or CLASSES.get(name) is OpClass.UPDATE


def of_params_only(values: Sequence[Value]) -> bool:
    """Whether these are params and numbers of the program, with whatever data laid over them."""
    return all(
        not value.rows if value.of_params else value.fixed or not is_float(value.array)
        for value in values
    )


def without_data(operands: Sequence[Value]) -> bool:
    """Whether a product of these is like a param.

    It is not if data was laid over one of them, which may be the activations of a single example.
    """
    return of_params_only(operands) and not any(value.laid for value in operands)


def adjusts(equation: core.JaxprEqn, values: Sequence[Value]) -> bool:
    """Whether data is laid over a param, which stays one: nothing is summed yet.

    A pruned weight, one divided by its spectral norm, a frozen one with a trained difference, one
    of which some rows are frozen. But what data was added to, and activations of the same shape
    now, is a stream of these.
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
    """What is known of results that are weights, beside the arrays."""
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
    """What has no gradient, made of params: which of them are large, or in which order they are."""
    data = any(value.rows or value.laid if value.of_params else not value.fixed for value in values)
    return Value(x, fixed=not (data or is_float(x)))


def without_params(x: Any, equation: core.JaxprEqn, values: Sequence[Value]) -> Value:
    """What no param has a part in. What is in a mutable array may be what was written last."""
    if _compat.is_ref(x):
        return Value(x, met=True)
    fixed = all(value.fixed for value in values) and not _calls_back(equation)
    return Value(x, fixed=fixed, met=any(value.met for value in values))


def _calls_back(equation: core.JaxprEqn) -> bool:
    """Whether it asks Python for numbers, which are data though nothing was given."""
    return "callback" in equation.primitive.name or any(
        _calls_back(inner) for program in _compat.sub_jaxprs(equation) for inner in program.eqns
    )


def _common_layout(equation: core.JaxprEqn, values: Sequence[Value]) -> Any:
    """The layout of results of the shape of their operands."""
    layouts = {value.layout for value in values if value.of_params and np.shape(value.array)}
    shapes = {np.shape(value.array) for value in values if is_float(value.array)} - {()}
    results = {var.aval.shape for var in equation.outvars if hasattr(var.aval, "shape")}
    return layouts.pop() if len(layouts) == 1 and shapes == results else None
