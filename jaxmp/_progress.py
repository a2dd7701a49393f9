"""A check that training moves: skipped steps are counted on the device and seen here."""

from typing import Any

import jax
import numpy as np

from jaxmp._optimizer import MixedPrecisionState


class TrainingStalled(RuntimeError):
    """Too many optimizer steps in a row were skipped; no loss scale will cure it."""


def check_progress(state: Any, loss: Any = None, *, limit: int = 50) -> None:
    """Raises if training has stopped moving: `limit` steps in a row were skipped.

    A loss scale backs off from its ceiling of 2**24 to 1 in 24 skips. What overflows after that
    is not the scaling, and skipping would go on silently for ever. Call this every few hundred
    steps: it waits for the device.

    Args:
      state: a `TrainState`, or anything that holds the state of `mixed_precision`: that state
        itself, Flax's `TrainState`, an `nnx.Optimizer`.
      loss: the last loss, if at hand: it tells a broken forward pass from overflowing gradients.
      limit: how many consecutive skips are too many.

    Raises:
      TrainingStalled: with the likely causes and what to do about each; also for a loss that is
        not finite in a step that was not skipped.
      TypeError: if no optimizer state of jaxmp is in `state`.
    """
    found = _find_states(state)
    if not found:
        raise TypeError(
            f"no state of jaxmp.mixed_precision in this {type(state).__name__}; pass the "
            "TrainState or the optimizer state"
        )
    for opt_state in found:
        skips = int(np.max(opt_state.consecutive_skips))  # of an ensemble, the worst member
        broken = loss is not None and not np.all(np.isfinite(loss))
        if broken and skips == 0:
            raise TrainingStalled(
                "the loss is not finite, and the step was taken all the same: its gradients were "
                "finite, or skip='none' does not look at them. Check the loss function, and "
                "whether the params still are finite"
            )
        if skips < limit:
            continue
        scale = float(np.min(opt_state.loss_scale.scale))
        first = (
            "The loss itself is not finite: the forward pass overflows or divides by zero"
            if broken
            else "If the loss itself is infinite or NaN, the forward pass is broken"
        )
        raise TrainingStalled(
            f"{skips} optimizer steps in a row were skipped, because their gradients (or loss, or "
            f"batch statistics) were not finite; the loss scale is {scale:g}. No loss scale cures "
            f"this. {first}; look for activations beyond 65504 in float16, log or sqrt of zero, "
            "statistics that overflow, and bad input data. A "
            "model pretrained in bfloat16 often overflows float16: use 'mixed_bfloat16'. "
            "Otherwise lower the learning rate, or warm it up for longer."
        )


def _find_states(tree: Any) -> list[MixedPrecisionState]:
    def is_state(x: Any) -> bool:
        return isinstance(x, MixedPrecisionState)

    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]
