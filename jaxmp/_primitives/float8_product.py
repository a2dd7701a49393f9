"""Products in float8: their forward pass, and the bilinear map of their derivatives.

One equation without a derivative takes the scales off a product of codes. As ordinary equations,
that would be a product of two values that both depend on an operand. JAX refuses to transpose such
a product where the operand is a tangent, as in the rule of a `jax.custom_jvp`.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.float8_codes import Coded, decode_float8
from jaxmp._policies.recipe import Recipe
from jaxmp._primitives.bilinear import (
    RESULT,
    BilinearMap,
    Cell,
    Gathers,
    bilinear_map,
    cast,
    function_of,
    operand_roles,
)
from jaxmp._primitives.block_product import block_product
from jaxmp._primitives.float8_encode import float8_encode
from jaxmp._primitives.gathering import gathered
from jaxmp._primitives.mixed_product import detach, with_derivatives
from jaxmp._primitives.operands import ProductOperand
from jaxmp._primitives.primitive_rules import batch_in_front, compile_alone, without_derivative
from jaxmp._primitives.varying import result_aval, varying_alike, varying_axes
from jaxmp._program.program import Op

# Operands: a product of codes, and its scale.
_scale_back_p = Primitive("float8_scale_back")


def without_scale(product: Any, scale: Any, dtype: Any) -> Any:
    """Takes the scale off a product of codes in bfloat16 or float32, by ordinary operations.

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


def _scale_back_aval(product: Any, scale: Any, *, dtype: Any) -> Any:
    like = max((product, scale), key=lambda x: len(varying_axes(x)))
    return result_aval(like, product.shape, dtype)


def _scale_back_batch(args: Any, axes: Any, **params: Any) -> Any:
    return _scale_back_p.bind(*batch_in_front(args, axes), **params), 0


compile_alone(_scale_back_p)
_scale_back_p.def_abstract_eval(_scale_back_aval)
without_derivative(_scale_back_p)
batching.primitive_batchers[_scale_back_p] = _scale_back_batch
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
    ordinary equation, which checkpoint policies and audits recognise; of blocks, audits alone.

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
    product_map = float8_map(
        tuple(sorted(params.items())),
        tuple((x.shape, np.dtype(x.dtype)) for x in operands),
        dtype,
        recipe,
        parameter,
    )
    if recipe.granularity == "block":
        arrays = list(map(ProductOperand, operands))
        return with_derivatives(
            product_map.multiplied(RESULT, arrays, (), dtype), product_map, arrays
        )
    codes = [product_map.encode(i, x, RESULT) for i, x in enumerate(operands)]
    detached = [Coded(detach(x.codes), x.scale) for x in codes]
    numbers = params["dimension_numbers"]
    out, *scales = product_map.product(detached, numbers, dtype, _FAST, exact=dtype == np.float32)
    out = scale_back(out, scales[0], dtype) if scales else out
    residuals = [
        ProductOperand(coded.codes, coded.scale, x)
        if recipe.keeps_codes(of_weight=i == parameter)
        else ProductOperand(x)
        for i, (coded, x) in enumerate(zip(codes, operands, strict=True))
    ]
    return with_derivatives(out, product_map, residuals)


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

    def multiplies_codes(self, result_role: int) -> bool:
        """Whether the map that returns a role multiplies codes."""
        return result_role != self.parameter or self.recipe.weight_gradient != "bfloat16"

    def multiplied(
        self,
        result_role: int,
        operands: Sequence[ProductOperand],
        others: Sequence[Any],
        dtype: Any,
        *,
        exact: bool = False,
    ) -> Any:
        """Makes a role from the two others; see `BilinearMap`."""
        if not self.multiplies_codes(result_role):
            return super().multiplied(result_role, operands, others, dtype, exact=exact)
        if self.recipe.granularity == "block":
            return self._in_blocks(result_role, operands, dtype)
        gathers = (*self.gathers, None)
        cells: list[Cell] = []
        for operand, role in zip(operands, operand_roles(result_role), strict=True):
            x, scale, _, derivative = operand
            if scale is None:
                x, scale = self.encode(role, x, result_role, derivative=derivative)
            cells.append(Coded(gathered(x, gathers[role]), scale))

        def multiply(op: Op, cells: list[Cell]) -> Cell:
            operands, numbers = [Coded(*cell) for cell in cells], op.params["dimension_numbers"]
            return self.product(operands, numbers, dtype, _EXACT, exact=exact)

        out, *scales = self.run(result_role, cells, dtype, multiply)
        return without_scale(out, scales[0], dtype) if scales else out

    def _in_blocks(self, result_role: int, operands: Sequence[ProductOperand], dtype: Any) -> Any:
        # Codes of one product do not fit the next, whose sum is another: each rounds the arrays.
        # Nothing is gathered: no partitioner splits such products.
        def multiply(op: Op, cells: list[Cell]) -> Cell:
            arrays, numbers = [x for (x,) in cells], op.params["dimension_numbers"]
            return (block_product(arrays, self.recipe.forward, numbers, dtype),)

        return self.run(result_role, [(x.value,) for x in operands], dtype, multiply)[0]

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
        sums = zip(operands, dimension_numbers[0], strict=True)
        codes = [x.codes for x in operands]
        is_integer = codes[0].dtype == jnp.int8
        length = math.prod(codes[0].shape[i] for i in dimension_numbers[0][0])
        # A symbolic length, as of `jax.export`, may be any.
        has_room = not is_integer or (isinstance(length, int) and length * 127**2 < 2**31)
        if any(x.scale.shape[i] != 1 for x, axes in sums for i in axes) or not has_room:
            # Scales that differ along a sum cannot come out of it, nor a sum of more than 32 bits.
            is_narrow = powers and not exact and dtype != jnp.float16
            decoded_dtype = jnp.bfloat16 if is_narrow else jnp.float32
            # XLA:GPU drops a cast to float8 and back, unless there is a barrier in between.
            coded = [x._replace(codes=lax.optimization_barrier(x.codes)) for x in operands]
            numbers = [decode_float8(x, decoded_dtype) for x in coded]
            highest = None if powers else _EXACT  # powers of two leave bfloat16's bits
            # A product of bfloat16 numbers rounds to bfloat16 before it rounds to float16.
            result_dtype = dtype if is_narrow else np.dtype(np.float32)
            out = bind(*numbers, precision=highest, preferred_element_type=result_dtype)
            return (cast(out, dtype),)
        # Powers of two scale bfloat16 exactly, and compilers fold one scalar into the product. In
        # float16, sums of codes would overflow.
        result_dtype = dtype if powers and dtype != jnp.float16 else np.dtype(np.float32)
        if is_integer:
            sums_of_codes = bind(*codes, preferred_element_type=np.dtype(np.int32))
            out = cast(sums_of_codes, np.float32)
            return Coded(out, _scale_of_product(operands, dimension_numbers, out.ndim))
        out = bind(*codes, precision=precision, preferred_element_type=result_dtype)
        return Coded(out, _scale_of_product(operands, dimension_numbers, out.ndim))

    def encode(self, role: int, x: Any, result_role: int, *, derivative: bool = False) -> Coded:
        """Rounds an operand of the map that returns a role; a tangent is a `derivative`, too."""
        dtype = self.recipe.gradient if derivative else self.recipe.forward
        is_weight = role == self.parameter and not derivative
        powers = self.recipe.power_of_two
        axes = self._axes_of_scale(role, result_role)
        return float8_encode(x, dtype, axes, power_of_two=powers, is_weight=is_weight)

    def _axes_of_scale(self, role: int, result_role: int) -> tuple[int, ...]:
        """Returns the axes along which an operand of the map that returns a role shares scales."""
        groups = self.groups[role]
        # As in torchao's recipe: in the backward pass, a weight that is not transposed by rows.
        is_weight = role == self.parameter and result_role != RESULT
        whole = is_weight and self.recipe.weight_gradient == "bfloat16"
        if whole or self.recipe.granularity == "tensor":
            return tuple(i for i, group in enumerate(groups) if group != _MAPPED)
        return tuple(i for i, group in enumerate(groups) if group == _SUMMED_BY[result_role])

    def _new_map(
        self, shapes: Any, others: Any, maps: Any, gathers: Gathers, axes: Any = ()
    ) -> "Float8Map":
        groups = tuple(
            group if axis is None else (*group[:axis], _MAPPED, *group[axis:])
            for group, axis in zip(self.groups, axes or (None,) * len(self.groups), strict=True)
        )
        args = (self.primitive, self.compute, shapes, others, maps, gathers)
        return Float8Map(*args, recipe=self.recipe, parameter=self.parameter, groups=groups)


