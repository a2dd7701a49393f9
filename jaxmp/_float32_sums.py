"""What is read many times in 16 bits has its gradients added up in float32, and rounded once.

A row that 4,096 edges of a graph read gets 4,096 gradients. The transpose of a gather adds them one
by one in the dtype of the row, where 256 + 1 is 256 in bfloat16: 88 % of the gradient is lost. In
the derivative the row is float32 here, and nothing else is: the value is the one gathered in 16
bits, and the backward pass keeps the indices only.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp import _compat

FLOAT32 = jnp.dtype(jnp.float32)
_HALVES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def is_half(x: Any) -> bool:
    return getattr(x, "dtype", None) in _HALVES


def gather(equation: core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Binds a gather; the gradients of a 16-bit array are added up in float32.

    Args:
      equation: the equation of the gather.
      values: the array, and the indices.

    Returns:
      What was gathered, in the dtype of the array.
    """
    if not is_half(values[0]):
        return _compat.bind(equation, values)

    @jax.custom_jvp
    def gathered(array: Any, *indices: Any) -> Any:
        return _compat.bind(equation, [array, *indices])[0]

    @gathered.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        array, *indices = primals
        wide = lax.convert_element_type(tangents[0], FLOAT32)
        # What lies outside of the array is a constant.
        (moved,) = _compat.bind(equation, [wide, *indices], fill_value=0)
        return gathered(*primals), lax.convert_element_type(moved, array.dtype)

    return [gathered(*values)]


def gathers(equation: core.JaxprEqn) -> bool:
    """Whether a 16-bit array is gathered in the programs of an equation, at any depth."""
    return any(
        gathers(inner) or (inner.primitive.name == "gather" and is_half(inner.invars[0].aval))
        for jaxpr in _compat.sub_jaxprs(equation)
        for inner in jaxpr.eqns
    )


@jax.custom_jvp
def accumulator(x: Any) -> Any:
    """A float32 array to which the gradients of a 16-bit one can go: its value means nothing.

    Args:
      x: the array.

    Returns:
      Zeros, whose derivative is that of the array.
    """
    return jnp.zeros_like(x, FLOAT32)


@accumulator.defjvp
def _accumulator_jvp(primals: Any, tangents: Any) -> Any:
    return accumulator(*primals), lax.convert_element_type(tangents[0], FLOAT32)
