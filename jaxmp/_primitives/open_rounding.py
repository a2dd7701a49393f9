"""Operands that TPUs multiply in bfloat16, and that may be sums over devices.

At the default precision a TPU multiplies bfloat16 roundings of float32 operands. If only such a
product reads a sum over devices, XLA runs the sum in bfloat16 too (`open_cast` says the same of
casts). If the operand is rounded in the open, the product is the same, and the sum stays float32.
Other devices multiply float32 operands as they are. There nothing is rounded.
"""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._numerics.rounding import rounded_to_bfloat16

# The identity; on TPUs one that rounds to bfloat16, or whose transpose does.
_open_rounding_p = Primitive("open_rounding")


def open_operand(x: Any) -> Any:
    """Returns a float32 operand of a product of the default precision, rounded on TPUs.

    >>> import jax.numpy as jnp
    >>> open_operand(jnp.float32(1 / 3))  # on a CPU
    Array(0.33333334, dtype=float32)
    """
    return _open_rounding_p.bind(x, of_gradient=False)


def open_gradient(x: Any) -> Any:
    """Returns the float32 result of such a product, whose gradient is an operand of two others."""
    return _open_rounding_p.bind(x, of_gradient=True)


def _on_tpu(x: Any, *, of_gradient: bool) -> Any:
    return x if of_gradient else rounded_to_bfloat16(x)


def _transpose(ct: Any, x: Any, *, of_gradient: bool) -> list[Any]:
    del x
    return [_open_rounding_p.bind(ct, of_gradient=not of_gradient)]


_open_rounding_p.def_impl(lambda x, *, of_gradient: x)
_open_rounding_p.def_abstract_eval(lambda x, *, of_gradient: x)
ad.deflinear2(_open_rounding_p, _transpose)
batching.defvectorized(_open_rounding_p)
mlir.register_lowering(_open_rounding_p, lambda ctx, x, *, of_gradient: [x])
_lower_on_tpu = mlir.lower_fun(_on_tpu, multiple_results=False)
mlir.register_lowering(_open_rounding_p, _lower_on_tpu, platform="tpu")
