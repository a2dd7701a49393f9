"""Runs a program again, with float32 gradients of values that are made of params.

It computes the same values as before. A value made of params alone also has a float32 copy, for its
derivative only, until it meets activations. There its gradient becomes a sum over the batch, and
over the devices among which the batch is divided.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxmp._float32_reduction.control_flow import rule_of
from jaxmp._float32_reduction.custom_derivatives import own_derivative_rule
from jaxmp._float32_reduction.open_sums import Sums, open_product, opened, reads_openly
from jaxmp._float32_reduction.values import FLOAT32, Origin, Value, is_short, like_param
from jaxmp._float32_reduction.weights import (
    aval_of,
    common_layout,
    is_arrangement,
    lays_data_over,
    of_params_only,
    origin_of,
    without_data,
    without_gradient,
    without_params,
)
from jaxmp._mesh.layout import layout_after
from jaxmp._numerics.dtypes import is_half, is_half_or_float32, is_inexact
from jaxmp._primitives.float32_sums import gather, gathers
from jaxmp._primitives.mixed_product import detach, product, with_derivatives
from jaxmp._primitives.operands import ProductOperand, operands_of
from jaxmp._primitives.varying import varying_alike, varying_axes
from jaxmp._program import compat
from jaxmp._program.evaluate import Cells, Interpreter, evaluate
from jaxmp._program.op_classes import (
    ADDS,
    CLASSES,
    CONTRACTIONS,
    CUSTOM_DERIVATIVES,
    LINEAR_MOVES,
    MIXED_SHAPES,
    MULTIPLIES,
    REPEATS,
    SCALES,
    OpClass,
)
from jaxmp._program.parts import PartCache
from jaxmp._program.program import Op, Program, numbers, read

Rule = Callable[[core.JaxprEqn, list[Value]], list[Value] | None]

# Smooth functions, which can be evaluated in any float dtype.
_ELEMENTWISE = frozenset({OpClass.PROMOTE, OpClass.FLOAT32, OpClass.RANGE})
_ARITHMETIC = _ELEMENTWISE | {OpClass.SUM}


def with_float32_gradients(closed: core.ClosedJaxpr, arguments: Sequence[Value]) -> list[Value]:
    """Runs a program; the results that are made of params are marked as such."""
    return evaluate(read(closed), arguments, _Reduction())


class _Reduction(Interpreter[Value]):
    """Computes what was traced; values that are made of params have a float32 array too."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.shared = PartCache()

    # NumPy arrays are a part of the program, or `w * np.tril(...)` would be an activation.
    def constant(self, value: Any) -> Value:
        return _number(value) if isinstance(value, np.ndarray) else Value(value)

    def literal(self, literal: core.Literal) -> Value:
        return _number(literal.val)

    def operands(self, op: Op, cells: Cells[Value]) -> list[Value]:
        if op.name in MULTIPLIES:
            # Under a checkpoint a param is gathered once for all uses. Elsewhere each product
            # gathers it, so that it is freed in between.
            for number in numbers(op.inputs):
                value = cells[number]
                if value.layout is not None and value.layout.recomputed and is_half(value.array):
                    cells[number] = value.for_products()
        return super().operands(op, cells)

    def results(self, program: Program, cells: Cells[Value]) -> list[Value]:
        return [
            _number(compat.number(atom))  # an array
            if isinstance(atom, core.Literal)
            else _finish_gather(cells[atom])
            for atom in program.outputs
        ]

    def operation(self, op: Op, operands: list[Value]) -> list[Value]:
        summed = [value.summed for value in operands]
        if reads_openly(op, summed):
            arrays = opened(op, _arrays_of(operands), summed)
            operands = [x._replace(array=y) for x, y in zip(operands, arrays, strict=True)]
        are_summed = self.sums.through(op, summed)
        pairs = zip(self._run(op, operands), are_summed, strict=True)
        return [x._replace(summed=is_summed and x.array.dtype == FLOAT32) for x, is_summed in pairs]

    def _run(self, op: Op, values: list[Value]) -> list[Value]:
        equation, name = op.equation, op.name
        if jax.sharding.get_abstract_mesh().manual_axes:
            values = _varying_as_traced(equation, values)
        if name not in MULTIPLIES:
            values = list(map(_finish_gather, values))
        program_rule = rule_of(op)
        as_traced = name != "pvary" and not any(value.of_params for value in values)
        if as_traced and program_rule is not None:
            reads_sums = self.sums.are_read_in(op, [value.summed for value in values])
            as_traced = not (gathers(equation) or reads_sums)
        if as_traced:
            bind = gather if name == "gather" else compat.bind
            arrays = bind(equation, _arrays_of(values))
            return [without_params(x, equation, values) for x in arrays]
        alone = of_params_only(values)
        like_params = alone or lays_data_over(equation, values)
        if alone and is_arrangement(equation):
            # Without a gather, parts of params would move from device to device.
            values = [value.in_place() for value in values]
        elif not alone and like_params and name not in SCALES:
            # An added value may be an activation, which is not laid out as the params are. A factor
            # is more likely a mask or a scale.
            values = [value.in_place() for value in values]
        rule = REDUCTIONS.get(name)
        if rule is None and like_params and CLASSES.get(name) in _ARITHMETIC:
            rule = _arithmetic
        if name in CUSTOM_DERIVATIVES:
            program_rule = own_derivative_rule
        if program_rule is not None:
            results = program_rule(self, op, values)
        else:
            results = rule(equation, values) if rule else None
        if results is None:
            values = list(map(_finish_gather, values))
            results = (_run_on_params if like_params else _run_on_activations)(equation, values)
        return results


