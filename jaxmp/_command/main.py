"""The `jaxmp` command: reads its arguments, runs one command, and answers with an exit code."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from jaxmp._command.audit_command import add_audit
from jaxmp._command.bench_command import add_bench
from jaxmp._command.doctor_command import add_doctor
from jaxmp._command.estimate_command import add_estimate
from jaxmp._command.output import print_answer
from jaxmp._command.plan_command import add_plan
from jaxmp._command.program import UsageError
from jaxmp._command.sensitivity_command import add_sensitivity

_EPILOG = """exit codes: 0 if all is well, 1 if a check failed, 2 if the command was called wrongly
or the program could not be read.

`jaxmp COMMAND --help` says what each command takes."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="jaxmp",
        description="Mixed precision for JAX: questions before and during a run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print JSON in place of tables")
    shared.add_argument(
        "--traceback", action="store_true", help="show where an error comes from, for bug reports"
    )
    commands = whole.add_subparsers(dest="command", required=True)
    for add in (add_doctor, add_plan, add_audit, add_estimate, add_bench, add_sensitivity):
        add(commands, shared)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: its arguments; by default those of the process.

    Returns:
      The exit code: 0 if all is well, 1 if a check failed, 2 for wrong use or for a program that
      could not be read.

    Raises:
      SystemExit: for `--help`, and for arguments that the parser does not know, with code 2.
    """
    arguments = parser().parse_args(argv)
    try:
        # What the user's program prints is not part of the answer, which may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            answer = arguments.run(arguments)
        return print_answer(answer, arguments.json)
    except BrokenPipeError:  # as in `jaxmp audit ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # whatever the user's program raises ends in one line
        if arguments.traceback:
            raise
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        print(f"jaxmp {arguments.command}: {kind}{error}", file=sys.stderr)
        return 2
