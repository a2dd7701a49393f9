"""Products of 16-bit operands whose gradients with respect to float32 arrays are float32.

The transpose of a product has the dtype of its operand. So a float32 param that is cast to bfloat16
for a product gets a gradient that was rounded to bfloat16, and the partitioner sums it over devices
in bfloat16.

Two primitives fix this. `float32_gradient` is the identity on the value of a product. It adds the
derivative of that value with respect to the float32 source of an operand. This derivative is a
`low_precision_product`: linear in each of two operands, multiplied in 16 bits, and with a result of
any dtype, so that its transpose can be float32.

The cost: XLA:GPU has such matrix products, but no convolution of 16-bit operands with a float32
result. It converts the operands of that one convolution, of the three, to float32.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._numerics.dtypes import DType
from jaxmp._primitives.bilinear import (
    NO_GATHERS,
    RESULT,
    BilinearMap,
    Gathers,
    bilinear_map,
    function_of,
    operand_roles,
    without_caller,
)
from jaxmp._primitives.gathering import gathered
from jaxmp._primitives.operands import ProductOperand, flat_operands, operands_of, place_of_linear
from jaxmp._primitives.primitive_rules import (
    batch_size,
    compile_alone,
    never_saved,
    without_derivative,
    zero_tangent,
)
from jaxmp._primitives.varying import result_aval, varying_alike

# These are primitives, as `jax.custom_vjp` has no forward mode, and `linear_call` has no rule for
# `vmap` (jax 0.10 and 0.12).

# The identity on the operands of the product itself, without a derivative. Unlike
# `jax.lax.stop_gradient`, program rewriters see it, and it has a transpose.
_detach_p = Primitive("held")
# Operands: the result of the product, its operands, operands without a derivative, the scales of
# operands in float8, the sources of operands that have one.
_attach_gradient_p = Primitive("float32_gradient")
# Operands: the two operands of the product, operands without a derivative, scales and sources where
# there are some. The sources do not change the value; they say where second derivatives go.
_bilinear_p = Primitive("low_precision_product")


def detach(x: Any) -> Any:
    """Returns the value without its derivative; another equation has the derivative."""
    return _detach_p.bind(x)


def product(
    primitive: Primitive,
    params: Mapping[str, Any],
    operands: Sequence[Any],
    wide: Sequence[Any | None],
    gathers: Gathers = NO_GATHERS,
    compute: DType | None = None,
) -> Any:
    """Binds a product of 16-bit operands whose gradients for float32 sources are float32.

    The product itself is an ordinary equation, which checkpoint policies and audits recognise.
    Derivatives of any order and mode come from a second primitive behind it.

    Args:
      primitive: `dot_general`, `conv_general_dilated` or `ragged_dot_general`.
      params: its params, with `preferred_element_type` the 16-bit dtype, or float32.
      operands: the two arrays, of 16 bits or widened from them where a CPU asks for it, then
        integer ones (the group sizes of `ragged_dot`).
      wide: for each of the two, the float32 array that it was rounded from, or None where the
        gradient belongs to the operand itself.
      gathers: for each of the two, the shardings before and after it is gathered, or None. A
        derivative gathers it again, so that the operand is kept as it was given.
      compute: the dtype in which derivatives multiply; by default that of the result, so that the
        gradient of a float32 result is not rounded.

    Returns:
      The product, in the preferred dtype.

    Raises:
      NotImplementedError: on differentiation, for operands sharded over explicit mesh axes.
    """
    arrays = varying_alike([*operands, *(x for x in wide if x is not None)])
    operands, sources = arrays[: len(operands)], iter(arrays[len(operands) :])
    widens = compute is not None and compute != params["preferred_element_type"]
    if all(x is None for x in wide) and not widens:
        return primitive.bind(*operands, **params)
    # The second primitive supplies all derivatives: JAX's own rule for a detached operand would
    # lack the second derivative by both operands.
    pairs = zip(operands[:2], gathers, strict=True)
    detached = [gathered(detach(x), gather) for x, gather in pairs]
    dtype = np.dtype(params["preferred_element_type"])
    bilinear = bilinear_map(
        primitive,
        tuple(sorted(params.items())),
        dtype if compute is None else compute,
        tuple((x.shape, x.dtype) for x in operands),
        gathers,
    )
    if widens:
        # CPUs cannot run many such products as ordinary equations; see `_lower_on_cpu`.
        arrays = list(map(ProductOperand, detached))
        out = _bilinear(bilinear, RESULT, dtype, arrays, operands[2:])
    else:
        out = primitive.bind(*detached, *operands[2:], **params)
    # Not the detached arrays: a loop would keep a copy of them.
    product_operands = [
        ProductOperand(x, source=None if source is None else next(sources))
        for x, source in zip(operands, wide, strict=False)
    ]
    return with_derivatives(out, bilinear, product_operands, operands[2:])


def with_derivatives(
    out: Any,
    bilinear: BilinearMap,
    operands: Sequence[ProductOperand],
    others: Sequence[Any] = (),
) -> Any:
    """Returns the result of a product with the derivatives of its map.

    The result has none itself. `others` are operands without a derivative.
    """
    arrays, specs = flat_operands(operands, others)
    return _attach_gradient_p.bind(out, *arrays, product_map=bilinear, specs=specs)


def _bilinear(
    bilinear: BilinearMap,
    result_role: int,
    dtype: Any,
    operands: Sequence[ProductOperand],
    others: Any,
) -> Any:
    """Binds the map from two roles to the third."""
    arrays, specs = flat_operands(operands, others)
    avals = tuple((x.shape, x.dtype) for x in arrays)
    return _bilinear_p.bind(
        *arrays,
        jaxpr=bilinear.realized(result_role, specs, avals, dtype),
        product_map=bilinear,
        returned=result_role,
        specs=specs,
        dtype=np.dtype(dtype),
    )


def _tangents(
    bilinear: BilinearMap, result_role: int, dtype: Any, specs: Any, primals: Any, tangents: Any
) -> list[Any]:
    """Returns the derivative by each operand, or by its source if it has one; without zeros."""
    operands, others = operands_of(primals, specs)
    directions, _ = operands_of(tangents, specs)
    terms = []
    for i in range(2):
        if isinstance(directions[i].linear, ad.Zero):
            continue
        factors = list(operands)
        factors[i] = ProductOperand(directions[i].linear, derivative=True)
        terms.append(_bilinear(bilinear, result_role, dtype, factors, others))
    return terms


def _cotangents(bilinear: BilinearMap, result_role: int, specs: Any, ct: Any, args: Any) -> Any:
    """Returns the transpose by the one operand that is linear, or by its source."""
    operands, others = operands_of(args, specs)
    linear = [i for i in range(2) if ad.is_undefined_primal(operands[i].linear)]
    if len(linear) != 1:
        raise TypeError(f"a product of {bilinear} is linear in one operand, not in both at once")
    (i,) = linear
    roles = operand_roles(result_role)
    into_result = ProductOperand(ct, derivative=True)
    by_role = dict(zip(roles, operands, strict=True)) | {result_role: into_result}
    factors = [by_role[role] for role in operand_roles(roles[i])]
    cotangents: list[Any] = [None] * len(args)
    dtype = operands[i].linear.aval.dtype
    place = place_of_linear(i, len(args), specs)
    cotangents[place] = _bilinear(bilinear, roles[i], dtype, factors, others)
    return cotangents


def _attach_gradient_jvp(
    primals: Any, tangents: Any, *, product_map: BilinearMap, specs: Any
) -> Any:
    out = _attach_gradient_p.bind(*primals, product_map=product_map, specs=specs)
    terms = _tangents(product_map, RESULT, out.dtype, specs, primals[1:], tangents[1:])
    return out, functools.reduce(ad.add_tangents, terms, tangents[0])


def _attach_gradient_transpose(ct: Any, *args: Any, product_map: BilinearMap, specs: Any) -> Any:
    if isinstance(ct, ad.Zero):
        return [None] * len(args)
    if not any(map(ad.is_undefined_primal, args[1:])):
        return [ct, *[None] * (len(args) - 1)]
    # The result also depends on the linear operand through the detached product, but that part has
    # no derivative: the other primitive has all of it.
    return [None, *_cotangents(product_map, RESULT, specs, ct, args[1:])]


def _bilinear_jvp(
    primals: Any,
    tangents: Any,
    *,
    product_map: BilinearMap,
    returned: int,
    specs: Any,
    **params: Any,
) -> Any:
    out = _bilinear_p.bind(
        *primals, product_map=product_map, returned=returned, specs=specs, **params
    )
    terms = _tangents(product_map, returned, params["dtype"], specs, primals, tangents)
    if not terms:
        return out, zero_tangent(out)
    return out, functools.reduce(ad.add_tangents, terms)


def _bilinear_transpose(
    ct: Any, *args: Any, product_map: BilinearMap, returned: int, specs: Any, **params: Any
) -> Any:
    del params
    if isinstance(ct, ad.Zero):
        return [None] * len(args)
    return _cotangents(product_map, returned, specs, ct, args)


def _at_axis(x: Any, axis_before: int | None, axis: int | None, size: int) -> Any:
    """Moves the batch axis of an array, or makes one; None stays None."""
    if x is None or axis is None or axis_before == axis:
        return x
    if axis_before is not None:
        return jnp.moveaxis(x, axis_before, axis)
    shape = (*x.shape[:axis], size, *x.shape[axis:])
    return lax.broadcast_in_dim(x, shape, [i for i in range(len(shape)) if i != axis])


def _batch(
    bilinear: BilinearMap, result_role: int, specs: Any, args: Any, axes: Any, out: int
) -> tuple[BilinearMap, list[ProductOperand], list[Any]]:
    """Returns the batched map and its operands, for a result whose batch axis is `out`."""
    operands, others = operands_of(args, specs)
    before, other_axes = operands_of(axes, specs)
    size = batch_size(args, axes)
    if others:  # JAX's rule for ragged_dot wants everything batched, along the first axis
        after: list[Any] = [0, 0]
        others = [_at_axis(x, a, 0, size) for x, a in zip(others, other_axes, strict=True)]
        other_axes = [0] * len(others)
    else:
        after = [x.value if x.value is not None else x.linear for x in before]
        if after == [None, None]:
            after = [0, None]
    batched = []
    for operand, operand_axes, axis in zip(operands, before, after, strict=True):
        arrays = zip(operand[:3], operand_axes[:3], strict=True)
        value, scale, source = (_at_axis(x, a, axis, size) for x, a in arrays)
        batched.append(ProductOperand(value, scale, source, operand.derivative))
    by_role = {result_role: out, **dict(zip(operand_roles(result_role), after, strict=True))}
    batched_map = bilinear.batched(tuple(by_role[i] for i in range(3)), tuple(other_axes), size)
    return batched_map, batched, others


def _attach_gradient_batch(args: Any, axes: Any, *, product_map: BilinearMap, specs: Any) -> Any:
    size = batch_size(args, axes)
    (*_, others), out = operands_of(args[1:], specs), axes[0]
    out = 0 if out is None or others else out
    result = _at_axis(args[0], axes[0], out, size)
    if all(axis is None for axis in axes[1:]):
        args, axes = [args[0], _at_axis(args[1], None, 0, size), *args[2:]], [out, 0, *axes[2:]]
    product_map, operands, others = _batch(product_map, RESULT, specs, args[1:], axes[1:], out)
    return with_derivatives(result, product_map, operands, others), out


def _bilinear_batch(
    args: Any,
    axes: Any,
    *,
    jaxpr: Any,
    product_map: BilinearMap,
    returned: int,
    specs: Any,
    dtype: Any,
) -> Any:
    del jaxpr
    product_map, operands, others = _batch(product_map, returned, specs, args, axes, 0)
    return _bilinear(product_map, returned, dtype, operands, others), 0


def _bilinear_aval(
    lhs: Any, rhs: Any, *others: Any, product_map: BilinearMap, **params: Any
) -> Any:
    varying = max((lhs, rhs), key=lambda x: len(x.mat.varying))
    return result_aval(varying, product_map.shapes[params["returned"]], params["dtype"])


def _lower(ctx: Any, *args: Any, jaxpr: Any, function: Any = None, **params: Any) -> Any:
    del params
    # Lowered without varying axes, which the equations inside do not have.
    ctx = ctx.replace(avals_in=list(jaxpr.in_avals))
    with without_caller():
        return mlir.lower_fun(function or function_of(jaxpr), multiple_results=False)(ctx, *args)


def _lower_on_cpu(ctx: Any, *args: Any, jaxpr: Any, dtype: Any, **params: Any) -> Any:
    product_map, returned, specs = (params[name] for name in ("product_map", "returned", "specs"))

    def function(*args: Any) -> Any:
        return product_map.multiplied(returned, *operands_of(args, specs), np.float32, exact=True)

    # Many 16-bit products with a float32 result fail on CPU, some only after partitioning:
    # "Unsupported element type for DotThunk". Products of 16-bit numbers are exact in float32, so
    # that only the speed differs.
    is_float32 = dtype == np.float32
    return _lower(ctx, *args, jaxpr=jaxpr, function=function if is_float32 else None)


_detach_p.def_impl(lambda x: x)
_detach_p.def_abstract_eval(lambda x: x)
without_derivative(_detach_p)
batching.primitive_batchers[_detach_p] = lambda args, axes: (_detach_p.bind(*args), axes[0])
never_saved(_detach_p)
mlir.register_lowering(_detach_p, lambda ctx, x: [x])

_attach_gradient_p.def_impl(lambda out, *operands, **params: out)
_attach_gradient_p.def_abstract_eval(lambda out, *operands, **params: out)
ad.primitive_jvps[_attach_gradient_p] = _attach_gradient_jvp
ad.primitive_transposes[_attach_gradient_p] = _attach_gradient_transpose
batching.primitive_batchers[_attach_gradient_p] = _attach_gradient_batch
mlir.register_lowering(_attach_gradient_p, lambda ctx, out, *operands, **params: [out])

compile_alone(_bilinear_p)
_bilinear_p.def_abstract_eval(_bilinear_aval)
ad.primitive_jvps[_bilinear_p] = _bilinear_jvp
ad.primitive_transposes[_bilinear_p] = _bilinear_transpose
batching.primitive_batchers[_bilinear_p] = _bilinear_batch
mlir.register_lowering(_bilinear_p, _lower)
mlir.register_lowering(_bilinear_p, _lower_on_cpu, platform="cpu")