def _finish_gather(value: Value) -> Value:
    return value.in_place() if value.is_gathered else value


def _number(x: Any) -> Value:
    return Value(x, origin=Origin.NUMBER)


def _activation(x: Any) -> Value:
    return Value(x, origin=Origin.ACTIVATION)


def _varying_as_traced(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Makes operands in a `shard_map` vary alike, if they did when the program was traced.

    In a branch, params vary as the index of the branch does; then numbers of the program must too.
    """
    if len({varying_axes(atom.aval) for atom in equation.invars}) > 1:
        return values
    arrays = _arrays_of(values)
    alike = zip(values, varying_alike(arrays), strict=True)
    return [
        value.varying_as(x) if value.of_params else value._replace(array=x) for value, x in alike
    ]


def _arrays_of(values: Sequence[Value]) -> list[Any]:
    return [value.array for value in values]


def _floats(values: Sequence[Value]) -> list[Any]:
    return [value.array for value in values if is_inexact(value.array)]


def _run_on_activations(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Runs an operation in which params meet activations."""
    name = equation.primitive.name
    shape: Any = getattr(aval_of(equation), "shape", None)
    spreads = CLASSES.get(name) in _ELEMENTWISE and name not in MIXED_SHAPES
    if not (spreads and any(v.of_params and v.array.shape != shape for v in values)):
        # A program inside takes operands as it was traced, and makes them vary itself.
        others = [] if compat.sub_jaxprs(equation) else _floats(values)
        results = compat.bind(equation, [value.operand(others) for value in values])
        return list(map(_activation, results))

    # A bias may have dimensions of size 1: its gradient is a sum over them.
    def spread(values: list[Value]) -> list[Any]:
        values = [value.in_place() for value in values]
        others = _floats(values)
        return compat.bind(equation, [v.broadcast(shape).operand(others) for v in values])

    # A product keeps its operands for its derivative: the scale, and not its broadcast copy.
    run = spread if name in ADDS else jax.checkpoint(spread, prevent_cse=False)
    return list(map(_activation, run(values)))


def _run_on_params(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Runs an operation on params alone; its results are like params."""
    origin, layout = origin_of(equation, values), common_layout(equation, values)
    results = compat.bind(equation, [value.ungathered() for value in values])
    return [
        like_param(open_product(equation, x), origin, layout)
        if is_half_or_float32(x) and not compat.is_ref(x)
        else without_gradient(x, values)
        for x in results
    ]


def _convert(equation: core.JaxprEqn, values: list[Value]) -> list[Value] | None:
    (value,) = values
    target = equation.params["new_dtype"]
    if not (is_short(value.array.dtype) and is_short(target)):
        return None
    (array,) = compat.bind(equation, [value.array])
    return [value._replace(array=array if value.array.dtype == target else detach(array))]


def _move(equation: core.JaxprEqn, values: list[Value]) -> list[Value] | None:
    name, value = equation.primitive.name, values[0]
    if not value.of_params or any(x.of_params for x in values[1:]):
        return None
    # A transpose moves the split dimension along; a reshape may not, and then gathers.
    layout = layout_after(value.layout, equation)
    if layout is None and value.layout is not None:
        value = value.in_place()
    others = _arrays_of(values[1:])
    arrays = compat.bind(equation, [value.array, *others])
    sources = arrays if value.exact else compat.bind(equation, [value.source, *others])
    origin = value.origin
    # `x + b[None]`: a bias at the shape of activations is no weight, or all activations after it
    # would be weights.
    if name in REPEATS and arrays[0].size > value.array.size:
        origin = max(origin, Origin.REPEATED)
    # As a weight, the gradient of a table would be stored in float32 for each token.
    if name == "gather" and any(x.origin is not Origin.NUMBER for x in values[1:]):
        origin = Origin.ROWS
    return [Value(x, source, layout, origin) for x, source in zip(arrays, sources, strict=True)]


def _arithmetic(equation: core.JaxprEqn, values: list[Value]) -> list[Value] | None:
    """Runs arithmetic on params alone twice: for the value, and in float32 for its gradient."""
    floats = _floats(values)
    if not floats or not all(map(is_half, floats)):
        return None
    if equation.params.get("out_dtype") is not None:
        return None
    arrays = compat.bind(equation, _arrays_of(values))
    if any(map(is_inexact, arrays)) and not all(map(is_half, arrays)):
        return None
    if not all(map(is_half, arrays)):  # comparisons
        return [without_gradient(x, values) for x in arrays]
    sources = compat.bind(equation, [value.in_float32() for value in values])
    origin, layout = origin_of(equation, values), common_layout(equation, values)
    return [Value(x, source, layout, origin) for x, source in zip(arrays, sources, strict=True)]


def _contraction(equation: core.JaxprEqn, values: list[Value]) -> list[Value] | None:
    dtypes = {x.dtype for x in _arrays_of(values[:2])}
    dtype = aval_of(equation).dtype
    if len(dtypes) != 1 or dtype not in (FLOAT32, *dtypes):
        return None
    # A float32 product has float32 gradients by itself. It is run here only to gather its params,
    # so that the backward pass gathers them again and does not store them whole.
    layouts = [value.layout for value in values[:2] if value.layout is not None]
    gathers_float32 = FLOAT32 in dtypes and any(x.dtype in (None, FLOAT32) for x in layouts)
    if not gathers_float32 and not is_half(values[0].array):
        return None
    params = {**equation.params, "preferred_element_type": dtype}
    triples = (value.product_operand() for value in values[:2])
    operands, sources, gathers = zip(*triples, strict=True)
    arrays = [*operands, *_arrays_of(values[2:])]
    result = product(equation.primitive, params, arrays, sources, gathers)
    if without_data(values):
        return [like_param(open_product(equation, result))]
    return [_activation(result)]


def _hold(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Holds an operand of a product; another equation supplies its gradient."""
    (value,) = values
    return [Value(*compat.bind(equation, [value.in_place().array]))]


def _float8_encode(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Rounds a param to float8 before its gather, so that codes travel."""
    (value,) = values
    codes, scale = compat.bind(equation, [value.array])
    return [value._replace(array=codes), without_gradient(scale, values)]


def _float32_gradient(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Binds the `float32_gradient` of autocast again, with its params gathered.

    An operand that was computed from params gets its source here; autocast knows of none.
    """
    product_map = equation.params["product_map"]
    traced_operands, others = operands_of(values[1:], equation.params["specs"])
    operands, gathers = [], []
    for traced in traced_operands:
        array, source, gather = traced.value.product_operand()
        if traced.source is not None:
            value = traced.source
            # The product gathers its operand, and scatters the gradient to this source.
            value = value if gather or not value.of_params else value.in_place()
            source = value.source if value.of_params else value.array
        operands.append(ProductOperand(array, traced.scale and traced.scale.array, source))
        gathers.append(gather)
    product_map = product_map.gathering(tuple(gathers)) if any(gathers) else product_map
    result = with_derivatives(values[0].operand(), product_map, operands, _arrays_of(others))
    is_weight = without_data([traced.value for traced in traced_operands])
    return [like_param(result) if is_weight else _activation(result)]


def _pass_on(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Runs an operation that returns its operands; gradients go past it."""
    pairs = zip(values, compat.bind(equation, _arrays_of(values)), strict=True)
    return [v._replace(array=x, source=x if v.exact else v.source) for v, x in pairs]


def _constraint(equation: core.JaxprEqn, values: list[Value]) -> list[Value] | None:
    """Constrains the sharding of a value; its gradient keeps that of the param."""
    (value,) = values
    return _pass_on(equation, [value.whole()]) if value.of_params else None


def _vary(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Makes a value vary; in a branch of a `shard_map`, values of params may vary already."""
    (value,) = values
    varying = jax.typeof(value.array).mat.varying
    axes = tuple(axis for axis in equation.params["axes"] if axis not in varying)
    if not axes:
        return [value]
    (array,) = compat.bind(equation, [value.array], axes=axes)
    source = value.source
    if value.of_params:
        source = array if value.exact else compat.bind(equation, [value.source], axes=axes)[0]
    return [value._replace(array=array, source=source)]


REDUCTIONS: dict[str, Rule] = {
    "convert_element_type": _convert,
    "held": _hold,
    "float8_encode": _float8_encode,
    "float32_gradient": _float32_gradient,
    "name": _pass_on,
    "pvary": _vary,
    "optimization_barrier": _pass_on,
    **dict.fromkeys(LINEAR_MOVES, _move),
    **dict.fromkeys(CONTRACTIONS, _contraction),
    "sharding_constraint": _constraint,
}
