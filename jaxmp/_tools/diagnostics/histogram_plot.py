"""Draws histograms of magnitudes, and the ends of the range of a format."""

import math
import os
from typing import Any

import numpy as np
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import parse_dtype
from jaxmp._numerics.histograms import FINITE, LOWER_EDGES, Histograms, histograms
from jaxmp._tools.diagnostics.histogram_counts import fetch_counts
from jaxmp._tools.diagnostics.inputs import check_numbers
from jaxmp._tools.diagnostics.underflow_report import UnderflowReport, limits_of, underflow_report

_INK, _MUTED, _EDGE = "#1f2328", "#6e7781", "#d0d7de"
_ZONES = {"becomes zero": "#cf222e", "subnormal": "#bf8700", "overflows": "#8250df"}


def plot_histograms(
    tree: PyTree | Histograms,
    path: str | os.PathLike[str] | None = None,
    *,
    dtype: Any = "float16",
    loss_scale: Any = 1.0,
    most: int = 40,
) -> Any:
    """Draws the magnitudes of each array over powers of two, and the losses of a format.

    Each array is a row; the darker, the more of its numbers have this magnitude. Numbers to the
    left of the range of the format at the scale become zero or subnormal, those to the right
    overflow.

    Args:
      tree: gradients or other arrays; or `Histograms` of them, such as `metrics["histograms"]`.
      path: where to write the picture, by its suffix as PNG, SVG or PDF. None writes no file.
      dtype: the format whose range is drawn.
      loss_scale: the factor of the numbers: a number, or `state.loss_scale`.
      most: how many rows to draw: those that lose most.

    Returns:
      The figure of matplotlib, for notebooks. It waits for the device.

    Raises:
      ImportError: without matplotlib.
      ValueError: as `underflow_report` does, and if no array has a number that is not zero.

    >>> figure = plot_histograms({"w": np.array([1e-3, 0.5])}, loss_scale=2.0**10)
    >>> figure.axes[0].get_title(loc="left")
    'float16 at scale 2**10'
    """
    check_numbers(tree, "plot_histograms")
    tree = tree if isinstance(tree, Histograms) else histograms(tree)
    report = underflow_report(tree, dtype=dtype, loss_scale=loss_scale)
    counts, largest = fetch_counts(tree)
    # Those that lose most, in the order of the tree: neighbors are layers.
    worst = {row.name for row in report.rows[:most]}
    rows = [i for i, name in enumerate(tree.names) if name in worst and largest[i] > 0]
    if not rows:
        raise ValueError("there is nothing to draw: no array has a number that is not zero")
    # Shares of an array: a bias of 64 numbers would be white next to a weight.
    shares = counts[rows][:, FINITE]
    shares = shares / shares.sum(1, keepdims=True)
    figure = _figure([tree.names[i] for i in rows], shares, report)
    if path is not None:
        figure.savefig(path, dpi=160)
    return figure


def _figure(names: list[str], shares: Any, report: UnderflowReport) -> Any:
    figure, axes = _empty_figure(len(names))
    edges = np.append(np.log2(LOWER_EDGES), 128.0)
    filled = np.flatnonzero(shares.any(0))
    limits = limits_of(parse_dtype(report.dtype))
    marks = [math.log2(x / report.scale) for x in (limits.smallest, limits.normal, limits.ends)]
    # A margin of two powers of two on both sides.
    first, last = edges[filled[0]] - 2, edges[filled[-1] + 1] + 2
    # The ends of the range are shown if they are near.
    near = [x for x in marks if first - 12 < x < last + 12]
    first, last = min(first, *(x - 4 for x in near)), max(last, *(x + 4 for x in near))
    axes.set_xlim(first, last)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.pcolormesh(
        edges,
        np.arange(len(names) + 1) - 0.5,
        np.ma.masked_equal(shares, 0),
        cmap="Blues",
        vmin=-0.2 * shares.max(),  # so that small shares are not white
        vmax=shares.max(),
        zorder=2,
    )
    _tint_zones(axes, [first, *marks, last])
    axes.set_yticks(range(len(names)), names, color=_INK)
    axes.set_xlabel("magnitude, as a power of two", color=_INK)
    rows = {row.name: row for row in report.rows}
    for place, name in enumerate(names):
        percent = 100 * (rows[name].flushed + rows[name].overflow)
        axes.annotate(
            f"{percent:.1f} %",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=_INK if percent >= 0.05 else _MUTED,  # what is printed as 0.0 % is gray
            annotation_clip=False,
        )
    times = f" at scale 2**{math.log2(report.scale):g}" if report.scale != 1 else ""
    axes.set_title(f"{report.dtype}{times}", loc="left", color=_INK, fontsize=11, pad=22)
    axes.annotate(
        "lost",
        (1.01, 1.0),
        (0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color=_MUTED,
    )
    return figure


def _empty_figure(rows: int) -> tuple[Any, Any]:
    # Not a dependency of the package: training needs no pictures.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_histograms draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    # Not by pyplot, which would keep the figure and choose a window for it.
    figure = Figure(figsize=(9, 1.5 + 0.26 * rows), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK)
    for side in axes.spines.values():
        side.set_color(_EDGE)
    return figure, axes


def _tint_zones(axes: Any, bounds: list[float]) -> None:
    """Tints the losses: below the first mark, below the second, and above the third."""
    first, smallest, normal, ends, last = bounds
    spans = [(first, smallest), (smallest, normal), (ends, last)]
    for (begin, end), (name, color) in zip(spans, _ZONES.items(), strict=True):
        begin, end = max(begin, first), min(end, last)
        if begin >= end:
            continue
        axes.axvspan(begin, end, color=color, alpha=0.10, linewidth=0, zorder=1)
        axes.axvline(end if name != "overflows" else begin, color=color, linewidth=1, zorder=3)
        axes.annotate(
            name,
            ((begin + end) / 2, 1.0),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=color,
        )
