"""Comparing trees bit for bit: NaN payloads and the sign of zero count."""

from typing import Any

import jax
import numpy as np


def bits(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and raw bytes of one leaf."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.asarray(x)
    return str(array.dtype), array.shape, array.tobytes()


def tree_bits(tree: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The bits of every leaf by path: equal for two trees only if nothing at all differs."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): bits(leaf) for path, leaf in leaves}
