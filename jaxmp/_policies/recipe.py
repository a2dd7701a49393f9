"""Recipes: how products with params are multiplied in 8 bits."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxmp._numerics.dtypes import DType, any_dtype_name, code_kind, suggestion

Granularity = Literal["tensor", "row", "block"]
Minimum = Literal["auto"] | None

_E4M3, _E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
# A new format is added here, and to the docstring below. Of float8, `_NAMES` in
# `_numerics/dtypes.py` has its name, and `_FLOAT8` in `_tools/planning/devices.py` lists it.
_FORMATS = {"float8": (_E4M3, _E5M2), "int8": (jnp.dtype(jnp.int8),)}
# Why a product is left out that a call with more rows may have, as decoding has one row. No warning
# follows: it says nothing about the function.
ONE_ROW = "M = 1: one row is read, not multiplied"
_BFLOAT16: Literal["bfloat16"] = "bfloat16"
# Tensor cores and the shapes that XLA's float8 products take without padding; the size of a block.
_MULTIPLES: Mapping[str, int] = {"tensor": 16, "row": 16, "block": 32}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """How products with params are multiplied in 8 bits: formats, scales, and which products.

    Both operands are rounded to 8 bits. A scale brings each into the range of the format first.
    What shares a scale decides what an outlier costs. docs/float8.md says which recipe pays where.

    ============ =========================================== ====================
    name         one scale for                               gradients of weights
    ============ =========================================== ====================
    `tensorwise` each array                                  in float8
    `rowwise`    each row along the summed dimension         in float8
    `rowwise_hp` the same; in the backward pass, each weight in bfloat16
    `int8`       each array                                  in bfloat16
    `mxfp8`      32 numbers along the sum of each product    in float8
    ============ =========================================== ====================

    Args:
      granularity: `"tensor"`, `"row"` or `"block"`: what shares a scale. Blocks are MXFP8.
      forward: the dtype of activations and weights: float8_e4m3fn, float8_e5m2 or int8, or its
        name.
      gradient: the dtype of derivatives; int8 if `forward` is.
      power_of_two: whether scales are rounded down to powers of two. Without, a result is scaled
        in float32, which costs float8 a pass over it. Sums of int8 are integers, which are scaled
        in float32 anyway.
      weight_gradient: `"float8"` or `"int8"`, as the formats are, or `"bfloat16"` for gradients of
        weights that are computed without codes.
      minimum: `"auto"` leaves out products that are slower in 8 bits on a GPU: for tensors those
        with K <= 4096 and N <= 1024, for rows those with N <= 2048, or K <= 1024, or N <= 4096 and
        K <= 2048 (K is summed, N is the weight's other size). On other devices, for blocks, and
        for None, there is no threshold. Sizes that are no multiples of 16, or of 32 for blocks, are
        always left out.

    Raises:
      ValueError: for an unknown value.

    >>> Recipe()
    Recipe('tensorwise')
    >>> get_recipe("rowwise_hp").weight_gradient
    'bfloat16'
    """

    granularity: Granularity = "tensor"
    forward: Any = _E4M3
    gradient: Any = _E5M2
    power_of_two: bool = True  # a scale that is rounded itself moves a whole tensor by up to 0.2 %
    weight_gradient: Literal["float8", "int8", "bfloat16"] = "float8"
    minimum: Minimum = "auto"

    def __post_init__(self) -> None:
        formats = {dtype.name: dtype for dtypes in _FORMATS.values() for dtype in dtypes}
        for name in ("forward", "gradient"):
            format_name = any_dtype_name(getattr(self, name))
            if format_name not in formats:
                valid = ", ".join(formats)
                raise ValueError(f"{name} of a recipe must be one of {valid}; got {format_name}")
            object.__setattr__(self, name, formats[format_name])
        if self.gradient not in _FORMATS[self.codes]:
            raise ValueError(
                f"a recipe multiplies float8 or int8, not both; got forward={self.forward.name}, "
                f"gradient={self.gradient.name}"
            )
        is_mxfp8 = self.codes == "float8" and self.power_of_two and self.forward == self.gradient
        if self.granularity == "block" and not is_mxfp8:
            raise ValueError(
                "blocks are MXFP8: one float8 format, and scales that are powers of two; got "
                f"forward={self.forward.name}, gradient={self.gradient.name}, "
                f"power_of_two={self.power_of_two}. Take the recipe 'mxfp8'"
            )
        for name, choices in {**_CHOICES, "weight_gradient": (self.codes, _BFLOAT16)}.items():
            if (value := getattr(self, name)) not in choices:
                valid = ", ".join(map(repr, choices))
                raise ValueError(f"{name} of a recipe must be one of {valid}; got {value!r}")

    @property
    def codes(self) -> str:
        """`"float8"` or `"int8"`."""
        return code_kind(self.forward.name)

    def keeps_codes(self, *, of_weight: bool) -> bool:
        """Whether the backward pass reads the codes of the forward pass: 1 byte for each number."""
        # A backward product sums along other axes than the forward one: codes that have a scale for
        # each row of the first do not fit it. Codes with one scale do. Activations are read for the
        # gradient of the weight alone.
        is_read = of_weight or self.weight_gradient != _BFLOAT16
        return self.granularity == "tensor" and is_read

    def why_not(self, rows: int, summed: int, columns: int) -> str | None:
        """Returns why a product of these sizes is left out; None if it is not.

        Args:
          rows: the size of the other operand, without the summed dimensions (M).
          summed: the size of the summed dimensions (K).
          columns: the size of the weight, without the summed dimensions (N).

        >>> Recipe().why_not(4096, 512, 50257)
        'N = 50257 is no multiple of 16'
        """
        sizes = {"K": summed, "N": columns, "M": rows}
        for name, size in sizes.items() if self.granularity == "block" else ():
            if not isinstance(size, int) or size == 0:  # a symbolic size, as of `jax.export`
                return f"{name} = {size}, and blocks need a known size above 0"
        multiple = _MULTIPLES[self.granularity]
        for name in ("K", "N"):
            if sizes[name] % multiple:
                return f"{name} = {sizes[name]} is no multiple of {multiple}"
        if rows == 1:
            return ONE_ROW
        # The thresholds of torchao's filter, for one H100: rounding costs more than a small product
        # saves.
        is_slow = {
            "tensor": summed <= 4096 and columns <= 1024,
            "row": columns <= 2048 or summed <= 1024 or (columns <= 4096 and summed <= 2048),
            "block": False,
        }[self.granularity]
        if is_slow and self.minimum == "auto" and jax.default_backend() == "gpu":
            return f"K = {summed}, N = {columns} is slower in 8 bits"
        return None

    def __str__(self) -> str:
        fields = [field.name for field in dataclasses.fields(self)]

        def differing(base: "Recipe") -> list[str]:
            return [name for name in fields if getattr(self, name) != getattr(base, name)]

        # The nearest recipe with a name, and the fields that differ from it: `get_recipe` reads it.
        name, base = min(_RECIPES.items(), key=lambda item: len(differing(item[1])))
        values = {key: getattr(self, key) for key in differing(base)}
        texts = {k: v.name if isinstance(v, DType) else str(v).lower() for k, v in values.items()}
        return ":".join([name, *(f"{key}={text}" for key, text in texts.items())])

    def __repr__(self) -> str:
        return f"Recipe({str(self)!r})"


_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "granularity": ("tensor", "row", "block"),
    "power_of_two": (True, False),
    "minimum": ("auto", None),
}
# Names and formats of torchao. The gradient of a weight is a sum over tokens, where one outlier
# takes the scale of a feature for all of them. So `rowwise_hp` computes it in bfloat16.
_RECIPES: Mapping[str, Recipe] = {
    "tensorwise": Recipe(),
    "rowwise": Recipe(granularity="row", gradient=_E4M3),
    "rowwise_hp": Recipe(granularity="row", gradient=_E4M3, weight_gradient=_BFLOAT16),
    "int8": Recipe(forward="int8", gradient="int8", power_of_two=False, weight_gradient=_BFLOAT16),
    "mxfp8": Recipe(granularity="block", gradient=_E4M3),
}
# Names that users will try, and why they are not here.
_NOT_HERE: Mapping[str, str] = {
    name: f"{name} has numbers of 4 bits, whose gradients need transforms and random rounding, and "
    "no device was here to measure them. Of formats with blocks there is 'mxfp8', for a B200"
    for name in ("mxfp4", "nvfp4")
} | {
    "blockwise": "blockwise would be slower than bfloat16: XLA has no product of blocks of 128 "
    "with a scale each. For activations with outliers take 'rowwise_hp'",
    "delayed": "scales from earlier steps need a state, which no recipe has. Take 'tensorwise', "
    "whose scales come from the values at hand",
}


_WORDS: Mapping[str, bool | None] = {"none": None, "true": True, "false": False}


def get_recipe(recipe: str | Recipe | None) -> Recipe | None:
    """Returns a recipe for its name, with what differs behind colons; None for none.

    Args:
      recipe: a recipe, its name, or a text such as `"rowwise:gradient=float8_e5m2"`.

    Returns:
      The recipe.

    Raises:
      ValueError: for an unknown name or field, or a format that JAX does not multiply.
      TypeError: for anything else.

    >>> get_recipe("tensorwise:minimum=none").minimum is None
    True
    >>> get_recipe("rowwise_hp:minimum=none")
    Recipe('rowwise_hp:minimum=none')
    """
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"products must be a jaxmp.float8.Recipe or its name, got {type(recipe).__name__}"
        )
    name, *parts = (part.strip() for part in recipe.split(":"))
    if name.lower() in _NOT_HERE:
        raise ValueError(f"{_NOT_HERE[name.lower()]}. Use one of: {', '.join(_RECIPES)}")
    if name not in _RECIPES:
        hint = suggestion(name, list(_RECIPES))
        raise ValueError(f"unknown recipe {name!r}.{hint} Valid: {', '.join(_RECIPES)}")
    values: dict[str, Any] = {}
    fields = [field.name for field in dataclasses.fields(Recipe)]
    for change in parts:
        key, equals, value = (piece.strip() for piece in change.partition("="))
        if not equals or key not in fields or key in values:
            hint = suggestion(key, fields)
            raise ValueError(
                f"cannot read {change!r} in recipe {recipe!r}: expected one field=value of "
                f"{', '.join(fields)}.{hint}"
            )
        values[key] = _WORDS.get(value.lower(), value)
    return dataclasses.replace(_RECIPES[name], **values)
