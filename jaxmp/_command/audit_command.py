"""`jaxmp audit`: which operations of a program run in which dtype."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from jaxmp._command.output import Answer
from jaxmp._command.program import HOW_TO_NAME, UsageError, load_program
from jaxmp._inspect.api import AuditError, audit
from jaxmp._numerics.dtypes import suggestion

_DESCRIPTION = f"""Traces a program, without running it, and reports what runs in which dtype: the
FLOPs of products, upcasts by line, casts, and what is kept for the backward pass. A program is
named as {HOW_TO_NAME}."""


def add_audit(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Adds the command to the parser."""
    one = commands.add_parser(
        "audit",
        parents=[shared],
        help="what runs in which dtype, and where upcasts come from",
        description=_DESCRIPTION,
    )
    one.add_argument("program", help="such as train.py:program")
    one.add_argument("--html", metavar="PATH", help="write the report as a page, too")
    one.add_argument(
        "--compiled",
        action="store_true",
        help="compile the program for the device at hand, too: collectives and float8 products",
    )
    one.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="NAME=VALUE[,...]",
        help="fail with exit code 1 unless this holds, such as products=bfloat16,upcasts=0; the "
        f"names are {', '.join(_CHECKS)}, as in AuditReport.check",
    )
    one.set_defaults(run=_run_audit)


def _run_audit(arguments: argparse.Namespace) -> Answer:
    checks = parse_checks(arguments.check)
    program = load_program(arguments.program)
    report = audit(program.fn, *program.args, compiled=arguments.compiled, **program.kwargs)
    failure = ""
    try:
        if checks:
            report.check(**checks)
    except AuditError as error:
        failure = str(error)
    if arguments.html:
        report.to_html(arguments.html, title=program.name)
    more = {"check": {"passed": not failure, "message": failure}} if checks else {}
    return Answer(report, failure, more=more)


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _bytes_by_dtype(text: str) -> dict[str, int]:
    pairs = [pair.partition(":") for pair in _comma_separated(text)]
    return {dtype: int(number) for dtype, _, number in pairs}


_CHECKS: dict[str, Callable[[str], Any]] = {
    "products": _comma_separated,
    "share": float,
    "upcasts": int,
    "residual_bytes": int,
    "kept": _bytes_by_dtype,
    "reduced_in": str,
    "precision": str,
    "allow_unseen": _comma_separated,
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
            if not equals or name not in _CHECKS or name in found:
                near = suggestion(name, [each for each in _CHECKS if each not in found])
                raise UsageError(
                    f"cannot read --check {piece!r}: expected name=value once for each of "
                    f"{', '.join(_CHECKS)}.{near}"
                )
            try:
                found[name] = _CHECKS[name](value)
            except ValueError as error:
                raise UsageError(f"--check {name} cannot be {value!r}: {error}") from error
    return found
