"""ResNet-50 (He et al., 2015), with the stride in the 3 x 3 convolution, in linen."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, DTypeLike, Float


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    width: int
    stride: int = 1
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        convolution = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype
        )
        strides = (self.stride, self.stride)
        h = nn.relu(norm()(convolution(self.width, (1, 1))(x)))
        h = nn.relu(norm()(convolution(self.width, (3, 3), strides)(h)))
        h = norm()(convolution(4 * self.width, (1, 1))(h))
        if h.shape != x.shape:
            x = norm()(convolution(4 * self.width, (1, 1), strides)(x))
        return nn.relu(x + h)


class ResNet(nn.Module):
    """The network; with `dtype` the casts are by hand, as Flax's layers do them.

    Attributes:
      blocks: of each stage.
      width: channels of the first.
      kinds: of images.
      dtype: in which layers compute; None for that of their params and inputs.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    kinds: int = 1000
    dtype: Any = None

    @nn.compact
    def __call__(self, images: Float[Array, "batch height width 3"]) -> Float[Array, "batch kinds"]:
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.blocks):
            for block in range(count):
                stride = 2 if stage and not block else 1
                x = Bottleneck(self.width * 2**stage, stride, self.dtype)(x)
        x = x.mean((1, 2))
        return nn.Dense(self.kinds, dtype=self.dtype, name="head")(x).astype(jnp.float32)
