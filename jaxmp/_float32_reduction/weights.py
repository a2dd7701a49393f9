"""Tells weights from activations, by what a value is made of.

The gradient of a weight is a sum over the batch, the gradient of an activation is not. A program
does not say which is which. Here a value made of params alone counts as a weight. It stays a weight
where data is laid over it at its own shape: a mask, noise, frozen numbers. Any other operation of a
weight with data gives activations.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from jaxmp._float32_reduction.values import Origin, Value, like_param
from jaxmp._numerics.dtypes import is_half_or_float32, is_inexact
from jaxmp._program import compat
from jaxmp._program.op_classes import ARRANGEMENTS, CLASSES, LAID_ADDED, LAID_SCALED, OpClass
from jaxmp._program.program import equations_in

_LAID_OVER = (Origin.SCALED, Origin.ADDED)
_OF_DATA = (Origin.DATA, Origin.ACTIVATION, Origin.ROWS)


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
        value.origin is not Origin.ROWS
        if value.of_params
        else value.origin is Origin.NUMBER or not is_inexact(value.array)
        for value in values
    )


def is_alone(value: Value) -> bool:
    """Whether a value is made of params and the program's own numbers alone."""
    return value.origin in (Origin.NUMBER, Origin.WEIGHT, Origin.REPEATED)


def have_data(values: Sequence[Value]) -> bool:
    """Whether there is data among the operands: integers too, and rows that data chose."""
    return any(value.origin in _OF_DATA for value in values)


def without_data(operands: Sequence[Value]) -> bool:
    """Whether a product of these operands is like a param."""
    # An operand with data laid over it may be the activations of one example.
    return of_params_only(operands) and not any(value.origin in _LAID_OVER for value in operands)


def lays_data_over(equation: core.JaxprEqn, values: Sequence[Value]) -> bool:
    """Whether an equation lays data over a param that stays a param: nothing is summed yet.

    Examples: a pruned weight, a weight divided by its spectral norm, a frozen weight plus a trained
    difference, a weight with some frozen rows.
    """
    shape = getattr(aval_of(equation), "shape", None)
    own = [value for value in values if value.origin in (Origin.WEIGHT, *_LAID_OVER)]
    activations = [value.array for value in values if value.origin is Origin.ACTIVATION]
    streams = [np.shape(x) for x in activations if is_inexact(x)]
    if is_arrangement(equation):
        # A single number, such as a padding value, makes no weight of what it is written into.
        return not streams and any(np.size(value.array) > 1 for value in own)
    if equation.primitive.name not in LAID_SCALED | LAID_ADDED:
        return False
    # Data was added before, and activations of this shape come now: `x + f(x)` of one unbatched
    # sequence, a stream. As a weight, all activations behind it would be stored in float32.
    if shape in streams and any(value.origin is Origin.ADDED for value in values):
        return False
    return any(value.array.shape == shape for value in own)


def mixed_results(results: Sequence[Any], values: Sequence[Value]) -> list[Value]:
    """Wraps the results of a program inside an operation, in which params have met data."""
    are_rows = of_params_only(values)  # integers have chosen them
    return [
        like_param(x, Origin.ROWS)
        if are_rows and is_half_or_float32(x)
        else Value(x, origin=Origin.ACTIVATION)
        for x in results
    ]


def origin_of(equation: core.JaxprEqn, values: Sequence[Value]) -> Origin:
    """Returns the origin of results that are weights."""
    params = [value for value in values if value.of_params]
    data = [value for value in values if value.origin in _OF_DATA]
    if is_arrangement(equation):  # integers say where to write, and choose nothing
        data = [value for value in data if is_inexact(value.array)]
    if data and not lays_data_over(equation, values):
        return Origin.ROWS
    # Two origins, as data that is added twice makes a stream: `x + f(x)`.
    laid = Origin.SCALED if equation.primitive.name in LAID_SCALED else Origin.ADDED
    # A bias that is laid out along a weight is a part of the weight.
    arrays = [value for value in params if np.shape(value.array)] or params
    own = [value.origin for value in arrays if value.origin is not Origin.REPEATED]
    return max([*own, laid] if data else own, default=Origin.REPEATED)


def without_gradient(x: Any, values: Sequence[Value]) -> Value:
    """Wraps a result that says which params are large, or how they are ordered."""
    data = is_inexact(x) or not all(map(is_alone, values))
    return Value(x, origin=Origin.DATA if data else Origin.NUMBER)


def without_params(x: Any, equation: core.JaxprEqn, values: Sequence[Value]) -> Value:
    """Wraps the result of an operation without params."""
    if compat.is_ref(x):  # its contents are unknown: what was written there last may be activations
        return Value(x, origin=Origin.ACTIVATION)
    least = Origin.DATA if calls_back(equation) else Origin.NUMBER
    return Value(x, origin=max([least, *(value.origin for value in values)]))


def calls_back(equation: core.JaxprEqn) -> bool:
    """Whether an equation asks Python for numbers, which are data even without operands."""
    inside = equations_in(compat.sub_jaxprs(equation))
    return any("callback" in x.primitive.name for x in (equation, *inside))


def common_layout(equation: core.JaxprEqn, values: Sequence[Value]) -> Any:
    """Returns the layout of results that have the shape of their operands, or None."""
    layouts = {value.layout for value in values if value.of_params and np.shape(value.array)}
    shapes = {np.shape(value.array) for value in values if is_inexact(value.array)} - {()}
    results = {var.aval.shape for var in equation.outvars if hasattr(var.aval, "shape")}
    return layouts.pop() if len(layouts) == 1 and shapes == results else None
