"""Rows of results as tables of Markdown. It needs only Python."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a report: which entry of a row, its title, and the format if it is a number."""

    key: str
    title: str
    format: str = ""

    def cell(self, row: Mapping[str, Any]) -> str:
        """The entry as text; a dash where the row has none."""
        value = row.get(self.key)
        if value is None:
            return "-"
        return value if isinstance(value, str) else format(value, self.format)


def markdown_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of a table: titles, alignment, and one for each row."""
    return [
        _line(column.title for column in columns),
        _line("---:" if column.format else "---" for column in columns),
        *(_line(column.cell(row).replace("|", "\\|") for column in columns) for row in rows),
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def slug(text: str) -> str:
    """A text as a part of a file's name.

    >>> slug("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
