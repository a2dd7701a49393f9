"""A small network, its data and its loss, whose gradients `references` has in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def mlp(dtype: str = "float32") -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"w1": (8, 16), "b1": (16,), "w2": (16, 8), "b2": (8,)}
    values = {name: 0.5 * random.standard_normal(shape) for name, shape in shapes.items()}
    return jax.device_put({name: x.astype(jnp.dtype(dtype)) for name, x in values.items()})


def data(rows: int = 32) -> tuple[jax.Array, jax.Array]:
    x, y = np.random.default_rng(1).standard_normal((2, rows, 8), np.float32)
    return jax.device_put((x, y))


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """A mean over the examples, computed in the dtype of the params."""
    x = x.astype(params["w1"].dtype)
    out = jnp.tanh(x @ params["w1"] + params["b1"][None]) @ params["w2"] + params["b2"][None]
    return jnp.mean((out.astype(jnp.float32) - y) ** 2)


def assert_close(got: Any, want: Any, rtol: float) -> None:
    """Relative to the largest number of each array."""
    for name in want:
        np.testing.assert_allclose(
            got[name], want[name], rtol=0, atol=rtol * np.abs(want[name]).max(), err_msg=name
        )
