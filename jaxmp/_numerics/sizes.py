"""Sizes of arrays, without squares of numbers that leave the range of their dtype."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact


def norm(arrays: Sequence[Any]) -> Float[Array, ""]:
    """Returns the norm of all arrays together.

    >>> norm([jnp.float32([3e30]), jnp.float32([4e30])]) / 1e30
    Array(5., dtype=float32)
    """
    largest = jnp.max(jnp.array([jnp.max(jnp.abs(x), initial=0) for x in arrays]), initial=0)
    unit = jnp.where(largest > 0, largest, 1)
    squares = jnp.array([jnp.sum(jnp.abs(x / unit) ** 2) for x in arrays])
    return largest * jnp.sqrt(jnp.sum(squares))


def root_mean_square(x: Inexact[Array, "..."]) -> Float[Array, ""]:
    """Returns the root mean square of the finite numbers of an array; the others are zeros.

    >>> root_mean_square(jnp.float32([3, 3, -jnp.inf, 3])).round(2)
    Array(2.6, dtype=float32)
    """
    return norm([finite(x)]) / max(x.size, 1) ** 0.5


def finite(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """Returns an array with zeros for infinities and NaN.

    >>> finite(jnp.float32([1, jnp.nan]))
    Array([1., 0.], dtype=float32)
    """
    return jnp.where(jnp.isfinite(x), x, 0)
