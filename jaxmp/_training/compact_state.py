"""Stores the state of any optax optimizer in 16 or 8 bits; the optimizer sees float32.

`_storage_of` decides which leaves are stored in fewer bits; the codes are in `compact_forms`.
"""

import contextlib
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp._numerics.block_codes import block_of
from jaxmp._numerics.tree import leaf_names
from jaxmp._numerics.user_warnings import first_few, warn
from jaxmp._program import compat
from jaxmp._program.facts import NONE, made_of
from jaxmp._training.compact_forms import (
    CodedState,
    RoundedState,
    expanded_state,
    store_next,
    store_state,
)
from jaxmp._training.first_state import in_one_program

Moments = Literal["float32", "bfloat16", "int8"]


def compact_state(
    inner: optax.GradientTransformation | optax.MultiSteps, dtype: Moments, *, min_size: int = 4096
) -> optax.GradientTransformationExtraArgs:
    """Stores the state of an optimizer in 16 or 8 bits, and computes with it in float32.

    Moments take twice the memory of masters. This works for the state of any optimizer: moments of
    Adam, Lion or Muon, momentum, averages of params. Each floating array of at least `min_size`
    numbers is stored narrow between steps; counts, scalars, small and other arrays do not change.
    Arrays that the optimizer itself stores in bfloat16, such as moments of bfloat16 params, are
    computed in float32 too.

    - `"bfloat16"`, 2 bytes: rounded up or down at random. Rounded to nearest, a second moment with
      `b2=0.999` could not decrease, and an average of params would not move.
    - `"int8"`, 1 byte: codes in blocks of 8 x 128 with a scale each, or one scale a row. Only for
      moments: averages of params, the params of a schedule-free optimizer and sums of gradients
      must not be rounded so coarsely. Put `compact_state` around the part that has the moments:
      `optax.MultiSteps(compact_state(adamw, "int8"), 4)`.

    Args:
      inner: any optax optimizer.
      dtype: `"float32"` returns the optimizer unchanged.
      min_size: arrays with fewer numbers are not stored narrow.

    Returns:
      An optax optimizer. `expanded_state` converts its state to that of the inner optimizer.

    Raises:
      ValueError: for an unknown dtype.
      TypeError: if `inner` is not an optimizer; in `init`, if its state is stored narrow already,
        or has sums of gradients and `dtype` is `"int8"`.

    >>> tx = compact_state(optax.adam(0.1), "int8")
    >>> params = {"w": jnp.ones((64, 128)), "b": jnp.ones(128)}
    >>> state = tx.init(params)
    >>> jax.tree.map(lambda x: x.dtype.name, state.codes[0].mu)
    {'b': 'float32', 'w': 'int8'}
    >>> jax.tree.map(jnp.shape, state.scales)
    (MaskedNode(), MaskedNode(), (8, 1), MaskedNode(), (8, 1))
    """
    inner = check_optimizer(inner, dtype)
    if dtype == "float32":
        return inner

    def first(params: PyTree) -> RoundedState | CodedState:
        return compact_tree(inner.init(params), dtype, min_size=min_size)

    def init(params: PyTree) -> RoundedState | CodedState:
        warn_of_coded_params(inner, params, dtype, min_size=min_size)
        return in_one_program(first, params)

    def update(
        updates: PyTree,
        state: RoundedState | CodedState,
        params: PyTree | None = None,
        **extra: Any,
    ) -> tuple[PyTree, RoundedState | CodedState]:
        if not isinstance(state, CodedState if dtype == "int8" else RoundedState):
            raise TypeError(
                f"the state must be the one that compact_state(optimizer, {dtype!r}).init "
                f"returned, got {type(state).__name__}"
            )
        updates, new = inner.update(updates, expanded_state(state), params, **extra)
        return updates, store_next(state, new)

    return optax.GradientTransformationExtraArgs(init, update)


def check_optimizer(
    inner: optax.GradientTransformation | optax.MultiSteps, dtype: Moments
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer in optax's general form; raises for other objects and unknown dtypes."""
    if dtype not in get_args(Moments):
        raise ValueError(
            f"the dtype of moments must be one of {', '.join(map(repr, get_args(Moments)))}, "
            f"got {dtype!r}"
        )
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"inner must be an optax.GradientTransformation such as optax.adamw(1e-3), got "
            f"{type(inner).__name__}"
        )
    return optax.with_extra_args_support(inner)


def compact_tree(state: PyTree, dtype: Moments, *, min_size: int = 4096) -> PyTree:
    """Stores the first state of an optimizer as `compact_state` does."""
    if dtype == "float32":
        return state
    coded = str(dtype) == "int8"
    if coded and _holds(state, optax.MultiStepsState):
        raise TypeError(
            "optax.MultiSteps sums gradients in its state, and sums are not for int8. Put "
            "compact_state inside: "
            'optax.MultiSteps(jaxmp.storage.compact_state(optimizer, "int8"), n)'
        )
    if _holds(state, (RoundedState, CodedState)):
        raise TypeError(
            "the state of the optimizer is in the form of compact_state already. Wrap each part of "
            "an optimizer once: either the part with its moments, or all of it by moments=..."
        )
    leaves, structure = jax.tree.flatten(state)
    kinds = [_storage_of(x, coded, min_size) for x in leaves]
    if any(map(compat.is_traced, leaves)):
        # Most states begin with zeros, whose codes XLA would compute while it compiles: for 40 s,
        # of a GPT of 350 M params. It does not see through a barrier.
        one = jax.lax.optimization_barrier(jnp.float32(1))
        leaves = [
            x.astype(jnp.float32) * one if kind else x
            for x, kind in zip(leaves, kinds, strict=True)
        ]
    state = jax.tree.unflatten(structure, leaves)
    return store_state(state, tuple(kinds), coded, jnp.uint32(0))


def warn_of_coded_params(
    inner: optax.GradientTransformation, params: PyTree, dtype: Moments, *, min_size: int = 4096
) -> None:
    """Warns if `"int8"` would store what an optimizer makes of the params in its first state."""
    if dtype != "int8":
        return
    coded: list[str] = []
    with contextlib.suppress(Exception):  # any exception: the optimizer is the user's
        closed, state = jax.make_jaxpr(inner.init, return_shape=True)(params)
        labels = made_of(
            closed,
            [frozenset({"params"})] * len(closed.in_avals),
            lambda equation, operands: NONE.union(*operands),
            lambda aval: True,
        )
        leaves = zip(leaf_names(state), jax.tree.leaves(state), labels, strict=True)
        coded = [name for name, x, label in leaves if label and _storage_of(x, True, min_size)]
    if coded:
        warn(
            f"the state of this optimizer begins with what is made of params: {first_few(coded)}. "
            "8 bits are for moments: the params of a schedule-free AdamW were "
            "off by a third. Store the state in 16 bits, by 'bfloat16', or put "
            "jaxmp.storage.compact_state around the part that has moments"
        )


def _storage_of(x: Any, coded: bool, min_size: int) -> str:
    """Returns the dtype in which a leaf is stored; an empty text if it does not change.

    `init` decides this once. Later steps read it from the state (`stored_dtypes`).
    """
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 4:
        return ""
    # Small arrays, such as biases and norms, need few bytes and keep all bits. What the optimizer
    # itself has in bfloat16, as moments of bfloat16 params, stays so and is computed in float32.
    if np.ndim(x) and np.size(x) >= min_size and (not coded or block_of(np.shape(x))):
        return "int8" if coded else "bfloat16"
    return "bfloat16" if dtype == jnp.bfloat16 else ""


def _holds(state: PyTree, kinds: Any) -> bool:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in leaves)
