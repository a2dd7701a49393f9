"""Looks a machine over, and says which format to train in, and why."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group

from jaxmp._command.float8_advice import Float8Estimate, estimate_float8, float8_sentences
from jaxmp._command.machine import (
    WRONG_SUMS,
    Machine,
    remarks,
    settings,
    this_machine,
    versions,
)
from jaxmp._command.rates import Rate, measured_rates
from jaxmp._command.shapes import Padding, ProductShape, paddings, parse_shapes
from jaxmp._inspect.tables import Section, as_text, bullets, bytes_text, drawn, flops_text
from jaxmp._planning.devices import Device, find_device

# From the widest to the narrowest.
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


class FormatChoice(NamedTuple):
    """The format to train in.

    Attributes:
      policy: the name of the policy, for `jaxmp.get_policy`.
      reasons: why, in sentences.
    """

    policy: str
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """What a machine has; and, as follows from that, what to do with it.

    Attributes:
      machine: the devices of this process; None if JAX could not start them.
      no_machine: why there are none.
      asked: the device to advise for; None for that of the machine.
      versions: of Python and the packages, by name.
      settings: those of JAX and the compiler that are in force.
      rates: the measured products; empty if nothing was measured.
      shapes: the products that the user asked about.
    """

    machine: Machine | None
    no_machine: str
    asked: Device | None
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    rates: Sequence[Rate]
    shapes: Sequence[ProductShape]

    @property
    def device(self) -> Device | None:
        """The device that the advice is for; None if the table of devices does not have it."""
        return self.asked or (self.machine.known if self.machine is not None else None)

    @property
    def kind(self) -> str:
        """Its name."""
        named = self.asked or self.machine
        return named.name if named is not None else "this machine"

    @property
    def multiplies(self) -> dict[str, bool | None]:
        """Whether it multiplies each dtype without widening it; None if it is not known."""
        if self.device is not None:
            return {dtype: self.device.peaks.native(dtype) for dtype in DTYPES}
        here = self.machine
        return {dtype: None if here is None else here.multiplies(dtype) for dtype in DTYPES}

    @property
    def choice(self) -> FormatChoice:
        """The format to train in."""
        speeds = {rate.dtype: rate.flops for rate in self.rates if not rate.precision}
        return choose(self.multiplies, self.kind, speeds)

    @property
    def remarks(self) -> list[str]:
        """A sentence for each setting that changes what is computed."""
        return remarks(self.settings, self.machine, self.versions)

    @property
    def paddings(self) -> list[Padding]:
        """The sizes that the device pads."""
        return paddings(self.shapes, self.device)

    @property
    def estimates(self) -> list[Float8Estimate]:
        """What float8 would do for these products, on a device that multiplies it."""
        if self.device is None or not self.multiplies["float8_e4m3fn"]:
            return []
        return estimate_float8(self.shapes, self.device)

    @property
    def float8(self) -> list[str]:
        """Whether float8 pays, in sentences."""
        return float8_sentences(self.multiplies["float8_e4m3fn"], self.kind, self.estimates)

    @property
    def failure(self) -> str:
        """Why nothing can be trained here: no device, or a wrong compiler; `""` if it can."""
        if self.machine is None:
            return f"JAX has no device: {self.no_machine}"
        return WRONG_SUMS if self.machine.sums_wrongly else ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the facts and the advice by name, for `print_answer` to write."""
        names = ("device", "kind", "multiplies", "choice", "remarks", "float8")
        return {
            **vars(self),
            **{name: getattr(self, name) for name in names},
            "rates": [{**rate._asdict(), "flops": rate.flops} for rate in self.rates],
            "paddings": [{**each._asdict(), "padded": each.padded} for each in self.paddings],
            "estimates": [{**each._asdict(), "speedup": each.speedup} for each in self.estimates],
        }

    def __rich__(self) -> Any:
        return Group(*_report_parts(self))

    def __str__(self) -> str:
        return as_text(self)


def look_over(
    *, device: str | None = None, shapes: Sequence[str] = (), no_measure: bool = False
) -> DoctorReport:
    """Looks this machine over, and advises for it.

    Args:
      device: the name of another device to advise for; nothing is measured then.
      shapes: what `parse_shapes` reads.
      no_measure: whether to measure nothing on this machine either.

    Raises:
      UsageError: if shapes cannot be read.
    """
    try:
        machine, no_machine = this_machine(), ""
    except RuntimeError as error:  # JAX's way to say that a backend does not start
        machine, no_machine = None, str(error).partition("\n")[0]
    products = parse_shapes(shapes)
    rates: list[Rate] = []
    if not (machine is None or device or no_measure):
        # Float8 that is widened is not worth a measurement; 16 bits are, as on a CPU.
        rates = measured_rates(
            [name for name in DTYPES if name[:6] != "float8" or machine.multiplies(name)]
        )
    asked = find_device(device) if device else None
    return DoctorReport(machine, no_machine, asked, versions(), settings(), rates, products)


