"""The operands of a product, and the arrays of an equation that holds them."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class ProductOperand(NamedTuple):
    """One operand of a product.

    Attributes:
      value: the array that is multiplied.
      scale: the float32 scale of float8 codes; None for other arrays.
      source: the wider array that the value was rounded from, if its gradient goes there.
      derivative: whether it is a tangent or a cotangent.
    """

    value: Any
    scale: Any = None
    source: Any = None
    derivative: bool = False

    @property
    def linear(self) -> Any:
        """The array to which the gradient of the operand goes."""
        return self.value if self.source is None else self.source

    @property
    def spec(self) -> "OperandSpec":
        return OperandSpec(self.scale is not None, self.source is not None, self.derivative)


class OperandSpec(NamedTuple):
    """The facts about an operand without its arrays; attributes as in `ProductOperand`."""

    # A param of equations: its name and fields stand in printed jaxprs.

    scaled: bool
    wide: bool
    derivative: bool = False


def flat_operands(
    operands: Sequence[ProductOperand], others: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Returns the arrays of two operands and others for an equation, and the facts to rebuild them.

    >>> flat_operands([ProductOperand("x"), ProductOperand("codes", "scale", "w")], [])[0]
    ['x', 'codes', 'scale', 'w']
    """
    values, scales, sources, _ = zip(*operands, strict=True)
    extra = (x for x in (*scales, *sources) if x is not None)
    return [*values, *others, *extra], tuple(operand.spec for operand in operands)


def operands_of(
    args: Sequence[Any], specs: Sequence[OperandSpec]
) -> tuple[list[ProductOperand], list[Any]]:
    """Rebuilds operands from arrays, or from anything that stands for them.

    >>> operands_of(["x", "w16", "w"], [OperandSpec(False, False), OperandSpec(False, True)])[0][1]
    ProductOperand(value='w16', scale=None, source='w', derivative=False)
    """
    end = len(args) - sum(spec.scaled + spec.wide for spec in specs)
    extra = iter(args[end:])
    scales = [next(extra) if spec.scaled else None for spec in specs]
    sources = [next(extra) if spec.wide else None for spec in specs]
    derivatives = [spec.derivative for spec in specs]
    operands = map(ProductOperand, args[: len(specs)], scales, sources, derivatives)
    return list(operands), list(args[len(specs) : end])


def place_of_linear(i: int, count: int, specs: Sequence[OperandSpec]) -> int:
    """Returns where among `count` arrays the one is to which the gradient of an operand goes.

    >>> place_of_linear(0, 3, [OperandSpec(False, True), OperandSpec(False, False)])
    2
    """
    return count - sum(spec.wide for spec in specs[i:]) if specs[i].wide else i
