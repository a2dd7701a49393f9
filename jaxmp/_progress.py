"""A check that training moves: skipped steps are counted on the device and seen here."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from jaxmp._dtypes import is_inexact
from jaxmp._loss_scale import DynamicLossScale
from jaxmp._optimizer_step import MixedPrecisionState
from jaxmp._tree import leaf_names
from jaxmp._warnings import warn


class TrainingStalled(RuntimeError):
    """Too many optimizer steps in a row were skipped; no loss scale will cure it."""


def check_progress(state: Any, loss: Any = None, *, limit: int = 50) -> None:
    """Raises if training has stopped moving, or has lost its params.

    A loss scale backs off from its ceiling of 2**24 to 1 in 24 skips. What overflows after that
    is not the scaling, and skipping would go on silently for ever. And an optimizer that makes NaN
    of finite gradients takes a step which nothing can mend. Call this every few hundred steps: it
    waits for the device.

    Args:
      state: a `TrainState`, or anything that holds the state of `mixed_precision`: that state
        itself, Flax's `TrainState`, an `nnx.Optimizer`. Params are looked at where it has them.
      loss: the last loss, if at hand: it tells a broken forward pass from overflowing gradients.
      limit: how many consecutive skips are too many.

    Raises:
      TrainingStalled: with the likely causes and what to do about each: after `limit` skips in a
        row, for params that hold NaN, and for a loss that is not finite in a step that was taken.
      TypeError: if no optimizer state of jaxmp is in `state`.

    Warns:
      UserWarning: if the loss scale is lower than the optimizer of the state can have made it.
    """
    found = _find_states(state)
    if not found:
        raise TypeError(
            f"no state of jaxmp.mixed_precision in this {type(state).__name__}; pass the "
            "TrainState or the optimizer state"
        )
    params = [getattr(state, "params", None), *(opt_state.master for opt_state in found)]
    if lost := _bad_leaves(params, 0):
        raise TrainingStalled(
            f"params are lost: {lost} NaN, which no step mends. Gradients are tested before they "
            "are used, so it was the optimizer that made it, by its schedule, say; or it was set "
            "from outside, or there from the start. Go on from a checkpoint"
        )
    warn_of_foreign_scale(state)
    for opt_state in found:
        skips = int(np.max(opt_state.consecutive_skips))  # of an ensemble, the worst member
        broken = loss is not None and not np.all(np.isfinite(loss))
        if broken and skips == 0:
            raise TrainingStalled(
                "the loss is not finite, and the step was taken all the same: its gradients were "
                "finite, or skip='none' does not look at them. Check the loss function, and "
                "whether the params still are finite"
            )
        if skips >= limit:
            raise TrainingStalled(_stalled(opt_state, skips, broken, params))


def _stalled(opt_state: MixedPrecisionState, skips: int, broken: bool, params: list[PyTree]) -> str:
    scale = float(np.min(opt_state.loss_scale.scale))
    first = (
        "The loss itself is not finite: the forward pass overflows or divides by zero"
        if broken
        else "If the loss itself is infinite or NaN, the forward pass is broken"
    )
    infinite = _bad_leaves(params, 1).rpartition(" ")[0]
    return (
        f"{skips} optimizer steps in a row were skipped, because their gradients (or loss, or "
        f"batch statistics) were not finite; the loss scale is {scale:g}. No loss scale cures "
        f"this. {f'Params are not finite: {infinite}. ' if infinite else ''}{first}; look for "
        "inputs and activations beyond 65504 in float16 (cast='all' rounds the whole batch, labels "
        "too), log or sqrt of zero, statistics that overflow, and bad input data. A model "
        "pretrained in bfloat16 often overflows float16: use 'mixed_bfloat16'. Otherwise lower the "
        "learning rate, or warm it up for longer."
    )


def warn_of_foreign_scale(state: Any) -> None:
    """Warns of a dynamic loss scale below what its skipped steps explain.

    A state that was made, or saved, under a policy without a scale has scale 1: in float16 its
    gradients vanish for the thousands of steps in which it grows.
    """
    config = getattr(getattr(state, "tx", None), "loss_scale", None)
    if not isinstance(config, DynamicLossScale):
        return
    for opt_state in _find_states(state):
        scale, skipped = float(np.min(opt_state.loss_scale.scale)), int(np.max(opt_state.skipped))
        lowest = config.init_scale * config.backoff_factor**skipped
        if scale < 0.99 * max(lowest, config.min_scale):  # the scale is rounded
            warn(
                f"the loss scale of this state is {scale:g}, but its optimizer begins with "
                f"{config.init_scale:g} and has skipped {skipped} steps: the state was made with "
                "another optimizer, and small float16 gradients are lost until the scale has "
                "grown. Begin anew: state.replace(opt_state=state.opt_state._replace("
                "loss_scale=tx.loss_scale.init()))"
            )


def _bad_leaves(trees: list[PyTree], kind: Literal[0, 1]) -> str:
    """Which leaves hold NaN, or infinities too, in the first tree that has any; and a verb."""
    for tree in trees:
        named = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
        floats = {name: x for name, x in named if is_inexact(x)}
        flags = np.asarray(_nan_and_infinite(list(floats.values())))[kind] if floats else []
        found = [repr(name) for name, flag in zip(floats, flags, strict=True) if flag]
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            return f"{', '.join(found[:3])}{more} {'is' if len(found) == 1 else 'are'}"
    return ""


@jax.jit
def _nan_and_infinite(floats: list[Any]) -> Bool[Array, "2 leaves"]:
    bad = [jnp.stack([jnp.any(jnp.isnan(x)), ~jnp.all(jnp.isfinite(x))]) for x in floats]
    return jnp.stack(bad, axis=1)


def _find_states(tree: Any) -> list[MixedPrecisionState]:
    def is_state(x: Any) -> bool:
        return isinstance(x, MixedPrecisionState)

    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]
