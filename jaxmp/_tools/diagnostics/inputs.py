"""Checks the arguments of the tools that look at numbers."""

import math
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxmp._program import compat


def check_numbers(tree: PyTree, tool: str) -> None:
    """Raises unless the arrays of a tree hold numbers; other leaves pass.

    Raises:
      TypeError: under `jit`, and for shapes without numbers.
      ValueError: if the arrays were donated.

    >>> check_numbers({"w": jax.ShapeDtypeStruct((2,), np.float32)}, "compare")
    Traceback (most recent call last):
    ...
    TypeError: compare looks at numbers, and ShapeDtypeStruct(shape=(2,), dtype=float32) has none: \
give it arrays, and not what jax.eval_shape returns
    """
    # Without this the errors come from deep inside of NumPy or JAX, and name no cause.
    for x in jax.tree.leaves(tree):
        if compat.is_traced(x):
            raise TypeError(
                f"{tool} looks at numbers, and under jit there are none: call it outside, with "
                "what the jitted function takes or returns"
            )
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{tool} looks at numbers, and {x} has none: give it arrays, and not what "
                "jax.eval_shape returns"
            )
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                "these arrays were donated to a step, which wrote the next ones over them. Keep a "
                "copy before the step, or make it with make_train_step(..., donate=False)"
            )


def number_of_scale(loss_scale: Any) -> float:
    """Returns the number of a loss scale, or of its state; of several, the largest.

    Raises:
      TypeError: if it is neither.
      ValueError: if it is not positive, or not finite.
    """
    try:
        # A state of several steps, as from a scan, has several scales.
        scale = float(np.max(getattr(loss_scale, "scale", loss_scale)))
    except (TypeError, ValueError):
        raise TypeError(
            "loss_scale must be a number, or the state of a loss scale such as state.loss_scale, "
            f"got {loss_scale!r}"
        ) from None
    if not 0 < scale < math.inf:
        raise ValueError(f"loss_scale must be positive and finite, got {scale:g}")
    return scale
