"""A 16-bit value whose gradient goes to the float32 array of which it is the rounding.

The transpose of a cast is a cast, but of a gradient that was summed over the batch already, and so
over the devices, in 16 bits. With the cast in the derivative behind all that is made of the
rounded value, the sum is one of float32 numbers.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# Operands: a value, and the array to which its gradient goes. The identity on the value.
_gradient_of_p = Primitive("gradient_of")


def gradient_of(value: Any, wide: Any) -> Any:
    """The value, with the derivative of another array of its shape.

    Args:
      value: what is returned; no gradient goes to it.
      wide: what is differentiated instead, in any float dtype.

    Returns:
      The value.

    >>> import jax.numpy as jnp
    >>> w = jnp.float32(1 / 3)
    >>> jax.grad(lambda w: gradient_of(jnp.bfloat16(0.333), w).astype(jnp.float32))(w)
    Array(1., dtype=float32)
    """
    return _gradient_of_p.bind(value, wide)


def _jvp(primals: Any, tangents: Any) -> Any:
    value, _ = primals
    tangent = tangents[1]
    out = _gradient_of_p.bind(*primals)
    if isinstance(tangent, ad.Zero):
        return out, ad.Zero(jax.typeof(value).to_tangent_aval())
    return out, lax.convert_element_type(tangent, value.dtype)


def _batch(args: Any, axes: Any) -> Any:
    size = next(x.shape[a] for x, a in zip(args, axes, strict=True) if a is not None)
    moved = [batching.bdim_at_front(x, a, size) for x, a in zip(args, axes, strict=True)]
    return _gradient_of_p.bind(*moved), 0


_gradient_of_p.def_impl(lambda value, wide: value)
_gradient_of_p.def_abstract_eval(lambda value, wide: value)
ad.primitive_jvps[_gradient_of_p] = _jvp
batching.primitive_batchers[_gradient_of_p] = _batch
mlir.register_lowering(_gradient_of_p, lambda ctx, value, wide: [value])
