"""Shared parts of the benchmarks: their flags, and reports of their rows with the context."""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
from lab.timing import describe_hardware
from rich.console import Console
from rich.table import Table
from tables import Column as Column, Row as Row, markdown_table, slug

RESULTS = pathlib.Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jmp", "jaxmp")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags that every benchmark has, too; keeps the command line for the report."""
    add = parser.add_argument
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    args.flags = list(argv)
    return args


def add_repeats(parser: argparse.ArgumentParser, *, repeats: int, steps: int) -> None:
    """The flags of those that measure times."""
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds of taking turns")
    parser.add_argument("--steps", type=int, default=steps, help="steps timed in each turn")


@dataclasses.dataclass(frozen=True)
class Report:
    """Rows with what a reader needs in order to judge them.

    Attributes:
      script: the name of the benchmark.
      title: the heading.
      columns: the columns of the table; the JSON file has every entry of the rows.
      assumptions: what the numbers rest on, one sentence each.
      rows: one dictionary for each row.
      name: the first part of the name of the files; by default that of the script.
    """

    script: str
    title: str
    columns: Sequence[Column]
    assumptions: Sequence[str]
    rows: Sequence[Row]
    name: str = ""

    def publish(self, args: argparse.Namespace) -> list[Row]:
        """Prints the table, and writes it unless told not to; returns the rows."""
        self.show()
        if not args.no_write:
            command = " ".join([f"python benchmarks/{self.script}.py", *args.flags])
            print(f"wrote {self.write(args.results, command)}")
        return list(self.rows)

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

    def write(self, folder: pathlib.Path, command: str) -> pathlib.Path:
        """Writes the Markdown and the JSON file; returns the path of the first."""
        date = datetime.date.today().isoformat()
        context = {
            "hardware": describe_hardware(),
            "platform": jax.devices()[0].platform,
            "versions": {"python": platform.python_version()}
            | {name: metadata.version(name) for name in _PACKAGES},
            "date": date,
            "load_average": list(os.getloadavg()),
            "command": command,
            "assumptions": list(self.assumptions),
        }
        folder.mkdir(parents=True, exist_ok=True)
        name = self.name or self.script.removeprefix("bench_")
        stem = f"{name}_{slug(describe_hardware())}_{date}_jax{metadata.version('jax')}"
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
            *markdown_table(self.columns, self.rows),
            "",
            "Assumptions:",
            "",
            *(f"- {assumption}" for assumption in self.assumptions),
        ]
        return "\n".join(lines) + "\n"