def choose(
    multiplies: Mapping[str, bool | None], kind: str, rates: Mapping[str, float]
) -> FormatChoice:
    """Returns the format to train in: bfloat16 if the device multiplies it, else float16.

    Args:
      multiplies: whether the device multiplies each dtype; None if it is not known.
      kind: the device's name.
      rates: the measured FLOP/s by dtype, which decide if nothing is known.
    """
    start = kind[:1].upper() + kind[1:]
    if multiplies["bfloat16"]:
        reasons = [
            f"{start} multiplies bfloat16.",
            "bfloat16 has the range of float32, so that gradients need no loss scale.",
        ]
        if multiplies["float16"]:
            reasons.append(
                "float16 is as fast and has 3 bits more, but overflows beyond 65504: mixed_float16 "
                "comes with a dynamic loss scale."
            )
        return FormatChoice("mixed_bfloat16", tuple(reasons))
    if multiplies["float16"]:
        return FormatChoice(
            "mixed_float16",
            (
                f"{start} multiplies float16, but not bfloat16, which would be widened.",
                "float16 overflows beyond 65504: mixed_float16 comes with a dynamic loss scale.",
            ),
        )
    return _by_measurement(kind, rates)


# How much faster bfloat16 must be to be worth its roundings.
_WORTH = 1.2


def _by_measurement(kind: str, rates: Mapping[str, float]) -> FormatChoice:
    unknown = f"Whether {kind} multiplies 16 bits without widening them is not known."
    other = (
        "To prepare for an accelerator on this machine, train in its format, mixed_bfloat16: the "
        "numbers are alike, the speed is not. `--device h100` advises for an H100."
    )
    if not rates:
        return FormatChoice("float32", (unknown, "Nothing was measured.", other))
    faster = rates["bfloat16"] / rates["float32"]
    measured = f"Measured here, bfloat16 has {faster:.2f} times the speed of float32."
    if faster >= _WORTH:
        return FormatChoice("mixed_bfloat16", (unknown, measured))
    return FormatChoice("float32", (unknown, measured, other))


def _report_parts(report: DoctorReport) -> Iterator[Any]:
    yield _machine_text(report)
    yield Group(f"Train in {report.choice.policy}:", bullets(report.choice.reasons))
    if report.remarks:
        yield Group("Look at this:", bullets(report.remarks))
    yield drawn(_formats(report))
    if report.rates and report.machine is not None and report.machine.platform == "cpu":
        yield "Rates of a CPU say nothing about an accelerator."
    if report.shapes:
        yield from _shape_parts(report)
    yield Group("Float8:", bullets(report.float8))
    yield drawn(Section("Versions", ("package", "version"), [*report.versions.items()], 40))
    yield drawn(Section("Settings", ("name", "value"), [*report.settings.items()], 40))


def _machine_text(report: DoctorReport) -> str:
    machine = report.machine
    if machine is None:
        return report.failure
    said = f"JAX runs on {machine.devices} x {machine.kind} ({machine.platform})"
    if machine.processes > 1:
        said += f", in {machine.processes} processes"
    if machine.memory:
        said += f", {bytes_text(machine.memory)} each"
    if machine.compute_capability:
        said += f", compute capability {machine.compute_capability}"
    if report.kind != machine.name:
        said += f".\nThe advice is for {report.kind}, as asked"
    return f"{said}."


def _formats(report: DoctorReport) -> Section:
    """Returns the table of dtypes: whether the device multiplies them, and how fast."""
    rows = []
    measured = {(rate.dtype, rate.precision): rate for rate in report.rates}
    kinds = [(dtype, precision) for dtype in DTYPES for precision in _precisions(dtype)]
    for dtype, precision in kinds:
        rate = measured.get((dtype, precision))
        peak = report.device.peaks.of(dtype, precision or None) if report.device else 0.0
        native = report.multiplies[dtype]
        rows.append(
            (
                dtype + (f", {precision}" if precision else ""),
                _NATIVE[native],
                f"{flops_text(round(peak))}FLOP/s" if peak else "",
                f"{flops_text(round(rate.flops))}FLOP/s" if rate else "",
                f"{100 * rate.flops / peak:.0f} %" if rate and peak else "",
            )
        )
    sizes = {rate.size for rate in report.rates}
    title = "Products" + "".join(f", measured with {n} x {n} matrices" for n in sizes)
    return Section(title, ("dtype", "native", ">by its sheet", ">measured", ">reached"), rows)


_NATIVE = {True: "yes", False: "no, widened", None: "not known"}


def _precisions(dtype: str) -> tuple[str, ...]:
    return ("highest", "") if dtype == "float32" else ("",)


def _shape_parts(report: DoctorReport) -> Iterator[Any]:
    estimates = {each.shape: each for each in report.estimates}
    rows = []
    for shape in report.shapes:
        failing = [each for each in report.paddings if each.shape == shape]
        estimate = estimates.get(shape)
        rows.append(
            (
                str(shape) + (f"\n{shape.line}" if shape.line else ""),
                "\n".join(map(_padding_text, failing)),
                "" if estimate is None else estimate.left_out or f"{estimate.speedup:.2f} x",
            )
        )
    yield drawn(Section("Products M x K x N", ("product", "pad", "float8, estimated"), rows, 40))
    if report.paddings:
        yield bullets(_HOW_TO_PAD)
    else:
        yield "All sizes are multiples of what the device wants."


def _padding_text(padding: Padding) -> str:
    more = 100 * (padding.padded / padding.size - 1)
    return (
        f"{padding.name}: {padding.size} -> {padding.padded} for {padding.what}, "
        f"+{more:.{2 if more < 10 else 0}f} %"
    )


_HOW_TO_PAD = (
    "Pad N with columns of zeros in the weight, and drop the columns of the result: a vocabulary "
    "gets tokens that never occur, whose logits are set to -1e30 before the softmax.",
    "Pad K with zeros in both operands: choose the width of the layer before.",
)
