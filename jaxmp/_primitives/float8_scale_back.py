"""The scales of a product of codes, taken off by one equation that has no derivative.

As ordinary equations, these would be a product of two values that both depend on an operand. JAX
refuses to transpose that where the operand is a tangent, as in the rule of a `jax.custom_jvp`.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._primitives.varying import result_aval, varying_axes

# Operands: a product of codes, and its scale.
_scale_back_p = Primitive("float8_scale_back")


def without_scale(product: Any, scale: Any, dtype: Any) -> Any:
    """Takes the scale off a product of codes, by ordinary operations.

    Args:
      product: the product, in bfloat16 or float32.
      scale: float32, broadcast against the product.
      dtype: the dtype of the result.

    >>> import jax.numpy as jnp
    >>> without_scale(jnp.float32([3, 4]), jnp.float32([2]), np.float32)
    Array([1.5, 2. ], dtype=float32)
    """
    # Of a scalar, compilers fold one multiplication into the product, and not two.
    inverse = 1 / (scale.reshape(()) if scale.size == 1 else scale)
    scaled = product * lax.convert_element_type(inverse, product.dtype)
    return lax.convert_element_type(scaled, dtype)


def scale_back(product: Any, scale: Any, dtype: Any) -> Any:
    """Takes the scale off a product of codes, without a derivative; see `without_scale`."""
    return _scale_back_p.bind(product, scale, dtype=np.dtype(dtype))


def _aval(product: Any, scale: Any, *, dtype: Any) -> Any:
    like = max((product, scale), key=lambda x: len(varying_axes(x)))
    return result_aval(like, product.shape, dtype)


def _without_tangent(primals: Any, tangents: Any, **params: Any) -> Any:
    out = _scale_back_p.bind(*primals, **params)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


def _batched_scale_back(args: Any, axes: Any, **params: Any) -> Any:
    size = next(x.shape[a] for x, a in zip(args, axes, strict=True) if a is not None)
    product, scale = (batching.bdim_at_front(x, a, size) for x, a in zip(args, axes, strict=True))
    return _scale_back_p.bind(product, scale, **params), 0


@functools.lru_cache(maxsize=256)
def _compiled_scale_back(dtype: Any) -> Any:
    return jax.jit(functools.partial(_scale_back_p.bind, dtype=dtype))


def _impl_scale_back(*args: Any, dtype: Any) -> Any:
    with jax.disable_jit(False):  # where jit is disabled, this would call itself
        return _compiled_scale_back(dtype)(*args)


_scale_back_p.def_impl(_impl_scale_back)
_scale_back_p.def_abstract_eval(_aval)
ad.primitive_jvps[_scale_back_p] = _without_tangent
ad.primitive_transposes[_scale_back_p] = lambda ct, *args, **params: [None] * len(args)
batching.primitive_batchers[_scale_back_p] = _batched_scale_back
mlir.register_lowering(_scale_back_p, mlir.lower_fun(without_scale, multiple_results=False))
