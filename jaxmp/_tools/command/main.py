"""The `jaxmp` command: reads its arguments, runs one command, and returns an exit code."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from jaxmp._tools.command.commands import COMMANDS
from jaxmp._tools.command.machine import version_of
from jaxmp._tools.command.output import print_output
from jaxmp._tools.command.program import UsageError, load_program

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
    whole.add_argument("--version", action="version", version=f"jaxmp {version_of('jaxmp')}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print JSON in place of tables")
    shared.add_argument(
        "--traceback", action="store_true", help="show where an error comes from, for bug reports"
    )
    # Each command has its own parser, with the usage and the errors of that command.
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name, parents=[shared], help=command.about, description=command.description
        )
        for argument, options in command.arguments.items():
            subparser.add_argument(argument, **options)
        # Positional arguments stand first.
        first = [word["metavar"] for key, word in command.arguments.items() if key[0] != "-"]
        subparser.usage = " ".join([subparser.prog, *first, "[options]"])
        subparser.set_defaults(error=subparser.error)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: its arguments; by default those of the process.

    Returns:
      The exit code: 0 if all is well, 1 if a check failed, 2 for wrong use or for a program that
      could not be read, 130 if the user stopped it.

    Raises:
      SystemExit: for `--help`, and for arguments that the parser does not know, with code 2.
    """
    whole = parser()
    namespace, unknown = whole.parse_known_args(argv)
    values = vars(namespace)
    name, error = values.pop("command"), values.pop("error", whole.error)
    # `parse_args` would print the usage of the whole, not of the command.
    if unknown:
        error(f"unrecognized arguments: {' '.join(unknown)}. See its --help")
    # A script that forgot the command stops, and a reader sees what there is.
    if name is None:
        whole.print_help(sys.stderr)
        return 2
    as_json, raises = values.pop("json"), values.pop("traceback")
    try:
        # The user's program may print; the output may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            if "program" in values:
                values["program"] = load_program(values["program"])
            output = COMMANDS[name].run(**values)
        return print_output(output, as_json)
    except BrokenPipeError:  # as in `jaxmp audit ... | head`
        # Python flushes stdout as it ends, and would print an error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as raised:  # whatever the user's program raises ends in a message
        if raises:
            raise
        message = str(raised)
        # Our own errors say what to do; of others the user needs the place.
        if not isinstance(raised, UsageError):
            message = f"{type(raised).__name__}: {raised}\n(--traceback shows where)"
        print(f"jaxmp {name}: {message}", file=sys.stderr)
        return 2
