"""Which dtypes a program multiplies in, read from its jaxpr, with all jaxprs inside of it."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmp._program import compat

PRODUCTS = ("dot_general", "conv_general_dilated")


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of scans, checkpoints and nested jits among them."""
    for equation in compat.open_jaxpr(jaxpr).eqns:
        yield equation
        for param in equation.params.values():
            for inner in param if isinstance(param, (tuple, list)) else [param]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner)


def program_of(function: Callable[..., Any], *args: Any) -> Any:
    """The program as reports read it, and derivatives: with the primitives of jaxmp."""
    with compat.IS_READ(True):
        return jax.make_jaxpr(function)(*args)


def count_dots(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How many products have which operands: `{"bfloat16": 3}`, mixed ones `"float32,bfloat16"`."""
    found: collections.Counter[str] = collections.Counter()
    for equation in equations(program_of(function, *args)):
        if equation.primitive.name in (*PRODUCTS, "scaled_dot"):
            operands = [str(variable.aval.dtype) for variable in equation.invars[:2]]
            found[",".join(dict.fromkeys(operands))] += 1
    return dict(found)


def precisions(function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """The dtype of the operands of each product, and the precision that it asks for.

    `"none"` where it asks for nothing, `"high"` where both of its operands are to be HIGH.
    """
    found = []
    for equation in equations(program_of(function, *args)):
        if equation.primitive.name in (*PRODUCTS, "ragged_dot_general"):
            asked = equation.params["precision"]
            names = {each.name for each in (asked if isinstance(asked, tuple) else [asked]) if each}
            dtypes = {str(variable.aval.dtype) for variable in equation.invars[:2]}
            found.append((",".join(sorted(dtypes)), ",".join(names).lower() or "none"))
    return found
