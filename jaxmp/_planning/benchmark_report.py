"""The report of a benchmark of policies: a table, and a picture."""

import dataclasses
import os
import statistics
from typing import Any

from jaxmp._planning.cost import seconds_text

_ON_CPU = (
    "Measured on a CPU: this says nothing about an accelerator. A CPU has no matrix units for 16 "
    "bits, and mostly computes in float32 with casts."
)


@dataclasses.dataclass(frozen=True)
class PolicyTiming:
    """The times of one policy.

    Attributes:
      policy: its name.
      seconds: of one step, one number for each round.
      ratios: those over the first policy's, round by round.
      trace_seconds: what tracing and lowering took.
      compile_seconds: what compiling took.
      peak_bytes: what is allocated during a step, as the compiler planned it: arguments, results
        and temporaries.
      state_bytes: of it, the donated state.
      temporary_bytes: of it, what lives within a step alone.
      metrics: the scalars that the last step returned, such as `loss`.
    """

    policy: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    trace_seconds: float
    compile_seconds: float
    peak_bytes: int
    state_bytes: int
    temporary_bytes: int
    metrics: dict[str, float]

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """The median of the ratios: below 1, the policy is faster than the first."""
        return statistics.median(self.ratios)

    @property
    def differs(self) -> bool:
        """Whether all rounds agree that it is faster, or slower, than the first policy."""
        return max(self.ratios) < 1 or min(self.ratios) > 1


@dataclasses.dataclass(frozen=True)
class BenchmarkReport:
    """Times of a train step under several policies. Prints as a table.

    Attributes:
      rows: the policies, in the order given; ratios are of the first.
      hardware: the device that computed.
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      rounds: how many rounds there were.
      steps: how many steps of a turn were timed.
    """

    rows: tuple[PolicyTiming, ...]
    hardware: str
    platform: str
    rounds: int
    steps: int

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the numbers."""
        turns = (
            f"{self.rounds} rounds, in which each policy takes a step that is not timed and "
            f"{self.steps} that are. Ratios are of times of the same round."
        )
        same = [row.policy for row in self.rows[1:] if not row.differs]
        found = [turns]
        if same:
            found.append(
                f"Rounds disagree on what is faster than {self.rows[0].policy} and what is slower: "
                f"{', '.join(same)}. More rounds, or a quieter machine, would tell."
            )
        if skipped := [row.policy for row in self.rows if row.metrics.get("skipped", 0)]:
            found.append(
                f"Under {', '.join(skipped)} steps were skipped: the loss scale was still coming "
                "down, or the model overflows."
            )
        if self.platform == "cpu":
            found.append(_ON_CPU)
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain numbers, texts, lists and dictionaries, for JSON."""
        rows = [
            {
                **dataclasses.asdict(row),
                "median": row.median,
                "ratio": row.ratio,
                "seconds": list(row.seconds),
                "ratios": list(row.ratios),
            }
            for row in self.rows
        ]
        return {**dataclasses.asdict(self), "rows": rows, "notes": list(self.notes)}

    def __rich__(self) -> Any:
        from rich.console import Group

        from jaxmp._inspect.tables import Section, bullets, bytes_text, drawn

        rows = []
        for row in self.rows:
            ratio = f"{row.ratio:.2f} ({min(row.ratios):.2f} to {max(row.ratios):.2f})"
            loss = row.metrics.get("loss")
            rows.append(
                (
                    row.policy,
                    *map(seconds_text, (row.median, min(row.seconds), max(row.seconds))),
                    ratio if row is not self.rows[0] else "1",
                    seconds_text(row.trace_seconds + row.compile_seconds),
                    bytes_text(row.peak_bytes),
                    "" if loss is None else f"{loss:.5g}",
                )
            )
        columns = ["policy", ">median", ">min", ">max", f"over {self.rows[0].policy}"]
        columns += [">compile", ">memory", ">loss"]
        title = f"A train step on {self.hardware}"
        return Group(drawn(Section(title, columns, rows, len(rows))), bullets(self.notes))

    def __str__(self) -> str:
        from jaxmp._inspect.tables import as_text

        return as_text(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the times and the memory of the policies.

        Args:
          path: where to write; its suffix says the format: `.png`, `.svg` or `.pdf`.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from error
        height = 1.6 + 0.5 * len(self.rows)
        figure = Figure(figsize=(9, height), layout="constrained")
        times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        names = [row.policy for row in self.rows]
        medians = [1e3 * row.median for row in self.rows]
        times.barh(names, medians, height=0.55, color="#4c72b0")
        for place, row in enumerate(self.rows):  # every round, so that the spread is seen
            milliseconds = [1e3 * each for each in row.seconds]
            times.plot(milliseconds, [place] * len(milliseconds), "k|", markersize=9)
            slowest = max(milliseconds)
            times.annotate(
                f"{row.ratio:.2f} x",
                (slowest, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
            )
        times.set_xlim(0, 1.2 * max(1e3 * max(row.seconds) for row in self.rows))
        times.set_xlabel("ms a step: median, every round; x: over the first")
        times.invert_yaxis()
        self._draw_memory(memory, names)
        figure.suptitle(f"A train step on {self.hardware}", fontsize=11)
        figure.savefig(path, dpi=150)

    def _draw_memory(self, axes: Any, names: list[str]) -> None:
        state = [row.state_bytes / 2**20 for row in self.rows]
        temporary = [row.temporary_bytes / 2**20 for row in self.rows]
        rest = [
            row.peak_bytes / 2**20 - a - b
            for row, a, b in zip(self.rows, state, temporary, strict=True)
        ]
        left = [0.0] * len(names)
        for label, sizes, color in (
            ("state", state, "#55a868"),
            ("temporary", temporary, "#c44e52"),
            ("batch and rest", rest, "#bbbbbb"),
        ):
            axes.barh(names, sizes, left=left, height=0.55, label=label, color=color)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        axes.set_xlabel("MiB, as the compiler planned")
        axes.set_xlim(0, 1.05 * max(left) or 1)
        axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
