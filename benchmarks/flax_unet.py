"""A U-Net of residual blocks (Ho et al., 2020), without attention, in linen."""

from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float


class _Block(nn.Module):
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.Conv(self.width, (3, 3), dtype=self.dtype)(self._normed(x))
        h = nn.Conv(self.width, (3, 3), dtype=self.dtype)(self._normed(h))
        if x.shape != h.shape:
            x = nn.Conv(self.width, (1, 1), dtype=self.dtype)(x)
        return x + h

    def _normed(self, x: Array) -> Array:
        return nn.swish(nn.GroupNorm(8, dtype=self.dtype)(x))


class UNet(nn.Module):
    """The network.

    Attributes:
      width: channels at the full size; twice as many after each halving.
      halvings: how often the image is halved.
      blocks: at each size, on the way down; one more on the way up.
      dtype: in which layers compute; None for that of their params and inputs.
    """

    width: int = 32
    halvings: int = 3
    blocks: int = 2
    dtype: Any = None

    @nn.compact
    def __call__(self, images: Float[Array, "batch height width 3"]) -> Array:
        x = nn.Conv(self.width, (3, 3), dtype=self.dtype)(images)
        kept = [x]
        for level in range(self.halvings + 1):
            for _ in range(self.blocks):
                x = _Block(self.width * 2**level, self.dtype)(x)
                kept.append(x)
            if level < self.halvings:
                x = nn.Conv(x.shape[-1], (3, 3), (2, 2), dtype=self.dtype)(x)
                kept.append(x)
        for level in reversed(range(self.halvings + 1)):
            for _ in range(self.blocks + 1):
                x = jax.numpy.concatenate([x, kept.pop()], axis=-1)
                x = _Block(self.width * 2**level, self.dtype)(x)
            if level:
                batch, height, width, channels = x.shape
                x = jax.image.resize(x, (batch, 2 * height, 2 * width, channels), "nearest")
                x = nn.Conv(channels, (3, 3), dtype=self.dtype)(x)
        return nn.Conv(3, (3, 3), dtype=self.dtype)(nn.swish(nn.GroupNorm(8, dtype=self.dtype)(x)))
