"""What `train_lm.py` shows at its end: a table and a plot of the runs side by side."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table


def make_table(results: dict[str, dict[str, Any]]) -> Table:
    """The results side by side, one policy in a row."""
    count = next(iter(results.values()))["params"]
    title = f"{count:,} params, same init, same batches"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    state_parts = "bytes per param:\nparams + masters\n+ moments = all"
    headings = ("train\nloss", "val\nloss", "steps\nper s", state_parts, "skipped", "loss\nscale")
    for heading in headings:
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for name, run in results.items():
        speed, size = run["steps_per_second"], run["bytes_per_param"]
        table.add_row(
            name,
            f"{run['train_loss']:.4f}",
            f"{run['val_loss']:.4f}",
            f"{speed:.2f}" if speed else "-",
            "{params:.3g} + {masters:.3g} + {moments:.3g} = {total:.3g}".format(**size),
            str(run["skipped"]),
            f"2^{math.log2(run['loss_scale']):g}",
        )
    return table


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws the loss curves, the loss scales with the skipped steps, and the gaps in loss."""
    colors = ["#9a9a9a", "#0072b2", "#d55e00", "#009e73", "#cc79a7"]
    first = next(iter(results))
    with matplotlib.rc_context({"font.size": 13, "axes.titlesize": 14}):
        figure = Figure(figsize=(16, 6), layout="constrained")
        axes: dict[str, Axes] = figure.subplot_mosaic([["loss", "scale"], ["loss", "gap"]])
        for i, (name, run) in enumerate(results.items()):
            color = colors[i % len(colors)]
            # The first policy is a broad line in the background, on which the others are to lie.
            _draw_loss(axes["loss"], name, run, color, width=1.8 if i else 7.0)
            _draw_scale(axes["scale"], name, run, color)
            _draw_gap(axes["gap"], run, results[first], color, width=2.0 if i else 5.0)
        _annotate(axes, first)
        figure.savefig(path, dpi=100)


def _annotate(axes: dict[str, Axes], first: str) -> None:
    axes["loss"].set(xlabel="iteration", ylabel="cross entropy (nats per character)")
    axes["loss"].set_title("Loss: train (lines, smoothed) and validation (dots)")
    axes["loss"].legend(title="last validation loss", frameon=False)
    axes["scale"].set_title("Loss scale, where it is not 1")
    axes["scale"].set_yscale("log", base=2)
    if axes["scale"].has_data():
        axes["scale"].legend(loc="lower right", ncols=2)
    axes["gap"].set(xlabel="iteration", ylabel="%")
    axes["gap"].set_title(f"Validation loss, difference from {first}")
    axes["gap"].axhspan(-1, 1, color="#f2f2f2")
    for panel in axes.values():
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlim(left=0)


def _draw_loss(axes: Axes, name: str, run: dict[str, Any], color: str, width: float) -> None:
    history = run["history"]
    smooth = _smoothed(history["loss"])
    axes.plot(range(1, len(smooth) + 1), smooth, color=color, linewidth=width)
    label = f"{name}  {run['val_loss']:.4f}"
    axes.plot(history["val_at"], history["val_loss"], "o", color=color, ms=3 + width, label=label)


def _smoothed(values: Sequence[float], decay: float = 0.95) -> list[float]:
    """An exponential moving average that does not start from zero."""
    total, weight, out = 0.0, 0.0, []
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        out.append(total / weight)
    return out


def _draw_scale(axes: Axes, name: str, run: dict[str, Any], color: str) -> None:
    scales, skipped_at = run["history"]["loss_scale"], run["history"]["skipped_at"]
    if all(scale == 1.0 for scale in scales):
        return
    axes.step(range(1, len(scales) + 1), scales, where="post", color=color, lw=2, label=name)
    label = f"overflow: step skipped ({len(skipped_at)})"
    axes.plot(skipped_at, [scales[i - 1] for i in skipped_at], "kx", ms=8, mew=2, label=label)


def _draw_gap(
    axes: Axes, run: dict[str, Any], reference: dict[str, Any], color: str, width: float
) -> None:
    ours, theirs = (np.array(r["history"]["val_loss"]) for r in (run, reference))
    axes.plot(run["history"]["val_at"], 100 * (ours / theirs - 1), "o-", color=color, lw=width)
