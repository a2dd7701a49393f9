"""Metrics as the numbers that loggers take, without waiting for the device."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxmp._numerics.histograms import FINITE, ZEROS, Histograms
from jaxmp._numerics.tree import leaf_names
from jaxmp._tools.diagnostics.histogram_counts import cumulative_counts, fetch_counts
from jaxmp._tools.diagnostics.inputs import check_numbers

# Python numbers, which every logger takes; many know no arrays.
Scalar = int | float


def scalars(metrics: PyTree, *, prefix: str = "") -> dict[str, Scalar]:
    """Returns metrics as a flat dictionary of Python numbers, as loggers take them.

    All arrays are fetched at once; asking each for its number would wait for the device as often.
    It waits for the step: where that matters, use `scalar_log`.

    Args:
      metrics: a tree of arrays, such as the metrics of `make_train_step`. Booleans become 0 and 1.
        Of `Histograms`, for each array: the base-2 logarithms of the median and of the largest
        magnitude, and the share of zeros; nothing in calls that counted nothing. Arrays of several
        numbers, texts and the like have no place on a chart: they are left out.
      prefix: what each name begins with, such as `"train/"`.

    Returns:
      The numbers, by the paths of their leaves.

    Raises:
      TypeError: for arrays without numbers, as under `jit`.

    >>> import jax.numpy as jnp
    >>> metrics = {"loss": jnp.float32(0.5), "nonfinite": {"w": jnp.uint32(3)}, "text": "a"}
    >>> scalars(metrics, prefix="train/")
    {'train/loss': 0.5, 'train/nonfinite/w': 3}
    """
    return _flat_scalars(jax.device_get(_to_fetch(metrics)), prefix)


@contextlib.contextmanager
def scalar_log(
    write: Callable[[int, dict[str, Scalar]], Any], *, prefix: str = "", most: int = 100
) -> Iterator[Callable[[int, PyTree], None]]:
    """Hands metrics to a logger once the device has computed them, so that no step waits.

    A loop that reads the loss of each step waits for that step before it sends the next, and the
    device idles. This keeps metrics until their numbers have arrived, which is a step or two later,
    and hands them on in order. The last ones are written as the block ends.

    Args:
      write: called as `write(step, values)` with the number of the step and what `scalars` makes of
        its metrics, in the thread of the caller.
      prefix: what each name begins with.
      most: how many steps may wait to be written; then the oldest is waited for.

    Returns:
      A context with a function of a step and its metrics. The step is a Python number: the counter
      of a state is an array. The metrics are a tree of arrays, which may not be donated.

    Raises:
      ValueError: if `most` is not at least 1.

    >>> import jax.numpy as jnp
    >>> with scalar_log(lambda step, values: print(step, values)) as log:
    ...     log(0, {"loss": jnp.float32(0.5)})
    0 {'loss': 0.5}
    """
    if most < 1:
        raise ValueError(f"most must be at least 1 step, got {most!r}")
    waiting: collections.deque[tuple[int, Any]] = collections.deque()

    def write_oldest() -> None:
        step, numbers = waiting.popleft()
        write(step, _flat_scalars(jax.device_get(numbers), prefix))

    def log(step: int, metrics: PyTree) -> None:
        numbers = _to_fetch(metrics)
        # The copies run while the device computes the next step.
        for x in jax.tree.leaves(numbers):
            if hasattr(x, "copy_to_host_async"):
                x.copy_to_host_async()
        waiting.append((step, numbers))
        # In order: the metrics of a step wait for those of the step before.
        while waiting and (len(waiting) > most or _have_arrived(waiting[0][1])):
            write_oldest()

    try:
        yield log
    finally:
        while waiting:
            write_oldest()


def _have_arrived(numbers: Any) -> bool:
    return all(x.is_ready() for x in jax.tree.leaves(numbers) if hasattr(x, "is_ready"))


def _to_fetch(metrics: PyTree) -> dict[str, Any]:
    """Returns single numbers and histograms by path: all that is fetched from the device."""

    def is_histograms(x: Any) -> bool:
        return isinstance(x, Histograms)

    numbers = {}
    leaves = jax.tree.leaves(metrics, is_leaf=is_histograms)
    for name, x in zip(leaf_names(metrics, is_leaf=is_histograms), leaves, strict=True):
        dtype = getattr(x, "dtype", None)
        kinds = (np.floating, np.integer, np.bool_)
        is_real = dtype is not None and any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)
        is_number = is_real and getattr(x, "size", 0) == 1
        if is_number or isinstance(x, (Histograms, bool, int, float)):
            numbers[name] = x
    check_numbers(numbers, "scalars")
    return numbers


def _flat_scalars(numbers: dict[str, Any], prefix: str) -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for name, x in numbers.items():
        if isinstance(x, Histograms):
            flat |= {f"{prefix}{name}/{key}": n for key, n in _histogram_scalars(x).items()}
        else:
            value = np.asarray(x).reshape(()).item() if hasattr(x, "dtype") else x
            flat[prefix + name] = int(value) if isinstance(value, bool) else value
    return flat


def _histogram_scalars(histograms: Histograms) -> dict[str, Scalar]:
    counts, largest = fetch_counts(histograms)
    flat: dict[str, Scalar] = {}
    for name, row, most in zip(histograms.names, counts, largest, strict=True):
        # Calls that count nothing have empty histograms, which would be points at zero.
        if row.any():
            flat[f"{name}/zeros"] = float(row[ZEROS] / row.sum())
        if most > 0:
            edges, below = cumulative_counts(row[FINITE], most)
            median = np.interp(below[-1] / 2, below, edges)
            flat[f"{name}/log2_median"] = float(median)
            flat[f"{name}/log2_largest"] = float(np.log2(most))
    return flat
