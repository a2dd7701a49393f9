"""Checks that gradients, params and the state of an optimizer fit together."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import is_inexact
from jaxmp._numerics.tree import leaf_names, same_structure
from jaxmp._numerics.user_warnings import first_few


def first_difference(tree: PyTree, expected: PyTree) -> str:
    """Describes the first leaf of another shape or dtype, or the leaves if structures differ."""
    if not same_structure(tree, expected):
        return f"{_summary(tree)}; wanted: {_summary(expected)}"
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    for i, (x, y) in enumerate(leaves):
        # Scalars may have any dtype: users set learning rates.
        if jnp.shape(x) != jnp.shape(y) or (jnp.ndim(x) and x.dtype != y.dtype):
            return f"{leaf_names(tree)[i]} {_shape_and_dtype(x)}; wanted: {_shape_and_dtype(y)}"
    return ""


def check_same_params(params: PyTree, master: PyTree) -> None:
    """Raises ValueError unless masters, which may be masked, are those of all params."""
    names = leaf_names(params), leaf_names(master, lambda x: isinstance(x, optax.MaskedNode))
    if others := sorted(set(names[0]) ^ set(names[1])):
        raise ValueError(
            "the optimizer state was made for other params: only one of the two has "
            f"{first_few(list(map(repr, others)))}. Make it when the model has all its params: "
            "tx.init(params), TrainState.create, jaxmp.nnx.Optimizer(model, tx)"
        )


def check_trainable(params: PyTree, trainable: PyTree) -> None:
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(trainable), strict=True)
    for i, (x, is_trainable) in enumerate(leaves):
        if is_trainable and not is_inexact(x):
            raise TypeError(
                f"params, leaf {leaf_names(params)[i]!r}, is {x.dtype}, and the optimizer moves "
                "it, or may: only floating leaves have gradients and masters. Keep counters, keys "
                "and tables of integers elsewhere (Equinox: eqx.filter(model, "
                "eqx.is_inexact_array); nnx: a Variable that is no Param), convert it to a float, "
                "or freeze it by optax.set_to_zero in an optax.multi_transform around all else"
            )


def check_gradients(grads: PyTree, params: PyTree) -> None:
    for i, (g, p) in enumerate(zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)):
        dtype = jnp.result_type(g)
        if jnp.issubdtype(dtype, jnp.complexfloating) and not jnp.iscomplexobj(p):
            raise TypeError(
                f"gradients leaf {leaf_names(grads)[i]!r} is complex, but its param is real"
            )
        if is_inexact(p) and not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"gradients, leaf {leaf_names(grads)[i]!r}, is {dtype}, but its param is {p.dtype}"
            )


def _summary(tree: PyTree) -> str:
    leaves = list(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))
    texts = [f"{name} {_shape_and_dtype(x)}" for name, x in leaves[:4]]
    return ", ".join(texts + ["..."] * (len(leaves) > 4)) or "none"


def _shape_and_dtype(x: Any) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)}{list(jnp.shape(x))}"
