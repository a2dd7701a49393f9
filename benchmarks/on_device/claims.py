"""What the site says of GPUs, and whether the rows of a run bear it out."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tables import Column, Row

from on_device import names

Rows = Mapping[str, Mapping[str, Row]]  # by part, then by contender
Number = float | None

HOLDS, REFUTED, OPEN, DRY = "holds", "REFUTED", "not measured", "dry run"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim with what it is measured by.

    Attributes:
      text: the claim.
      page: where it stands.
      measure: reads a number from the rows; None where they do not have it.
      least: the least number for which it holds.
      most: the greatest.
      format: of the number.
    """

    text: str
    page: str
    measure: Callable[[Rows], Number]
    least: float = float("-inf")
    most: float = float("inf")
    format: str = ".3f"

    def row(self, rows: Rows, dry: bool) -> Row:
        """The claim as a row of a table; a dry run neither bears it out nor refutes it."""
        number = self.measure(rows)
        if number is None:
            verdict = OPEN
        elif dry:
            verdict = DRY
        else:
            verdict = HOLDS if self.least <= number <= self.most else REFUTED
        bounds = [f"at least {self.least:g}"] * (self.least > float("-inf"))
        bounds += [f"at most {self.most:g}"] * (self.most < float("inf"))
        return {
            "claim": self.text,
            "page": self.page,
            "bound": " and ".join(bounds),
            "measured": None if number is None else format(number, self.format),
            "verdict": verdict,
        }


COLUMNS = (
    Column("claim", "claim"),
    Column("page", "page"),
    Column("bound", "bound"),
    Column("measured", "measured"),
    Column("verdict", "verdict"),
)


def _entry(part: str, contender: str, key: str) -> Callable[[Rows], Number]:
    return lambda rows: rows.get(part, {}).get(contender, {}).get(key)


def _failed_tests(rows: Rows) -> Number:
    outcomes = [row.get("outcome") for row in rows.get("right", {}).values()]
    return float(outcomes.count("failed")) if "passed" in outcomes else None


def _over_state(contender: str) -> Callable[[Rows], Number]:
    """The allocator's peak less the state, over that of the baseline."""

    def measure(rows: Rows) -> Number:
        row = rows.get("gpt", {}).get(contender, {})
        other = rows.get("gpt", {}).get(row.get("baseline", ""), {})
        temporaries = [
            x["peak_bytes"] - x["state_bytes"]
            for x in (row, other)
            if x.get("peak_bytes") and x.get("state_bytes")
        ]
        return temporaries[0] / temporaries[1] if len(temporaries) == 2 else None

    return measure


def _furthest_plan(rows: Rows) -> Number:
    """How far the compiler's peaks are from the allocator's, at most, over all parts."""
    distances = [
        abs(row["planned_bytes"] / row["peak_bytes"] - 1)
        for part in rows.values()
        for row in part.values()
        if row.get("peak_bytes") and row.get("planned_bytes")
    ]
    return max(distances, default=None)


def _float8_products(rows: Rows) -> Number:
    """Layers that the page estimates at 1.3 or more: the least of their speedups."""
    speedups = [
        row["speedup"]
        for row in rows.get("float8", {}).values()
        if row.get("estimated", 0) >= 1.3 and row.get("speedup")
    ]
    return min(speedups, default=None)


def _torch_over_jaxmp(rows: Rows) -> Number:
    """Of its two ways to train in bfloat16, PyTorch's faster one."""
    both = names.TORCH, names.TORCH_16_BIT_RESIDUALS
    torch = [rows.get("torch_gpt", {}).get(name, {}).get("median_ms") for name in both]
    times = [time for time in torch if time]
    ours = rows.get("gpt", {}).get(names.AUTOCAST, {}).get("median_ms")
    return min(times) / ours if times and ours else None


CLAIMS: Sequence[Claim] = (
    Claim(
        "Tests whose truth depends on the device pass: number that failed",
        "why.md",
        _failed_tests,
        most=0,
        format=".0f",
    ),
    Claim(
        "A step under autocast is as fast as casts by hand: time over theirs",
        "autocast.md",
        _entry("gpt", names.AUTOCAST, "time_over"),
        most=1.05,
    ),
    Claim(
        "and takes no more memory: peak over theirs",
        "autocast.md",
        _entry("gpt", names.AUTOCAST, "peak_over"),
        most=1.05,
    ),
    Claim(
        "`recompute` keeps little of a scan: temporaries over those of casts by hand",
        "recompute.md",
        _over_state(names.RECOMPUTED_PLAIN),
        most=0.5,
    ),
    Claim(
        "and no product runs twice: time over casts by hand",
        "recompute.md",
        _entry("gpt", names.RECOMPUTED, "time_over"),
        most=1.1,
    ),
    Claim(
        "`remainder` with int8 moments takes less memory: peak over casts by hand",
        "storage.md",
        _entry("gpt", names.SMALL_STATE, "peak_over"),
        most=0.95,
    ),
    Claim(
        "A checked step costs what an unchecked one does: time of the optimizer's step",
        "how-it-works.md",
        _entry("optimizer", names.CHECKED, "time_over"),
        most=1.15,
    ),
    Claim(
        "The optimizer's step is limited by memory: bytes over those of a copy",
        "storage.md",
        _entry("optimizer", names.CHECKED, "share_of_copy"),
        least=0.7,
    ),
    Claim(
        "A layer in float8 is faster where the page says 1.3 and more: least speedup",
        "float8.md",
        _float8_products,
        least=1.1,
    ),
    Claim(
        "A train step of width 4,096 is faster in float8: time over casts by hand",
        "float8.md",
        _entry("float8", names.WIDE_FLOAT8, "time_over"),
        most=0.95,
    ),
    Claim(
        "The compiler's peak is the allocator's: the largest distance",
        "memory.md",
        _furthest_plan,
        most=0.1,
    ),
    Claim(
        "A step is not slower than PyTorch's, compiled: the faster of PyTorch's two over it",
        "(none)",
        _torch_over_jaxmp,
        least=1.0,
    ),
)


def verdicts(context: Mapping[str, Any], rows: Rows) -> list[Row]:
    """A row for each claim, as the rows of a run with this context show it."""
    dry = context["small"] or context["platform"] in (None, "cpu")
    return [claim.row(rows, dry) for claim in CLAIMS]


def as_rows(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Rows by part and contender, with what follows from two of them."""
    by_part: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "contender" in row:
            by_part.setdefault(row["part"], {})[row["contender"]] = dict(row)
    everywhere = {name: row for part in by_part.values() for name, row in part.items()}
    for name, part in by_part.items():
        # In the order of their worth, not in that in which they ran.
        by_part[name] = dict(sorted(part.items(), key=lambda entry: entry[1].get("order", 0)))
        for row in part.values():
            baseline = row.get("baseline", "")
            _compare(row, part.get(baseline) or everywhere.get(baseline, {}))
    return by_part


def _compare(row: Row, baseline: Row) -> None:
    for key, size in (("peak_gib", "peak_bytes"), ("planned_gib", "planned_bytes")):
        if row.get(size):
            row[key] = row[size] / 2**30
    if row.get("median_ms") and baseline.get("median_ms"):
        row["time_over"] = row["median_ms"] / baseline["median_ms"]
        row["speedup"] = 1 / row["time_over"]
    if row.get("peak_bytes") and baseline.get("peak_bytes"):
        row["peak_over"] = row["peak_bytes"] / baseline["peak_bytes"]
    if row.get("error"):
        row["remark"] = row["error"]
