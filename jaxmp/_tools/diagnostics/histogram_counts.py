"""Histograms on the host: their counts, and how many numbers are below a magnitude."""

from typing import Any

import jax
import numpy as np

from jaxmp._numerics.histograms import LOWER_EDGES, Histograms


def fetch_counts(histograms: Histograms) -> tuple[Any, Any]:
    """Returns counts by array and bin, and largest magnitudes by array, in float64.

    Those of several steps are added up.
    """
    counts, largest = jax.device_get((histograms.counts, histograms.largest))
    # Counts are float32 on the device; sums of steps and shares need more.
    steps = tuple(range(largest.ndim - 1))
    counts = np.asarray(counts, np.float64).sum(steps)
    return counts, np.asarray(largest, np.float64).max(steps, initial=0)


def check_not_empty(counts: Any) -> None:
    """Raises ValueError for histograms of arrays in which nothing was counted."""
    if len(counts) and not counts.any():
        raise ValueError(
            "these histograms are empty. A step of make_train_step(..., histograms_every=n) counts "
            "in its first call, and in each n-th call after it"
        )


def cumulative_counts(numbers: Any, largest: float) -> tuple[list[float], list[float]]:
    """Returns points of the distribution of magnitudes, given how many are in each finite bin.

    They are base-2 logarithms of magnitudes, and how many numbers are below each; the last point is
    the largest magnitude, with all of them.
    """
    edges = [*np.log2(LOWER_EDGES[largest >= LOWER_EDGES]), np.log2(largest)]
    return edges, [*np.cumsum([0.0, *numbers])[: len(edges) - 1], float(numbers.sum())]
