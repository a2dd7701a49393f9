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

from jaxmp._float32_reduction.values import FLOAT32, Origin, Value
from jaxmp._float32_reduction.weights import meet_data, met
from jaxmp._numerics.dtypes import is_half, is_half_or_float32
from jaxmp._primitives.varying import varying_as
from jaxmp._program import compat
from jaxmp._program.control_flow import rebind
from jaxmp._program.derivatives import Run, with_derivative, with_passes
from jaxmp._program.evaluate import Cells, Rules, evaluate
from jaxmp._program.facts import Demands, shared_programs
from jaxmp._program.op_classes import AFTER_PRODUCTS, CONTRACTIONS, CONTROL_FLOW, IDENTITIES
from jaxmp._program.program import Op, Program, read


def summed_in_float32(
    program: core.ClosedJaxpr, arguments: Sequence[Any], wanted: Sequence[bool]
) -> list[Any]:
    """Runs a program. Wanted 16-bit results are float32, and so are the sums that make them."""
    demands = Demands(_needed, shared_programs(_programs), decisions=False)
    backward = read(program)
    return evaluate(backward, arguments, _Summed(demands, backward, wanted))


def _programs(equation: core.JaxprEqn) -> list[Any]:
    return compat.bodies_of(equation) if equation.primitive.name in CONTROL_FLOW else []


def _needed(op: Op, wanted: Sequence[bool]) -> list[bool]:
    """Returns which operands of an operation are read in float32 for these results."""
    needed = [any(wanted) and is_half_or_float32(aval) for aval in op.in_avals]
    if op.name in AFTER_PRODUCTS:
        return needed
    return [is_read and i == 0 and op.name in IDENTITIES for i, is_read in enumerate(needed)]


class _Summed(Rules[Any]):
    """Runs a backward pass; what its wanted results ask for is computed in float32."""

    def __init__(self, demands: Demands, program: Program, wanted: Sequence[bool]) -> None:
        self.demands, self.wanted = demands, wanted
        self.wide = demands.values(program, wanted)

    def asked(self, op: Op) -> list[bool]:
        return [number in self.wide for number in op.outputs]

    def operands(self, op: Op, cells: Cells[Any]) -> list[Any]:
        needed, _ = self.demands.through(op, self.asked(op))
        return list(map(_as_needed, super().operands(op, cells), op.in_avals, needed))

    def results(self, program: Program, cells: Cells[Any]) -> list[Any]:
        avals = [
            x.aval if isinstance(x, core.Literal) else program.avals[x] for x in program.outputs
        ]
        return list(map(_as_needed, super().results(program, cells), avals, self.wanted))

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        asked, params = self.asked(op), op.params
        if not any(asked):
            return compat.bind(op.equation, operands)
        if op.name in CONTROL_FLOW:
            _, inside = self.demands.through(op, asked)
            rules = [_Summed(self.demands, *each) for each in inside]
            bodies = zip(rules, compat.bodies_of(op.equation), strict=True)
            makers = [functools.partial(each.traced, op, body) for each, body in bodies]
            return rebind(op.equation, operands, makers)
        if op.name == "convert_element_type" and is_half_or_float32(operands[0]):
            return operands
        if op.name.startswith("scatter"):  # its own function has the dtype of the trace
            scatter = lax.scatter if op.name == "scatter" else lax.scatter_add
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [scatter(*operands, **{name: params[name] for name in names})]
        if op.name in CONTRACTIONS and is_half(op.out_avals[0]):
            return compat.bind(op.equation, operands, preferred_element_type=FLOAT32)
        return compat.bind(op.equation, operands)


def _as_needed(value: Any, aval: Any, in_float32: bool) -> Any:
    """Returns a value in float32 if it is needed so, and in the 16 bits of its type else."""
    if not is_half(value if in_float32 else aval):
        return value
    dtype = FLOAT32 if in_float32 else aval.dtype
    return value if value.dtype == dtype else lax.convert_element_type(value, dtype)


def own_derivative_rule(rules: Rules[Value], op: Op, values: list[Value]) -> list[Value] | None:
    """Runs the function and its forward pass as they are, and its derivative with float32 sums.

    The derivative of a `jax.custom_jvp` is linear in the tangents. So it is its own derivative, and
    that one has float32 sums where tangents of params come in as params do.
    """
    if not meet_data(values):
        return None
    values = [value.whole() for value in values]
    of_params = [value.of_params for value in values]  # derivatives may not hold arrays
    arrays, structure = jax.tree.flatten(values)
    count = len(arrays)

    def used(arrays: Sequence[Any]) -> list[Any]:
        return [value.used() for value in jax.tree.unflatten(structure, arrays)]

    def primal(arrays: Sequence[Any]) -> list[Any]:
        return compat.bind(op.equation, used(arrays))

    def derivative(program: Any, by: Sequence[int], arguments: list[Any]) -> list[Any]:
        primals, tangents = arguments[:count], arguments[count:]
        operands = jax.tree.unflatten(structure, primals)

        def along(*tangents: Any) -> list[Any]:
            moved = [_tangent(operands[i], x) for i, x in zip(by, tangents, strict=True)]
            results = rules.inside(op, program, [*operands, *moved])
            return [value.used() for value in results[len(op.outputs) :]]

        nowhere = [varying_as(jnp.zeros_like(x), x) for x in tangents]
        return [*call(primals), *jax.jvp(along, nowhere, tangents)[1]]

    def ahead(program: core.ClosedJaxpr, arrays: list[Any]) -> tuple[list[Any], Run]:
        return core.jaxpr_as_fun(program)(*used(arrays)), behind

    def behind(program: Any, by: Sequence[int], arguments: list[Any]) -> list[Any]:
        return summed_in_float32(program, arguments, [of_params[i] for i in by])

    # The gradient of a param is for the last of its arrays.
    ends = itertools.accumulate(len(jax.tree.leaves(value)) for value in values)
    places = [end - 1 for end in ends]
    if op.name == "custom_jvp_call":
        call = with_derivative(op.equation, primal, derivative, places)
    else:
        call = with_passes(op.equation, primal, ahead, places)
    return met(call(arrays), values)


def _tangent(value: Value, tangent: Any) -> Value:
    if not value.of_params:
        return Value(tangent, origin=Origin.ACTIVATION)
    if value.exact:
        return Value(tangent, tangent, origin=Origin.WEIGHT)
    narrow = lax.convert_element_type(tangent, value.array.dtype)
    return Value(narrow, tangent, origin=Origin.WEIGHT)
