"""A 16-bit value whose gradient goes to the float32 array that it was rounded from.

The transpose of a cast is a cast, but it comes after the gradient was summed over batch and devices
in 16 bits. Here the cast in the derivative comes after all operations on the rounded value, so that
its transpose comes before the sum, which is in float32.
"""

from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._primitives.primitive_rules import batch_in_front, zero_tangent

# Operands: a value, and the array to which its gradient goes. The identity on the value.
_gradient_of_p = Primitive("gradient_of")


def gradient_of(value: Any, source: Any) -> Any:
    """Returns the value, with the derivative of another array of its shape, of any float dtype.

    >>> import jax, jax.numpy as jnp
    >>> w = jnp.float32(1 / 3)
    >>> jax.grad(lambda w: gradient_of(jnp.bfloat16(0.333), w).astype(jnp.float32))(w)
    Array(1., dtype=float32)
    """
    return _gradient_of_p.bind(value, source)


def _jvp(primals: Any, tangents: Any) -> Any:
    value, _ = primals
    tangent = tangents[1]
    out = _gradient_of_p.bind(*primals)
    if isinstance(tangent, ad.Zero):
        return out, zero_tangent(value)
    return out, lax.convert_element_type(tangent, value.dtype)


_gradient_of_p.def_impl(lambda value, source: value)
_gradient_of_p.def_abstract_eval(lambda value, source: value)
ad.primitive_jvps[_gradient_of_p] = _jvp
batching.primitive_batchers[_gradient_of_p] = lambda args, axes: (
    _gradient_of_p.bind(*batch_in_front(args, axes)),
    0,
)
mlir.register_lowering(_gradient_of_p, lambda ctx, value, source: [value])
