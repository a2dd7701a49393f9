"""`jaxmp doctor`: what this machine has, which format to train in, and what to mend."""

import argparse
from typing import Any

from jaxmp._command.arguments import device_argument
from jaxmp._command.doctor import DTYPES, diagnose
from jaxmp._command.machine import WRONG_SUMS, Machine, remarks, settings, this_machine, versions
from jaxmp._command.output import Answer
from jaxmp._command.program import UsageError, load_program
from jaxmp._command.rates import Rate, measured_rates
from jaxmp._command.shapes import ProductShape, parse_shapes, shapes_in
from jaxmp._planning.devices import Device

_DESCRIPTION = """Says what this machine has: versions, devices, which dtypes they multiply and how
fast, and the settings that change dtypes. Then which format to train in, and why; and for sizes of
products, what to pad and whether float8 pays. Exit code 1 if JAX has no device, or a compiler that
computes wrongly."""


def add_doctor(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Adds the command to the parser."""
    one = commands.add_parser(
        "doctor",
        parents=[shared],
        help="devices, dtypes, settings, and the format to train in",
        description=_DESCRIPTION,
    )
    one.add_argument(
        "--shapes",
        nargs="+",
        default=[],
        metavar="MxKxN",
        help="sizes of products, rows x summed x columns, such as 4096x1024x50257; or "
        "package.module:factory, for all products of a program",
    )
    one.add_argument(
        "--device",
        type=device_argument,
        help="advise for this device, such as h100 or v5e, not for this one",
    )
    one.add_argument("--no-measure", action="store_true", help="measure no products")
    one.set_defaults(run=_run_doctor)


def _run_doctor(arguments: argparse.Namespace) -> Answer:
    asked: Device | None = arguments.device
    machine, no_machine = _machine()
    device = asked or (machine.known if machine is not None else None)
    kind = asked.name if asked else machine.name if machine else "this machine"
    found, installed = settings(), versions()
    report = diagnose(
        machine=machine,
        no_machine=no_machine,
        device=device,
        kind=kind,
        versions=installed,
        settings=found,
        remarks=remarks(found, machine, installed),
        rates=[] if machine is None or asked or arguments.no_measure else _rates(machine),
        shapes=[shape for text in arguments.shapes for shape in _shapes_named(text)],
    )
    if machine is None:
        return Answer(report, f"JAX has no device: {no_machine}")
    return Answer(report, WRONG_SUMS if machine.sums_wrongly else "")


def _machine() -> tuple[Machine | None, str]:
    try:
        return this_machine(), ""
    except RuntimeError as error:  # JAX's way to say that a backend does not start
        return None, str(error).partition("\n")[0]


def _rates(machine: Machine) -> list[Rate]:
    # Float8 that is widened is not worth a measurement; 16 bits are, as on a CPU.
    dtypes = [d for d in DTYPES if not d.startswith("float8") or machine.multiplies(d)]
    return measured_rates(dtypes)


def _shapes_named(text: str) -> list[ProductShape]:
    if ":" not in text:
        return parse_shapes([text])
    found = shapes_in(load_program(text))
    if not found:
        raise UsageError(f"the program {text} has no products of matrices")
    return found
