"""The base of all reports that print as tables."""

import dataclasses
import math
from typing import Any


class TableReport:
    """A report that prints as the tables that its `__rich__` returns."""

    def __str__(self) -> str:
        # Rich is imported here: most reports are checked in a test and never drawn.
        from jaxmp._tools.inspect.tables import as_text

        return as_text(self)


def plain(record: Any) -> dict[str, Any]:
    """Returns the fields of a record for json.dumps, which has no infinity: None for it and NaN."""
    named = hasattr(record, "_asdict")
    fields: dict[str, Any] = record._asdict() if named else dataclasses.asdict(record)
    return {
        name: None if isinstance(x, float) and not math.isfinite(x) else x
        for name, x in fields.items()
    }
