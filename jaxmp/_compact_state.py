"""Optimizer state in 16 or 8 bits, under any optax optimizer, which sees float32."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, BFloat16, Float32, PyTree, UInt32

from jaxmp._block_codes import Codes, block_of, decode, encode
from jaxmp._stochastic import hashed_words, round_by_words

Moments = Literal["float32", "bfloat16", "int8"]
# Keeps the random words of states apart from those of params.
_STREAM = np.uint32(0x5747)


class Rounded(NamedTuple):
    """A float32 array of a state, rounded up or down at random."""

    bfloat16: BFloat16[Array, "*shape"]


class CompactState(NamedTuple):
    """The state of `compact_state`.

    Attributes:
      inner: that of the optimizer inside, with `Rounded` or `Codes` in place of large float32
        arrays.
      step: counts the steps, for random rounding.
    """

    inner: Any
    step: UInt32[Array, ""]


def compact_state(
    inner: optax.GradientTransformation, dtype: Moments, *, min_size: int = 4096
) -> optax.GradientTransformationExtraArgs:
    """Stores the state of an optimizer in 16 or 8 bits, and computes with it in float32.

    Moments fill as much memory as masters, twice. It holds for whatever state an optimizer has:
    moments of Adam, Lion or Muon, momentum, averages of params. Each float32 array of at least
    `min_size` numbers is stored narrow between steps; counts, scalars, small and other arrays stay.

    - `"bfloat16"`, 2 bytes: rounded up or down at random, as to nearest a second moment with
      `b2=0.999` could not decrease, and an average of params would not move.
    - `"int8"`, 1 byte: codes in blocks of 8 x 128 with a scale each, or one scale a row. For
      moments. An average of params, or a sum of gradients, is not to be rounded so coarsely:
      put `compact_state` around the part that has the moments alone,
      `optax.MultiSteps(compact_state(adamw, "int8"), 4)`.

    Args:
      inner: any optax optimizer.
      dtype: `"float32"` returns the optimizer as it is.
      min_size: the fewest numbers of an array that is stored narrow.

    Returns:
      An optax optimizer. `expanded_state` gives its state as the inner optimizer has it.

    Raises:
      ValueError: for another dtype.
      TypeError: if `inner` is no optimizer.

    >>> tx = compact_state(optax.adam(0.1), "int8")
    >>> params = {"w": jnp.ones((64, 128)), "b": jnp.ones(128)}
    >>> state = tx.init(params)
    >>> mu = state.inner[0].mu
    >>> mu["w"].codes.dtype.name, mu["w"].scales.shape, mu["b"].dtype.name
    ('int8', (8, 1), 'float32')
    """
    if dtype not in get_args(Moments):
        raise ValueError(
            f"the dtype of moments must be one of {', '.join(map(repr, get_args(Moments)))}, "
            f"got {dtype!r}"
        )
    if isinstance(inner, optax.MultiSteps):
        raise TypeError(
            f"optax.MultiSteps sums gradients in its state, and sums are not for {dtype}. Put "
            f'compact_state inside: optax.MultiSteps(jaxmp.compact_state(optimizer, "{dtype}"), n)'
        )
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"compact_state takes an optax.GradientTransformation, got {type(inner).__name__}"
        )
    inner = optax.with_extra_args_support(inner)
    if dtype == "float32":
        return inner
    kinds = {"bfloat16": Rounded, "int8": Codes}

    def init(params: PyTree) -> CompactState:
        def pack(x: Any, number: int) -> Any:
            kept = jnp.result_type(x) == jnp.float32 and np.size(x) >= min_size
            return _packed(kinds[dtype], jnp.asarray(x), number, jnp.uint32(0)) if kept else x

        return CompactState(_numbered(pack, inner.init(params)), jnp.uint32(0))

    def update(
        updates: PyTree, state: CompactState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, CompactState]:
        updates, new = inner.update(updates, expanded_state(state), params, **extra)
        return updates, _stored_like(state, new, state.step)._replace(step=state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def expanded_state(state: PyTree) -> PyTree:
    """An optimizer state with all that `compact_state` stored narrow in float32 again.

    Args:
      state: any tree, such as the state of `mixed_precision`, or a `TrainState`.

    Returns:
      The tree as it would be without `compact_state`, rounded as the stored one was.

    >>> state = compact_state(optax.sgd(0.1, momentum=0.9), "bfloat16").init(jnp.ones((64, 64)))
    >>> expanded_state(state)[0].trace.dtype.name
    'float32'
    """

    def is_compact(x: Any) -> bool:
        return isinstance(x, CompactState) or _is_packed(x)

    def expand(x: Any) -> Any:
        if isinstance(x, CompactState):
            return expanded_state(x.inner)
        if isinstance(x, Rounded):
            return x.bfloat16.astype(jnp.float32)
        return decode(x) if isinstance(x, Codes) else x

    return jax.tree.map(expand, state, is_leaf=is_compact)


def stored_like(state: PyTree, expanded: PyTree) -> PyTree:
    """An expanded state, stored as another one is.

    Args:
      state: a state, with or without what `compact_state` makes.
      expanded: a tree of the structure of `expanded_state(state)`.

    Returns:
      The values of `expanded` in the form of `state`.
    """

    def store(old: Any, new: PyTree) -> Any:
        return _stored_like(old, new, old.step) if isinstance(old, CompactState) else new

    return jax.tree.map(store, state, expanded, is_leaf=lambda x: isinstance(x, CompactState))


def _stored_like(state: CompactState, expanded: PyTree, step: Any) -> CompactState:
    def pack(old: Any, number: int, x: Any) -> Any:
        return _packed(type(old), x, number, step) if _is_packed(old) else x

    return CompactState(_numbered(pack, state.inner, expanded), state.step)


def _packed(kind: Any, x: Float32[Array, "..."], number: int, step: Any) -> Any:
    if kind is Codes and block_of(x.shape) is None:
        return x
    words = hashed_words(x.shape, [_STREAM, np.uint32(number), step])
    if kind is Codes:
        return encode(x, words)
    return Rounded(round_by_words(x, jnp.dtype(jnp.bfloat16), words))


def _is_packed(x: Any) -> bool:
    return isinstance(x, (Rounded, Codes))


def _numbered(fun: Any, tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps over a tree, with the number of each leaf as the second argument."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_packed)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    return jax.tree.map(fun, tree, numbers, *rest, is_leaf=_is_packed)
