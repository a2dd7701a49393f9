"""The report of an estimate: what a program costs on a device, and which lines of it."""

import dataclasses
from typing import Any

from jaxmp._planning.devices import DEVICES


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """One kernel of a compiled program: a fusion, a product, a copy or a collective.

    Numbers are for all its runs in one execution of the program, on one device.

    Attributes:
      name: the compiler's name.
      line: the line of the user's code that it comes from; of a fusion the line of its result.
      path: the module, if scopes tell.
      direction: `"forward"`, `"backward"`, `"recomputed"`, or `""` outside of both.
      times: how often it runs.
      dtype: of the operands of its products; `""` if it has none.
      flops: two for each multiply-add of its products.
      bytes: what it reads from and writes to device memory.
      seconds: how long it takes at least.
      cycles: what a TPU's compiler expects; 0 on GPUs, and where it says nothing.
      bound: what `seconds` is for: `"compute"`, `"memory"` or `"launch"`; `"beside"` for copies
        beside other work and `"transfer"` for collectives, which have none.
    """

    name: str
    line: str
    path: str
    direction: str
    times: int
    dtype: str
    flops: float
    bytes: float
    seconds: float
    cycles: int
    bound: str


@dataclasses.dataclass(frozen=True)
class CostEstimate:
    """What a program is estimated to cost on each of its devices. Prints as tables.

    Attributes:
      device: the name of the device.
      devices: how many the program runs on.
      seconds: how long one run takes at least, transfers between devices left out.
      flops: the operations of its products by the dtype of their operands; `"float32 (exact)"` for
        those at the highest precision.
      bytes: what it moves through device memory.
      cycles: what a TPU's compiler expects, the turns of loops counted; None on GPUs.
      collectives: the bytes of collectives by kind, of whole arrays.
      arguments: bytes of the arguments.
      outputs: bytes of the results.
      temporaries: bytes of what it needs beside them while it runs.
      aliased: bytes of results that take the place of donated arguments.
      rows: its kernels, those that take longest first.
      unseen: what the estimate does not see.
    """

    device: str
    devices: int
    seconds: float
    flops: dict[str, float]
    bytes: float
    cycles: int | None
    collectives: dict[str, int]
    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    rows: tuple[KernelCost, ...]
    unseen: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The memory that a run needs: results that take the place of arguments need none."""
        return self.arguments + self.outputs + self.temporaries - self.aliased

    @property
    def bound(self) -> dict[str, float]:
        """Seconds by what bounds the kernels: compute, memory, launch."""
        found = dict.fromkeys(("compute", "memory", "launch"), 0.0)
        for row in self.rows:
            found[row.bound] = found.get(row.bound, 0.0) + row.seconds
        return {name: seconds for name, seconds in found.items() if seconds}

    def as_dict(self) -> dict[str, Any]:
        """The estimate as plain numbers, texts, lists and dictionaries, for JSON."""
        return {**dataclasses.asdict(self), "rows": [dataclasses.asdict(row) for row in self.rows]}

    def __rich__(self) -> Any:
        from rich.console import Group

        from jaxmp._inspect.tables import bullets, drawn

        return Group(self._summary(), drawn(self._lines()), "Not seen:", bullets(self.unseen))

    def __str__(self) -> str:
        from jaxmp._inspect.tables import as_text

        return as_text(self)

    def _summary(self) -> Any:
        from rich.table import Table

        from jaxmp._inspect.tables import bytes_text, flops_text

        # Compilers are not devices, and a reader of numbers forgets it.
        title = f"An estimate for {self.device}"
        title += f", each of {self.devices} devices" if self.devices > 1 else ""
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right", no_wrap=True)
        table.add_column()
        bound = (f"{name} {s / sum(self.bound.values()):.0%}" for name, s in self.bound.items())
        table.add_row("time, at least", seconds_text(self.seconds), ", ".join(bound))
        for dtype, flops in self.flops.items():
            table.add_row(f"products of {dtype}", f"{flops_text(round(flops))}FLOP", "")
        rate = f"{bytes_text(int(DEVICES[self.device].bandwidth))}/s"
        table.add_row("device memory traffic", bytes_text(round(self.bytes)), f"at {rate}")
        for kind, size in self.collectives.items():
            table.add_row(kind, bytes_text(size), "of whole arrays")
        if self.cycles is not None:
            table.add_row("the compiler's estimate", f"{self.cycles / 1e6:,.3f} M", "cycles")
        memory = DEVICES[self.device].memory
        share = f"{self.peak_bytes / memory:.1%} of {bytes_text(memory)}"
        share += ": does not fit" if self.peak_bytes > memory else ""
        table.add_row("memory", bytes_text(self.peak_bytes), share)
        table.add_row("of it temporary", bytes_text(self.temporaries), "")
        return table

    def _lines(self) -> Any:
        from jaxmp._inspect.sections import place_text
        from jaxmp._inspect.tables import Section, bytes_text, flops_text

        groups: dict[str, list[KernelCost]] = {}
        for row in self.rows:
            groups.setdefault(place_text(row), []).append(row)
        total = sum(row.seconds for row in self.rows) or 1.0
        lines = []
        for place, rows in groups.items():
            seconds = sum(row.seconds for row in rows)
            flops, moved = sum(row.flops for row in rows), sum(row.bytes for row in rows)
            texts = (
                place,
                max(rows, key=lambda row: row.seconds).bound,
                seconds_text(seconds),
                f"{seconds / total:.1%}",
                flops_text(round(flops)).strip() if flops else "",
                bytes_text(round(moved)) if moved else "",
                str(len(rows)),
                str(sum(row.times for row in rows)),
            )
            lines.append((seconds, texts))
        columns = ["line, module, pass", "bound by", ">time", ">share", ">FLOP", ">traffic"]
        ordered = sorted(lines, key=lambda line: -line[0])
        return Section("By line", [*columns, ">kernels", ">runs"], [texts for _, texts in ordered])


def seconds_text(seconds: float) -> str:
    """Formats a time with three digits.

    >>> seconds_text(0.00123), seconds_text(4.5e-6), seconds_text(12.0)
    ('1.23 ms', '4.50 us', '12.0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            number = seconds / size
            break
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{digits}f} {unit}"
