"""The commands: the arguments of each on a command line, and its function.

An argument here is the argument of the function behind the command, under the same name. Its value
is passed on unchanged, so that the function raises the error of a wrong one.
"""

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import optax
import optax.contrib

from jaxmp._numerics.dtypes import suggestion
from jaxmp._recompute.api import Mode, check_recompute
from jaxmp._tools.command.doctor import diagnose
from jaxmp._tools.command.output import Output
from jaxmp._tools.command.program import (
    HOW_TO_NAME,
    NamedProgram,
    UsageError,
    load_program,
    loss_of,
)
from jaxmp._tools.inspect.api import AuditError, audit
from jaxmp._tools.planning.devices import find_device
from jaxmp._tools.planning.memory_plan import memory_plan
from jaxmp._training.compact_state import Moments
from jaxmp._training.master_storages import STORAGES
from jaxmp._training.optimizer import mixed_precision


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


# The arguments of `AuditReport.check`: the parser of each, and an example.
CHECKS: dict[str, tuple[Callable[[str], Any], str]] = {
    "products": (_comma_separated, "bfloat16,float16"),
    "share": (float, "0.9"),
    "upcasts": (int, "0"),
    "residual_bytes": (int, "4096"),
    "kept": (
        lambda text: {
            dtype: int(number)
            for dtype, _, number in (pair.partition(":") for pair in _comma_separated(text))
        },
        "bfloat16:4096",
    ),
    "precision": (str, "highest"),
    "allow_unseen": (_comma_separated, "pallas_call"),
    "lock": (str, "numerics.json"),
}


def parse_checks(texts: list[str]) -> dict[str, Any]:
    """Reads checks of a command line as arguments of `AuditReport.check`.

    Each text is one or more `name=value`, with commas between.

    Raises:
      UsageError: for an unknown name, a name that is given twice, or a value that it cannot have.

    >>> parse_checks(["products=bfloat16,float16,upcasts=0", "kept=bfloat16:4096"])
    {'products': ('bfloat16', 'float16'), 'upcasts': 0, 'kept': {'bfloat16': 4096}}
    """
    checks: dict[str, Any] = {}
    for text in texts:
        # A comma separates checks only before a name: dtypes have commas between, too.
        for piece in re.split(r",\s*(?=\w+=)", text.strip().rstrip(",")):
            name, equals, value = (part.strip() for part in piece.partition("="))
            if not equals or name not in CHECKS or name in checks:
                near = suggestion(name, [check for check in CHECKS if check not in checks])
                examples = ", ".join(f"{check}={example}" for check, (_, example) in CHECKS.items())
                raise UsageError(
                    f"cannot read --check {piece!r}: expected name=value, each name at most once, "
                    f"as in {examples}.{near}"
                )
            read, example = CHECKS[name]
            try:
                checks[name] = read(value)
            except ValueError as error:
                raise UsageError(
                    f"--check {name} cannot be {value!r}. Write it as in {name}={example}"
                ) from error
    return checks


class Command(NamedTuple):
    """One command.

    Attributes:
      run: called with the arguments by name; a `program` is loaded before.
      about: its question, in a line.
      description: the same at more length.
      arguments: the options of `ArgumentParser.add_argument`, by the name of the argument.
    """

    run: Callable[..., Output]
    about: str
    description: str
    arguments: dict[str, dict[str, Any]]


