"""Rows of zeros, but for the number at the label; the derivative needs the labels alone.

With `jnp.where` the backward pass would keep the mask, a byte for each number. A `jax.checkpoint`
that is linear has no transpose under the flag `jax_remat3` (jax 0.12).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._primitives.primitive_rules import batch_in_front, compile_alone
from jaxmp._primitives.varying import varying_alike

# Operands: integer labels, one for each row, and an array of rows along an axis. Linear in the
# array, and its own transpose.
_at_label_p = Primitive("at_label")


def at_label(labels: Any, x: Any, axis: int) -> Any:
    """Returns the array with zeros in all places of its rows but those of the labels.

    >>> at_label(jnp.int32([[1], [0]]), jnp.int32([[3, 4], [5, 6]]), axis=1)
    Array([[0, 4],
           [5, 0]], dtype=int32)
    """
    return _at_label_p.bind(*varying_alike([labels, x]), axis=axis)


def _zero_elsewhere(labels: Any, x: Any, *, axis: int) -> Any:
    places = lax.broadcasted_iota(labels.dtype, x.shape, axis)
    return jnp.where(labels == places, x, jnp.zeros((), x.dtype))


def _with_tangent(primals: Any, tangents: Any, *, axis: int) -> Any:
    (labels, x), tangent = primals, tangents[1]
    is_zero = isinstance(tangent, ad.Zero)
    return at_label(labels, x, axis), tangent if is_zero else at_label(labels, tangent, axis)


def _transposed_rows(ct: Any, labels: Any, x: Any, *, axis: int) -> list[Any]:
    return [None, ct if isinstance(ct, ad.Zero) else at_label(labels, ct, axis)]


def _batch_rows(args: Any, axes: Any, *, axis: int) -> Any:
    labels, x = batch_in_front(args, axes)
    return at_label(labels, x, axis + 1), 0


compile_alone(_at_label_p)
_at_label_p.def_abstract_eval(lambda labels, x, axis: x)
ad.primitive_jvps[_at_label_p] = _with_tangent
ad.primitive_transposes[_at_label_p] = _transposed_rows
batching.primitive_batchers[_at_label_p] = _batch_rows
mlir.register_lowering(_at_label_p, mlir.lower_fun(_zero_elsewhere, multiple_results=False))
