"""The rounding of an operand to float8, as one equation that has no derivative.

It compiles to ordinary operations, so that compilers fuse them, and share those of one array.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._jaxpr import compat
from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.float8_codes import (
    Coded,
    encoded,
    encoded_as_expected,
    encoded_in_blocks,
)
from jaxmp._primitives.checkpoints import never_saved
from jaxmp._primitives.varying import result_aval

# Operands: an array, and the largest magnitude to expect of it if its scale is known before.
# Results: its codes, their scales, and in that case the largest magnitude.
_encode_p = Primitive("float8_encode")
_encode_p.multiple_results = True


def float8_encode(
    x: Any,
    dtype: DType,
    axes: tuple[int, ...],
    *,
    power_of_two: bool,
    in_blocks: bool = False,
    is_weight: bool = False,
    history: int = 0,
) -> Coded:
    """Rounds an array to float8, without a derivative.

    Args:
      x: the array, of any float dtype up to float32.
      dtype: the float8 dtype.
      axes: the axes that share a scale, or are cut into blocks that do.
      power_of_two: whether scales are powers of two.
      in_blocks: whether each block of 128 numbers has its own scale.
      is_weight: whether it is a weight, which stays as it lies in memory.
      history: for how many steps its largest magnitudes are kept, if somebody keeps them; 0 for
        current scaling. It changes nothing here.

    Returns:
      The codes and the scales. Under `vmap`, each array of the batch has its own scale; in a
      `shard_map`, each shard.
    """
    params = {"axes": axes, "power_of_two": power_of_two, "in_blocks": in_blocks}
    params |= {"is_weight": is_weight, "history": history}
    return Coded(*_encode_p.bind(x, dtype=np.dtype(dtype), **params))


def encode_as_expected(
    x: Any,
    dtype: DType,
    axes: tuple[int, ...],
    expected: Any,
    *,
    power_of_two: bool,
    is_weight: bool = False,
) -> tuple[Coded, Any]:
    """Rounds an array to float8 by a scale that is known before, without a derivative.

    Args:
      x: the array, of any float dtype up to float32.
      dtype: the float8 dtype.
      axes: the axes that share a scale.
      expected: the largest magnitude to expect, a float32 scalar.
      power_of_two: whether scales are powers of two.
      is_weight: whether it is a weight, which stays as it lies in memory.

    Returns:
      The codes and the scales, and the largest magnitude that is there. Under a `vmap` over `x`
      alone, this is one number for the whole batch.
    """
    params = {"axes": axes, "power_of_two": power_of_two, "is_weight": is_weight}
    fixed = {"dtype": np.dtype(dtype), "in_blocks": False, "history": 0}
    codes, scale, seen = _encode_p.bind(x, expected, **params, **fixed)
    return Coded(codes, scale), seen


def _encoded(
    x: Any, *expected: Any, in_blocks: bool, dtype: DType, axes: Any, power_of_two: bool, **_: Any
) -> list[Any]:
    if expected:
        made, seen = encoded_as_expected(x, dtype, axes, *expected, power_of_two=power_of_two)
        return [*made, seen]
    function = encoded_in_blocks if in_blocks else encoded
    return list(function(x, dtype, axes, power_of_two=power_of_two))


def _lower_on_gpu(ctx: Any, x: Any, *expected: Any, is_weight: bool, **params: Any) -> Any:
    # Tensor cores of an H100 read float8 operands along what is summed. XLA would transpose a whole
    # stack of float32 weights for that, before the loop over its layers: 1.19 times the temporaries
    # of bfloat16 for a GPT in a rematerialized scan (12 layers of width 1024). Fixed here, it
    # transposes codes. An array on several devices would be gathered for that, and `jax.export`
    # refuses layouts.
    fixed = is_weight and compat.is_for_one_device(ctx) and not compat.is_for_export(ctx)

    def function(x: Any, *expected: Any) -> list[Any]:
        x = with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if fixed else x
        return _encoded(x, *expected, **params)

    return mlir.lower_fun(function, multiple_results=True)(ctx, x, *expected)


def _avals(
    x: Any, *expected: Any, dtype: DType, axes: Any, in_blocks: bool, **params: Any
) -> list[Any]:
    shape = x.shape
    if not in_blocks:
        shape = tuple(1 if i in axes else size for i, size in enumerate(shape))
    seen = [result_aval(x, each.shape, jnp.float32) for each in expected]
    return [result_aval(x, x.shape, dtype), result_aval(x, shape, jnp.float32), *seen]


def _encode_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = _encode_p.bind(*primals, **params)
    return out, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]


def _batched(args: Any, batch_axes: Any, *, axes: Any, **params: Any) -> Any:
    (x, *expected), (axis, *axis_of_expected) = args, batch_axes
    size = next(x.shape[i] for x, i in zip(args, batch_axes, strict=True) if i is not None)
    x = batching.bdim_at_front(x, axis, size)
    axes = tuple(axis + 1 for axis in axes)
    if axis_of_expected == [None] and expected[0].ndim == 0:
        # One number is expected of the whole batch, and one is found: never a sum.
        return _encode_p.bind(x, *expected, axes=axes, **params), [0, 0, None]
    expected = [
        batching.bdim_at_front(y, i, size) for y, i in zip(expected, axis_of_expected, strict=True)
    ]
    return _encode_p.bind(x, *expected, axes=axes, **params), [0, 0, *[0 for _ in expected]]


@functools.lru_cache(maxsize=4096)
def _compiled(params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(_encode_p.bind, **dict(params)))


def _impl(*args: Any, **params: Any) -> Any:
    with jax.disable_jit(False):  # where jit is disabled, this would call itself
        return _compiled(tuple(params.items()))(*args)


_encode_p.def_impl(_impl)
_encode_p.def_abstract_eval(_avals)
ad.primitive_jvps[_encode_p] = _encode_jvp
# For `jax.linear_transpose`: the product has the derivative, as that of a held operand.
ad.primitive_transposes[_encode_p] = lambda cts, *args, **params: [None] * len(args)
batching.primitive_batchers[_encode_p] = _batched
never_saved(_encode_p)
mlir.register_lowering(_encode_p, mlir.lower_fun(_encoded, multiple_results=True))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_encode_p, _lower_on_gpu, platform=_platform)