@functools.lru_cache(maxsize=1024)
def float8_map(
    params: tuple[tuple[str, Any], ...],
    avals: tuple[tuple[tuple[int, ...], Any], ...],
    compute: DType,
    recipe: Recipe,
    parameter: int,
) -> Float8Map:
    """Returns the map of a product, as `bilinear_map` does."""
    base = bilinear_map(lax.dot_general_p, params, compute, avals)
    sums, shared = dict(params)["dimension_numbers"]
    ndims = [len(shape) for shape, _ in avals]
    sides = [
        tuple(
            _SUMMED if i in sums[side] else _SHARED if i in shared[side] else own
            for i in range(ndims[side])
        )
        for side, own in enumerate((_LEFT, _RIGHT))
    ]
    result = (
        *[_SHARED] * len(shared[0]),
        *[group for groups in sides for group in groups if group in (_LEFT, _RIGHT)],
    )
    maps = {RESULT: function_of(base.float32_map(RESULT))}
    args = (base.primitive, compute, base.shapes, base.others, maps)
    return Float8Map(*args, recipe=recipe, parameter=parameter, groups=(*sides, result))


def _scale_of_product(operands: Sequence[Coded], dimension_numbers: Any, ndim: int) -> Any:
    """Returns the scale of a product of codes: float32, broadcast against the result."""
    sums, shared = dimension_numbers
    scales = []
    for side, (_, scale) in enumerate(operands):
        not_free = (*shared[side], *sums[side])
        free = [i for i in range(scale.ndim) if i not in not_free]
        batch, own = ([scale.shape[i] for i in axes] for axes in (shared[side], free))
        ones = [1] * (ndim - len(batch) - len(own))
        transposed = scale.transpose([*shared[side], *free, *sums[side]])
        scales.append(transposed.reshape([*batch, *ones, *own] if side else [*batch, *own, *ones]))
    return scales[0] * scales[1]
