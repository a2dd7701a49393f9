"""8-bit codes that the backward pass reads in place of values; the forward pass has the values.

The rounding errors of two numbers are independent, so that the error of a gradient averages out
over a batch, as that of bfloat16 does. COAT (2024) and ActNN (2021) keep activations in this way.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxmp._numerics.dtypes import DType, is_floating, is_inexact
from jaxmp._numerics.tree import split_floats

Kept = Literal["int8", "float8_e4m3fn"]

# Fewer numbers save nothing: XLA may hold them in registers or in a fast memory.
_SMALLEST = 4096
# A scale takes four bytes, in the place of the bytes that codes save for four numbers.
_SHORTEST_ROW = 16
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


class RowCodes(NamedTuple):
    """A value in codes.

    Attributes:
      codes: one byte for each number.
      scales: the largest magnitude of each row, along the last axis.
    """

    codes: Array
    scales: Float32[Array, "..."]


def has_codes(aval: Any) -> bool:
    """Whether values of this type are kept in codes: floats of 16 or 32 bits that are not small."""
    fits = len(aval.shape) >= 2 and aval.size >= _SMALLEST and aval.shape[-1] >= _SHORTEST_ROW
    return bool(fits and is_floating(aval) and aval.dtype.itemsize in (2, 4))


def encode_rows(x: Float[Array, "*shape"], kept: Kept) -> RowCodes:
    """Rounds to 8 bits, with a scale for each row.

    Codes of int8 hold square roots: `sign(x) * sqrt(|x| / scale) * 127`. If one number of a
    row is 1,000 times the others, these have an error of 13 %; evenly spaced codes would make them
    zero. Rows without an outlier have the error of evenly spaced codes.

    Args:
      x: 16 or 32 bits, of two axes or more.
      kept: the dtype of the codes.

    Returns:
      The codes.

    >>> x = jnp.array([[1000.0, 1.0, -2.0, 0.0]])
    >>> decode_rows(encode_rows(x, "int8"), x.dtype).round().tolist()
    [[1000.0, 1.0, -2.0, 0.0]]
    """
    wide = x.astype(jnp.float32)
    magnitude = jnp.abs(wide)
    # Compared as integers, NaN is the largest; a maximum of floats may ignore NaN.
    bits = jnp.max(jax.lax.bitcast_convert_type(magnitude, jnp.int32), -1, keepdims=True)
    scales = jax.lax.bitcast_convert_type(bits, jnp.float32)
    shares = magnitude / jnp.where(scales > 0, scales, 1)
    codes = (
        jnp.round(jnp.sqrt(shares) * LARGEST[kept]) if kept == "int8" else shares * LARGEST[kept]
    )
    return RowCodes(jnp.where(wide < 0, -codes, codes).astype(kept), scales)


def decode_rows(x: RowCodes, dtype: Any) -> Float[Array, "*shape"]:
    """Returns the numbers that codes stand for; NaN in rows with an infinity or NaN."""
    codes = x.codes.astype(jnp.float32)
    largest = LARGEST[x.codes.dtype.name]
    if x.codes.dtype == jnp.int8:
        return (codes * jnp.abs(codes) * (x.scales / largest**2)).astype(dtype)
    return (codes * (x.scales / largest)).astype(dtype)


def with_coded_residuals(
    run: Callable[..., list[Any]], dtypes: Sequence[DType | None]
) -> Callable[[list[Any], list[RowCodes]], list[Any]]:
    """Returns a function whose backward pass reads some of its arguments as codes.

    Its forward pass is `run`. Its backward pass runs `run` again on the decoded arguments.

    Args:
      run: a function of arrays.
      dtypes: for each array, its dtype if it is read as codes, and None if it is kept.

    Returns:
      A function of the arrays, and of the codes of those that have some.
    """
    coded = [dtype is not None for dtype in dtypes]

    @jax.custom_vjp
    def exact(arrays: list[Any], codes: list[RowCodes]) -> list[Any]:
        return run(*arrays)

    def forward(arrays: list[Any], codes: list[RowCodes]) -> tuple[list[Any], Any]:
        pairs = list(zip(arrays, coded, strict=True))
        saved = [None if has_codes else x for x, has_codes in pairs]
        once = _differentiable_once([x for x, has_codes in pairs if has_codes])
        return run(*arrays), (saved, codes, once)

    def backward(residuals: Any, cotangents: list[Any]) -> tuple[list[Any], None]:
        saved, codes, _ = residuals
        waiting = iter(codes)
        arrays = [
            x if dtype is None else decode_rows(next(waiting), dtype)
            for x, dtype in zip(saved, dtypes, strict=True)
        ]
        floats, merge = split_floats(arrays)
        _, pull_back = jax.vjp(lambda floats: run(*merge(floats, arrays)), floats)
        (gradients,) = pull_back(cotangents)
        remaining = iter(gradients)
        # None is the cotangent of an integer.
        return [next(remaining) if is_inexact(x) else None for x in arrays], None

    exact.defvjp(forward, backward)
    return exact


@jax.custom_jvp
def _differentiable_once(arrays: list[Array]) -> Float32[Array, ""]:
    """Raises where a backward pass is differentiated: it would see no derivative of codes."""
    return jnp.zeros((), jnp.float32)


@_differentiable_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "the backward pass of this function reads 8-bit codes (kept= of jaxmp.recompute), which "
        "have no derivative. Leave kept= out for a second derivative"
    )
