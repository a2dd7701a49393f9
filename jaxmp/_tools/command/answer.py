"""Prints what a command found out, for readers or for programs."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console

from jaxmp._tools.inspect.tables import as_text


class Answer(NamedTuple):
    """What a command found out.

    Attributes:
      report: a report, with `as_dict()` for JSON.
      failure: what check failed, for stderr; `""` if none did.
      below: a text below the tables.
      more: what JSON has beside the report's own.
    """

    report: Any
    failure: str = ""
    below: str = ""
    more: Mapping[str, Any] = MappingProxyType({})


def print_answer(answer: Answer, as_json: bool) -> int:
    """Prints an answer, as tables or as JSON, and returns the exit code: 1 if a check failed."""
    if as_json:
        print(json.dumps(_json_value({**answer.report.as_dict(), **answer.more}), indent=2))
    else:  # a file has no width to fit
        width = None if sys.stdout.isatty() else 120
        print(as_text(answer.report, Console(highlight=False, width=width)))
    if answer.below and not as_json:
        print(f"\n{answer.below}")
    if answer.failure:
        print(answer.failure, file=sys.stderr)
    return 1 if answer.failure else 0


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
    if isinstance(value, float) and math.isfinite(value):
        return value
    return value if isinstance(value, (str, int, type(None))) else str(value)