def device_argument(text: str) -> str:
    """Reads the name of a device.

    Raises:
      ArgumentTypeError: if the table of devices does not have it.

    >>> device_argument("H100")
    'h100'
    """
    try:
        return find_device(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def recompute_argument(text: str) -> Mode | float:
    """Reads a mode of `recompute`, or a share.

    Raises:
      ArgumentTypeError: for anything else.

    >>> recompute_argument("auto"), recompute_argument("0.2")
    ('auto', 0.2)
    """
    option: Any = float(text) if re.fullmatch(r"[\d.]+", text) else text
    try:
        check_recompute(option)
    except ValueError as error:
        hint = "" if isinstance(option, float) else ", or a share such as 0.2"
        raise argparse.ArgumentTypeError(f"{error}{hint}") from error
    return option


def _run_doctor() -> Output:
    report = diagnose()
    return Output(report, report.failure)


def _run_plan(
    what: str, policy: str, optimizer: str, master: Any, moments: Any, **options: Any
) -> Output:
    tx = mixed_precision(_optimizer_by_name(optimizer), policy, master=master, moments=moments)
    # Options without a value keep the defaults of `memory_plan`.
    options = {name: value for name, value in options.items() if value}
    # A path may begin with a digit, and a number has no colon.
    params: Any = what
    if ":" in what or not what.lstrip(".")[:1].isdigit():
        options["loss_fn"], params, options["batch"] = loss_of(load_program(what))
    plan = memory_plan(params, tx, **options)
    failure = f"it does not fit: {plan.peak:,} bytes on a device of {plan.capacity:,}"
    if plan.is_refused:
        failure = plan.limits[0]
    return Output(plan, "" if plan.fits() else failure)


def _optimizer_by_name(name: str) -> Any:
    # The learning rate changes no byte of the plan.
    make = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    try:
        optimizer = make(learning_rate=1e-3) if callable(make) else None
    except TypeError:
        optimizer = None
    if not isinstance(optimizer, optax.GradientTransformation):
        raise UsageError(
            f"{name!r} is no optimizer of optax that takes a learning rate alone. Give one such as "
            "'adamw', 'sgd' or 'lion'"
        )
    return optimizer


def _run_audit(
    program: NamedProgram, check: list[str], html: str | None, lock: str | None, compiled: bool
) -> Output:
    checks = parse_checks(check)
    report = audit(program.fn, *program.args, compiled=compiled, **program.kwargs)
    failure = ""
    try:
        if checks:
            report.check(**checks)
    except AuditError as error:
        failure = str(error)
    # A failed check writes its page too: that is when it is read.
    if html:
        report.to_html(html, title=program.name)
    # A lock that is checked in the same command must not be written over by what failed.
    if lock and not failure:
        report.write_lock(lock)
    more = {"check": {"passed": not failure, "message": failure}} if checks else {}
    return Output(report, failure, more)


def _option(text: str, default: Any = None, **options: Any) -> dict[str, Any]:
    text += f"; by default {default}" if default else ""
    return {"help": text, "default": default, **options}


def _flag(text: str) -> dict[str, Any]:
    return {"help": text, "action": "store_true"}


COMMANDS = {
    "doctor": Command(
        _run_doctor,
        "versions, devices, and settings that change dtypes",
        "Says what this machine has: versions, devices, and the settings that change dtypes. Exit "
        "code 1 if JAX has no device, or a compiler that computes wrongly.",
        {},
    ),
    "plan": Command(
        _run_plan,
        "how much memory training takes on each device",
        "Plans the bytes that training takes on each device. What lives between steps is counted. "
        "With a loss, the step is compiled for the device, which need not be here, and its "
        "compiler says the peak. Nothing runs. Exit code 1 if it does not fit the device.",
        {
            "what": {
                "metavar": "WHAT",
                "help": "a number of params, such as 8B or 350M; or a loss, such as train.py:loss: "
                f"{HOW_TO_NAME}, here (loss_fn, (params, batch))",
            },
            "--policy": _option("the policy", "mixed_bfloat16"),
            "--optimizer": _option("a name in optax", "adamw"),
            "--master": _option("how masters are kept", "float32", choices=tuple(STORAGES)),
            "--moments": _option("how moments are kept", "float32", choices=get_args(Moments)),
            "--microbatches": _option(
                "parts of a batch, one after the other", type=int, metavar="N"
            ),
            "--recompute": _option(
                f"{', '.join(get_args(Mode))}, or a share of what JAX would keep, such as 0.2; by "
                "default loops",
                type=recompute_argument,
            ),
            "--devices": _option("how many share params and state", 1, type=int, metavar="N"),
            "--device": _option(
                "such as h100 or v5e; by default the one at hand, and h100 on a CPU",
                type=device_argument,
            ),
            "--has-aux": _flag("the loss returns (loss, more)"),
        },
    ),
    "audit": Command(
        _run_audit,
        "what runs in which dtype, and where upcasts come from",
        "Traces a program, without running it, and reports what runs in which dtype: the FLOPs of "
        "products, upcasts by line, casts, and what is kept for the backward pass.",
        {
            "program": {
                "metavar": "PROGRAM",
                "help": f"such as train.py:step: {HOW_TO_NAME}",
            },
            "--html": _option("write the report as a page, too", metavar="PATH"),
            "--lock": _option("write what runs in which dtype, for --check lock=", metavar="PATH"),
            "--compiled": _flag("compile it here, too: collectives and 8-bit products"),
            "--check": _option(
                "fail with exit code 1 unless this holds, as AuditReport.check says: "
                + ", ".join(f"{name}={example}" for name, (_, example) in CHECKS.items()),
                [],
                action="append",
                metavar="NAME=VALUE[,...]",
            ),
        },
    ),
}
