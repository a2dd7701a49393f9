"""Lets `flax.serialization` save a train state, as its arrays by name."""

import sys
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._numerics.dtypes import is_key
from jaxmp._numerics.tree import check_like, leaf_names


def register(cls: type) -> None:
    """Tells Flax of a class of train states, if Flax is imported."""
    # Flax knows classes of its own and those it was told of. Any other it returns as it is: a state
    # cannot be written then, and "restores" to what it was. Training alone does not import Flax.
    serialization: Any = sys.modules.get("flax.serialization")
    if serialization is not None and not serialization.is_serializable(cls):
        serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


def to_state_dict(state: Any) -> dict[str, Any]:
    """Returns the arrays of a tree in nested dictionaries; of typed PRNG keys, their words.

    >>> to_state_dict({"layers": [jax.numpy.int32(1)], "nothing": None})
    {'layers': {'0': Array(1, dtype=int32)}}
    """
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        *outer, last = (jax.tree_util.keystr((entry,), simple=True) for entry in path)
        node = nested
        for name in outer:
            node = node.setdefault(name, {})
        if last in node:  # of a dictionary with the keys 1 and "1"
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"two arrays of the state have the name {name!r}: rename one")
        node[last] = _words(leaf) if is_key(leaf) else leaf
    return nested


def from_state_dict(state: Any, saved: dict[str, Any]) -> Any:
    """Returns a state like `state`, with the arrays of another.

    Args:
      state: a state of the same policy, storage and optimizer. It may be abstract.
      saved: what `to_state_dict` returned, with NumPy arrays if it was written to a file.

    Raises:
      ValueError: naming the arrays that are missing, left over, or of another shape or dtype.
    """
    wanted = to_state_dict(state)
    names = {"name": "the saved state", "like_name": "this one"}
    check_like(saved, wanted, advice=_ADVICE, **names)
    pairs = zip(jax.tree.leaves(saved), jax.tree.leaves(wanted), strict=True)
    for i, (x, y) in enumerate(pairs):
        if jnp.result_type(x) != jnp.result_type(y):
            raise ValueError(
                f"the saved state has {jnp.result_type(x)} at {leaf_names(wanted)[i]!r}, and this "
                f"one {jnp.result_type(y)}. {_ADVICE}"
            )

    def leaf(path: tuple[Any, ...], like: Any) -> Any:
        value: Any = saved
        for entry in path:
            value = value[jax.tree_util.keystr((entry,), simple=True)]
        return _keys(value, like) if is_key(like) else value

    return jax.tree_util.tree_map_with_path(leaf, state)


def _words(keys: Any) -> Any:
    words = jax.random.key_data
    return words(keys) if isinstance(keys, jax.Array) else jax.eval_shape(words, keys)


def _keys(words: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(jnp.empty((), like.dtype)))


_ADVICE = (
    "Restore into a state of the policy, the storage and the optimizer that wrote it, and convert: "
    "jaxmp.convert_state(state, tx)"
)
