"""`jaxmp estimate`: what a program costs on a device that need not be here."""

import argparse
from typing import Any

from jaxmp._command.arguments import device_argument
from jaxmp._command.output import Answer
from jaxmp._command.program import HOW_TO_NAME, load_program
from jaxmp._planning.devices import DEVICES
from jaxmp._planning.estimate import estimate

_DESCRIPTION = f"""Compiles a program for a device that need not be here, and estimates its time
from the operations and bytes of each kernel (roofline). It is an estimate, to compare programs. The
compilers come with `pip install jaxmp[aot]`. A program is named as {HOW_TO_NAME}."""


def add_estimate(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Adds the command to the parser."""
    one = commands.add_parser(
        "estimate",
        parents=[shared],
        help="what a program costs on a device that need not be here",
        description=_DESCRIPTION,
    )
    one.add_argument("program", help="such as train.py:program")
    one.add_argument(
        "--device",
        required=True,
        type=device_argument,
        help=f"one of {', '.join(DEVICES)}, if there is a compiler",
    )
    one.add_argument(
        "--donate",
        type=int,
        nargs="+",
        default=[],
        metavar="POSITION",
        help="arguments whose memory the results may take, such as 0 for a train state",
    )
    one.set_defaults(run=_run_estimate)


def _run_estimate(arguments: argparse.Namespace) -> Answer:
    program = load_program(arguments.program)
    cost = estimate(
        program.fn,
        *program.args,
        device=arguments.device,
        donate=tuple(arguments.donate),
        **program.kwargs,
    )
    return Answer(cost)
