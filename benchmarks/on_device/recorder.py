"""Where a part writes its rows, and how much time it has."""

import dataclasses
import json
import math
import pathlib
import platform
import time
from typing import Any

from tables import Row


@dataclasses.dataclass(frozen=True)
class Recorder:
    """The rows of a run, in a file with one in each line.

    Attributes:
      path: the file. Each row is there as soon as it is recorded, should the part be ended.
      part: which part writes.
      deadline: when the part is ended, as `time.time()` counts.
      small: whether this is a dry run: sizes that a CPU computes in seconds.
    """

    path: pathlib.Path
    part: str
    deadline: float
    small: bool

    def record(self, **row: Any) -> None:
        """Adds a row. A later one of the same part and `contender` takes its place."""
        with self.path.open("a") as file:
            # Written at once, so that a process that is ended rarely leaves half a line.
            file.write(json.dumps({"part": self.part} | _plain(row)) + "\n")

    def seconds_left(self) -> float:
        """Until the part is ended."""
        return self.deadline - time.time()

    def rows(self, part: str) -> list[Row]:
        """What was recorded of a part, an earlier one too."""
        return [row for row in read_rows(self.path) if row["part"] == part]

    def has_measured(self, contender: str) -> bool:
        """Whether this part has a result of a contender, of an earlier run that is continued."""
        rows = [row for row in self.rows(self.part) if row.get("contender") == contender]
        return any("median_ms" in row or row.get("outcome") == "passed" for row in rows)

    def record_failure(self, contender: str, error: BaseException, **row: Any) -> None:
        """Adds the row of a contender that raised, which does not stop the others."""
        text = f"{type(error).__name__}: {error}"
        self.record(**row | {"contender": contender, "error": " ".join(text.split())[:500]})

    def record_late(self, contender: str, **row: Any) -> None:
        """Adds the row of a contender for which there was no time."""
        self.record(**row | {"contender": contender, "remark": "not measured: out of time"})

    def record_machine(self) -> None:
        """Adds what JAX says of the device, for the head of the page.

        Raises:
          RuntimeError: if it is a CPU, and this is no dry run.
        """
        import jax  # only here: the process that starts the parts reads rows, and has no device

        device = jax.devices()[0]
        if device.platform == "cpu" and not self.small:
            raise RuntimeError("JAX has no accelerator here; on a CPU, --small is a dry run")
        name = device.device_kind
        self.record(
            machine=name if device.platform != "cpu" else f"CPU ({platform.machine()})",
            platform=device.platform,
            memory_bytes=(device.memory_stats() or {}).get("bytes_limit"),
        )


def read_rows(path: pathlib.Path) -> list[Row]:
    """Reads the rows of a run; a contender's last row stands for it."""
    rows: dict[Any, Row] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the process was ended in the middle of it
        rows[row["part"], row.get("contender", number)] = row
    return list(rows.values())


def _plain(value: Any) -> Any:
    """A value as JSON has it: NaN and infinities as text, arrays as numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
