"""What the benchmarks share: steps compiled once, timed in turn, and reported with their context.

A machine is never quiet. Contenders are therefore timed one after the other within each round, so
that a disturbance hits neighbours alike, and are compared by the ratios within the rounds.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jmp", "jaxmp")

Row = dict[str, Any]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to write a train step.

    Attributes:
      name: what the table calls it.
      start: makes a fresh state.
      step: `step(state, batch) -> (state, metrics)`, not jitted.
      precision: the `jax.default_matmul_precision` to compile with; None for the device's own.
    """

    name: str
    start: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, Metrics]]
    precision: str | None = None


class Memory(NamedTuple):
    """Bytes that a compiled step needs, as the compiler planned them."""

    argument: int
    output: int
    temp: int
    alias: int

    @property
    def peak(self) -> int:
        """What is allocated during the step: an aliased output lives in its argument."""
        return self.argument + self.output + self.temp - self.alias


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A contender with its compiled step, whose state is donated."""

    contender: Contender
    run: Callable[[Any, Any], tuple[Any, Metrics]]
    memory: Memory


@dataclasses.dataclass
class Measurement:
    """What timing found out about one contender.

    Attributes:
      seconds: per step, one number for each round.
      metrics: of the last step of the last round.
      device_peak: the device's high-water mark, in bytes, if this contender raised it. The mark
        cannot be set back, so a contender that needs less than an earlier one has None.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    device_peak: int | None = None

    def ratios(self, baseline: "Measurement") -> list[float]:
        """Times the baseline's, round by round."""
        return [a / b for a, b in zip(self.seconds, baseline.seconds, strict=True)]


def compile_step(contender: Contender, batch: Any) -> CompiledStep:
    """Compiles a contender's step for its own state, without making the state."""
    state = jax.eval_shape(contender.start)
    with jax.default_matmul_precision(contender.precision):
        compiled = jax.jit(contender.step, donate_argnums=0).lower(state, batch).compile()
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError(f"{jax.default_backend()} does not tell what memory a program needs")
    memory = Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
    )
    return CompiledStep(contender, compiled, memory)


def time_in_turn(
    contenders: Sequence[CompiledStep], batch: Any, *, rounds: int, steps: int
) -> dict[str, Measurement]:
    """Times every contender once in each round; only one state is in memory at a time."""
    found = {c.contender.name: Measurement() for c in contenders}
    for _ in range(rounds):
        for contender in contenders:
            _take_turn(contender, batch, steps, found[contender.contender.name])
    return found


def _take_turn(compiled: CompiledStep, batch: Any, steps: int, into: Measurement) -> None:
    before = _device_peak()
    # The first step touches memory that was never used, and is not timed.
    state, metrics = compiled.run(compiled.contender.start(), batch)
    jax.block_until_ready((state, metrics))
    begin = time.perf_counter()
    for _ in range(steps):
        state, metrics = compiled.run(state, batch)
    jax.block_until_ready((state, metrics))
    into.seconds.append((time.perf_counter() - begin) / steps)
    into.metrics = {name: float(x) for name, x in metrics.items() if jnp.ndim(x) == 0}
    after = _device_peak()
    if before is not None and after is not None and after > before:
        into.device_peak = after


def _device_peak() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def spread(values: Sequence[float]) -> str:
    """`"1.02 (0.99 to 1.10)"`: median, least and greatest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def add_common_arguments(parser: argparse.ArgumentParser, *, repeats: int, steps: int) -> None:
    """The flags that every benchmark has."""
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds of taking turns")
    parser.add_argument("--steps", type=int, default=steps, help="steps timed in each turn")
    parser.add_argument("--no-write", action="store_true", help="print only, write no files")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="where to write")


def describe_hardware() -> str:
    """The device that computes, as its maker calls it."""
    device = jax.devices()[0]
    cpu = f"{_cpu_model()}, {_usable_cores()} cores"
    return cpu if device.platform == "cpu" else device.device_kind


def _cpu_model() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _usable_cores() -> int:
    # Within a container there may be fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a report: which entry of a row, its title, and the format if it is a number."""

    key: str
    title: str
    format: str = ""

    def cell(self, row: Row) -> str:
        """The entry as text; a dash where the row has none."""
        value = row.get(self.key)
        return "-" if value is None else format(value, self.format)


@dataclasses.dataclass(frozen=True)
class Report:
    """Rows with what a reader needs in order to judge them.

    Attributes:
      name: the first part of the name of the files.
      title: the heading.
      command: the command line that makes it again.
      columns: the columns of the table; the JSON file has every entry of the rows.
      rows: one dictionary for each row.
      assumptions: what the numbers rest on, one sentence each.
    """

    name: str
    title: str
    command: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    assumptions: Sequence[str]

    def show(self) -> None:
        """Prints the table."""
        table = Table(title=f"{self.title}: {describe_hardware()}")
        for column in self.columns:
            table.add_column(column.title, justify="right" if column.format else "left")
        for row in self.rows:
            table.add_row(*(column.cell(row) for column in self.columns))
        # A terminal's width would cut the numbers off where output is piped.
        console = Console()
        console = console if console.is_terminal else Console(width=200)
        console.print(table)
        for assumption in self.assumptions:
            console.print(f"• {assumption}", highlight=False)

    def write(self, folder: pathlib.Path) -> pathlib.Path:
        """Writes the Markdown and the JSON file; returns the path of the first."""
        date = datetime.date.today().isoformat()
        context = {
            "hardware": describe_hardware(),
            "platform": jax.devices()[0].platform,
            "versions": {"python": platform.python_version()}
            | {name: metadata.version(name) for name in _PACKAGES},
            "date": date,
            "load_average": list(os.getloadavg()),
            "command": self.command,
            "assumptions": list(self.assumptions),
        }
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.name}_{_slug(describe_hardware())}_{date}_jax{metadata.version('jax')}"
        path = folder / f"{stem}.md"
        path.write_text(self._markdown(context))
        content = json.dumps(context | {"rows": list(self.rows)}, indent=1)
        path.with_suffix(".json").write_text(content + "\n")
        return path

    def _markdown(self, context: dict[str, Any]) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in context["versions"].items())
        load = ", ".join(f"{x:.1f}" for x in context["load_average"])
        lines = [
            f"# {self.title}",
            "",
            f"- Hardware: {context['hardware']}",
            f"- Versions: {versions}",
            f"- Date: {context['date']}",
            f"- Load average at the end, over 1, 5 and 15 minutes: {load} (this run included)",
            f"- Command: `{context['command']}`",
            "",
            _markdown_line(column.title for column in self.columns),
            _markdown_line("---:" if column.format else "---" for column in self.columns),
            *(_markdown_line(column.cell(row) for column in self.columns) for row in self.rows),
            "",
            "Assumptions:",
            "",
            *(f"- {assumption}" for assumption in self.assumptions),
        ]
        return "\n".join(lines) + "\n"


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
