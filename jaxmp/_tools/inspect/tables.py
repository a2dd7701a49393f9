"""Draws tables for a terminal, and formats their numbers."""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def as_text(renderable: Any, console: Console | None = None) -> str:
    """Returns what rich would draw on a console; by default of 120 columns without colors."""
    # Else rich draws on the page of a notebook instead, and the text is empty.
    console = console or Console(
        file=io.StringIO(), width=120, color_system=None, force_jupyter=False
    )
    _fit_width(console, renderable)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).rstrip()


def as_html(renderable: Any, title: str) -> str:
    """Returns what rich would draw, below a title, as an HTML page that loads nothing."""
    console = Console(file=io.StringIO(), record=True, width=160, force_jupyter=False)
    _fit_width(console, renderable)
    console.print(Text(title, style="bold"), renderable, sep="\n\n")
    return console.export_html()


def _fit_width(console: Console, renderable: Any) -> None:
    # Where a console is too narrow for words and numbers, rich would cut digits and units off.
    unlimited = console.options.update(max_width=10_000)
    console.width = max(console.width, Measurement.get(console, unlimited, renderable).minimum)


class Section(NamedTuple):
    """One table of a report.

    Attributes:
      title: the title.
      columns: their names; `>` marks columns of numbers.
      rows: the texts of the cells; the lines of a place are the line, and the module below it.
      most: how many rows a terminal shows.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    most: int = 12

    def without_empty_columns(self) -> "Section":
        """Returns the table without columns that say nothing: empty, or runs that are counts."""
        places = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        is_counted = tuple(self.columns[-2:]) == (">count", ">runs")
        if is_counted and all(row[-2] == row[-1] for row in self.rows):
            places.remove(len(self.columns) - 1)
        rows = [tuple(row[i] for i in places) for row in self.rows]
        return self._replace(columns=[self.columns[i] for i in places], rows=rows)


def drawn(section: Section) -> Table:
    """Returns a table as rich draws it, without empty columns."""
    more = len(section.rows) - section.most
    caption = f"and {more} more rows" if more > 0 else None
    table = Table(
        title=section.title, title_justify="left", caption=caption, caption_justify="left"
    )
    compact = section.without_empty_columns()
    for column in compact.columns:
        # A number that is cut or folded reads as another number.
        is_number = column.startswith(">")
        table.add_column(
            column.lstrip(">"),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number,
        )
    for row in compact.rows[: section.most]:
        table.add_row(*row)
    return table


def bullets(sentences: Sequence[str]) -> Any:
    """Returns sentences as a list, for rich."""
    grid = Table.grid(padding=(0, 1))
    for sentence in sentences:
        grid.add_row(" -", sentence)
    return grid


def flops_text(flops: int) -> str:
    """Formats a number of operations with three digits.

    >>> flops_text(1_234_567_890), flops_text(42)
    ('1.23 G', '42 ')
    """
    return _three_digits(flops, 1000, ("", "k", "M", "G", "T", "P", "E"))


def bytes_text(size: int) -> str:
    """Formats a size in memory.

    >>> bytes_text(1536), bytes_text(100)
    ('1.50 KiB', '100 B')
    """
    return _three_digits(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _three_digits(number: int, base: int, units: Sequence[str]) -> str:
    power, scaled = 0, float(number)
    while scaled >= base and power + 1 < len(units):
        scaled /= base
        power += 1
    if power == 0:
        return f"{number} {units[0]}"
    digits = max(0, 2 - (scaled >= 10) - (scaled >= 100))
    return f"{scaled:.{digits}f} {units[power]}"
