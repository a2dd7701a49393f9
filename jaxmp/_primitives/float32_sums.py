"""Float32 sums of gradients, rounded once, for 16-bit values that are read many times.

A row that 4,096 edges of a graph read gets 4,096 gradients. The transpose of a gather adds them one
by one in the dtype of the row, where 256 + 1 is 256 in bfloat16: 88 % of the gradient is lost. Here
only the derivative has the row in float32: the value is gathered in 16 bits, and the backward pass
keeps the indices only.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._numerics.dtypes import is_half
from jaxmp._numerics.rounding import open_cast
from jaxmp._program import compat
from jaxmp._program.program import equations_in

FLOAT32 = jnp.dtype(jnp.float32)


def gather(equation: core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Binds a gather; the gradients of a 16-bit array are added up in float32."""
    if not is_half(values[0]):
        return compat.bind(equation, values)

    # A `custom_vjp` would have no forward mode. JAX transposes this rule to a scatter-add in
    # float32.
    @jax.custom_jvp
    def gathered(array: Any, *indices: Any) -> Any:
        return compat.bind(equation, [array, *indices])[0]

    @gathered.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        array, *indices = primals
        tangent = open_cast(tangents[0], FLOAT32)
        # Values from outside of the array are constants.
        (tangent,) = compat.bind(equation, [tangent, *indices], fill_value=0)
        return gathered(*primals), lax.convert_element_type(tangent, array.dtype)

    return [gathered(*values)]


def gathers(equation: core.JaxprEqn) -> bool:
    """Whether a 16-bit array is gathered in the programs of an equation, at any depth."""
    inside = equations_in(compat.sub_jaxprs(equation))
    return any(x.primitive.name == "gather" and is_half(x.invars[0].aval) for x in inside)


@jax.custom_jvp
def accumulator(x: Any) -> Any:
    """Returns zeros in float32, to collect the gradients of a 16-bit array."""
    return jnp.zeros_like(x, FLOAT32)


@accumulator.defjvp
def _accumulator_jvp(primals: Any, tangents: Any) -> Any:
    return accumulator(*primals), open_cast(tangents[0], FLOAT32)
