"""Reads a program as autocast plans it, with other programs in the place of some equations.

Helpers such as `jnp.where` are inlined. A product that adds nothing up is the multiplication that
it is. Random numbers that JAX would draw in 16 bits are drawn in float32.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._autocast.planners import asks_for_precision
from jaxmp._numerics.dtypes import HALVES, is_half, is_half_or_float32
from jaxmp._program.compat import holds_arrays, is_of_jax, trace
from jaxmp._program.flops import is_elementwise
from jaxmp._program.op_classes import CLASSES, IN_HELPERS, JITS, OpClass
from jaxmp._program.program import Program, equations_in, numbers, plain_call, read

# The plan must see what reads the result of a helper: with helpers as calls, losses of logits were
# computed in 16 bits. Helpers of jax.nn and jax.numpy have up to 42 equations (`nanpercentile`, jax
# 0.10). Larger functions stay calls, so that they are compiled once.
_LARGEST_HELPER = 100  # equations
# The name of programs that are run in the place of an equation that they are not a part of.
WRITTEN = "jaxmp.written"


def read_for_plan(closed: Any) -> Program:
    """Reads the program of a jaxpr for the plan of autocast."""
    return read(closed, _in_place_of)


def _in_place_of(equation: core.JaxprEqn) -> tuple[Any, str] | None:
    params = equation.params
    if call := plain_call(equation):
        if _draws_16_bits(equation):
            return _traced_for(equation, _draw), WRITTEN
        # Functions that multiply matrices stay functions, so that layers that share one are still
        # compiled once.
        return call if _is_helper(params["jaxpr"]) else None
    if is_elementwise(equation) and not asks_for_precision(params["precision"]):
        avals = [atom.aval for atom in (*equation.invars, *equation.outvars)]
        if all(map(is_half_or_float32, avals)) and params["out_sharding"] is None:
            return _traced_for(equation, _multiplied), WRITTEN
    return None


def _is_helper(body: Any) -> bool:
    if holds_arrays(body):  # a checkpoint around it could not hold them
        return False
    inside = equations_in([body], lambda eqn: eqn.primitive.name in JITS)
    names = [eqn.primitive.name for eqn in itertools.islice(inside, _LARGEST_HELPER + 1)]
    not_simple = (None, OpClass.CONTROL, OpClass.ALONE, OpClass.LOWER)
    is_simple = all(name in IN_HELPERS or CLASSES.get(name) not in not_simple for name in names)
    return is_simple and len(names) <= _LARGEST_HELPER


def _traced_for(equation: core.JaxprEqn, fun: Any) -> Any:
    avals = [atom.aval for atom in equation.invars]
    with equation.ctx.manager:
        return trace(lambda *operands: fun(equation, *operands), avals)


def _multiplied(equation: core.JaxprEqn, *operands: Any) -> Any:
    """Multiplies what a product without a sum multiplies, in the order of its dimensions."""
    ones, batches = equation.params["dimension_numbers"]
    aval: Any = equation.outvars[0].aval
    laid_out, own = [], range(len(batches[0]), len(batches[0]))
    for x, one, batch in zip(operands, ones, batches, strict=True):
        others = [axis for axis in range(x.ndim) if axis not in (*one, *batch)]
        own = range(own.stop, own.stop + len(others))  # the operand's own dimensions of the result
        x = lax.transpose(x, (*batch, *others, *one))
        x = lax.squeeze(x, range(len(batch) + len(others), x.ndim))
        if x.shape != aval.shape:
            x = lax.broadcast_in_dim(x, aval.shape, (*range(len(batch)), *own))
        laid_out.append(lax.convert_element_type(x, aval.dtype))
    return lax.mul(*laid_out)


def _draws_16_bits(equation: core.JaxprEqn) -> bool:
    """Whether this is the function of `jax.random` that all draws of floats end in, in 16 bits."""
    # It draws 7 random bits in bfloat16: of 2,000 equal classes, 890 could be drawn.
    params = equation.params
    bounds = equation.invars[1:]
    return (
        params["name"] == "_uniform"
        and is_of_jax(params["jaxpr"], "random/")
        and is_half(equation.outvars[0].aval)
        and len(bounds) == 2
        and all(isinstance(x, core.Literal) for x in bounds)
    )


def _draw(equation: core.JaxprEqn, key: Any, *_: Any) -> Any:
    bounds: list[Any] = equation.invars[1:]
    least, most = sorted(float(number.val) for number in bounds)  # JAX has them in either order
    aval: Any = equation.outvars[0].aval
    return jax.random.uniform(key, aval.shape, jnp.float32, least, most)


def casts_back(program: Program) -> set[int]:
    """Returns the casts back to 16 bits of float32 sums of 16-bit numbers, by their operations.

    In a program in 16 bits `jnp.mean`, `jnp.var` and `jnp.linalg.norm` make them: they add up in
    float32. Squares of float16 do not fit into what they return.
    """
    widened: dict[int, tuple[Any, int]] = {}  # what floats were cast from, and how many they were
    sums: set[int] = set()
    found: set[int] = set()
    for op in program.ops:
        (before, *_), (after, *_) = op.in_avals or [None], op.out_avals or [None]
        parts = [widened[x] for x in numbers(op.inputs) if x in widened]
        if op.name == "convert_element_type" and not parts and after.dtype == jnp.float32:
            if before.dtype in HALVES:
                widened[op.outputs[0]] = before.dtype, before.size
        elif op.name == "convert_element_type" and parts:
            dtype, size = parts[0]
            if op.inputs[0] in sums and after.dtype == dtype and after.size < size:
                found.add(op.number)
        elif parts and len(op.outputs) == 1 and CLASSES.get(op.name) is not OpClass.CONTROL:
            widened[op.outputs[0]] = max(parts, key=lambda part: part[1])
            adds_up = CLASSES.get(op.name) is OpClass.SUM
            if adds_up or not sums.isdisjoint(numbers(op.inputs)):
                sums.add(op.outputs[0])
    return found
