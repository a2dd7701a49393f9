"""Reports on a machine: its versions, devices and settings."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group

from jaxmp._program.cpu_compiler import WRONG_SUMS
from jaxmp._tools.command.machine import (
    Machine,
    remarks,
    settings,
    this_machine,
    versions,
)
from jaxmp._tools.inspect.table_report import TableReport
from jaxmp._tools.inspect.tables import Section, bullets, bytes_text, drawn


@dataclasses.dataclass(frozen=True)
class DoctorReport(TableReport):
    """The facts of a machine.

    Attributes:
      machine: the devices of this process; None if JAX could not start them.
      no_machine: why there are none.
      versions: of Python and the packages, by name.
      settings: those of JAX and the compiler that are in force.
    """

    machine: Machine | None
    no_machine: str
    versions: Mapping[str, str]
    settings: Mapping[str, str]

    @property
    def remarks(self) -> list[str]:
        """A sentence for each setting that changes dtypes, results or speed."""
        return remarks(self.settings, self.machine, self.versions)

    @property
    def failure(self) -> str:
        """Why nothing can be trained here: no device, or a wrong compiler; `""` if it can."""
        if self.machine is None:
            return f"JAX has no device: {self.no_machine}"
        return WRONG_SUMS if self.machine.sums_wrongly else ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the facts and the remarks by name, for `print_output` to write."""
        return {**vars(self), "remarks": self.remarks}

    def __rich__(self) -> Any:
        return Group(*_parts(self))


def diagnose() -> DoctorReport:
    """Reports on this machine."""
    try:
        machine, no_machine = this_machine(), ""
    # JAX raises it if a backend does not start. The report then has the reason, and the settings.
    except RuntimeError as error:
        machine, no_machine = None, str(error).partition("\n")[0]
    return DoctorReport(machine, no_machine, versions(), settings())


def _parts(report: DoctorReport) -> Iterator[Any]:
    # What needs a look comes first; versions and settings, for bug reports, come last.
    yield _machine_text(report)
    if report.remarks:
        yield Group("Look at this:", bullets(report.remarks))
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
    return f"{text}."
