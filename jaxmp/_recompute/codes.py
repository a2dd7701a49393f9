"""8-bit codes that the backward pass reads in place of values; the forward pass has the values.

The rounding errors of two numbers are independent, so that the error of a gradient averages out
over a batch, as that of bfloat16 does. COAT (2024) and ActNN (2021) keep activations in this way.
"""

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jaxtyping import Array, Float, Float32

from jaxmp._numerics.dtypes import DType, is_floating

RowFormat = Literal["int8", "float8_e4m3fn"]

# Fewer numbers save nothing: XLA may hold them in registers or in a fast memory.
_SMALLEST = 4096
# The scales of a row take twelve bytes, in the place of the bytes that codes save.
_SHORTEST_ROW = 16
# The largest magnitude of a row is special if it is this many times the next: a mask or an outlier
# would leave nothing of the other numbers.
_APART = 256.0
_INFINITY_BITS, _LARGEST_FLOAT32 = 0x7F800000, 3.4028235e38
# The code of special numbers, infinities and NaN; the largest and the smallest one of others.
_SPECIAL = {"int8": 127.0, "float8_e4m3fn": 448.0}
_LARGEST = {"int8": 126.0, "float8_e4m3fn": 416.0}
_SMALLEST_CODE = {"int8": 1.0, "float8_e4m3fn": 2.0**-9}


class RowCodes(NamedTuple):
    """A value in codes, with three scales for each row, along the last axis.

    Attributes:
      codes: one byte for each number.
      units: a typical magnitude for int8, and the largest one of numbers for float8.
      bounds: for int8, the inverse hyperbolic sine of the largest magnitude in units.
      specials: the largest magnitude, which may be a mask, infinite or NaN.
    """

    codes: Array
    units: Float32[Array, "..."]
    bounds: Float32[Array, "..."] | None
    specials: Float32[Array, "..."]


def has_codes(aval: Any) -> bool:
    """Whether values of this type are kept in codes: floats of 16 or 32 bits that are not small.

    An axis of unknown length counts as a long one.
    """
    sizes = [size if isinstance(size, int) else _SMALLEST for size in aval.shape]
    fits = len(sizes) >= 2 and math.prod(sizes) >= _SMALLEST and sizes[-1] >= _SHORTEST_ROW
    return bool(fits and is_floating(aval) and aval.dtype.itemsize in (2, 4))


def encode_rows(x: Float[Array, "*shape"], kept: RowFormat) -> RowCodes:
    """Rounds to 8 bits, with scales for each row.

    Codes of int8 are evenly spaced in `asinh(x / unit)`, where the unit is that of a typical number
    of the row. Of normally distributed rows the error is 0.75 % of their standard deviation, near
    the least that 255 codes allow (Panter and Dite, 1951); evenly spaced codes have 0.93 %. If one
    or a few numbers of a row are many times the others, evenly spaced codes make these zero.

    A sign stays, and zero is the only zero. The largest magnitude of a row stays as it is if it is
    infinite, NaN, or more than 256 times the next, such as a mask. Infinities beside NaN become
    NaN.

    Args:
      x: 16 or 32 bits, of two axes or more.
      kept: the dtype of the codes.

    Returns:
      The codes.

    >>> x = jnp.array([[3.0, 1.0, -2.0, 0.0, -1e9]])
    >>> decode_rows(encode_rows(x, "int8"), x.dtype).round().tolist()
    [[3.0, 1.0, -2.0, 0.0, -1000000000.0]]
    """
    wide = jax.lax.stop_gradient(x).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.abs(wide), jnp.int32)
    # Compared as integers, NaN is the largest; a maximum of floats may ignore NaN.
    top = jnp.max(bits, -1, keepdims=True)
    specials = jax.lax.bitcast_convert_type(top, jnp.float32)
    # Arithmetic in place of `where`: a loop would keep the constant of a `where` as a large array.
    below = bits * (bits < jnp.minimum(top, _INFINITY_BITS)).astype(jnp.int32)
    others = jax.lax.bitcast_convert_type(below, jnp.float32)
    largest = jnp.max(others, -1, keepdims=True)
    # Not true of NaN.
    has_numbers_only = specials <= jnp.minimum(_APART * largest, _LARGEST_FLOAT32)
    largest = jnp.where(has_numbers_only, specials, largest)
    is_number = (bits <= jax.lax.bitcast_convert_type(largest, jnp.int32)).astype(jnp.int32)
    numbers = jax.lax.bitcast_convert_type(bits * is_number, jnp.float32)
    if kept == "int8":
        # A mean of square roots hardly sees an outlier.
        units = jnp.square(jnp.mean(jnp.sqrt(others), -1, keepdims=True))
        bounds = jnp.asinh(largest / _nonzero(units))
        shares = jnp.asinh(numbers / _nonzero(units)) / _nonzero(bounds)
        levels = jnp.round(shares * _LARGEST[kept])
    else:
        units, bounds = largest, None
        shares = numbers / _nonzero(units)
        levels = (shares * _LARGEST[kept]).astype(kept).astype(jnp.float32)
    is_positive, is_special = (mask.astype(jnp.float32) for mask in (numbers > 0, is_number == 0))
    levels = jnp.maximum(levels, is_positive * _SMALLEST_CODE[kept])
    levels = jnp.maximum(levels, is_special * _SPECIAL[kept])
    codes = jnp.where(wide < 0, -levels, levels).astype(kept)
    return RowCodes(codes, _derived_from(units, x), bounds, specials)


