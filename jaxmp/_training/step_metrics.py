"""The metrics of a train step, some of which are computed only on request."""

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
    """Returns the metrics of the loss scale and of skipped steps, from states before and after."""
    return {
        "grads_finite": new.opt_state.grads_finite,
        "loss_scale": old.loss_scale.scale,
        "skipped": new.opt_state.skipped,
        "consecutive_skips": new.opt_state.consecutive_skips,
    }


def gradient_metrics(
    grads: PyTree, finite: Any, state: TrainState, counts: bool, every: int | None
) -> Metrics:
    """Returns the metrics of gradients, from the state before the step.

    With `counts`, how many numbers are not finite in skipped steps; histograms `every` so many
    calls, or never for None.
    """

    def none(grads: PyTree) -> PyTree:
        return jax.tree.map(lambda _: jnp.uint32(0), grads)

    # The branch of a step that is taken reads no gradient.
    nonfinite = {"nonfinite": jax.lax.cond(finite, none, count_nonfinite, grads)} if counts else {}
    if every is None:
        return nonfinite
    # Skipped calls count too: each call of a series of skips would count its gradients otherwise.
    calls = state.step + state.opt_state.skipped
    return nonfinite | {"histograms": histograms(grads, when=calls % every == 0)}


def check_histograms_every(every: Any) -> None:
    """Raises ValueError unless it is None or a whole number of at least 1."""
    whole = isinstance(every, (int, np.integer)) and not isinstance(every, bool)
    if every is not None and not (whole and every >= 1):
        raise ValueError(
            "histograms_every must be the number of calls from one histogram to the next, such as "
            f"100, or None for none, got {every!r}"
        )
