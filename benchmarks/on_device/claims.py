"""What the site says of GPUs, and whether the rows of a run bear it out."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tables import Column, Row

from on_device import names

Rows = Mapping[str, Mapping[str, Row]]  # by part, then by contender
Number = float | None

HOLDS, REFUTED, NOT_MEASURED, DRY_RUN = "holds", "REFUTED", "not measured", "dry run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim with what it is measured by.

    Attributes:
      text: what is measured.
      page: the page that it is of; none for a question that the site leaves open.
      says: what the page says.
      measure: reads a number from the rows; None where they do not have it.
      least: the least number for which the claim holds.
      most: the greatest.
      format: of the number.
    """

    text: str
    page: str = ""
    says: str = ""
    measure: Callable[[Rows], Number]
    least: float = -math.inf
    most: float = math.inf
    format: str = ".3f"

    def row(self, rows: Rows, dry_run: bool) -> Row:
        """The claim as a row of a table; a dry run neither bears it out nor refutes it."""
        number = self.measure(rows)
        if number is None:
            verdict = NOT_MEASURED
        elif dry_run:
            verdict = DRY_RUN
        elif self.least <= number <= self.most:
            verdict = HOLDS
        else:
            verdict = REFUTED
        bounds = [f"at least {self.least:g}"] * (self.least > -math.inf)
        bounds += [f"at most {self.most:g}"] * (self.most < math.inf)
        return {
            "claim": self.text,
            "page": self.page,
            "says": self.says,
            "bound": " and ".join(bounds),
            "measured": None if number is None else format(number, self.format),
            "verdict": verdict,
        }


COLUMNS = (
    Column("claim", "what is measured"),
    Column("page", "page"),
    Column("says", "the page says"),
    Column("bound", "holds if"),
    Column("measured", "measured"),
    Column("verdict", "verdict"),
)


def _entry(part: str, contender: str, key: str) -> Callable[[Rows], Number]:
    return lambda rows: rows.get(part, {}).get(contender, {}).get(key)


def _failed_tests(rows: Rows) -> Number:
    """How many tests failed; None if none did, but not all have run."""
    outcomes = [row["outcome"] for row in rows.get("right", {}).values()]
    failures = outcomes.count("failed")
    is_complete = "passed" in outcomes and names.NOT_RUN not in outcomes
    return float(failures) if failures or is_complete else None


def _recomputed_temporaries(rows: Rows) -> Number:
    """The compiled peak less the state, over that of casts by hand."""
    steps = rows.get("gpt", {})
    recomputed = steps.get(names.RECOMPUTED_PLAIN, {})
    by_hand = steps.get(recomputed.get("baseline", ""), {})
    if not all(row.get("planned_bytes") for row in (recomputed, by_hand)):
        return None
    temporaries = [row["planned_bytes"] - row["state_bytes"] for row in (recomputed, by_hand)]
    return temporaries[0] / temporaries[1]


def _furthest_plan(rows: Rows) -> Number:
    """How far the compiler's peaks of steps are from the allocator's, at most."""
    distances = [
        abs(row["planned_bytes"] / row["peak_bytes"] - 1)
        for part in ("gpt", "optimizer", "vision")
        for row in rows.get(part, {}).values()
        if row.get("planned_bytes") and row.get("peak_bytes") and not row.get("peak_is_bound")
    ]
    return max(distances, default=None)


def _float8_layers(rows: Rows) -> Number:
    """The least speedup over its estimate, of layers that are estimated at 1.3 and more."""
    layers = [row for row in rows.get("float8", {}).values() if row.get("estimated", 0) >= 1.3]
    if not all(row.get("speedup") for row in layers):
        return None
    return min((row["speedup"] / row["estimated"] for row in layers), default=None)


def _torch_over_jaxmp(rows: Rows) -> Number:
    """Of its two ways to train in bfloat16, PyTorch's faster one."""
    both = names.TORCH, names.TORCH_16_BIT_RESIDUALS
    torch = [rows.get("torch_gpt", {}).get(name, {}).get("median_ms") for name in both]
    times = [time for time in torch if time]
    ours = rows.get("gpt", {}).get(names.RECOMPUTED, {}).get("median_ms")
    return min(times) / ours if times and ours else None


