"""Reads what `jaxmp audit --check` is to hold a program to."""

import re
from collections.abc import Callable
from typing import Any

from jaxmp._numerics.dtypes import suggestion
from jaxmp._tools.command.program import UsageError


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _bytes_by_dtype(text: str) -> dict[str, int]:
    pairs = [pair.partition(":") for pair in _comma_separated(text)]
    return {dtype: int(number) for dtype, _, number in pairs}


# The arguments of `AuditReport.check`: what reads each, and an example.
CHECKS: dict[str, tuple[Callable[[str], Any], str]] = {
    "products": (_comma_separated, "bfloat16,float16"),
    "share": (float, "0.9"),
    "upcasts": (int, "0"),
    "residual_bytes": (int, "4096"),
    "kept": (_bytes_by_dtype, "bfloat16:4096"),
    "precision": (str, "highest"),
    "allow_unseen": (_comma_separated, "pallas_call"),
}


def parse_checks(texts: list[str]) -> dict[str, Any]:
    """Reads checks of a command line as arguments of `AuditReport.check`.

    Args:
      texts: each one or more `name=value`, with commas between. Names of dtypes have commas
        between, too.

    Returns:
      The arguments.

    Raises:
      UsageError: for an unknown name, a name that is given twice, or a value that it cannot have.

    >>> parse_checks(["products=bfloat16,float16,upcasts=0", "kept=bfloat16:4096"])
    {'products': ('bfloat16', 'float16'), 'upcasts': 0, 'kept': {'bfloat16': 4096}}
    """
    found: dict[str, Any] = {}
    for text in texts:
        for piece in re.split(r",\s*(?=\w+=)", text.strip().rstrip(",")):
            name, equals, value = (part.strip() for part in piece.partition("="))
            if not equals or name not in CHECKS or name in found:
                near = suggestion(name, [each for each in CHECKS if each not in found])
                raise UsageError(
                    f"cannot read --check {piece!r}: expected name=value once for each of "
                    f"{', '.join(CHECKS)}.{near}"
                )
            read, example = CHECKS[name]
            try:
                found[name] = read(value)
            except ValueError as error:
                raise UsageError(
                    f"--check {name} cannot be {value!r}. Write it as in {name}={example}"
                ) from error
    return found
