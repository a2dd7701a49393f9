"""Products in MXFP8, whose operands have a scale for each 32 numbers along the sum.

`lax.scaled_dot` has no derivative, and cannot stand where one is taken. Here neither the rounding
of the operands nor their product has one; the map of the product has it, as in float8.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.float8_codes import BLOCK, encode_blocks
from jaxmp._primitives.primitive_rules import (
    batch_in_front,
    compile_alone,
    never_saved,
    without_derivative,
)
from jaxmp._primitives.varying import result_aval, varying_axes
from jaxmp._program import compat

# Operand: an array. Results: codes, and a scale for each block along the last axis, both padded.
_encode_p = Primitive("mxfp8_encode")
_encode_p.multiple_results = True
# Operands, params and the name are those of JAX's own product, by which tools know it. Its arrays
# have three axes, batch, rows and sum: compilers decode the blocks of others.
_product_p = Primitive("scaled_dot")
_NUMBERS = (((2,), (2,)), ((0,), (0,)))
# Of compute capabilities with products of blocks: B200 and B300. Compilers fail for those of 12.
_CAPABILITY = 10


def block_product(
    arrays: Sequence[Any], code_dtype: DType, dimension_numbers: Any, dtype: Any
) -> Any:
    """Rounds two arrays to MXFP8 along their own sum, and multiplies them.

    Args:
      arrays: the arrays, of 16 or 32 bits.
      code_dtype: the dtype of the codes.
      dimension_numbers: as for `jax.lax.dot_general`.
      dtype: the dtype of the result: bfloat16 or float32; others are rounded from float32.

    Returns:
      The product, of the shape that `dot_general` gives.
    """
    sums, shared = dimension_numbers
    coded, shapes = [], []
    for x, summed_axes, shared_axes in zip(arrays, sums, shared, strict=True):
        free_axes = [i for i in range(x.ndim) if i not in (*summed_axes, *shared_axes)]
        groups = (shared_axes, free_axes, summed_axes)
        shapes.append([[x.shape[i] for i in axes] for axes in groups])
        batch, rows, summed = map(math.prod, shapes[-1])
        x = lax.transpose(x, [i for axes in groups for i in axes]).reshape(batch, rows, summed)
        coded.append(_encode_p.bind(x, dtype=code_dtype))
    codes, scales = zip(*coded, strict=True)
    out = _product_p.bind(
        *codes,
        *scales,
        dimension_numbers=_NUMBERS,
        preferred_element_type=np.dtype(dtype if dtype == jnp.bfloat16 else np.float32),
    )
    (shared_shape, lhs_shape, _), (_, rhs_shape, _) = shapes
    return lax.convert_element_type(out.reshape(*shared_shape, *lhs_shape, *rhs_shape), dtype)


def _multiply(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, **params: Any) -> Any:
    return lax.scaled_dot(lhs, rhs, lhs_scale=lhs_scale, rhs_scale=rhs_scale, **params)


def _lower_product(ctx: Any, *args: Any, **params: Any) -> Any:
    check_device(ctx)
    return mlir.lower_fun(_multiply, multiple_results=False)(ctx, *args, **params)


def check_device(ctx: Any) -> None:
    """Raises an error if a program is lowered for a device that has no products of blocks."""
    kind, capability = compat.target_of(ctx)
    if int(capability) != _CAPABILITY:
        raise NotImplementedError(_NOT_HERE.format(target=kind))
    if not compat.is_for_one_device(ctx) and not compat.is_alone_in_shard_map(ctx):
        raise NotImplementedError(_NOT_SPLIT)


_NOT_HERE = (
    "mxfp8 runs on NVIDIA GPUs of compute capability 10, such as a B200. This program is for "
    "{target}, where products of blocks would be products in bfloat16. Use 'tensorwise' or "
    "'rowwise_hp' there"
)
_NOT_SPLIT = (
    "mxfp8 runs on one device, or inside of a jax.shard_map without the Shardy partitioner "
    "(jax.config.update('jax_use_shardy_partitioner', False)), which does not know products of "
    "blocks; no partitioner splits them. Use 'tensorwise' or 'rowwise_hp' on a mesh"
)


def _encode_padded(x: Any, *, dtype: DType) -> tuple[Any, Any]:
    return encode_blocks(lax.pad(x, np.zeros((), x.dtype), _padding(x)), dtype)


def _padding(x: Any) -> list[tuple[int, int, int]]:
    # Zeros add nothing. The compiler of jax 0.10 has no kernel for a sum of one block.
    return [(0, 0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % (2 * BLOCK), 0)]


def _code_avals(x: Any, *, dtype: DType) -> list[Any]:
    length = x.shape[-1] + _padding(x)[-1][1]
    codes = result_aval(x, (*x.shape[:-1], length), dtype)
    return [codes, result_aval(x, (*x.shape[:-1], length // BLOCK), jnp.float8_e8m0fnu)]


def _block_product_aval(
    lhs: Any, rhs: Any, *scales: Any, preferred_element_type: Any, **_: Any
) -> Any:
    del scales
    like = max((lhs, rhs), key=lambda x: len(varying_axes(x)))
    return result_aval(like, (*lhs.shape[:-1], rhs.shape[-2]), preferred_element_type)


def _code_batch(args: Any, axes: Any, **params: Any) -> Any:
    return _encode_p.bind(*batch_in_front(args, axes), **params), [0, 0]


def _block_product_batch(args: Any, axes: Any, **params: Any) -> Any:
    args = batch_in_front(args, axes)
    size, batch = args[0].shape[:2]
    out = _product_p.bind(*(x.reshape(size * batch, *x.shape[2:]) for x in args), **params)
    return out.reshape(size, batch, *out.shape[1:]), 0


for _primitive in (_encode_p, _product_p):
    compile_alone(_primitive)
    without_derivative(_primitive)  # the map has it
never_saved(_encode_p)
_encode_p.def_abstract_eval(_code_avals)
_product_p.def_abstract_eval(_block_product_aval)
batching.primitive_batchers[_encode_p] = _code_batch
batching.primitive_batchers[_product_p] = _block_product_batch
mlir.register_lowering(_encode_p, mlir.lower_fun(_encode_padded, multiple_results=True))
mlir.register_lowering(_product_p, _lower_product)
