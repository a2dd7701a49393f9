"""Arrays in 8 bits: a code for each number, and a scale for each block of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int8, UInt32

# A block is one tile of a TPU: of other blocks its compiler makes copies in another layout, of 13
# to 16 bytes for each number (4096 x 4096, v5e).
_ROWS, _COLUMNS = 8, 128
_SHORTEST_ROW = 8
_LARGEST = 127


class Codes(NamedTuple):
    """What `encode` makes of an array.

    Attributes:
      codes: the numbers, in the shape of the array: `sign(x) * sqrt(|x| / scale) * 127`, rounded
        at random.
      scales: the largest magnitude of each block.
    """

    codes: Int8[Array, "*shape"]
    scales: Float32[Array, "*blocks"]


def block_of(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """How far a block reaches along each of the last two axes, or one; None for no blocks.

    8 x 128 numbers where that divides; one row where it does not, unless it is so short that its
    scale would take more than half a byte for each of its numbers; of a vector 128 numbers. Never
    the whole array: one outlier would take the precision of all of it.

    >>> block_of((4096, 512)), block_of((103, 65)), block_of((1024,)), block_of((103,))
    ((8, 128), (1, 65), (128,), None)
    """
    if not shape or 0 in shape:
        return None
    tiled = shape[-1] % _COLUMNS == 0
    if len(shape) == 1:
        return (_COLUMNS,) if tiled else None
    if tiled and shape[-2] % _ROWS == 0:
        return (_ROWS, _COLUMNS)
    if shape[-1] < _SHORTEST_ROW:
        return None
    return (1, _COLUMNS if tiled else shape[-1])


def blocks_of(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the scales of an array; None if it has no blocks.

    >>> blocks_of((2, 4096, 512)), blocks_of((103, 65))
    ((2, 512, 4), (103, 1))
    """
    block = block_of(shape)
    if block is None:
        return None
    counts = (n // b for n, b in zip(shape[-len(block) :], block, strict=True))
    return (*shape[: -len(block)], *counts)


def encode(x: Float32[Array, "*shape"], words: UInt32[Array, "*shape"]) -> Codes:
    """Rounds to 8 bits in blocks, up or down at random, so that the mean is right.

    Codes are dense near zero: their square roots are spaced evenly. What is not zero does not
    become zero: where a second moment did, an optimizer would divide by nothing. To nearest, a
    moment that changes by less than half of its distance to the next code would stay as it is, and
    lag behind.

    Args:
      x: float32, of a shape of which `block_of` has blocks.
      words: uniform random words.

    Returns:
      Codes and scales.

    Source: Dettmers et al., "8-bit optimizers via block-wise quantization" (2021), for blocks;
    FlashOptim (2026), for codes with a square root.

    >>> x = jnp.linspace(-1, 1, 1024, dtype=jnp.float32).reshape(8, 128)
    >>> codes, scales = encode(x, jnp.zeros(x.shape, jnp.uint32))
    >>> codes.dtype.name, scales.shape, bool(jnp.all(abs(decode(Codes(codes, scales)) - x) < 0.016))
    ('int8', (1, 1), True)
    """
    shape = blocks_of(x.shape)
    if shape is None:
        raise ValueError(f"no blocks in an array of shape {x.shape}")
    counts, within = shape[-2:], _within(x.ndim)
    blocks = _in_blocks(x, counts)
    magnitude = jnp.abs(blocks)
    # As integers, in whose order NaN comes last: a maximum of floats may leave it out.
    bits = jax.lax.bitcast_convert_type(magnitude, jnp.int32)
    largest = jnp.max(bits, within, keepdims=True)
    scales = jax.lax.bitcast_convert_type(largest, jnp.float32)
    square = magnitude / jnp.where(scales > 0, scales, 1) * _LARGEST**2
    below = jnp.minimum(jnp.floor(jnp.sqrt(square)), _LARGEST - 1)
    # The next code stands for (below + 1) ** 2.
    share = (square - below * below) / (2 * below + 1)
    draw = _in_blocks((words >> 8).astype(jnp.float32) * 2.0**-24, counts)
    code = jnp.where(draw < share, below + 1, below)
    code = jnp.where(magnitude > 0, jnp.maximum(code, 1), 0)
    codes = (jnp.sign(blocks) * code).astype(jnp.int8)
    return Codes(codes.reshape(x.shape), jnp.squeeze(scales, within))


def decode(x: Codes) -> Float32[Array, "*shape"]:
    """The numbers that codes stand for.

    Args:
      x: codes and scales.

    Returns:
      float32.
    """
    root = _in_blocks(x.codes.astype(jnp.float32), x.scales.shape[-2:]) * (1 / _LARGEST)
    values = root * jnp.abs(root) * jnp.expand_dims(x.scales, _within(x.codes.ndim))
    return values.reshape(x.codes.shape)


def _within(ndim: int) -> tuple[int, ...]:
    """The axes along which an array of so many has the numbers of a block, as `_in_blocks` ends."""
    return (-1,) if ndim == 1 else (-3, -1)


def _in_blocks(x: Array, counts: tuple[int, ...]) -> Array:
    """Each of the last axes as two: so many blocks, and what is in one."""
    axes = len(counts)
    split = [(count, n // count) for count, n in zip(counts, x.shape[-axes:], strict=True)]
    return x.reshape(*x.shape[:-axes], *(n for pair in split for n in pair))
