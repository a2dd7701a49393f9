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
    """An array in 8 bits: what `encode` returns, and what `scales_of` and `codes_of` return apart.

    Attributes:
      codes: the numbers, in the shape of the array: `sign(x) * (|x| / scale) ** (1/4) * 127`,
        rounded at random.
      scales: the largest magnitude of each block.
    """

    codes: Int8[Array, "*shape"]
    scales: Float32[Array, "*blocks"]


def block_of(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the size of a block along the last two axes (or the only one); None for no blocks.

    A block has 8 x 128 numbers where these divide the shape. Otherwise it is in one row: 128
    numbers if these divide the row, else the whole row. Rows of fewer than 8 numbers have no
    blocks. A block of a vector has 128 numbers.

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
    if shape[-1] < _SHORTEST_ROW:  # a scale would take more than half a byte for each number
        return None
    # No block holds all rows: one outlier would cost all of them their precision.
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
    """Rounds float32 to 8 bits in blocks, up or down at random, so that the mean is right.

    Codes are dense near zero: the fourth roots of their values are evenly spaced. The smallest
    value is 4e-9 of the scale, so that square roots of second moments reach down to 6e-5. Nonzero
    numbers become at least the smallest code, never zero.

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
    """Returns the largest magnitude of each block, in the shape that `blocks_of` returns."""
    shape = blocks_of(x.shape)
    if shape is None:
        raise ValueError(f"no blocks in an array of shape {x.shape}")
    # Compared as integers, NaN is the largest; a maximum of floats may ignore NaN.
    bits = jax.lax.bitcast_convert_type(jnp.abs(_split_blocks(x, shape[-2:])), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, _axes_in_block(x.ndim)), jnp.float32)


def codes_of(
    x: Float32[Array, "*shape"], scales: Float32[Array, "*blocks"], words: UInt32[Array, "*shape"]
) -> Int8[Array, "*shape"]:
    """Returns the codes of numbers whose blocks have these scales, by uniform random words."""
    counts = scales.shape[-2:]
    blocks = _split_blocks(x, counts)
    magnitude = jnp.abs(blocks)
    scales = jnp.expand_dims(scales, _axes_in_block(x.ndim))
    # Codes are fourth roots: the number is between the fourth powers of two neighboring codes.
    fourth = magnitude / jnp.where(scales > 0, scales, 1) * _LARGEST**4
    code_below = jnp.minimum(jnp.floor(jnp.sqrt(jnp.sqrt(fourth))), _LARGEST - 1)
    lower, upper = _square(_square(code_below)), _square(_square(code_below + 1))
    # Rounded to nearest, a moment that changes by less than half the distance to the next code
    # would not move, and lag behind.
    draw = _split_blocks((words >> 8).astype(jnp.float32) * 2.0**-24, counts)
    codes = jnp.where(draw * (upper - lower) < fourth - lower, code_below + 1, code_below)
    # Never zero: an optimizer would divide by a second moment of zero.
    codes = jnp.where(magnitude > 0, jnp.maximum(codes, 1), 0)
    codes = (jnp.sign(blocks) * codes).astype(jnp.int8)
    return _reshape(codes, x.shape, jax.typeof(x).sharding.spec)


def decode(x: Codes) -> Float32[Array, "*shape"]:
    """Returns the float32 numbers that codes stand for."""
    root = _split_blocks(x.codes.astype(jnp.float32), x.scales.shape[-2:]) * (1 / _LARGEST)
    scales = jnp.expand_dims(x.scales, _axes_in_block(x.codes.ndim))
    values = jnp.sign(root) * _square(_square(root)) * scales
    return _reshape(values, x.codes.shape, jax.typeof(x.codes).sharding.spec)


def _square(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return x * x


def _axes_in_block(ndim: int) -> tuple[int, ...]:
    """Returns the axes along which the result of `_split_blocks` has the numbers of a block."""
    return (-1,) if ndim == 1 else (-3, -1)


def _split_blocks(x: Array, counts: tuple[int, ...]) -> Array:
    """Splits each of the last axes in two: the blocks, and the numbers in a block."""
    ndim, first = x.ndim, x.ndim - len(counts)
    sharding = jax.typeof(x).sharding
    spec = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    of_blocks = spec_of_blocks((*x.shape[:first], *counts), jax.P(*spec), sharding.mesh)
    shape, split = [*x.shape[:first]], [*of_blocks[:first]]
    for axis, count in enumerate(counts, first):
        shape += [count, x.shape[axis] // count]
        split += [of_blocks[axis], None]
    return _reshape(x, tuple(shape), split)


def _reshape(x: Array, shape: tuple[int, ...], spec: Any) -> Array:
    """Reshapes an array; on a mesh with explicit axes, the result has the sharding `spec`."""
    sharding = jax.typeof(x).sharding
    explicit = any(spec) or any(sharding.spec)
    out = jax.NamedSharding(sharding.mesh, jax.P(*spec)) if explicit else None
    return jax.lax.reshape(x, shape, out_sharding=out)


def spec_of_blocks(shape: tuple[int, ...], spec: jax.P, mesh: Any) -> jax.P:
    """Returns the spec of the blocks of an array; `shape` counts blocks along each axis.

    An axis stays split where each device holds whole blocks. The result has as many entries as
    `spec`.
    """
    entries = []
    for size, axes in zip(shape, spec, strict=False):
        names = (axes,) if isinstance(axes, str) else axes or ()
        devices = math.prod(mesh.shape[name] for name in names)
        entries.append(axes if size % devices == 0 else None)
    return jax.P(*entries)
