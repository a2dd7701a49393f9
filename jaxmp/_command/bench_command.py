"""`jaxmp bench`: how fast a model trains under several policies, on the device at hand."""

import argparse
from typing import Any

from jaxmp._command.output import Answer
from jaxmp._command.program import HOW_TO_NAME, load_program, loss_of
from jaxmp._planning.benchmark import POLICIES, benchmark

_DESCRIPTION = f"""Trains a model for a few steps under several policies, in turn, and reports time
and memory. The program is a loss, named as {HOW_TO_NAME}, here (loss_fn, (params, batch)) with real
arrays and without a policy of its own."""


def add_bench(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Adds the command to the parser."""
    one = commands.add_parser(
        "bench",
        parents=[shared],
        help="how fast a model trains under several policies",
        description=_DESCRIPTION,
    )
    one.add_argument("program", help="such as train.py:loss")
    one.add_argument(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        metavar="POLICY",
        help=f"ratios are of the first; by default {' '.join(POLICIES)}",
    )
    one.add_argument("--rounds", type=int, default=5, help="turns of each; by default %(default)s")
    one.add_argument("--steps", type=int, default=5, help="in a turn; by default %(default)s")
    one.add_argument("--microbatches", type=int, default=1)
    one.add_argument("--has-aux", action="store_true", help="the loss returns (loss, more)")
    one.add_argument("--plot", metavar="PATH", help="draw the report, too, such as bench.png")
    one.set_defaults(run=_run_bench)


def _run_bench(arguments: argparse.Namespace) -> Answer:
    loss_fn, params, batch = loss_of(load_program(arguments.program))
    report = benchmark(
        loss_fn,
        params,
        batch,
        policies=arguments.policies,
        rounds=arguments.rounds,
        steps=arguments.steps,
        microbatches=arguments.microbatches,
        has_aux=arguments.has_aux,
    )
    if arguments.plot:
        report.plot(arguments.plot)
    return Answer(report)
