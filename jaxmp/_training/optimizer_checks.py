"""Checks that gradients, params and the state of an optimizer fit together."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import is_inexact
from jaxmp._numerics.tree import leaf_names, same_structure


def first_difference(given: PyTree, wanted: PyTree) -> str:
    """Describes the first leaf of another shape or dtype, or the leaves if structures differ.

    Scalars may have any dtype: users set learning rates.
    """
    if not same_structure(given, wanted):
        return f"{_summary(given)}; wanted: {_summary(wanted)}"
    leaves = zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True)
    for i, (x, y) in enumerate(leaves):
        if jnp.shape(x) != jnp.shape(y) or (jnp.ndim(x) and x.dtype != y.dtype):
            return f"{leaf_names(given)[i]} {_shape_and_dtype(x)}; wanted: {_shape_and_dtype(y)}"
    return ""


def check_moved(params: PyTree, moved: PyTree) -> None:
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True)
    for i, (x, moves) in enumerate(leaves):
        if moves and not is_inexact(x):
            raise TypeError(
                f"params, leaf {leaf_names(params)[i]!r}, is {x.dtype}, and the optimizer moves "
                "it, or may: only floating leaves have gradients and masters. Keep counters, keys "
                "and tables of integers elsewhere (Equinox: eqx.filter(model, "
                "eqx.is_inexact_array); nnx: a Variable that is no Param), convert it to a float, "
                "or freeze it by optax.set_to_zero in an optax.multi_transform around all else"
            )


def check_gradients(grads: PyTree, params: PyTree) -> None:
    for i, (g, p) in enumerate(zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)):
        given = jnp.result_type(g)
        if jnp.issubdtype(given, jnp.complexfloating) and not jnp.iscomplexobj(p):
            raise TypeError(
                f"gradients leaf {leaf_names(grads)[i]!r} is complex, but its param is real"
            )
        if is_inexact(p) and not jnp.issubdtype(given, jnp.inexact):
            raise TypeError(
                f"gradients, leaf {leaf_names(grads)[i]!r}, is {given}, but its param is {p.dtype}"
            )


def _summary(tree: PyTree) -> str:
    leaves = list(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
    shown = [f"{name} {_shape_and_dtype(x)}" for name, x in leaves[:4]]
    return ", ".join(shown + ["..."] * (len(leaves) > 4)) or "none"


def _shape_and_dtype(x: Any) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)}{list(jnp.shape(x))}"
