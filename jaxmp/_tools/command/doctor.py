"""Reports on a machine: which format to train in there, and why."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group

from jaxmp._policies.recipe import Recipe
from jaxmp._program.cpu_compiler import WRONG_SUMS
from jaxmp._tools.command.machine import (
    Machine,
    remarks,
    settings,
    this_machine,
    versions,
)
from jaxmp._tools.command.shapes import Padding, ProductShape, paddings, parse_shapes
from jaxmp._tools.inspect.table_report import TableReport
from jaxmp._tools.inspect.tables import Section, bullets, bytes_text, drawn
from jaxmp._tools.planning.devices import Device, find_device

# From the widest to the narrowest.
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8")


class FormatChoice(NamedTuple):
    """The format to train in.

    Attributes:
      policy: the name of the policy, for `jaxmp.get_policy`.
      reason: why, in a sentence or two.
    """

    policy: str
    reason: str


# The format for a device, by the first of these dtypes that it multiplies. bfloat16 comes first: it
# needs no loss scale.
_FORMATS = {
    "bfloat16": FormatChoice(
        "mixed_bfloat16",
        "bfloat16 has the range of float32, so that gradients need no loss scale.",
    ),
    "float16": FormatChoice(
        "mixed_float16",
        "bfloat16 would be widened. float16 overflows beyond 65504: mixed_float16 comes with a "
        "dynamic loss scale.",
    ),
    "": FormatChoice(
        "float32",
        "It is not known to multiply 16 bits without widening them. To prepare for an accelerator, "
        "train in its format, mixed_bfloat16: the numbers are alike, the speed is not. "
        "`--device h100` advises for an H100.",
    ),
}
_TRY_BOTH = (
    "train both for a while, and compare losses and times. `jaxmp audit PROGRAM --compiled` says "
    "what runs in 8 bits."
)
# The advice on products of 8 bits, by the first of these dtypes that a device multiplies.
_EIGHT_BITS = {
    "float8_e4m3fn": "It multiplies float8: mixed_float8 has one scale for each array. A product "
    f"then differs from its bfloat16 by 4 to 6 %: {_TRY_BOTH}",
    "int8": "It multiplies int8, and widens float8: `,products=int8` behind the policy above, such "
    "as mixed_int8, has one scale for each array, and gradients of weights in bfloat16. A product "
    f"then differs by 1 to 2 %: {_TRY_BOTH} By estimates it pays for layers of width 4,096 on a "
    "TPU v5e, and of 8,192 on a v6e; on others it was not measured.",
    "": "It does not multiply 8 bits: they would be converted to more bits. Use the policy named "
    "above.",
}
_EIGHT_BITS_UNKNOWN = (
    "Whether it multiplies 8 bits is not known. NVIDIA GPUs multiply float8 from compute "
    "capability 8.9 on (L4, H100, B200), TPU 7x float8, and TPU v5e, v5p and v6e int8."
)
# Policies in 8 bits lower products with params alone.
_IN_BATCHES = "a batch of products, as in attention"


@dataclasses.dataclass(frozen=True)
class DoctorReport(TableReport):
    """The facts of a machine, and the advice that follows from them.

    Attributes:
      machine: the devices of this process; None if JAX could not start them.
      no_machine: why there are none.
      asked: the device to advise for; None for that of the machine. A key of the JSON.
      versions: of Python and the packages, by name.
      settings: those of JAX and the compiler that are in force.
      shapes: the products from `--shapes`.
    """

    machine: Machine | None
    no_machine: str
    asked: Device | None
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    shapes: Sequence[ProductShape]

    @property
    def device(self) -> Device | None:
        """The device that the advice is for; None if the table of devices does not have it."""
        return self.asked or (self.machine.known if self.machine is not None else None)

    @property
    def kind(self) -> str:
        """Its name."""
        device = self.asked or self.machine
        return device.name if device is not None else "this machine"

    @property
    def multiplies(self) -> dict[str, bool | None]:
        """Whether it multiplies each dtype without widening it; None if it is not known."""
        # The table is more exact than the compute capability, and knows absent devices.
        if self.device is not None:
            return {dtype: self.device.peaks.native(dtype) for dtype in DTYPES}
        here = self.machine
        return {dtype: None if here is None else here.multiplies(dtype) for dtype in DTYPES}

    @property
    def choice(self) -> FormatChoice:
        """The format to train in."""
        return next(
            choice for dtype, choice in _FORMATS.items() if not dtype or self.multiplies[dtype]
        )

    @property
    def remarks(self) -> list[str]:
        """A sentence for each setting that changes dtypes, results or speed."""
        return remarks(self.settings, self.machine, self.versions)

    @property
    def paddings(self) -> list[Padding]:
        """The sizes that the device pads."""
        return paddings(self.shapes, self.device)

    @property
    def codes(self) -> str:
        """The dtype of 8 bits that the device multiplies; `""` for none."""
        return next((dtype for dtype in _EIGHT_BITS if self.multiplies.get(dtype)), "")

    @property
    def eight_bits(self) -> str:
        """Whether the device multiplies 8 bits, and what follows."""
        if not self.codes and self.multiplies["float8_e4m3fn"] is None:
            return _EIGHT_BITS_UNKNOWN
        return _EIGHT_BITS[self.codes]

    def left_out_of_8_bits(self, shape: ProductShape) -> str:
        """Why a policy in 8 bits leaves a product in 16 bits; `""` if it does not."""
        if self.device is None or not self.codes:
            return ""
        if shape.batch > 1:
            return _IN_BATCHES
        sizes = shape.rows, shape.summed, shape.columns
        return Recipe().why_not(*sizes, self.device.platform) or ""

    @property
    def failure(self) -> str:
        """Why nothing can be trained here: no device, or a wrong compiler; `""` if it can."""
        if self.machine is None:
            return f"JAX has no device: {self.no_machine}"
        return WRONG_SUMS if self.machine.sums_wrongly else ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the facts and the advice by name, for `print_output` to write."""
        names = ("device", "kind", "multiplies", "choice", "remarks", "eight_bits")
        return {
            **vars(self),
            **{name: getattr(self, name) for name in names},
            "paddings": [{**size._asdict(), "padded": size.padded} for size in self.paddings],
            "left_out_of_8_bits": list(map(self.left_out_of_8_bits, self.shapes)),
        }

    def __rich__(self) -> Any:
        return Group(*_parts(self))


