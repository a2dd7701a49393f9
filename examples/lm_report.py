"""The output of `train_lm.py`: its progress, and at the end a table and a plot of its runs.

If the output is not a terminal, a line at every validation replaces the progress bars.
"""

import contextlib
import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# Reports that a run has reached an iteration, with its status.
Report = Callable[[int, str], None]


@contextlib.contextmanager
def show_progress(console: Console, steps: int, every: int) -> Iterator[Callable[[str], Report]]:
    """Progress of runs, one after the other: yields a function that adds a run by its name.

    Args:
      console: the output: bars on a terminal, otherwise lines.
      steps: the iterations of each run.
      every: the iterations between two lines; 0 for only the last.
    """
    if not console.is_terminal:
        yield lambda name: _as_lines(console, name, steps, every)
        return
    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[info]}"),
    )
    with Progress(*columns, console=console) as progress:

        def add_run(name: str) -> Report:
            task = progress.add_task(name, total=steps, info="compiling")
            return lambda i, info: progress.update(task, completed=i, info=info)

        yield add_run


def _as_lines(console: Console, name: str, steps: int, every: int) -> Report:
    def report(i: int, info: str) -> None:
        if i == steps or (every and i % every == 0):
            line = f"{name:14} {i:{len(str(steps))}}/{steps}  {info}"
            console.print(line, soft_wrap=True, highlight=False)

    return report


@dataclasses.dataclass(frozen=True)
class Earlier:
    """An earlier run with results or checkpoints in the folder of this one.

    Attributes:
      folder: the folder.
      when: when the run ended, or began if it did not end.
      val_loss: its last validation losses, by policy; empty if it did not end.
    """

    folder: Path
    when: datetime.datetime
    val_loss: dict[str, float]

    @classmethod
    def find(cls, folder: Path) -> "Earlier | None":
        """The run in a folder, or None."""
        results = folder / "results.json"
        for file in (results, folder / "checkpoints"):
            if file.exists():
                when = datetime.datetime.fromtimestamp(file.stat().st_mtime)
                return cls(folder, when, _val_losses(results))
        return None

    def describe(self, *, resume: bool) -> str:
        """The name of the run, and what happens to it."""
        which = "a run" if self.val_loss else "a run without results"
        fate = "goes on from its checkpoints" if resume else "replaces it"
        return f"{self.folder} has {which} of {self.when:%Y-%m-%d %H:%M}: this one {fate}."

    def losses(self) -> str:
        """Its validation losses."""
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in self.val_loss.items())
        return f"Validation losses of the run of {self.when:%Y-%m-%d %H:%M}: {losses or 'none'}."


def _val_losses(results: Path) -> dict[str, float]:
    try:
        return {name: float(r["val_loss"]) for name, r in json.loads(results.read_text()).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # missing, cut off, or not ours


def make_table(results: dict[str, dict[str, Any]]) -> Table:
    """The results of all policies, one in each row."""
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
            # The first policy is a broad line in the background, which the others should cover.
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
