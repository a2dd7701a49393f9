"""What a train step says of itself: its metrics, and what of them is computed only if asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._numerics.histograms import histograms
from jaxmp._numerics.tree import count_nonfinite
from jaxmp._training.train_state import TrainState

Metrics = dict[str, Any]


def step_metrics(old: TrainState, new: TrainState) -> Metrics:
    """Returns what every step says of its loss scale, and whether it was skipped.

    Args:
      old: the state that the step was given.
      new: the state that it returns.
    """
    return {
        "grads_finite": new.opt_state.grads_finite,
        "loss_scale": old.loss_scale.scale,
        "skipped": new.opt_state.skipped,
        "consecutive_skips": new.opt_state.consecutive_skips,
    }


def gradient_metrics(
    grads: PyTree, finite: Any, state: TrainState, counts: bool, every: int | None
) -> Metrics:
    """Returns what a step says of its gradients, as far as it is asked for.

    Args:
      grads: the gradients.
      finite: whether the step is taken.
      state: the state that the step was given.
      counts: whether to count the numbers that are not finite, in skipped steps.
      every: every how many calls to make histograms; None for never.
    """
    nonfinite = {"nonfinite": _overflow_counts(grads, finite)} if counts else {}
    if every is None:
        return nonfinite
    # Skipped calls count too: each call of a series of skips would count its gradients otherwise.
    calls = state.step + state.opt_state.skipped
    return nonfinite | {"histograms": histograms(grads, when=calls % every == 0)}


def _overflow_counts(grads: PyTree, finite: Any) -> PyTree:
    """Returns how many numbers of each gradient are not finite; zeros where the step is taken."""

    def none(grads: PyTree) -> PyTree:
        return jax.tree.map(lambda _: jnp.uint32(0), grads)

    return jax.lax.cond(finite, none, count_nonfinite, grads)


def check_histograms_every(every: Any) -> None:
    """Raises ValueError unless it is None or a whole number of at least 1."""
    whole = isinstance(every, (int, np.integer)) and not isinstance(every, bool)
    if every is not None and not (whole and every >= 1):
        raise ValueError(
            "histograms_every must be the number of calls from one histogram to the next, such as "
            f"100, or None for none, got {every!r}"
        )
