"""Shared parts of the benchmarks: their flags, and reports of their rows with the context."""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
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


def add_common_arguments(parser: argparse.ArgumentParser, *, repeats: int, steps: int) -> None:
    """The flags that every benchmark has."""
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds of taking turns")
    parser.add_argument("--steps", type=int, default=steps, help="steps timed in each turn")
    parser.add_argument("--no-write", action="store_true", help="print only, write no files")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="where to write")


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
        stem = f"{self.name}_{slug(describe_hardware())}_{date}_jax{metadata.version('jax')}"
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
