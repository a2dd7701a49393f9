"""Products in float8: their forward pass, and the bilinear map of their derivatives.

One equation without a derivative takes the scales off a product of codes. As ordinary equations,
that would be a product of two values that both depend on an operand. JAX refuses to transpose such
a product where the operand is a tangent, as in the rule of a `jax.custom_jvp`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.float8_codes import Coded, decoded
from jaxmp._policies.recipe import Recipe
from jaxmp._primitives.bilinear import (
    RESULT,
    BilinearMap,
    Cell,
    Gathers,
    bilinear_map,
    cast,
    function_of,
    slots,
)
from jaxmp._primitives.float8_encode import float8_encode
from jaxmp._primitives.gathering import gathered
from jaxmp._primitives.mixed_product import held, with_derivatives
from jaxmp._primitives.operands import ProductOperand
from jaxmp._primitives.varying import result_aval, varying_alike, varying_axes
from jaxmp._program.program import Op

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


# Each axis of an operand or result is of one group: summed, of the left or right operand alone,
# shared by both, or added by `vmap`.
_SUMMED, _LEFT, _RIGHT, _SHARED, _MAPPED = "summed", "left", "right", "shared", "mapped"
_Groups = tuple[tuple[str, ...], ...]
# The group that a map sums, by the role that it returns.
_SUMMED_BY = (_RIGHT, _LEFT, _SUMMED)
_FAST, _EXACT = (lax.Precision.DEFAULT,) * 2, (lax.Precision.HIGHEST,) * 2


def float8_product(
    params: Mapping[str, Any], lhs: Any, rhs: Any, recipe: Recipe, parameter: int
) -> Any:
    """Binds a product in float8, with its derivatives.

    The backward pass multiplies in float8 too, as the recipe says. The forward product is an
    ordinary equation, which checkpoint policies and audits recognise.

    Args:
      params: the params of a `dot_general`; `preferred_element_type` is the dtype of the result.
      lhs: the left operand, of 16 or 32 bits. Its gradient has its dtype.
      rhs: the right operand.
      recipe: the recipe.
      parameter: which operand is the weight, 0 or 1.

    Returns:
      The product.
    """
    operands = varying_alike([lhs, rhs])
    dtype = np.dtype(params["preferred_element_type"])
    form = float8_map(
        tuple(sorted(params.items())),
        tuple((x.shape, np.dtype(x.dtype)) for x in operands),
        dtype,
        recipe,
        parameter,
    )
    coded = [form.encode(i, x, RESULT) for i, x in enumerate(operands)]
    shown = [Coded(held(x.codes), x.scale) for x in coded]
    numbers = params["dimension_numbers"]
    out, *scales = form.product(shown, numbers, dtype, _FAST, exact=dtype == np.float32)
    out = scale_back(out, scales[0], dtype) if scales else out
    kept = [ProductOperand(x) for x in operands]
    if recipe.keeps_codes:
        kept = [ProductOperand(x.codes, x.scale, y) for x, y in zip(coded, operands, strict=True)]
    return with_derivatives(out, form, kept)


class Float8Map(BilinearMap):
    """A product in float8 for given shapes: the maps from any two of its roles to the third.

    Attributes:
      recipe: the recipe.
      parameter: the role of the weight.
      groups: for each role, the group of each axis.
    """

    def __init__(self, *args: Any, recipe: Recipe, parameter: int, groups: _Groups) -> None:
        super().__init__(*args)
        self.recipe = recipe
        self.parameter = parameter
        self.groups = groups

    def multiplied(
        self,
        returned: int,
        operands: Sequence[ProductOperand],
        others: Sequence[Any],
        dtype: Any,
        *,
        exact: bool = False,
    ) -> Any:
        """Makes a role from the two others; see `BilinearMap`."""
        if returned == self.parameter and self.recipe.weight_gradient != "float8":
            return super().multiplied(returned, operands, others, dtype, exact=exact)
        gathers = (*self.gathers, None)
        coded: list[Cell] = []
        for operand, role in zip(operands, slots(returned), strict=True):
            x, scale, _, derivative = operand
            if scale is None:
                x, scale = self.encode(role, x, returned, derivative=derivative)
            coded.append(Coded(gathered(x, gathers[role]), scale))

        def product(op: Op, cells: list[Cell]) -> Cell:
            each, numbers = [Coded(*cell) for cell in cells], op.params["dimension_numbers"]
            return self.product(each, numbers, dtype, _EXACT, exact=exact)

        out, *scales = self.run(returned, coded, dtype, product)
        return without_scale(out, scales[0], dtype) if scales else out

    def product(
        self,
        operands: Sequence[Coded],
        dimension_numbers: Any,
        dtype: Any,
        precision: Any,
        *,
        exact: bool,
    ) -> Cell:
        """Multiplies two arrays in float8; the scales of the result still have to be taken off.

        Args:
          operands: the arrays.
          dimension_numbers: those of the `dot_general`.
          dtype: the dtype of the result.
          precision: the precision of the product.
          exact: whether to multiply decoded numbers as float32: a CPU has no product of 16-bit
            numbers with a float32 result.

        Returns:
          The result with its scales, or the result alone if scales were taken off before.
        """
        powers = self.recipe.power_of_two
        bind = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers)
        summed = zip(operands, dimension_numbers[0], strict=True)
        if any(x.scale.shape[i] != 1 for x, axes in summed for i in axes):
            # Scales that differ along a sum cannot come out of it.
            is_narrow = powers and not exact and dtype != jnp.float16
            narrow = jnp.bfloat16 if is_narrow else jnp.float32
            # XLA:GPU drops a cast to float8 and back, unless there is a barrier in between.
            kept = [x._replace(codes=lax.optimization_barrier(x.codes)) for x in operands]
            numbers = [decoded(x, narrow) for x in kept]
            highest = None if powers else _EXACT  # powers of two leave bfloat16's bits
            # A product of bfloat16 numbers rounds to bfloat16 before it rounds to float16.
            wide = dtype if is_narrow else np.dtype(np.float32)
            out = bind(*numbers, precision=highest, preferred_element_type=wide)
            return (cast(out, dtype),)
        # Powers of two scale bfloat16 exactly, and compilers fold one scalar into the product. In
        # float16, sums of codes would overflow.
        wide = dtype if powers and dtype != jnp.float16 else np.dtype(np.float32)
        codes = [x.codes for x in operands]
        out = bind(*codes, precision=precision, preferred_element_type=wide)
        return Coded(out, _scale_of_product(operands, dimension_numbers, out.ndim))

    def encode(self, role: int, x: Any, returned: int, *, derivative: bool = False) -> Coded:
        """Rounds an operand of one of the maps to float8.

        Args:
          role: the role of the operand.
          x: the operand.
          returned: the role that the map returns.
          derivative: whether the operand is a tangent or a cotangent.
        """
        dtype = self.recipe.gradient if derivative else self.recipe.forward
        is_weight = role == self.parameter and not derivative
        powers = self.recipe.power_of_two
        axes = self.axes_of_scale(role, returned)
        return float8_encode(x, dtype, axes, power_of_two=powers, is_weight=is_weight)

    def axes_of_scale(self, role: int, returned: int) -> tuple[int, ...]:
        """Returns the axes along which an operand of the map that returns a role shares scales."""
        groups = self.groups[role]
        # As in torchao's recipe: in the backward pass, a weight that is not transposed by rows.
        is_weight = role == self.parameter and returned != RESULT
        whole = is_weight and self.recipe.weight_gradient != "float8"
        if whole or self.recipe.granularity == "tensor":
            return tuple(i for i, group in enumerate(groups) if group != _MAPPED)
        return tuple(i for i, group in enumerate(groups) if group == _SUMMED_BY[returned])

    def _made(
        self, shapes: Any, others: Any, given: Any, gathers: Gathers, axes: Any = ()
    ) -> "Float8Map":
        groups = tuple(
            each if axis is None else (*each[:axis], _MAPPED, *each[axis:])
            for each, axis in zip(self.groups, axes or (None,) * len(self.groups), strict=True)
        )
        args = (self.primitive, self.compute, shapes, others, given, gathers)
        return Float8Map(*args, recipe=self.recipe, parameter=self.parameter, groups=groups)


@functools.lru_cache(maxsize=1024)
def float8_map(
    params: tuple[tuple[str, Any], ...],
    avals: tuple[tuple[tuple[int, ...], Any], ...],
    compute: DType,
    recipe: Recipe,
    parameter: int,
) -> Float8Map:
    """Returns the map of a product: one object for equal products, so that jit caches find it."""
    given = bilinear_map(lax.dot_general_p, params, compute, avals)
    summed, shared = dict(params)["dimension_numbers"]
    ndims = [len(shape) for shape, _ in avals]
    sides = [
        tuple(
            _SUMMED if i in summed[side] else _SHARED if i in shared[side] else own
            for i in range(ndims[side])
        )
        for side, own in enumerate((_LEFT, _RIGHT))
    ]
    result = (
        *[_SHARED] * len(shared[0]),
        *[group for groups in sides for group in groups if group in (_LEFT, _RIGHT)],
    )
    maps = {RESULT: function_of(given.float32_map(RESULT))}
    args = (given.primitive, compute, given.shapes, given.others, maps)
    return Float8Map(*args, recipe=recipe, parameter=parameter, groups=(*sides, result))


def _scale_of_product(operands: Sequence[Coded], dimension_numbers: Any, ndim: int) -> Any:
    """Returns the scale of a product of codes: float32, broadcast against the result."""
    contracted, shared = dimension_numbers
    found = []
    for side, (_, scale) in enumerate(operands):
        taken = (*shared[side], *contracted[side])
        free = [i for i in range(scale.ndim) if i not in taken]
        batch, own = ([scale.shape[i] for i in axes] for axes in (shared[side], free))
        ones = [1] * (ndim - len(batch) - len(own))
        moved = scale.transpose([*shared[side], *free, *contracted[side]])
        found.append(moved.reshape([*batch, *ones, *own] if side else [*batch, *own, *ones]))
    return found[0] * found[1]
