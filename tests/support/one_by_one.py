"""Runs a program operation by operation: without the roundings of fusions."""

from collections.abc import Callable
from typing import Any

import jax

# They make one operation of several, or other ones: loops and single operations get different bits.
_REWRITES = ("fusion", "algsimp", "transpose-folding", "reshape-mover", "tree_reduction_rewriter")


def one_by_one(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, compiled to a kernel for each of its operations."""
    options = {
        "xla_disable_hlo_passes": ",".join(_REWRITES),
        "xla_allow_excess_precision": False,  # every rounding to 16 bits stays
    }
    return jax.jit(fun, compiler_options=options)