def _nonzero(x: Array) -> Array:
    return x + (x == 0).astype(x.dtype)


def decode_rows(x: RowCodes, dtype: Any) -> Float[Array, "*shape"]:
    """Returns the numbers that codes stand for."""
    kept = x.codes.dtype.name
    codes = x.codes.astype(jnp.float32)
    shares = codes / _LARGEST[kept]
    numbers = (shares if x.bounds is None else jnp.sinh(shares * x.bounds)) * x.units
    special = jnp.where(codes < 0, -x.specials, x.specials)
    return jnp.where(jnp.abs(codes) == _SPECIAL[kept], special, numbers).astype(dtype)


def with_coded_derivative(
    run: Callable[..., list[Any]],
    dtypes: Sequence[DType | None],
    reached: Callable[[Sequence[bool]], Sequence[bool]],
    barriers: bool,
) -> Callable[[list[Any], list[RowCodes]], list[Any]]:
    """Returns a function whose derivative reads some of its arguments as codes.

    The function itself is `run`. Its derivative is that of `run` at the decoded arguments, in a
    checkpoint, which keeps nothing but arguments and codes.

    Args:
      run: a function of arrays.
      dtypes: for each array, its dtype if it is read as codes, and None if it is kept.
      reached: returns which results a derivative by some of the arrays reaches.
      barriers: whether the compiler may not merge what the passes compute.

    Returns:
      A function of the arrays, and of the codes of those that have some.
    """

    @jax.custom_jvp
    def exact(arrays: list[Any], codes: list[RowCodes]) -> list[Any]:
        return run(*arrays)

    def derivative(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        arrays, codes = primals
        moving = tuple(not isinstance(x, SymbolicZero) for x in tangents[0])
        results, are_reached = run(*arrays), reached(moving)
        if not any(are_reached):
            return results, [zero_from_primal(y, symbolic_zeros=True) for y in results]
        read_once = [x._replace(units=_differentiable_once(x.units)) for x in codes]
        decoded = map(decode_rows, read_once, filter(None, dtypes))
        operands = [
            x if dtype is None else next(decoded) for x, dtype in zip(arrays, dtypes, strict=True)
        ]

        def run_from(moved: list[Any]) -> list[Any]:
            remaining = iter(moved)
            moved_operands = [
                next(remaining) if moves else x for x, moves in zip(operands, moving, strict=True)
            ]
            return list(compress(run(*moved_operands), are_reached))

        moved, directions = (list(compress(x, moving)) for x in (operands, tangents[0]))
        new = iter(jax.jvp(run_from, (moved,), (directions,))[1])
        return results, [
            next(new) if is_reached else zero_from_primal(y, symbolic_zeros=True)
            for y, is_reached in zip(results, are_reached, strict=True)
        ]

    exact.defjvp(derivative, symbolic_zeros=True)
    # The checkpoint is around the rule, not in it: a checkpoint in a rule has no transpose in the
    # newest form of checkpoints (JAX_REMAT3). What only the results read is not kept.
    return jax.checkpoint(exact, prevent_cse=barriers)


def _derived_from(units: Float32[Array, "..."], x: Array) -> Float32[Array, "..."]:
    """Returns the units, which have a tangent where `x` has one, so that one can ask for it."""
    # Not a function with a rule of its own: scans of jax 0.10 may leave the rule out.
    rows = jnp.sum(x.astype(units.dtype), -1, keepdims=True)
    return jnp.where(False, rows, units)


@jax.custom_jvp
def _differentiable_once(units: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns the units; raises if they have a tangent.

    A first derivative reads them and ignores their tangents. A second derivative asks for the
    derivative of the first, which reads them here.
    """
    return units


@_differentiable_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "the derivative of this function reads 8-bit codes (codes= of jaxmp.recompute), which "
        "have no derivative. Leave codes= out for a second derivative"
    )
