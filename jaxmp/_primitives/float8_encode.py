"""The rounding of an operand to float8, as one equation that has no derivative.

It compiles to ordinary operations, so that compilers fuse them, and share those of one array.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.float8_codes import Coded, encode_float8, largest_magnitude, round_to_codes
from jaxmp._primitives.primitive_rules import (
    batch_in_front,
    compile_alone,
    never_saved,
    without_derivative,
)
from jaxmp._primitives.varying import result_aval
from jaxmp._program import compat

# Operands: an array, and its scales where they are known. Results: its codes, and their scales, or
# in place of known ones the largest magnitudes.
_encode_p = Primitive("float8_encode")
_encode_p.multiple_results = True


def float8_encode(
    x: Any,
    dtype: DType,
    axes: tuple[int, ...],
    *,
    power_of_two: bool,
    is_weight: bool = False,
) -> Coded:
    """Rounds an array to float8, without a derivative, with one scale for all numbers along axes.

    Under `vmap`, each array of the batch has its own scale; in a `shard_map`, each shard. A weight
    stays as it lies in memory.
    """
    params = {"axes": axes, "power_of_two": power_of_two, "is_weight": is_weight}
    return Coded(*_encode_p.bind(x, dtype=np.dtype(dtype), **params))


def encode_by_scale(
    x: Any,
    scale: Any,
    *,
    dtype: DType,
    axes: tuple[int, ...],
    power_of_two: bool,
    is_weight: bool = False,
) -> tuple[Coded, Any]:
    """Rounds an array to float8 by a scale that is known before, without a derivative.

    The scale is one number, or one for each place along the first axes. Returned are the codes and
    the scales, and the largest magnitudes in the shape of the scales. Numbers out of range become
    the largest code, and infinite ones NaN.
    """
    shape = [1 if i in axes else size for i, size in enumerate(x.shape)]
    scales = jnp.broadcast_to(scale.reshape(*scale.shape, *[1] * (x.ndim - scale.ndim)), shape)
    params = {"axes": axes, "power_of_two": power_of_two, "is_weight": is_weight}
    codes, largest = _encode_p.bind(x, scales, dtype=np.dtype(dtype), **params)
    if dtype == jnp.int8:  # which has no NaN: the scale makes all of a product NaN
        scales = jnp.where(jnp.isfinite(largest), scales, jnp.float32(jnp.nan))
    return Coded(codes, scales), largest


def _encode(
    x: Any, *scale: Any, dtype: DType, axes: Any, power_of_two: bool, **_: Any
) -> tuple[Any, Any]:
    if not scale:
        return encode_float8(x, dtype, axes, power_of_two=power_of_two)
    # Infinite numbers become NaN: the scale, which is from before, cannot show them.
    visible = jnp.where(jnp.isfinite(x), x, jnp.asarray(jnp.nan, x.dtype))
    return round_to_codes(visible, scale[0], dtype), largest_magnitude(x, axes)


def _lower_on_gpu(ctx: Any, x: Any, *scale: Any, is_weight: bool, **params: Any) -> Any:
    # Tensor cores of an H100 read float8 operands along the summed dimension. XLA would transpose a
    # whole stack of float32 weights for that, before the loop over its layers: 1.19 times the
    # temporaries of bfloat16 for a GPT in a rematerialized scan (12 layers of width 1024). Fixed
    # here, it transposes codes. An array on several devices would be gathered for that, and
    # `jax.export` refuses layouts.
    fixed = is_weight and compat.is_for_one_device(ctx) and not compat.is_for_export(ctx)

    def function(x: Any, *scale: Any) -> tuple[Any, Any]:
        x = with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if fixed else x
        return _encode(x, *scale, **params)

    return mlir.lower_fun(function, multiple_results=True)(ctx, x, *scale)


def _encode_avals(x: Any, *scale: Any, dtype: DType, axes: Any, **params: Any) -> list[Any]:
    del scale, params
    shape = tuple(1 if i in axes else size for i, size in enumerate(x.shape))
    return [result_aval(x, x.shape, dtype), result_aval(x, shape, jnp.float32)]


def _encode_batch(args: Any, batch_axes: Any, *, axes: Any, **params: Any) -> Any:
    # Each array of the batch has its own scale.
    axes = tuple(axis + 1 for axis in axes)
    return _encode_p.bind(*batch_in_front(args, batch_axes), axes=axes, **params), [0, 0]


compile_alone(_encode_p)
_encode_p.def_abstract_eval(_encode_avals)
without_derivative(_encode_p)  # the product has it
batching.primitive_batchers[_encode_p] = _encode_batch
never_saved(_encode_p)
mlir.register_lowering(_encode_p, mlir.lower_fun(_encode, multiple_results=True))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_encode_p, _lower_on_gpu, platform=_platform)