CLAIMS: Sequence[Claim] = (
    Claim(
        text="Tests whose truth depends on the device: how many failed",
        page="why.md",
        says="none",
        measure=_failed_tests,
        most=0,
        format=".0f",
    ),
    Claim(
        text="A step under autocast: time over casts by hand",
        page="why.md",
        says="no more casts",
        measure=_entry("gpt", names.AUTOCAST, "time_over"),
        most=1.05,
    ),
    Claim(
        text="A step under autocast: peak over casts by hand",
        page="autocast.md",
        says="the same temporaries",
        measure=_entry("gpt", names.AUTOCAST, "peak_over"),
        most=1.05,
    ),
    Claim(
        text="`recompute` in a scan: temporaries over casts by hand",
        page="recompute.md",
        says="0.32",
        measure=_recomputed_temporaries,
        most=0.4,
    ),
    Claim(
        text="`recompute` in a scan: time over casts by hand",
        page="recompute.md",
        says="no product runs twice",
        measure=_entry("gpt", names.RECOMPUTED, "time_over"),
        most=1.1,
    ),
    Claim(
        text="`remainder` with int8 moments: peak over float32 masters by hand",
        page="storage.md",
        says="6 bytes a param for 12",
        measure=_entry("gpt", names.SMALL_STATE, "peak_over"),
        most=0.95,
    ),
    Claim(
        text="A checked step of the optimizer: time over an unchecked one",
        page="how-it-works.md",
        says="no second state",
        # It reads all gradients once more: 32 bytes for 28.
        measure=_entry("optimizer", names.CHECKED, "time_over"),
        most=1.25,
    ),
    Claim(
        text="A checked step of the optimizer: share of the bandwidth of a copy",
        page="storage.md",
        says="least traffic",
        measure=_entry("optimizer", names.CHECKED, "share_of_copy"),
        least=0.7,
    ),
    Claim(
        text="Large layers in float8: least speedup over the estimate",
        page="float8.md",
        says="1.35 to 1.50",
        measure=_float8_layers,
        least=0.85,
    ),
    Claim(
        text="A train step of width 4,096 in float8: speedup over casts by hand",
        page="float8.md",
        says="1.24 where layers have 1.4",
        measure=_entry("float8", names.WIDE_FLOAT8, "speedup"),
        least=1.05,
    ),
    Claim(
        text="The compiler's peaks: the largest distance from the allocator's",
        page="memory.md",
        says="up to 3 %",
        measure=_furthest_plan,
        most=0.05,
    ),
    Claim(
        text="The faster of PyTorch's compiled steps: time over autocast's with `recompute`",
        measure=_torch_over_jaxmp,
        least=1.0,
    ),
)


def verdicts(context: Mapping[str, Any], rows: Rows) -> list[Row]:
    """A row for each claim, as the rows of a run with this context show it."""
    dry_run = context["small"] or context["platform"] in (None, "cpu")
    return [claim.row(rows, dry_run) for claim in CLAIMS]


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
    if row.get("peak_bytes"):
        bound = "at most " if row.get("peak_is_bound") else ""
        row["peak"] = f"{bound}{row['peak_bytes'] / 2**30:.2f}"
    if row.get("planned_bytes"):
        row["planned_gib"] = row["planned_bytes"] / 2**30
    if row.get("median_ms") and baseline.get("median_ms"):
        row["time_over"] = row["median_ms"] / baseline["median_ms"]
        row["speedup"] = 1 / row["time_over"]
    if row.get("median_ms") and row.get("bytes_moved"):
        rate = 1e3 * row["bytes_moved"] / row["median_ms"]
        row["gigabytes_per_second"] = rate / 1e9
        row["share_of_copy"] = rate / row["copy_bytes_per_second"]
    if row.get("planned_bytes") and baseline.get("planned_bytes"):
        row["peak_over"] = row["planned_bytes"] / baseline["planned_bytes"]
    if row.get("error"):
        row["remark"] = row["error"]
