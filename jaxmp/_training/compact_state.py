"""Stores the state of any optax optimizer in 16 or 8 bits; the optimizer sees float32.

`_storage_of` decides which leaves are stored in fewer bits; `_store_state` makes the codes.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree, UInt32

from jaxmp._numerics.block_codes import Codes, block_of, codes_of, decode, scales_of
from jaxmp._numerics.stochastic import hashed_words, round_by_words
from jaxmp._numerics.tree import leaf_names
from jaxmp._numerics.user_warnings import first_few, warn
from jaxmp._program import compat
from jaxmp._program.facts import NONE, made_of

Moments = Literal["float32", "bfloat16", "int8"]
# Gives states other random words than params.
_STREAM = np.uint32(0x5747)


class RoundedState(NamedTuple):
    """The state of `compact_state` in bfloat16.

    Attributes:
      rounded: the state of the inner optimizer, with bfloat16 in place of large float32 arrays.
      step: counts the steps, for random rounding.
    """

    rounded: Any
    step: UInt32[Array, ""]


class CodedState(NamedTuple):
    """The state of `compact_state` in 8 bits.

    Attributes:
      codes: the state of the inner optimizer, with int8 in place of large float32 arrays.
      scales: the scales of each leaf of `codes`; `optax.MaskedNode()` for leaves that are not
        codes.
      step: counts the steps, for random rounding.
    """

    codes: Any
    scales: tuple[Any, ...]
    step: UInt32[Array, ""]


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

    def init(params: PyTree) -> RoundedState | CodedState:
        warn_of_coded_params(inner, params, dtype, min_size=min_size)
        return compact_tree(inner.init(params), dtype, min_size=min_size)

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
            'compact_state inside: optax.MultiSteps(jaxmp.compact_state(optimizer, "int8"), n)'
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
    return _store_state(jax.tree.unflatten(structure, leaves), kinds, coded, jnp.uint32(0))


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
            "jaxmp.compact_state around the part that has moments"
        )


def is_compact(x: Any) -> bool:
    """Whether this is a state of `compact_state`."""
    return isinstance(x, (RoundedState, CodedState))


def expanded_state(state: PyTree) -> PyTree:
    """Converts all arrays that `compact_state` stored narrow back to float32.

    Args:
      state: any tree, such as the state of `mixed_precision`, or a `TrainState`.

    Returns:
      The tree as it would be without `compact_state`, with the rounded values that were stored.

    >>> state = compact_state(optax.sgd(0.1, momentum=0.9), "bfloat16").init(jnp.ones((64, 64)))
    >>> expanded_state(state)[0].trace.dtype.name
    'float32'
    """

    def expand(x: Any) -> Any:
        if not is_compact(x):
            return x
        leaves, structure = jax.tree.flatten(x[0])
        for i, (kind, leaf) in enumerate(zip(_kinds(x), leaves, strict=True)):
            if kind == "int8":
                leaves[i] = decode(Codes(leaf, x.scales[i]))
            elif kind == "bfloat16":
                leaves[i] = leaf.astype(jnp.float32)
        return jax.tree.unflatten(structure, leaves)

    return jax.tree.map(expand, state, is_leaf=is_compact)


def store_like(state: PyTree, expanded: PyTree) -> PyTree:
    """Stores an expanded state in the form of another state.

    Args:
      state: a state, which may have parts that `compact_state` made.
      expanded: a tree with the structure of `expanded_state(state)`.

    Returns:
      The values of `expanded` in the form of `state`.
    """

    def store(old: Any, new: PyTree) -> Any:
        return _store_like(old, new) if is_compact(old) else new

    return jax.tree.map(store, state, expanded, is_leaf=is_compact)


def store_next(
    state: RoundedState | CodedState, expanded: PyTree, after: Sequence[Array] = ()
) -> RoundedState | CodedState:
    """Stores the next state in the form of this one.

    Args:
      state: a state that `compact_state` made.
      expanded: the next state, as the optimizer returned it.
      after: other arrays computed from `state`, to be ready before it is overwritten.

    Returns:
      The next state.
    """
    return _store_like(state, expanded, after)._replace(step=state.step + jnp.uint32(1))


def _store_like(state: Any, expanded: PyTree, after: Sequence[Array] = ()) -> Any:
    return _store_state(expanded, _kinds(state), isinstance(state, CodedState), state.step, after)


def _store_state(
    state: PyTree, kinds: list[str], coded: bool, step: Any, after: Sequence[Array] = ()
) -> RoundedState | CodedState:
    """Stores leaves as `kinds` says, rounded by new random words for each step and leaf."""
    leaves, structure = jax.tree.flatten(state)
    # Rounded to nearest, a second moment with `b2=0.999` could not decrease, and an average of
    # params would not move.
    float32 = {i: jnp.asarray(leaves[i], jnp.float32) for i, kind in enumerate(kinds) if kind}
    words = {i: hashed_words(x.shape, [_STREAM, np.uint32(i), step]) for i, x in float32.items()}
    # Codes need the scales, and so a second pass.
    coded_leaves = [i for i in float32 if kinds[i] == "int8"]
    float32 |= {i: _store_on_gpus(float32[i]) for i in coded_leaves}
    scales = {i: scales_of(float32[i]) for i in coded_leaves}
    scales = _wait_on_tpus(after, scales)
    for i, x in float32.items():
        if i in scales:
            leaves[i] = codes_of(x, scales[i], words[i])
        else:
            leaves[i] = round_by_words(x, jnp.dtype(jnp.bfloat16), words[i])
    inner = jax.tree.unflatten(structure, leaves)
    if not coded:
        return RoundedState(inner, step)
    all_scales = tuple(scales.get(i, optax.MaskedNode()) for i in range(len(leaves)))
    return CodedState(inner, all_scales, step)


def _store_on_gpus(x: Array) -> Array:
    """Returns an array that a GPU has to store before it reduces it."""
    if not compat.is_traced(x):
        return x
    # Otherwise XLA reduces blocks in the kernel that computes moments and params, whose loads then
    # wait for each other: on an H200 it took 1.95 ms for 100 M params, 3.5 times what its bytes
    # take (AdamW, remainders, jax 0.11.2). A TPU would store float32 moments that it need not.
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(x, cuda=barrier, rocm=barrier, default=lambda x: x)


def _wait_on_tpus(arrays: Sequence[Array], scales: dict[int, Array]) -> dict[int, Array]:
    """Returns the scales, for which a TPU must wait until these arrays are made."""
    if not scales or not any(map(compat.is_traced, arrays)):
        return scales

    # Otherwise its compiler makes the new codes before the params, which read the old codes, and
    # keeps both: 2.2 bytes for each param (48 params of 4096 x 4096). GPUs do not wait, as they
    # would store the arrays before they choose between new and old values.
    def wait(scales: Any, arrays: Any) -> Any:
        return jax.lax.optimization_barrier((scales, arrays))[0]

    return jax.lax.platform_dependent(
        scales, list(arrays), tpu=wait, default=lambda scales, _: scales
    )


def _storage_of(x: Any, coded: bool, min_size: int) -> str:
    """Returns the dtype in which a leaf is stored; an empty text if it does not change.

    `init` decides this once. Later steps read it from the state (`_kinds`).
    """
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 4:
        return ""
    # Small arrays, such as biases and norms, need few bytes and keep all bits. What the optimizer
    # itself has in bfloat16, as moments of bfloat16 params, stays so and is computed in float32.
    if np.ndim(x) and np.size(x) >= min_size and (not coded or block_of(np.shape(x))):
        return "int8" if coded else "bfloat16"
    return "bfloat16" if dtype == jnp.bfloat16 else ""


def _kinds(state: RoundedState | CodedState) -> list[str]:
    """Returns the dtypes in which the leaves of a state are stored."""
    leaves = jax.tree.leaves(state[0])
    kinds = ["bfloat16" if jnp.result_type(x) == jnp.bfloat16 else "" for x in leaves]
    if isinstance(state, CodedState):
        for i, scale in enumerate(state.scales):
            kinds[i] = kinds[i] if isinstance(scale, optax.MaskedNode) else "int8"
    return kinds


def _holds(state: PyTree, kinds: Any) -> bool:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in leaves)
