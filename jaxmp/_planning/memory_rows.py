"""The report of the memory planner."""

import dataclasses
from typing import Any

from jaxmp._planning.devices import find_device

# What lives between steps, and what a step adds, in the order of the table.
PERSISTENT = ("params", "masters", "moments", "collections", "counters")
OF_A_STEP = (
    "batch",
    "results",
    "gradients",
    "accumulators",
    "activations",
    "temporaries",
    "compiled",
)
_MEANING = {
    "params": "live params, in the dtypes of the policy",
    "masters": "what is kept beside params of 16 bits",
    "moments": "the state of the optimizer",
    "collections": "batch statistics, keys and the like",
    "counters": "steps, skips and the loss scale",
    "batch": "the batch of one step",
    "results": "metrics, aux, and a new state beside the old one",
    "gradients": "gradients of params",
    "accumulators": "sums of gradients over microbatches",
    "activations": "what the forward pass keeps for the backward pass",
    "temporaries": "what is in use at the peak for a short time",
    "compiled": "all else that the compiled step holds at its peak",
}


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Bytes that one device needs for one purpose, at the peak.

    Attributes:
      name: one of "params", "masters", "moments", "collections", "counters", "batch", "results",
        "gradients", "accumulators", "activations", "temporaries", "compiled".
      bytes: of one device, the one that holds most.
      is_persistent: whether it lives between steps.
      is_exact: whether it is counted, from shapes and dtypes; if not, it is an estimate.
    """

    name: str
    bytes: int
    is_persistent: bool
    is_exact: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory that training takes on each device. Prints as a table.

    Attributes:
      rows: what takes how much, at the peak of a step.
      params: how many numbers the params have, on all devices.
      devices: how many devices there are.
      policy: the policy or the rules, as text.
      master: how masters are stored.
      moments: how the optimizer's state is stored.
      device: the kind of device, such as `"h100"`.
      limits: sentences about what the plan leaves out.
      program: the jitted step and its abstract arguments, if a loss function was given:
        `plan.program.lower().compile().memory_analysis()` asks the compiler.
    """

    rows: tuple[MemoryRow, ...]
    params: int
    devices: int
    policy: str
    master: str
    moments: str
    device: str
    limits: tuple[str, ...]
    program: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def persistent(self) -> int:
        """Bytes that live between steps: exact."""
        return sum(row.bytes for row in self.rows if row.is_persistent)

    @property
    def peak(self) -> int:
        """The most bytes at one time in a step; without activations if no loss was given."""
        return sum(row.bytes for row in self.rows)

    @property
    def capacity(self) -> int:
        """The memory of the device, by datasheet."""
        return find_device(self.device).memory

    @property
    def is_complete(self) -> bool:
        """Whether activations and temporaries are in the peak."""
        return self.program is not None

    def bytes_of(self, name: str) -> int:
        """Returns the bytes of one row; 0 if the plan has no such row.

        Raises:
          ValueError: for a name that no plan has.
        """
        if name not in _MEANING:
            raise ValueError(f"rows are called {', '.join(_MEANING)}; got {name!r}")
        return sum(row.bytes for row in self.rows if row.name == name)

    def fits(self, device: str | None = None) -> bool:
        """Whether the peak is no more than the memory of a device, by default the plan's own.

        Args:
          device: the kind of device, such as `"h200"`.
        """
        return self.peak <= find_device(self.device if device is None else device).memory

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as dictionaries, lists, numbers and texts, for `json.dumps`."""
        told = ("params", "devices", "policy", "master", "moments", "device")
        return {
            **{name: getattr(self, name) for name in told},
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "persistent": self.persistent,
            "peak": self.peak,
            "capacity": self.capacity,
            "fits": self.fits(),
            "is_complete": self.is_complete,
            "limits": list(self.limits),
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        several = f"each of {self.devices} devices" if self.devices > 1 else "one device"
        title = f"{self.params:,} params, {self.policy}, on {several}"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        table.add_column(self._unit[0], justify="right")
        table.add_column("bytes a param", justify="right")
        table.add_column("")
        for row in self.rows:
            about = "" if row.is_exact else "about "
            table.add_row(row.name, *self._numbers(row.bytes), about + _MEANING[row.name])
        table.add_section()
        table.add_row("persistent", *self._numbers(self.persistent), "lives between steps")
        what = "the most at one time" if self.is_complete else "the least that a step needs"
        table.add_row("peak", *self._numbers(self.peak), what)
        return Group(table, *self._sentences())

    def _numbers(self, size: int) -> tuple[str, str]:
        each = self.devices * size / self.params if self.params else 0.0
        return f"{size / self._unit[1]:,.3f}", f"{each:.2f}"

    @property
    def _unit(self) -> tuple[str, float]:
        return ("GB", 1e9) if self.peak >= 1e9 else ("MB", 1e6)

    def _sentences(self) -> list[str]:
        room = self.capacity / 2**30
        share = self.peak / self.capacity
        fits = f"{share:.0%} of the {room:.0f} GiB of one {self.device}."
        if not self.fits():
            fits = f"{share:.1f} times the {room:.0f} GiB of one {self.device}: it does not fit."
        return [fits, *self.limits]

    def __str__(self) -> str:
        from jaxmp._inspect.tables import as_text

        return as_text(self)
