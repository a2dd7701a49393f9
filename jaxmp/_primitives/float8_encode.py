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
from jaxmp._numerics.float8_codes import Coded, encode_float8
from jaxmp._primitives.primitive_rules import (
    batch_in_front,
    compile_alone,
    never_saved,
    without_derivative,
)
from jaxmp._primitives.varying import result_aval
from jaxmp._program import compat

# Operand: an array. Results: its codes, and their scales.
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


def _encode(x: Any, *, is_weight: bool, **params: Any) -> Coded:
    del is_weight
    return encode_float8(x, **params)


def _lower_on_gpu(ctx: Any, x: Any, *, is_weight: bool, **params: Any) -> Any:
    # Tensor cores of an H100 read float8 operands along the summed dimension. XLA would transpose a
    # whole stack of float32 weights for that, before the loop over its layers: 1.19 times the
    # temporaries of bfloat16 for a GPT in a rematerialized scan (12 layers of width 1024). Fixed
    # here, it transposes codes. An array on several devices would be gathered for that, and
    # `jax.export` refuses layouts.
    fixed = is_weight and compat.is_for_one_device(ctx) and not compat.is_for_export(ctx)

    def function(x: Any) -> Coded:
        x = with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if fixed else x
        return encode_float8(x, **params)

    return mlir.lower_fun(function, multiple_results=True)(ctx, x)


def _encode_avals(x: Any, *, dtype: DType, axes: Any, **params: Any) -> list[Any]:
    del params
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
