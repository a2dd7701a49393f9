"""The report of what the collectives of a compiled program carry."""

import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxmp._audit._check import dtype_name
from jaxmp._audit._rows import Direction
from jaxmp._dtypes import suggestion
from jaxmp._hlo import KINDS

REDUCERS = ("add", "max", "min", "mul", "and", "or", "xor", "select", "mixed")


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """What one collective of a compiled program carries in one dtype.

    Attributes:
      kind: `"all-reduce"`, `"reduce-scatter"`, `"all-gather"`, `"all-to-all"`,
        `"collective-permute"` or `"collective-broadcast"`.
      dtype: what it carries.
      reducer: what an all-reduce or a reduce-scatter does with it: `"add"`, `"max"`, `"and"`, ...
        `"select"` is an addition in which all but one device put in zeros, as for a lookup in a
        table that is split: it rounds nothing. `"mixed"` is more than one operation.
      axes: the mesh axes that it goes over; None if no mesh is known.
      group_size: how many devices take part together; two in a permute.
      line: the line of the user's code.
      path: the module, where the name stack has it.
      direction: as in `ProductLine`.
      op_name: JAX's name of the operation that it is part of.
      arrays: how many arrays it carries; compilers combine collectives.
      elements: the numbers of the arrays, in one run.
      size: the bytes of the arrays, in one run. They are the whole ones where collectives split or
        join: the operand of an all-reduce and of a reduce-scatter, the result of an all-gather. In
        all-to-all and permutes they are what a device sends.
      runs: how often it runs. A loop of unknown length counts once.
      bytes: the size times the runs.
      groups: which devices take part together, as positions in the mesh.
    """

    kind: str
    dtype: str
    reducer: str
    axes: tuple[str, ...] | None
    group_size: int
    line: str
    path: str
    direction: Direction
    op_name: str
    arrays: int
    elements: int
    size: int
    runs: int
    bytes: int
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(repr=False)

    @property
    def sums(self) -> bool:
        """Whether it adds floats of several devices, so that its dtype decides about rounding."""
        floats = ("float", "bfloat", "complex")
        return self.reducer in ("add", "mixed") and self.dtype.startswith(floats)


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The collectives of a compiled program. They print as tables, and are iterated by row.

    Attributes:
      rows: one for each collective and dtype, those with the most bytes first.
      origin: what was read: the compiled program, or for CPUs the program after partitioning.
      devices: how many devices the program runs on.
      mesh_axes: names and sizes of the mesh axes, if a mesh is known.
      no_mesh: why none is known.
      unseen: what this report does not show of this program.
    """

    rows: tuple[CompiledCollective, ...]
    origin: str
    devices: int
    mesh_axes: tuple[tuple[str, int], ...]
    no_mesh: str
    unseen: tuple[str, ...]

    def __iter__(self) -> Iterator[CompiledCollective]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def select(
        self,
        kind: Any = None,
        dtype: Any = None,
        axis: Any = None,
        reducer: Any = None,
    ) -> "Collectives":
        """The same report with some of the rows.

        Args:
          kind: the kind, such as `"all-gather"`, or a tuple of kinds.
          dtype: the dtype, by name or as a dtype, or a tuple of dtypes.
          axis: a mesh axis, or a tuple of them: what goes over one of them, alone or with others.
          reducer: the reducer, such as `"add"`, or a tuple of them.

        Returns:
          The report.

        Raises:
          ValueError: for a name that does not exist, or an axis where no mesh is known.
        """
        tests: list[Callable[[CompiledCollective], bool]] = []
        if kind is not None:
            kinds = [_known(name, KINDS, "kind") for name in _several(kind)]
            tests.append(lambda row: row.kind in kinds)
        if dtype is not None:
            dtypes = [dtype_name(name) for name in _several(dtype)]
            tests.append(lambda row: row.dtype in dtypes)
        if axis is not None:
            axes = self._axes(axis)
            tests.append(lambda row: bool(axes.intersection(row.axes or ())))
        if reducer is not None:
            reducers = [_known(name, REDUCERS, "reducer") for name in _several(reducer)]
            tests.append(lambda row: row.reducer in reducers)
        rows = tuple(row for row in self.rows if all(test(row) for test in tests))
        return dataclasses.replace(self, rows=rows)

    def bytes(
        self,
        kind: Any = None,
        dtype: Any = None,
        axis: Any = None,
        reducer: Any = None,
    ) -> int:
        """How many bytes collectives carry, of all of them or of some.

        Args:
          kind: as in `select`.
          dtype: as in `select`.
          axis: as in `select`.
          reducer: as in `select`.

        Returns:
          The sum of `bytes` of the rows.

        Raises:
          ValueError: as `select` does.
        """
        return sum(row.bytes for row in self.select(kind, dtype, axis, reducer))

    def _axes(self, axis: Any) -> set[str]:
        if not self.mesh_axes:
            raise ValueError(f"no mesh axis is known: {self.no_mesh}. Give the mesh as mesh=")
        names = tuple(name for name, _ in self.mesh_axes)
        return {_known(name, names, "mesh axis") for name in _several(axis)}

    def __rich__(self) -> Any:
        from jaxmp._audit._tables import compiled_tables

        return compiled_tables(self)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).rstrip()


def _several(names: Any) -> list[Any]:
    return list(names) if isinstance(names, (tuple, list, set, frozenset)) else [names]


def _known(name: Any, valid: Sequence[str], what: str) -> str:
    if name not in valid:
        near = suggestion(str(name), list(valid))
        raise ValueError(f"unknown {what} {name!r}.{near} Valid: {', '.join(valid)}")
    return str(name)
