"""Rules for functions with derivatives of their own, `jax.custom_jvp` and `jax.custom_vjp`.

Params are used by the function as it was traced. Its derivative rule runs again, with sums of
gradients in float32.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._float32_reduction.backward import summed_in_float32
from jaxmp._float32_reduction.values import Origin, Value
from jaxmp._float32_reduction.weights import meet_data, met
from jaxmp._primitives.varying import varying_as
from jaxmp._program import compat
from jaxmp._program.derivatives import Run, with_derivative, with_passes
from jaxmp._program.evaluate import Rules
from jaxmp._program.program import Op


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
