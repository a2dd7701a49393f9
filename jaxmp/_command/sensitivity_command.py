"""`jaxmp sensitivity`: which parts of a program need more bits."""

import argparse
from typing import Any

from jaxmp._command.arguments import positive_argument
from jaxmp._command.output import Answer
from jaxmp._command.program import HOW_TO_NAME, load_program
from jaxmp._diagnostics.sensitivity import sensitivity
from jaxmp._policies.patterns import pattern_text

_DESCRIPTION = f"""Lowers each part of a program alone, and reports the error that this puts on the
loss and the gradients. With --target, it finds the rules that stay below an error and keep as
few parts high as they can; exit code 1 if none do. The program is a loss, named as
{HOW_TO_NAME}, with real arrays and without a policy of its own."""


def add_sensitivity(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Adds the command to the parser."""
    one = commands.add_parser(
        "sensitivity",
        parents=[shared],
        help="which parts of a program need more bits",
        description=_DESCRIPTION,
    )
    one.add_argument("program", help="such as train.py:loss")
    one.add_argument("--low", default="mixed_bfloat16", help="the policy to try; %(default)s")
    one.add_argument(
        "--reference", default="float32", help="errors are relative to it; %(default)s"
    )
    one.add_argument(
        "--candidates",
        nargs="+",
        metavar="PATTERN",
        help="the parts to try, as in PolicyRules, such as '*/norm*'; by default every scope",
    )
    one.add_argument(
        "--loss-scale", type=positive_argument, help="by default one is found for float16"
    )
    one.add_argument("--has-aux", action="store_true", help="the loss returns (loss, outputs)")
    one.add_argument(
        "--target",
        type=positive_argument,
        metavar="ERROR",
        help="find rules below it, such as 0.01",
    )
    one.add_argument(
        "--of",
        default="gradients",
        choices=("loss", "outputs", "gradients"),
        help="whose error the target is for; %(default)s",
    )
    one.set_defaults(run=_run_sensitivity)


def _run_sensitivity(arguments: argparse.Namespace) -> Answer:
    program = load_program(arguments.program)
    report = sensitivity(
        program.fn,
        *program.args,
        low=arguments.low,
        reference=arguments.reference,
        candidates=arguments.candidates,
        has_aux=arguments.has_aux,
        loss_scale=arguments.loss_scale,
        **program.kwargs,
    )
    if arguments.target is None:
        return Answer(report)
    try:
        rules = report.rules(arguments.target, arguments.of)
    except ValueError as error:  # no rules reach it
        return Answer(report, str(error), more={"rules": None})
    pairs = [[pattern_text(pattern), str(policy)] for pattern, policy in rules.rules]
    return Answer(
        report,
        below=f"Rules with an error of {arguments.of} up to {arguments.target:g}:\n{rules}",
        more={"rules": pairs, "default": str(rules.default)},
    )
