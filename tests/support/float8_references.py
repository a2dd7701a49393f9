"""Products in 8 bits in NumPy float64, from the definition: scales, codes, products, gradients."""

import dataclasses
from typing import Any

import numpy as np

import jaxmp

# Bits of mantissa, least exponent of normal numbers, largest number. Integers lie as close as the
# subnormal numbers of a format with six bits of mantissa would.
FORMATS = {
    "float8_e4m3fn": (3, -6, 448.0),
    "float8_e5m2": (2, -14, 57344.0),
    "int8": (6, 6, 127.0),
}
LEAST_AMAX = 1e-12


def rounded(x: Any, form: str) -> np.ndarray:
    """Numbers rounded to 8 bits, to nearest even, as float64; out of range is the largest."""
    mantissa, least, largest = FORMATS[form]
    x = np.clip(np.asarray(x, np.float64), -largest, largest)
    exponent = np.maximum(np.frexp(x)[1] - 1, least)
    step = np.ldexp(1.0, exponent - mantissa)
    return np.rint(x / step) * step  # dividing by a power of two is exact


def scale(amax: Any, form: str, power_of_two: bool) -> np.ndarray:
    """Float32 scales, as float64; NaN where the largest magnitude is not finite."""
    amax = np.asarray(amax, np.float64)
    with np.errstate(all="ignore"):
        # A float64 quotient of float32 numbers, rounded again, is the float32 quotient.
        found = (FORMATS[form][2] / np.maximum(amax, LEAST_AMAX)).astype(np.float32)
    found = found.astype(np.float64)
    if power_of_two:
        found = np.ldexp(0.5, np.frexp(found)[1])
    return np.where(np.isfinite(amax), found, np.nan)


def coded(
    x: Any, form: str, axes: tuple[int, ...], *, power_of_two: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The codes and the scale of each number, as float64."""
    x = np.asarray(x, np.float64)
    amax = np.broadcast_to(np.abs(x).max(axis=axes, keepdims=True), x.shape)
    scales = scale(amax, form, power_of_two)
    # The number that is rounded is a float32.
    scaled = (x * scales).astype(np.float32)
    return rounded(scaled, form), scales


def in_blocks(x: Any, form: str, axes: tuple[int, ...]) -> np.ndarray:
    """The numbers that MXFP8 codes and scales stand for, in blocks of 32 along summed axes.

    The scale is the least power of two by which the largest number of a block is in range.
    """
    x = np.moveaxis(np.asarray(x, np.float64), axes, range(-len(axes), 0))
    lines = x.reshape(-1, int(np.prod(x.shape[x.ndim - len(axes) :])))
    padded = np.pad(lines, ((0, 0), (0, -lines.shape[1] % 32)))
    blocks = padded.reshape(len(lines), -1, 32)
    amax = np.abs(blocks).max(axis=2, keepdims=True)
    mantissa, exponent = np.frexp(amax / FORMATS[form][2])
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)  # a power of two itself
    exponent = np.where(amax > 0, np.clip(exponent, -127, 127), -127)
    decoded = np.ldexp(rounded(np.ldexp(blocks, -exponent), form), exponent)
    found = decoded.reshape(padded.shape)[:, : lines.shape[1]].reshape(x.shape)
    return np.moveaxis(found, range(-len(axes), 0), axes)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product in einsum's letters, `"mk,kn->mn"`, and which operand is the weight."""

    spec: str
    recipe: jaxmp.float8.Recipe
    parameter: int = 1

    def letters(self) -> list[str]:
        lhs, rest = self.spec.split(",")
        return [lhs, *rest.split("->")]

    def numbers(self) -> Any:
        """The dimension numbers of its `dot_general`."""
        lhs, rhs, out = self.letters()
        pairs = []
        for kind in (
            [c for c in lhs if c in rhs and c not in out],
            [c for c in lhs if c in rhs and c in out],
        ):
            pairs.append(tuple(tuple(side.index(c) for c in kind) for side in (lhs, rhs)))
        return tuple(pairs)

    def decoded(self, role: int, x: Any, returned: int) -> np.ndarray:
        """What an operand (0, 1; 2 is the cotangent) is multiplied as, in one of the maps."""
        recipe, letters = self.recipe, self.letters()
        own = letters[role]
        others = next(letters[i] for i in range(3) if i not in (role, returned))
        summed = tuple(i for i, c in enumerate(own) if c in others and c not in letters[returned])
        axes = summed
        narrow = recipe.weight_gradient == "bfloat16"
        if returned == self.parameter and narrow:
            return np.asarray(x, np.float64)
        if recipe.granularity == "tensor" or (role == self.parameter and narrow and returned != 2):
            axes = tuple(range(len(own)))
        form = recipe.gradient if role == 2 else recipe.forward
        if recipe.granularity == "block":
            return in_blocks(x, form.name, summed)
        codes, scales = coded(x, form.name, axes, power_of_two=recipe.power_of_two)
        return codes / scales

    def result(self, lhs: Any, rhs: Any) -> np.ndarray:
        """The product."""
        return np.einsum(self.spec, self.decoded(0, lhs, 2), self.decoded(1, rhs, 2))

    def gradients(self, lhs: Any, rhs: Any, ct: Any) -> tuple[np.ndarray, np.ndarray]:
        """The gradients by both operands."""
        a, b, out = self.letters()
        by_lhs = np.einsum(f"{out},{b}->{a}", self.decoded(2, ct, 0), self.decoded(1, rhs, 0))
        by_rhs = np.einsum(f"{a},{out}->{b}", self.decoded(0, lhs, 1), self.decoded(2, ct, 1))
        return by_lhs, by_rhs


def error(got: Any, want: Any) -> float:
    """The norm of the difference, relative to that of what is wanted; inf for NaN."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    found = float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-300))
    return np.inf if np.isnan(found) else found
