"""Two models of convolutions for the memory planner: a U-Net, and blocks as in ConvNeXt.

Their losses are plain functions of params that `jax.eval_shape` need not make. Under tensor
parallelism, "up" has its results split, and "down" what it sums.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

_WIDTHS = (64, 128, 256)  # of the levels of the U-Net
_GROUPS = 16  # of channels, in each group norm
_WIDTH, _BLOCKS, _KINDS, _PATCH = 192, 6, 1024, 4  # of the ConvNeXt

Program = tuple[Callable[..., Float[Array, ""]], PyTree]


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def unet_program() -> Program:
    """A loss of images, and the params of a U-Net: residual blocks with group norms."""
    params = {"stem": _floats(3, 3, 3, _WIDTHS[0]), "last": _floats(3, 3, _WIDTHS[0], 3)}
    given = _WIDTHS[0]
    for i, width in enumerate(_WIDTHS):
        params[f"fall_{i}_0"], params[f"fall_{i}_1"] = _block(given, width), _block(width, width)
        given = width
    for i, width in reversed(list(enumerate(_WIDTHS))):
        params[f"rise_{i}"] = _block(given + width, width)
        given = width

    def loss(params: PyTree, batch: tuple[Array, Array]) -> Float[Array, ""]:
        x, y = batch
        x, kept = _convolve(x, params["stem"]), []
        for i in range(len(_WIDTHS)):
            x = _residual(_residual(x, params[f"fall_{i}_0"]), params[f"fall_{i}_1"])
            kept.append(x)
            if i < len(_WIDTHS) - 1:
                two = (1, 2, 2, 1)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, two, two, "VALID")
        for i in reversed(range(len(_WIDTHS))):
            x = _residual(jnp.concatenate([x, kept[i]], -1), params[f"rise_{i}"])
            if i:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        return jnp.mean((_convolve(x, params["last"]).astype(jnp.float32) - y) ** 2)

    return loss, params


def _block(given: int, width: int) -> PyTree:
    return {
        "scales": (_floats(given), _floats(width)),
        "biases": (_floats(given), _floats(width)),
        "up": _floats(3, 3, given, width),
        "down": _floats(3, 3, width, width),
        "skip": _floats(1, 1, given, width),
    }


def _residual(x: Array, w: PyTree) -> Array:
    h = x
    for i, name in enumerate(("up", "down")):
        h = _convolve(jax.nn.silu(_group_norm(h, w["scales"][i], w["biases"][i])), w[name])
    return _convolve(x, w["skip"]) + h


def _group_norm(x: Array, scale: Array, bias: Array) -> Array:
    shape = (*x.shape[:3], _GROUPS, x.shape[3] // _GROUPS)
    normal = _normal(x.astype(jnp.float32).reshape(shape), (1, 2, 4))
    return (normal.reshape(x.shape) * scale + bias).astype(jnp.bfloat16)


def convnext_program() -> Program:
    """A loss of images and their kinds, and params: depthwise convolutions and wide products."""
    c = _WIDTH
    block = {
        "each": _floats(7, 7, 1, c),
        "scale": _floats(c),
        "bias": _floats(c),
        "up": _floats(c, 4 * c),
        "down": _floats(4 * c, c),
        "gain": _floats(c),
    }
    params: dict[str, PyTree] = {f"block_{i}": block for i in range(_BLOCKS)}
    params |= {"stem": _floats(_PATCH, _PATCH, 3, c), "head": _floats(c, _KINDS)}

    def loss(params: PyTree, batch: tuple[Array, Array]) -> Float[Array, ""]:
        images, kinds = batch
        x = _convolve(images, params["stem"], stride=_PATCH)
        for i in range(_BLOCKS):
            w = params[f"block_{i}"]
            h = _convolve(x, w["each"], groups=c).astype(jnp.float32)
            h = (_normal(h, (3,)) * w["scale"] + w["bias"]).astype(jnp.bfloat16)
            h = jax.nn.gelu(h @ w["up"]) @ w["down"]
            x = x + (h * w["gain"]).astype(x.dtype)
        logits = (x.astype(jnp.float32).mean((1, 2)) @ params["head"]).astype(jnp.float32)
        right = jnp.take_along_axis(logits, kinds[:, None], 1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - right)

    return loss, params


def _normal(x: Array, axes: tuple[int, ...]) -> Array:
    centered = x - x.mean(axes, keepdims=True)
    return centered * jax.lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def _convolve(x: Array, kernel: Array, stride: int = 1, groups: int = 1) -> Array:
    return jax.lax.conv_general_dilated(
        x.astype(jnp.bfloat16),
        kernel.astype(jnp.bfloat16),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
