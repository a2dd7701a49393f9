"""Counts the floating-point operations of products, and finds the programs inside equations."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxmp._program.compat import open_jaxpr, sub_jaxprs
from jaxmp._program.op_classes import COMBINERS, CUSTOM_DERIVATIVES, DOT, OPAQUE, PRODUCTS


def programs_inside(equation: Any) -> list[Any]:
    """Returns the open jaxprs that run inside an equation; of a `cond`, all branches."""
    name = equation.primitive.name
    if name in OPAQUE or name in COMBINERS or name.startswith("scatter"):
        return []
    if name == "custom_linear_solve":  # its other programs are for derivatives
        return [open_jaxpr(equation.params["jaxprs"].solve)]
    programs = sub_jaxprs(equation)
    # Not the rules, which run only in derivatives.
    return programs[:1] if name in CUSTOM_DERIVATIVES else programs


def is_elementwise(equation: Any) -> bool:
    """Whether a product adds nothing up, and so multiplies numbers one by one.

    It contracts no axes, or axes of one element, as positions `t[:, None] @ rates[None]` do.
    """
    if equation.primitive.name != DOT:
        return False
    (contracted, _), _ = equation.params["dimension_numbers"]
    return all(equation.invars[0].aval.shape[axis] == 1 for axis in contracted)


def products_in(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of all products in a jaxpr, and in the programs inside."""
    for equation in open_jaxpr(jaxpr).eqns:
        yield from products_of(equation)


def products_of(equation: Any) -> Iterator[Any]:
    """Yields an equation if it is a product, and the products in the programs inside."""
    if equation.primitive.name in PRODUCTS and not is_elementwise(equation):
        yield equation
    for program in programs_inside(equation):
        yield from products_in(program)


def product_flops(equation: Any) -> int:
    """Counts two for each multiply-add, as XLA's cost analysis does; 0 if this is not a product.

    Multiplications of a convolution by padding, or by the holes of a dilated input, do not count.
    Each row of a ragged product counts for its own group only.
    """
    name = equation.primitive.name
    if name not in PRODUCTS or is_elementwise(equation):
        return 0
    lhs, rhs = (variable.aval.shape for variable in equation.invars[:2])
    if name == "conv_general_dilated":
        return _convolution(lhs, rhs, equation)
    if name.startswith("scaled_matmul"):  # both operands are (batch, rows, contracted)
        return 2 * math.prod(lhs) * rhs[1]
    if name == "ragged_dot":  # (rows, contracted) and (groups, contracted, columns)
        return 2 * math.prod(lhs) * rhs[-1]
    if name == "ragged_dot_general":
        ragged = equation.params["ragged_dot_dimension_numbers"]
        dimensions = ragged.dot_dimension_numbers
        groups = tuple(ragged.rhs_group_dimensions)
    else:
        dimensions, groups = equation.params["dimension_numbers"], ()
    (_, contracted), (_, batch) = dimensions
    others = {*contracted, *batch, *groups}
    columns = math.prod(size for axis, size in enumerate(rhs) if axis not in others)
    return 2 * math.prod(lhs) * columns


def _convolution(lhs: Any, rhs: Any, equation: Any) -> int:
    params = equation.params
    numbers = params["dimension_numbers"]
    out = equation.outvars[0].aval.shape
    batch, outputs = lhs[numbers.lhs_spec[0]], rhs[numbers.rhs_spec[0]]
    inputs = rhs[numbers.rhs_spec[1]]
    taps = 1
    for i, axis in enumerate(numbers.lhs_spec[2:]):
        taps *= _taps(
            lhs[axis],
            rhs[numbers.rhs_spec[2 + i]],
            out[numbers.out_spec[2 + i]],
            params["window_strides"][i],
            params["padding"][i][0],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
    return 2 * (batch // params["batch_group_count"]) * outputs * inputs * taps


@functools.lru_cache(maxsize=4096)
def _taps(
    size: int, kernel: int, out: int, stride: int, padding: int, holes: int, dilation: int
) -> int:
    """Counts the pairs of an output and a kernel element that meet an element of the input."""
    # Padding and the holes of a dilated input meet none, as in XLA's cost analysis.
    positions = np.arange(out)[:, None] * stride + np.arange(kernel) * dilation - padding
    inside = (positions >= 0) & (positions < (size - 1) * holes + 1) & (positions % holes == 0)
    return int(inside.sum())
