"""Gradient accumulation: one part of the batch after the other, summed in float32."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxmp._dtypes import at_least_float32
from jaxmp._tree import leaf_names


class Evaluation(NamedTuple):
    """One evaluation of a loss and its gradient: what a microbatch contributes.

    Attributes:
      loss: the unscaled loss, times the weight of the microbatch.
      grads: its unscaled gradients, float32 or wider.
      aux: whatever else the loss function returned.
    """

    loss: Float[Array, ""]
    grads: PyTree
    aux: Any


def check_microbatches(count: Any) -> None:
    """Raises ValueError unless `count` is a whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"microbatches must be a whole number of at least 1, got {count!r}")


def split_batch(batch: PyTree, count: int) -> PyTree:
    """Gives every leaf a leading axis of microbatches.

    Microbatch `i` takes the examples `i, i + count, ...`. Contiguous blocks would put each
    microbatch on a few of the devices over which the batch is sharded, and move it there.

    Args:
      batch: arrays with a leading batch axis; typed PRNG keys without one are split.
      count: how many microbatches.

    Returns:
      The tree with leaves of shape `(count, batch / count, ...)`, and keys of shape `(count,)`.

    Raises:
      ValueError: naming a leaf that has no batch axis or does not divide.

    >>> split_batch(jnp.arange(6), 2)
    Array([[0, 2, 4],
           [1, 3, 5]], dtype=int32)
    """
    leaves, treedef = jax.tree.flatten(batch)
    parts = [_split_leaf(x, count, name) for name, x in zip(leaf_names(batch), leaves, strict=True)]
    return jax.tree.unflatten(treedef, parts)


def _split_leaf(x: Any, count: int, name: str) -> Array:
    shape = jnp.shape(x)
    if shape == () and jnp.issubdtype(getattr(x, "dtype", jnp.float32), jax.dtypes.prng_key):
        return jax.random.split(x, count)
    if shape == ():
        raise ValueError(
            f"batch leaf {name!r} is a scalar and cannot be split into {count} microbatches. Pass "
            "it as a keyword argument, or name the arguments to split with batch_argnums"
        )
    if shape[0] % count:
        raise ValueError(
            f"batch leaf {name!r} has {shape[0]} examples, which {count} microbatches do not "
            f"divide. Use a batch size that is a multiple of {count}"
        )
    strided = jnp.reshape(x, (shape[0] // count, count, *shape[1:]))
    return jnp.swapaxes(strided, 0, 1)


def zeros_like_grads(params: PyTree) -> PyTree:
    """Where gradients accumulate: float32, since a bfloat16 sum stops growing at 256 terms."""
    return jax.tree.map(
        lambda p: jnp.zeros(jnp.shape(p), at_least_float32(jnp.result_type(p))), params
    )


def sum_over_microbatches(
    evaluate: Callable[[Any, Any], tuple[Any, Evaluation]],
    carry: Any,
    zeros: PyTree,
    microbatches: PyTree,
) -> tuple[Any, Evaluation]:
    """Runs `evaluate` over the microbatches in a `lax.scan`, so that it is traced once.

    Args:
      evaluate: `(carry, microbatch) -> (carry, evaluation)`; the weights of the evaluations are
        its business.
      carry: what passes from one microbatch to the next, such as batch statistics.
      zeros: the gradients to start the sum from.
      microbatches: a tree whose leaves have a leading axis of microbatches.

    Returns:
      The last carry, and the evaluation with loss and gradients summed and `aux` stacked.
    """

    def body(state: tuple[Any, PyTree], part: Any) -> tuple[Any, Any]:
        carry, total = state
        carry, (loss, grads, aux) = evaluate(carry, part)
        return (carry, jax.tree.map(jnp.add, total, grads)), (loss, aux)

    (carry, grads), (losses, aux) = jax.lax.scan(body, (carry, zeros), microbatches)
    return carry, Evaluation(jnp.sum(losses), grads, aux)
