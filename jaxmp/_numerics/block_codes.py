"""Arrays in 8 bits: a code for each number, and a scale for each block of numbers."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int8, UInt32

# A block is one tile of a TPU. For other blocks the TPU compiler makes copies in another layout, of
# 13 to 16 bytes for each number (4096 x 4096, v5e).
_ROWS, _COLUMNS = 8, 128
_SHORTEST_ROW = 8
_LARGEST = 127


class Codes(NamedTuple):
    """An array in 8 bits, as `encode` returns it.

    Attributes:
      codes: the numbers, in the shape of the array: `sign(x) * (|x| / scale) ** (1/4) * 127`,
        rounded at random.
      scales: the largest magnitude of each block.
    """

    codes: Int8[Array, "*shape"]
    scales: Float32[Array, "*blocks"]


def block_of(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the size of a block along the last two axes (or the only one); None for no blocks.

    A block has 8 x 128 numbers where these divide the shape. Otherwise it lies in one row: 128
    numbers if these divide the row, else the whole row. Rows of fewer than 8 numbers have no
    blocks, as a scale would take more than half a byte for each number. A block of a vector has 128
    numbers. No block holds all rows: one outlier would cost all of them their precision.

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
    """Returns the shape of the scales of an array; None if it has no blocks.

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

    Codes are dense near zero: the fourth roots of their values are evenly spaced. The smallest
    value is 4e-9 of the scale, so that square roots of second moments reach down to 6e-5. Rounded
    to nearest, a moment that changes by less than half the distance to the next code would not
    move, and lag behind.

    Nonzero numbers become at least the smallest code, never zero: an optimizer would divide by a
    second moment of zero.

    Args:
      x: float32, in a shape that has blocks (see `block_of`).
      words: uniform random words.

    Returns:
      Codes and scales.

    Source: Dettmers et al., "8-bit optimizers via block-wise quantization" (2021), for blocks;
    FlashOptim (2026), for codes of roots.

    >>> x = jnp.linspace(-1, 1, 1024, dtype=jnp.float32).reshape(8, 128)
    >>> codes, scales = encode(x, jnp.zeros(x.shape, jnp.uint32))
    >>> codes.dtype.name, scales.shape, bool(jnp.all(abs(decode(Codes(codes, scales)) - x) < 0.032))
    ('int8', (1, 1), True)
    """
    scales = scales_of(x)
    return Codes(codes_of(x, scales, words), scales)


def scales_of(x: Float32[Array, "*shape"]) -> Float32[Array, "*blocks"]:
    """Returns the largest magnitude of each block.

    Args:
      x: float32, in a shape that has blocks (see `block_of`).

    Returns:
      float32, in the shape that `blocks_of` returns.
    """
    shape = blocks_of(x.shape)
    if shape is None:
        raise ValueError(f"no blocks in an array of shape {x.shape}")
    # Compared as integers, NaN is the largest; a maximum of floats may ignore NaN.
    bits = jax.lax.bitcast_convert_type(jnp.abs(_in_blocks(x, shape[-2:])), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, _within(x.ndim)), jnp.float32)


def codes_of(
    x: Float32[Array, "*shape"], scales: Float32[Array, "*blocks"], words: UInt32[Array, "*shape"]
) -> Int8[Array, "*shape"]:
    """Returns the codes that `encode` makes of numbers whose blocks have these scales.

    Args:
      x: float32.
      scales: `scales_of(x)`.
      words: uniform random words.

    Returns:
      The codes.
    """
    counts = scales.shape[-2:]
    blocks = _in_blocks(x, counts)
    magnitude = jnp.abs(blocks)
    scales = jnp.expand_dims(scales, _within(x.ndim))
    fourth = magnitude / jnp.where(scales > 0, scales, 1) * _LARGEST**4
    below = jnp.minimum(jnp.floor(jnp.sqrt(jnp.sqrt(fourth))), _LARGEST - 1)
    lower, upper = _square(_square(below)), _square(_square(below + 1))
    draw = _in_blocks((words >> 8).astype(jnp.float32) * 2.0**-24, counts)
    code = jnp.where(draw * (upper - lower) < fourth - lower, below + 1, below)
    code = jnp.where(magnitude > 0, jnp.maximum(code, 1), 0)
    codes = (jnp.sign(blocks) * code).astype(jnp.int8)
    return _reshaped(codes, x.shape, jax.typeof(x).sharding.spec)


def decode(x: Codes) -> Float32[Array, "*shape"]:
    """Returns the numbers that codes stand for.

    Args:
      x: codes and scales.

    Returns:
      float32.
    """
    root = _in_blocks(x.codes.astype(jnp.float32), x.scales.shape[-2:]) * (1 / _LARGEST)
    scales = jnp.expand_dims(x.scales, _within(x.codes.ndim))
    values = jnp.sign(root) * _square(_square(root)) * scales
    return _reshaped(values, x.codes.shape, jax.typeof(x.codes).sharding.spec)


def _square(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return x * x


def _within(ndim: int) -> tuple[int, ...]:
    """Returns the axes along which the result of `_in_blocks` has the numbers of a block."""
    return (-1,) if ndim == 1 else (-3, -1)


def _in_blocks(x: Array, counts: tuple[int, ...]) -> Array:
    """Splits each of the last axes in two: the blocks, and the numbers in a block."""
    ndim, first = x.ndim, x.ndim - len(counts)
    sharding = jax.typeof(x).sharding
    spec = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    of_blocks = spec_of_blocks((*x.shape[:first], *counts), jax.P(*spec), sharding.mesh)
    shape, split = [*x.shape[:first]], [*of_blocks[:first]]
    for axis, count in enumerate(counts, first):
        shape += [count, x.shape[axis] // count]
        split += [of_blocks[axis], None]
    return _reshaped(x, tuple(shape), split)


def _reshaped(x: Array, shape: tuple[int, ...], spec: Any) -> Array:
    """Reshapes an array; on a mesh with explicit axes, the result has the sharding `spec`."""
    given = jax.typeof(x).sharding
    explicit = any(spec) or any(given.spec)
    out = jax.NamedSharding(given.mesh, jax.P(*spec)) if explicit else None
    return jax.lax.reshape(x, shape, out_sharding=out)


def spec_of_blocks(shape: tuple[int, ...], spec: jax.P, mesh: Any) -> jax.P:
    """Returns the spec of an array's blocks: that of the array where devices hold whole blocks.

    Args:
      shape: the number of blocks along each axis.
      spec: the spec of the array.
      mesh: the mesh.

    Returns:
      The spec of the blocks, with as many entries as that of the array.
    """
    found = []
    for size, axes in zip(shape, spec, strict=False):
        names = (axes,) if isinstance(axes, str) else axes or ()
        devices = math.prod(mesh.shape[name] for name in names)
        found.append(axes if size % devices == 0 else None)
    return jax.P(*found)