def diagnose(*, device: str | None = None, shapes: Sequence[str] = ()) -> DoctorReport:
    """Reports on this machine, and advises for it.

    Args:
      device: the name of another device to advise for.
      shapes: texts for `parse_shapes`.

    Raises:
      UsageError: if shapes cannot be read.
    """
    try:
        machine, no_machine = this_machine(), ""
    # JAX raises it if a backend does not start. The report then has the reason, and the settings.
    except RuntimeError as error:
        machine, no_machine = None, str(error).partition("\n")[0]
    target = find_device(device) if device else None
    return DoctorReport(machine, no_machine, target, versions(), settings(), parse_shapes(shapes))


def _parts(report: DoctorReport) -> Iterator[Any]:
    # First what to do, then why; versions and settings, for bug reports, come last.
    yield _machine_text(report)
    yield Group(f"Train in {report.choice.policy}:", bullets([report.choice.reason]))
    if report.remarks:
        yield Group("Look at this:", bullets(report.remarks))
    native = {True: "yes", False: "no, widened", None: "not known"}
    dtypes = [(dtype, native[value]) for dtype, value in report.multiplies.items()]
    yield drawn(Section("Products", ("dtype", "native"), dtypes))
    if report.shapes:
        yield from _shape_parts(report)
    yield Group("8 bits:", bullets([report.eight_bits]))
    yield drawn(Section("Versions", ("package", "version"), [*report.versions.items()], 40))
    yield drawn(Section("Settings", ("name", "value"), [*report.settings.items()], 40))


def _machine_text(report: DoctorReport) -> str:
    machine = report.machine
    if machine is None:
        return report.failure
    text = f"JAX runs on {machine.devices} x {machine.kind} ({machine.platform})"
    if machine.processes > 1:
        text += f", in {machine.processes} processes"
    if machine.memory:
        text += f", {bytes_text(machine.memory)} each"
    if machine.compute_capability:
        text += f", compute capability {machine.compute_capability}"
    if report.kind != machine.name:
        text += f".\nThe advice is for {report.kind}, as asked"
    return f"{text}."


def _shape_parts(report: DoctorReport) -> Iterator[Any]:
    texts: dict[ProductShape, list[str]] = {}
    for size in report.paddings:
        more = 100 * (size.padded / size.size - 1)
        texts.setdefault(size.shape, []).append(
            f"{size.name}: {size.size} -> {size.padded} for {size.what}, "
            f"+{more:.{2 if more < 10 else 0}f} %"
        )
    # A row for each product, with or without a size to pad: the last column is about all of them.
    rows = [
        (
            str(shape) + (f"\n{shape.line}" if shape.line else ""),
            "\n".join(texts.get(shape, [])),
            report.left_out_of_8_bits(shape),
        )
        for shape in report.shapes
    ]
    yield drawn(Section("Products M x K x N", ("product", "pad", "left out of 8 bits"), rows, 40))
    if report.paddings:
        yield bullets(_HOW_TO_PAD)
    else:
        yield "All sizes are multiples of what the device wants."


_HOW_TO_PAD = (
    "Pad N with columns of zeros in the weight, and drop the columns of the result: a vocabulary "
    "gets tokens that never occur, whose logits are set to -1e30 before the softmax.",
    "Pad K with zeros in both operands: choose the width of the layer before.",
)
