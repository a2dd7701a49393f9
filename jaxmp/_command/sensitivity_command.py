"""`jaxmp sensitivity`: which parts of a program need more bits."""

import argparse
import sys
from typing import Any

from jaxmp._command.arguments import positive_argument
from jaxmp._command.output import print_report
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


def _run_sensitivity(arguments: argparse.Namespace) -> int:
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
    rules, failure = None, ""
    if arguments.target is not None:
        try:
            rules = report.rules(arguments.target, arguments.of)
        except ValueError as error:  # no rules reach it
            failure = str(error)
    more: dict[str, Any] = {}
    if arguments.target is not None:
        pairs = rules.rules if rules is not None else ()
        more = {"rules": [[pattern_text(pattern), str(policy)] for pattern, policy in pairs]}
        more |= {"default": str(rules.default) if rules is not None else None, "message": failure}
    print_report(report, arguments.json, **more)
    if rules is not None and not arguments.json:
        print(f"\nRules with an error of {arguments.of} up to {arguments.target:g}:\n{rules}")
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0
