"""Gradient accumulation: evaluates the batch part by part, and sums in float32."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxmp._numerics.dtypes import at_least_float32, is_key
from jaxmp._numerics.tree import leaf_names, split_floats, widen
from jaxmp._program.hoist import with_hoisted
from jaxmp._program.mesh_axes import named_axes


class Evaluation(NamedTuple):
    """One evaluation of a loss and its gradient: what a microbatch contributes.

    Attributes:
      loss: the unscaled loss, times the weight of the microbatch.
      grads: the unscaled gradients of this loss, float32 or wider.
      aux: whatever else the loss function returned.
    """

    loss: Float[Array, ""]
    grads: PyTree
    aux: Any


def check_microbatches(count: Any) -> None:
    """Raises ValueError unless `count` is a whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"microbatches must be a whole number of at least 1, got {count!r}")


def is_single_key(x: Any) -> bool:
    """Whether this is one typed PRNG key, not a batch of keys."""
    return is_key(x) and x.shape == ()


def split_batch(batch: PyTree, count: int, *, whole: PyTree = None) -> PyTree:
    """Gives every leaf a leading axis of microbatches.

    Microbatch `i` takes the examples `i, i + count, ...`: arrays have a leading batch axis, of one
    length, and typed PRNG keys without one are split.

    Raises:
      ValueError: if a leaf has no batch axis or another length, or cannot be divided; or if one of
        the `whole` arguments, which are not split, looks like a part of the batch.

    >>> split_batch(jnp.arange(6), 2)
    Array([[0, 2, 4],
           [1, 3, 5]], dtype=int32)
    """
    leaves, treedef = jax.tree.flatten(batch)
    _, examples = examples_of(batch, whole, "into microbatches", "or, in value_and_grad,")
    if examples % count:
        raise ValueError(
            f"the batch has {examples} examples, which {count} microbatches do not divide. Use a "
            f"batch size that is a multiple of {count}"
        )

    def split_leaf(x: Any) -> Array:
        if is_single_key(x):
            return jax.random.split(x, count)
        shape = jnp.shape(x)
        _check_share(x, count)
        # Microbatch `i` takes every `count`-th example. Contiguous blocks would put it on a few of
        # the devices over which the batch is sharded, and move it there.
        strided = jnp.reshape(x, (shape[0] // count, count, *shape[1:]))
        return jnp.swapaxes(strided, 0, 1)

    return jax.tree.unflatten(treedef, [split_leaf(x) for x in leaves])


def examples_of(batch: PyTree, whole: PyTree, how: str, hint: str = "or") -> tuple[str, int]:
    """Returns the first leaf with examples, and how many all leaves of a batch hold.

    Args:
      batch: a batch to split; without any examples if there are only PRNG keys.
      whole: arguments that are not split, and must not look like a part of the batch.
      how: the way in which it is split, for messages.
      hint: how the advice about `batch_argnums` begins, which not every caller has.
    """
    examples: list[tuple[str, int]] = []
    for name, x in zip(leaf_names(batch), jax.tree.leaves(batch), strict=True):
        if is_single_key(x):
            continue
        if jnp.ndim(x) == 0:
            raise ValueError(
                f"batch leaf {name!r} is a scalar and has no examples to split {how}. Give each "
                f"example its own, jnp.full(examples, x), {hint} leave its argument out of "
                "batch_argnums"
            )
        examples.append((name, jnp.shape(x)[0]))
    first, count = next(iter(examples), ("", 0))
    if others := [(name, n) for name, n in examples if n != count]:
        other, n = others[0]
        raise ValueError(
            f"batch leaves {first!r} and {other!r} have {count} and {n} examples: only arrays with "
            f"one and the same leading batch axis can be split {how}. Give each example its own "
            f"copy of the others, {hint} leave their argument out of batch_argnums (a PRNG key "
            "must be a typed one, jax.random.key)"
        )
    for name, x in zip(leaf_names(whole), jax.tree.leaves(whole), strict=True):
        if examples and jnp.shape(x)[:1] == (count,):
            raise ValueError(
                f"keyword argument {name!r} has {count} examples like the batch, but keyword "
                f"arguments are not split {how}. Pass it by position, or let the loss function "
                "close over it if it is no part of the batch"
            )
    return first, count


def _check_share(x: Any, count: int) -> None:
    """Raises ValueError if explicit mesh axes leave no room for the parts of a batch."""
    sharding = jax.typeof(x).sharding
    entry = sharding.spec.partitions[0] if sharding.spec.partitions else None
    share = x.shape[0] // math.prod(sharding.mesh.shape[name] for name in named_axes(entry))
    if share % count:
        raise ValueError(
            f"each device has {share} examples, which {count} microbatches do not divide. On "
            "explicit mesh axes a batch is not moved: use a larger batch, fewer microbatches, or a "
            "mesh of jax.sharding.AxisType.Auto, where the batch is moved"
        )


def sum_over_microbatches(
    evaluate: Callable[[Any, Any], tuple[Any, Evaluation]],
    carry: Any,
    params: PyTree,
    batch: PyTree,
    count: int,
    whole: PyTree = None,
) -> tuple[Any, Evaluation]:
    """Evaluates the batch at once, or each microbatch in turn.

    Args:
      evaluate: `(carry, microbatch) -> (carry, evaluation)`; it applies the weights of the
        evaluations itself.
      carry: what passes from one microbatch to the next, such as batch statistics.
      params: a tree with the shapes and shardings of the gradients.
      batch: what to split; see `split_batch`.
      count: how many microbatches.
      whole: arguments that every microbatch gets unchanged.

    Returns:
      The last carry, and the evaluation with loss and gradients summed and, if there are several
      microbatches, `aux` stacked.
    """
    if count == 1:
        return evaluate(carry, batch)
    parts = split_batch(batch, count, whole=whole)
    floats, merged = split_floats(params)

    def body(state: tuple[Any, list[Any]], part: Any) -> tuple[Any, Any]:
        carry, total = state
        carry, (loss, grads, aux) = evaluate(carry, part)
        addends = widen(split_floats(grads)[0])
        return (carry, [x + y for x, y in zip(total, addends, strict=True)]), (loss, aux)

    # Float32 sums, since a bfloat16 sum stops growing at 256 terms.
    # `zeros_like` keeps the sharding of a param. Other zeros would be whole on each device.
    zeros = [jnp.zeros_like(p, dtype=at_least_float32(jnp.result_type(p))) for p in floats]

    # In a `lax.scan` the loss is traced once, whatever the count.
    def loop(initial: Any, parts: PyTree) -> Any:
        return jax.lax.scan(body, initial, parts)

    # A weight is rounded to float8 once for all parts.
    (carry, total), (losses, aux) = with_hoisted(loop)((carry, zeros), parts)
    no_gradients = jax.tree.map(lambda p: np.zeros(jnp.shape(p), jax.dtypes.float0), params)
    return carry, Evaluation(jnp.sum(losses), merged(total, no_gradients), aux)
