"""Prints the output of a command, for readers or for programs."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console

from jaxmp._tools.inspect.tables import as_text


class Output(NamedTuple):
    """The output of a command.

    Attributes:
      report: a report, with `as_dict()` for JSON.
      failure: the failed check, for stderr; `""` if none failed.
      more: further fields of the JSON.
    """

    report: Any
    failure: str = ""
    more: Mapping[str, Any] = MappingProxyType({})


def print_output(output: Output, as_json: bool) -> int:
    """Prints an output, as tables or as JSON, and returns the exit code: 1 if a check failed."""
    if as_json:
        print(json.dumps(_json_value({**output.report.as_dict(), **output.more}), indent=2))
    else:  # a file has no width to fit
        width = None if sys.stdout.isatty() else 120
        print(as_text(output.report, Console(highlight=False, width=width)))
    # On stderr, so that stdout is JSON and nothing else.
    if output.failure:
        print(output.failure, file=sys.stderr)
    return 1 if output.failure else 0


def _json_value(value: Any) -> Any:
    """Returns a value of JSON: named fields are dictionaries, and infinities are texts."""
    # json.dumps would write a NamedTuple as a list, and infinity as a word that JSON does not have.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return value
    return value if isinstance(value, (str, int, type(None))) else str(value)
