"""The report of the memory planner."""

import dataclasses
from typing import Any

from jaxmp._tools.inspect.table_report import TableReport
from jaxmp._tools.planning.devices import find_device

# The rows of a table, in order, with their meaning.
MEANING = {
    "params": "live params, in the dtypes of the policy",
    "masters": "stored next to params of 16 bits",
    "moments": "the state of the optimizer",
    "collections": "batch statistics, keys and the like",
    "counters": "steps, skips and the loss scale",
    "batch": "the batch of one step",
    "gradients": "gradients of params",
    "compiled": "all else that the compiled step holds at its peak",
}
# Those that a step adds; the others live between steps.
OF_A_STEP = ("batch", "gradients", "compiled")


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Bytes that one device needs for one purpose, at the peak.

    Attributes:
      name: one of "params", "masters", "moments", "collections", "counters", "batch", "gradients",
        "compiled".
      bytes: of one device, the one that holds most.
      is_persistent: whether it lives between steps.
      is_exact: whether it is counted, or from the compiler; only gradients are neither.
    """

    name: str
    bytes: int
    is_persistent: bool
    is_exact: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan(TableReport):
    """The memory that training takes on each device. Prints as a table.

    Attributes:
      rows: the bytes by purpose, at the peak of a step.
      params: how many numbers the params have, on all devices.
      devices: how many devices there are.
      policy: the policy or the rules, as text.
      master: how masters are stored.
      moments: how the optimizer's state is stored.
      device: the kind of device, such as `"h100"`.
      limits: sentences about what the plan leaves out.
      residual_bytes: what the forward pass keeps for the backward pass, as traced and as `audit`
        counts it: of all devices together, and of one microbatch. None without a loss. Compilers
        may keep less, and compute some of it again.
      is_complete: whether the peak is the compiler's, and not only the least that a step needs.
      is_refused: whether a compiler made no program, since the step does not fit.
    """

    rows: tuple[MemoryRow, ...]
    params: int
    devices: int
    policy: str
    master: str
    moments: str
    device: str
    limits: tuple[str, ...] = ()
    residual_bytes: int | None = None
    is_complete: bool = False
    is_refused: bool = False

    @property
    def persistent(self) -> int:
        """Bytes that live between steps: exact."""
        return sum(row.bytes for row in self.rows if row.is_persistent)

    @property
    def peak(self) -> int:
        """The most bytes at one time in a step; the least that it needs if not `is_complete`."""
        # The row "compiled" is the compiler's peak without the others, so that rows add up to it.
        return sum(row.bytes for row in self.rows)

    @property
    def capacity(self) -> int:
        """The memory of the device, by datasheet."""
        return find_device(self.device).memory

    def bytes_of(self, name: str) -> int:
        """Returns the bytes of one row; 0 if the plan has no such row.

        Raises:
          ValueError: for a name that no plan has.
        """
        if name not in MEANING:
            raise ValueError(f"rows are called {', '.join(MEANING)}; got {name!r}")
        return sum(row.bytes for row in self.rows if row.name == name)

    def fits(self, device: str | None = None) -> bool:
        """Whether the peak is no more than the memory of a device, by default the plan's own.

        A plan that is not complete fits if the least that it needs does.

        Args:
          device: the kind of device, such as `"h200"`.
        """
        other = find_device(self.device if device is None else device)
        # A compiler speaks for its own device: a larger one may have room.
        is_refused = self.is_refused and other.name == self.device
        return not is_refused and self.peak <= other.memory

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as dictionaries, lists, numbers and texts, for `json.dumps`."""
        names = ("params", "devices", "policy", "master", "moments", "device")
        return {
            **{name: getattr(self, name) for name in names},
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "persistent": self.persistent,
            "peak": self.peak,
            "capacity": self.capacity,
            "fits": self.fits(),
            "is_complete": self.is_complete,
            "residual_bytes": self.residual_bytes,
            "limits": list(self.limits),
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        several = f"each of {self.devices} devices" if self.devices > 1 else "one device"
        title = f"{self.params:,} params on {several}"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        table.add_column(self._unit[0], justify="right")
        table.add_column("bytes a param", justify="right")
        table.add_column("")
        for row in self.rows:
            about = "" if row.is_exact else "about "
            table.add_row(row.name, *self._numbers(row.bytes), about + MEANING[row.name])
        table.add_section()
        table.add_row("persistent", *self._numbers(self.persistent), "lives between steps")
        peak = ("peak", "the most at one time")
        name, meaning = peak if self.is_complete else ("at least", "the least that a step needs")
        table.add_row(name, *self._numbers(self.peak), meaning)
        least = "" if self.is_complete else "at least "
        room = f"the {self.capacity / 2**30:.0f} GiB of one {self.device}"
        share = self.peak / self.capacity
        size = (
            f"{least}{share:.0%} of {room}." if share <= 1 else f"{least}{share:.1f} times {room}."
        )
        sentences = [size[0].upper() + size[1:] + ("" if self.fits() else " It does not fit.")]
        if self.residual_bytes is not None:
            number, unit = self.residual_bytes / self._unit[1], self._unit[0]
            where = ", on all devices together" if self.devices > 1 else ""
            sentences.append(f"Kept for the backward pass, as traced: {number:,.3f} {unit}{where}.")
        return Group(table, *map(Text, [*sentences, *self.limits]))

    def _numbers(self, size: int) -> tuple[str, str]:
        # Of all devices together: a sharded state takes as much for each param as a whole one.
        bytes_a_param = self.devices * size / self.params if self.params else 0.0
        return f"{size / self._unit[1]:,.3f}", f"{bytes_a_param:.2f}"

    @property
    def _unit(self) -> tuple[str, float]:
        return ("GB", 1e9) if self.peak >= 1e9 else ("MB", 1e6)
