"""The forms in which `compact_state` stores the state of an optimizer, in 16 or 8 bits."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree, UInt32

from jaxmp._numerics.block_codes import Codes, codes_of, decode, scales_of
from jaxmp._numerics.stochastic import hashed_words, round_by_words

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


def is_compact(x: Any) -> bool:
    """Whether this is a state of `compact_state`."""
    return isinstance(x, (RoundedState, CodedState))


def expanded_state(state: PyTree) -> PyTree:
    """Converts all arrays that `compact_state` stored narrow back to float32.

    Args:
      state: any tree, such as the state of `mixed_precision`, or a `TrainState`.

    Returns:
      The tree as it would be without `compact_state`, with the rounded values that were stored.

    >>> import jaxmp
    >>> state = jaxmp.storage.compact_state(optax.sgd(0.1, momentum=0.9), "bfloat16").init(
    ...     jnp.ones((64, 64))
    ... )
    >>> expanded_state(state)[0].trace.dtype.name
    'float32'
    """

    def expand(x: Any) -> Any:
        return _expanded(x, tuple(stored_dtypes(x))) if is_compact(x) else x

    return jax.tree.map(expand, state, is_leaf=is_compact)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _expanded(state: Any, kinds: tuple[str, ...]) -> Any:
    leaves, structure = jax.tree.flatten(state[0])
    for i, (kind, leaf) in enumerate(zip(kinds, leaves, strict=True)):
        if kind == "int8":
            leaves[i] = decode(Codes(leaf, state.scales[i]))
        elif kind == "bfloat16":
            leaves[i] = leaf.astype(jnp.float32)
    return jax.tree.unflatten(structure, leaves)


def store_like(state: PyTree, expanded: PyTree) -> PyTree:
    """Stores a tree like `expanded_state(state)` in the form of the state."""

    def store(old: Any, new: PyTree) -> Any:
        return _store_like(old, new) if is_compact(old) else new

    return jax.tree.map(store, state, expanded, is_leaf=is_compact)


def store_next(
    state: RoundedState | CodedState, expanded: PyTree, after: Sequence[Array] = ()
) -> RoundedState | CodedState:
    """Stores the next state, as the optimizer returned it, in the form of this one.

    `after` are other arrays computed from this state, to be ready before it is overwritten.
    """
    return _store_like(state, expanded, after)._replace(step=state.step + jnp.uint32(1))


def _store_like(state: Any, expanded: PyTree, after: Sequence[Array] = ()) -> Any:
    coded = isinstance(state, CodedState)
    return store_state(expanded, tuple(stored_dtypes(state)), coded, state.step, after)


# Outside of `jit`, this and `_expanded` are one compiled call each, not one for each operation.
@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def store_state(
    state: PyTree, kinds: tuple[str, ...], coded: bool, step: Any, after: Sequence[Array] = ()
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
    # Otherwise XLA reduces blocks in the kernel that computes moments and params, whose loads then
    # wait for each other: on an H200 it took 1.95 ms for 100 M params, 3.5 times what its bytes
    # take (AdamW, remainders, jax 0.11.2). A TPU would store float32 moments that it need not.
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(x, cuda=barrier, rocm=barrier, default=lambda x: x)


def _wait_on_tpus(arrays: Sequence[Array], scales: dict[int, Array]) -> dict[int, Array]:
    """Returns the scales, for which a TPU must wait until these arrays are made."""
    if not scales or not arrays:
        return scales

    # Otherwise its compiler makes the new codes before the params, which read the old codes, and
    # keeps both: 2.2 bytes for each param (48 params of 4096 x 4096). GPUs do not wait, as they
    # would store the arrays before they choose between new and old values.
    def wait(scales: Any, arrays: Any) -> Any:
        return jax.lax.optimization_barrier((scales, arrays))[0]

    return jax.lax.platform_dependent(
        scales, list(arrays), tpu=wait, default=lambda scales, _: scales
    )


def stored_dtypes(state: RoundedState | CodedState) -> list[str]:
    """Returns the dtypes in which the leaves of a state are stored."""
    leaves = jax.tree.leaves(state[0])
    kinds = ["bfloat16" if jnp.result_type(x) == jnp.bfloat16 else "" for x in leaves]
    if isinstance(state, CodedState):
        for i, scale in enumerate(state.scales):
            kinds[i] = kinds[i] if isinstance(scale, optax.MaskedNode) else "int8"
    return kinds
