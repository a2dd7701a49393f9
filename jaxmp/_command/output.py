"""Prints a report for readers or for programs."""

import dataclasses
import json
import math
import sys
from typing import Any

from rich.console import Console

from jaxmp._inspect.tables import as_text


def print_report(report: Any, as_json: bool, **more: Any) -> None:
    """Prints a report as tables or as JSON.

    Args:
      report: a report, with `as_dict()` for JSON.
      as_json: whether to print JSON.
      **more: what JSON has beside the report's own.
    """
    if as_json:
        print(json.dumps(_json_value(report.as_dict() | more), indent=2, default=str))
        return
    if sys.stdout.isatty():
        Console(highlight=False).print(report)
    else:  # no width to fit, no colours
        print(as_text(report))


def _json_value(value: Any) -> Any:
    """Returns what JSON can hold: named fields as dictionaries, and no infinities."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _json_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
