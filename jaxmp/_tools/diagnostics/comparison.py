"""The report of `compare`: the differences of two programs, by module."""

import dataclasses
from typing import Any, NamedTuple

from jaxmp._tools.diagnostics.log_probs import LogProbGap
from jaxmp._tools.inspect.table_report import TableReport, plain

# A model has hundreds of values. `first` names the one that matters, and `rows` has all.
_MOST_ROWS = 40


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that both programs have, and how far it is apart.

    Attributes:
      path: the scope that it leaves, or the path of a result.
      number: which value of this scope it is, from 0.
      direction: `"forward"`, `"backward"`, `"recomputed"`, or `""` without gradients.
      line: the line of the first program that makes it.
      turns: the numbers of the turns of the scans around it: the layer, for scanned layers.
      shape: its shape.
      dtypes: its dtypes in both programs.
      ulps: the root mean square of the difference, in units of the last place at the root mean
        square of the value. Infinite if only one program is finite somewhere, if the value of the
        second is zero everywhere, and for integers that differ.
      largest: the largest difference, in these units.
      relative: the norm of the difference, divided by that of the value in the second program.
    """

    path: str
    number: int
    direction: str
    line: str
    turns: tuple[int, ...]
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    ulps: float
    largest: float
    relative: float


class Unmatched(NamedTuple):
    """A value that only one program has, or an operation inside of which nothing is seen.

    Attributes:
      program: 1 or 2.
      path: its scope.
      line: its line.
      why: its dtype, shape and operation, and what the other program has.
    """

    program: int
    path: str
    line: str
    why: str


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far the float results of two programs are apart, and how far roundings move them.

    Both are root mean squares over these results, each relative to its size.

    Attributes:
      distance: the distance; infinite if integers differ, or a result has no partner.
      deviation: one standard deviation of what the roundings of both programs do; NaN without a
        derivative.
      unexplained: paths of results further apart than roundings move one of so many, or alone.
      uncounted: operations whose effect is not in it, as `"net.py:12 (route): top_k"`.
    """

    distance: float
    deviation: float
    unexplained: tuple[str, ...]
    uncounted: tuple[str, ...]

    @property
    def is_rounding(self) -> bool:
        """Whether each result is as near as roundings leave it.

        No bar as large as the results explains anything: the first order ends before.
        """
        return not self.distance or (not self.unexplained and 3 * self.deviation < 1)

    def __str__(self) -> str:
        verdict = ": ".join(("roundings that are counted do not explain it", *self.unexplained[:1]))
        if not self.distance:
            verdict = "equal"
        elif self.is_rounding:
            verdict = "this is rounding"
        bars = f"{self.deviation:.2g} (68 %), {2 * self.deviation:.2g} (95 %)"
        text = f"results {self.distance:.2g} apart, of roundings {bars}: {verdict}"
        return text + (f"; not counted: {', '.join(self.uncounted)}" if self.uncounted else "")


@dataclasses.dataclass(frozen=True)
class Comparison(TableReport):
    """Where two programs part. Prints as a table.

    Attributes:
      rows: the values that leave scopes, in the order of the first program.
      results: the results.
      unmatched: the values that were not compared.
      unit: the coarsest float dtype in both programs, whose units of the last place are counted.
      tolerance: how many of these units (`ulps`) do not count.
      gap: how far the results are apart, and what roundings explain; None with `error_bar=False`.
      log_probs: how far log-probabilities are apart; None without `log_probs=`.
    """

    rows: tuple[Difference, ...]
    results: tuple[Difference, ...]
    unmatched: tuple[Unmatched, ...]
    unit: str
    tolerance: float | int
    gap: Gap | None
    log_probs: LogProbGap | None

    @property
    def first(self) -> Difference | None:
        """The first value that is further apart than the tolerance; None if there is none."""
        return next((row for row in (*self.rows, *self.results) if row.ulps > self.tolerance), None)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and text, as json.dumps takes them; None for infinities and NaN."""
        return {
            "rows": [plain(row) for row in self.rows],
            "results": [plain(row) for row in self.results],
            "unmatched": [value._asdict() for value in self.unmatched],
            "unit": self.unit,
            "tolerance": self.tolerance,
            "first": None if self.first is None else plain(self.first),
            "gap": self.gap and plain(self.gap) | {"is_rounding": self.gap.is_rounding},
            "log_probs": None if self.log_probs is None else plain(self.log_probs),
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        caption = f"nothing is further apart than {self.tolerance:g} ulps of {self.unit}"
        if self.first is not None:
            line = f", {self.first.line}" if self.first.line else ""
            caption = (
                f"first further apart than {self.tolerance:g} ulps of {self.unit}: "
                f"{_title(self.first)}{line}"
            )
        table = Table(caption=caption, caption_justify="left")
        # Folded, not cut: a path may be longer than the terminal is wide.
        table.add_column("value", overflow="fold")
        table.add_column("shape")
        table.add_column("dtypes")
        for name in ("ulps", "largest", "relative"):
            table.add_column(name, justify="right")
        for row in self.rows[:_MOST_ROWS]:
            table.add_row(*_cells(row))
        if more := len(self.rows) - _MOST_ROWS:
            table.add_row(f"... {more} more", *[""] * 5) if more > 0 else None
        # Results are apart: they have no scope, and come last in every program.
        table.add_section()
        for row in self.results[:_MOST_ROWS]:
            table.add_row(*_cells(row))
        notes = [
            f"not compared, program {x.program}: {x.path or x.line}: {x.why}"
            for x in self.unmatched
        ]
        sentences = [str(x) for x in (self.gap, self.log_probs) if x is not None]
        return Group(table, *notes[:_MOST_ROWS], *sentences)


def _title(row: Difference) -> str:
    turn = f" turn {', '.join(map(str, row.turns))}" if row.turns else ""
    number = f" #{row.number}" if row.number else ""
    return f"{row.path}{number}{turn}" + (f" ({row.direction})" if row.direction else "")


def _cells(row: Difference) -> list[str]:
    same = len(set(row.dtypes)) == 1
    dtypes = row.dtypes[0] if same else " / ".join(row.dtypes)
    numbers = [f"{row.ulps:.2g}", f"{row.largest:.2g}", f"{row.relative:.1e}"]
    return [_title(row), str(list(row.shape)), dtypes, *numbers]
