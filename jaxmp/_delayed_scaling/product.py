"""A product in float8 whose operands, and whose cotangent, are rounded by scales known before."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, Float32

from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.float8_codes import scale_of
from jaxmp._primitives.bilinear import RESULT, BilinearMap, Gathers, slots
from jaxmp._primitives.float8_encode import encode_by_scale
from jaxmp._primitives.float8_product import Float8Map
from jaxmp._primitives.mixed_product import with_derivatives
from jaxmp._primitives.operands import ProductOperand, operands_of


class DelayedMap(BilinearMap):
    """A product in float8, with the scale of its cotangent as one more operand.

    Attributes:
      current: the product with current scaling.
    """

    def __init__(self, current: Float8Map) -> None:
        super().__init__(
            current.primitive, current.compute, current.shapes, (), {}, current.gathers
        )
        self.current = current

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
        pairs = zip(operands, slots(returned), strict=True)
        rounded = [self._rounded(x, role, returned, *others) for x, role in pairs]
        return self.current.multiplied(returned, rounded, (), dtype, exact=exact)

    def _rounded(
        self, operand: ProductOperand, role: int, returned: int, scale: Any
    ) -> ProductOperand:
        """Rounds the cotangent of the result; other operands are rounded by the product."""
        if role != RESULT or not operand.derivative:
            return operand
        recipe, axes = self.current.recipe, self.current.axes_of_scale(role, returned)
        params = {"dtype": recipe.gradient, "axes": axes, "power_of_two": recipe.power_of_two}
        coded, _ = encode_by_scale(operand.value, scale, **params)
        return ProductOperand(*coded, derivative=True)

    def batched(self, axes: Any, other_axes: Any, size: int) -> "DelayedMap":
        """Returns the map of `size` products, each with its scale."""
        del other_axes
        return delayed_map(self.current.batched(axes, (), size))

    def gathering(self, gathers: Gathers) -> "DelayedMap":
        """Returns the map of the same product of operands that are gathered first."""
        return delayed_map(self.current.gathering(gathers))


@functools.lru_cache(maxsize=1024)
def delayed_map(current: Any) -> DelayedMap:
    """Returns one object for equal products, so that jit caches find it."""
    return DelayedMap(current)


def encoded_by(
    equation: core.JaxprEqn, x: Any, expected: Float32[Array, ""]
) -> tuple[list[Any], Float32[Array, ""]]:
    """Rounds an operand again, by a scale that is known before.

    Args:
      equation: the equation that rounds it by current magnitudes.
      x: the operand.
      expected: the largest magnitude to expect.

    Returns:
      The codes and the scales, and the largest magnitude that is there.
    """
    params = equation.params
    scale = scale_expecting(expected, params["dtype"], params["power_of_two"])
    coded, largest = encode_by_scale(x, scale, **params)
    return list(coded), jnp.max(largest)


def attached_by(equation: core.JaxprEqn, values: list[Any], expected: Float32[Array, ""]) -> Any:
    """Attaches the derivatives of a product again, its cotangent to be rounded by a known scale.

    Args:
      equation: the equation that attaches them.
      values: its operands.
      expected: the largest magnitude to expect of the cotangent.

    Returns:
      The result of the product.
    """
    form = equation.params["form"]
    operands, _ = operands_of(values[1:], equation.params["kept"])
    scale = scale_expecting(expected, form.recipe.gradient, form.recipe.power_of_two)
    return with_derivatives(values[0], delayed_map(form), operands, [scale])


def scale_expecting(
    expected: Float32[Array, ""], dtype: DType, power_of_two: bool
) -> Float32[Array, ""]:
    """Returns the scale for a magnitude to expect; 1 for zero, which says nothing.

    >>> scale_expecting(jnp.float32(0), jnp.dtype("float8_e4m3fn"), True)
    Array(1., dtype=float32)
    """
    scale = scale_of(expected, dtype, power_of_two=power_of_two)
    return jnp.where(expected == 0, jnp.float32(1), scale)
