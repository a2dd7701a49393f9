"""`jaxmp plan`: how much memory training takes on each device."""

import argparse
from typing import Any, get_args

from jaxmp._command.output import Answer
from jaxmp._command.program import HOW_TO_NAME, load_program, loss_of
from jaxmp._planning.memory_plan import memory_plan
from jaxmp._recompute.api import Recompute
from jaxmp._training.compact_state import Moments

_DESCRIPTION = f"""Plans the bytes that training takes on each device: params, masters, moments,
gradients, and with a loss function also activations. WHAT is a number of params, such as 8B or
350M; or a loss, named as {HOW_TO_NAME}, here (loss_fn, (params, batch)). Nothing runs, and
nothing is compiled unless asked for. Exit code 1 if it does not fit the device."""
_MASTERS = ("float32", "remainder", "remainder8", "kahan", "stochastic", "none")


def add_plan(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Adds the command to the parser."""
    one = commands.add_parser(
        "plan",
        parents=[shared],
        help="how much memory training takes on each device",
        description=_DESCRIPTION,
    )
    one.add_argument("what", metavar="WHAT", help="such as 8B, or train.py:loss")
    one.add_argument("--policy", default="mixed_bfloat16", help="by default %(default)s")
    one.add_argument("--optimizer", default="adamw", help="a name in optax; by default %(default)s")
    one.add_argument("--master", default="float32", choices=_MASTERS)
    one.add_argument("--moments", default="float32", choices=get_args(Moments))
    one.add_argument("--gradients", metavar="DTYPE", help="of gradients, for a number of params")
    one.add_argument("--microbatches", type=int, default=1)
    one.add_argument("--recompute", default="never", choices=get_args(Recompute))
    one.add_argument("--devices", type=int, default=1, help="how many share params and state")
    one.add_argument("--device", default="h100", help="such as h100 or v5e; by default %(default)s")
    one.add_argument("--has-aux", action="store_true", help="the loss returns (loss, more)")
    one.add_argument(
        "--compiled",
        action="store_true",
        help="compile the step for the device, which need not be here, for the compiler's peak",
    )
    one.set_defaults(run=_run_plan)


def _run_plan(arguments: argparse.Namespace) -> Answer:
    options: dict[str, Any] = {"gradients": arguments.gradients}
    params: Any = arguments.what
    if ":" in arguments.what:
        loss_fn, params, batch = loss_of(load_program(arguments.what))
        options |= {
            "loss_fn": loss_fn,
            "batch": batch,
            "has_aux": arguments.has_aux,
            "recompute": arguments.recompute,
        }
    plan = memory_plan(
        params,
        arguments.policy,
        optimizer=arguments.optimizer,
        master=arguments.master,
        moments=arguments.moments,
        microbatches=arguments.microbatches,
        devices=arguments.devices,
        device=arguments.device,
        compiled=arguments.compiled,
        **options,
    )
    missing = f"it does not fit: {plan.peak:,} bytes on a device of {plan.capacity:,}"
    return Answer(plan, "" if plan.fits() else missing)
