"""Rules for functions with derivatives of their own, `jax.custom_jvp` and `jax.custom_vjp`.

Params are used by the function as it was traced. Its derivative rule runs again, with sums of
gradients in float32: on the way back from a gradient, elementwise operations, moves and sums run in
float32, up to the products that they start from. These have float32 results, and 16-bit operands as
before.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._float32_reduction.open_sums import opened
from jaxmp._float32_reduction.values import FLOAT32, Origin, Value, like_param
from jaxmp._float32_reduction.weights import (
    common_layout,
    have_data,
    mixed_results,
    origin_of,
    without_gradient,
)
from jaxmp._numerics.dtypes import is_half, is_half_or_float32
from jaxmp._numerics.rounding import open_cast
from jaxmp._primitives.mixed_product import product
from jaxmp._primitives.varying import varying_as
from jaxmp._program import compat
from jaxmp._program.control_flow import rebind
from jaxmp._program.derivatives import Run, with_derivative, with_passes
from jaxmp._program.evaluate import Cells, Interpreter, evaluate
from jaxmp._program.facts import BackwardAnalysis, shared_programs
from jaxmp._program.op_classes import AFTER_PRODUCTS, CONTRACTIONS, CONTROL_FLOW, IDENTITIES
from jaxmp._program.program import Op, Program, read


def sum_in_float32(
    program: core.ClosedJaxpr, arguments: Sequence[Any], in_float32: Sequence[bool]
) -> list[Any]:
    """Runs a program. These of its results are float32, and so are the sums that make them."""

    def programs(equation: core.JaxprEqn) -> list[Any]:
        return compat.bodies_of(equation) if equation.primitive.name in CONTROL_FLOW else []

    demands = BackwardAnalysis(_float32_operands, shared_programs(programs), decisions=False)
    backward = read(program)
    return evaluate(backward, arguments, _Float32Sums(demands, backward, in_float32))


def _float32_operands(op: Op, in_float32: Sequence[bool]) -> list[bool]:
    """Returns which operands of an operation are read in float32 for these results."""
    candidates = [any(in_float32) and is_half_or_float32(aval) for aval in op.in_avals]
    if op.name in AFTER_PRODUCTS:
        return candidates
    return [is_read and i == 0 and op.name in IDENTITIES for i, is_read in enumerate(candidates)]


class _Float32Sums(Interpreter[Any]):
    """Runs a backward pass; some of its results, and the sums on the way to them, in float32."""

    def __init__(
        self, demands: BackwardAnalysis, program: Program, in_float32: Sequence[bool]
    ) -> None:
        self.demands, self.in_float32 = demands, in_float32
        self.float32_values = demands.values(program, in_float32)

    def float32_results(self, op: Op) -> list[bool]:
        return [number in self.float32_values for number in op.outputs]

    def operands(self, op: Op, cells: Cells[Any]) -> list[Any]:
        in_float32, _ = self.demands.through(op, self.float32_results(op))
        return list(map(_cast_between, super().operands(op, cells), op.in_avals, in_float32))

    def results(self, program: Program, cells: Cells[Any]) -> list[Any]:
        avals = [
            x.aval if isinstance(x, core.Literal) else program.avals[x] for x in program.outputs
        ]
        return list(map(_cast_between, super().results(program, cells), avals, self.in_float32))

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        in_float32, params = self.float32_results(op), op.params
        # A cotangent may be a sum over devices, and so may what is computed from it.
        if op.name in CONTRACTIONS or not any(in_float32):
            may_be = [getattr(x, "dtype", None) == FLOAT32 for x in operands]
            operands = opened(op, operands, may_be)
        if not any(in_float32):
            return compat.bind(op.equation, operands)
        if op.name in CONTROL_FLOW:
            _, demands = self.demands.through(op, in_float32)
            interpreter = [_Float32Sums(self.demands, *demand) for demand in demands]
            pairs = zip(interpreter, compat.bodies_of(op.equation), strict=True)
            makers = [functools.partial(rule.traced, op, body) for rule, body in pairs]
            return rebind(op.equation, operands, makers)
        if op.name == "convert_element_type" and is_half_or_float32(operands[0]):
            return operands
        if op.name.startswith("scatter"):  # its own function has the dtype of the trace
            scatter = lax.scatter if op.name == "scatter" else lax.scatter_add
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [scatter(*operands, **{name: params[name] for name in names})]
        if op.name in CONTRACTIONS and is_half(op.out_avals[0]):
            wide, low = {"preferred_element_type": FLOAT32}, op.out_avals[0].dtype
            if any(aval.dtype != low for aval in op.in_avals[:2]):
                return compat.bind(op.equation, operands, **wide)
            # CPUs do not run each such product: not those that `vmap` makes.
            multiply = functools.partial(product, op.equation.primitive, params | wide)
            return [multiply(operands, (None, None), compute=low)]
        return compat.bind(op.equation, operands)


def _cast_between(value: Any, aval: Any, in_float32: bool) -> Any:
    """Returns a value in float32, or else in the 16 bits that its type had."""
    if not is_half(value if in_float32 else aval):
        return value
    dtype = FLOAT32 if in_float32 else aval.dtype
    return value if value.dtype == dtype else open_cast(value, dtype)


def own_derivative_rule(
    interpreter: Interpreter[Value], op: Op, values: list[Value]
) -> list[Value] | None:
    """Runs the function and its forward pass as they are, and its derivative with float32 sums."""
    # The function takes arrays as it was traced, so that the loss keeps its bits.
    alone, layout = not have_data(values), common_layout(op.equation, values)
    values = [value._replace(layout=None) if alone else value.whole() for value in values]
    of_params = [value.of_params for value in values]  # derivatives may not hold arrays
    arrays, structure = jax.tree.flatten(values)
    count = len(arrays)

    def operands_of(arrays: Sequence[Any]) -> list[Any]:
        return [value.operand() for value in jax.tree.unflatten(structure, arrays)]

    def primal(arrays: Sequence[Any]) -> list[Any]:
        return compat.bind(op.equation, operands_of(arrays))

    def derivative(program: Any, by: Sequence[int], arguments: list[Any]) -> list[Any]:
        primals, tangents = arguments[:count], arguments[count:]
        operands = jax.tree.unflatten(structure, primals)

        def along(*tangents: Any) -> list[Any]:
            directions = []
            for i, x in zip(by, tangents, strict=True):
                value = operands[i]
                narrow = value.of_params and not value.exact
                array = lax.convert_element_type(x, value.array.dtype) if narrow else x
                source = x if value.of_params else None
                origin = Origin.WEIGHT if value.of_params else Origin.ACTIVATION
                directions.append(Value(array, source, origin=origin))
            results = interpreter.inside(op, program, [*operands, *directions])
            return [value.operand() for value in results[len(op.outputs) :]]

        # A derivative is linear in the tangents, and so its own derivative. Differentiated once
        # more, with tangents that come in as params do, its products get float32 transposes.
        zeros = [varying_as(jnp.zeros_like(x), x) for x in tangents]
        return [*call(primals), *jax.jvp(along, zeros, tangents)[1]]

    def forward(program: core.ClosedJaxpr, arrays: list[Any]) -> tuple[list[Any], Run]:
        return core.jaxpr_as_fun(program)(*operands_of(arrays)), backward

    def backward(program: Any, by: Sequence[int], arguments: list[Any]) -> list[Any]:
        return sum_in_float32(program, arguments, [of_params[i] for i in by])

    # The gradient of a param is for the last of its arrays.
    ends = itertools.accumulate(len(jax.tree.leaves(value)) for value in values)
    places = [end - 1 for end in ends]
    if op.name == "custom_jvp_call":
        call = with_derivative(op.equation, primal, derivative, places)
    else:
        call = with_passes(op.equation, primal, forward, places)
    results = call(arrays)
    if not alone:
        return mixed_results(results, values)
    origin = origin_of(op.equation, values)
    return [
        like_param(x, origin, layout) if is_half_or_float32(x) else without_gradient(x, values)
        for x in results
    ]
