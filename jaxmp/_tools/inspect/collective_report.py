"""The report on the collectives of a compiled program."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxmp._numerics.dtypes import any_dtype_name, suggestion
from jaxmp._tools.hlo.collectives import KINDS
from jaxmp._tools.inspect.rows import Direction
from jaxmp._tools.inspect.table_report import TableReport

# `select` is an addition in which all devices but one contribute zeros.
REDUCERS = ("add", "max", "min", "mul", "and", "or", "xor", "select", "mixed")


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """The arrays of one dtype that a collective of a compiled program carries.

    Attributes:
      kind: `"all-reduce"`, `"reduce-scatter"`, `"all-gather"`, `"all-to-all"`,
        `"collective-permute"` or `"collective-broadcast"`.
      dtype: the dtype of the arrays.
      reducer: the operation of an all-reduce or a reduce-scatter: `"add"`, `"max"`, `"and"`, ...
        `"select"` is an addition in which all but one device contribute zeros, as for a lookup in
        a sharded table: it rounds nothing. `"mixed"` is more than one operation.
      axes: the mesh axes that it goes over; None if no mesh is known.
      group_size: how many devices communicate with each other; two in a permute.
      between_slices: whether it goes from one TPU slice to another, over the data centre's network.
      line: the line of the user's code.
      path: the module, if the name stack has it.
      direction: as in `ProductLine`.
      op_name: JAX's name of the operation that it is part of.
      arrays: the number of arrays; compilers combine collectives.
      elements: the number of elements in one run.
      size: the bytes of these elements. Counts the whole arrays: the operand of an all-reduce or
        reduce-scatter, the result of an all-gather. For all-to-all and permutes, it counts what
        each device sends.
      runs: how often it runs. A loop of unknown length counts once.
      bytes: the size times the runs.
      groups: the devices that communicate with each other, as positions in the mesh.
    """

    kind: str
    dtype: str
    reducer: str
    axes: tuple[str, ...] | None
    group_size: int
    between_slices: bool
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
        """Whether it adds floats of several devices, so that its dtype decides the rounding."""
        # Integers, such as counts of tokens, do not round. `mixed` may hide an addition.
        floats = ("float", "bfloat", "complex")
        return self.reducer in ("add", "mixed") and self.dtype.startswith(floats)


@dataclasses.dataclass(frozen=True)
class CompiledProduct:
    """The products of a compiled program in one line that have 8-bit operands, or had.

    Attributes:
      operands: the dtypes of the operands; those that were widened, before that.
      result: the dtype of the result.
      ran: how they run. `"float8"` or `"int8"`: by cuBLAS's product of these. `"float8 operands"`
        or `"int8 operands"`: as the device multiplies them, which of TPUs is float8 from 7x on, and
        int8 on v5e and v6e. `"widened to bfloat16"`: as products of 16 bits. `"not known"`: in a
        fusion, whose kernel may widen its operands.
      line: the line of the user's code.
      path: the module, if the name stack has it.
      direction: as in `ProductLine`.
      count: how many there are.
      runs: how often they run. A loop of unknown length counts once.
    """

    operands: tuple[str, str]
    result: str
    ran: str
    line: str
    path: str
    direction: Direction
    count: int
    runs: int


@dataclasses.dataclass(frozen=True)
class Collectives(TableReport):
    """The collectives of a compiled program. The report prints as tables and iterates by row.

    Attributes:
      rows: one row for each collective and dtype, most bytes first.
      origin: the program that was read: the compiled one, or on CPUs the one after partitioning.
      devices: how many devices the program runs on.
      mesh_axes: names and sizes of the mesh axes, if a mesh is known.
      no_mesh: why no mesh is known.
      unseen: the parts of the program that this report does not show.
      float8_products: the products with 8-bit operands, by line.
    """

    rows: tuple[CompiledCollective, ...]
    origin: str
    devices: int
    mesh_axes: tuple[tuple[str, int], ...]
    no_mesh: str
    unseen: tuple[str, ...]
    float8_products: tuple[CompiledProduct, ...] = ()

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
        between_slices: bool | None = None,
    ) -> "Collectives":
        """Returns the report with only some of the rows.

        Args:
          kind: the kind, such as `"all-gather"`, or a tuple of kinds.
          dtype: the dtype, by name or as a dtype, or a tuple of dtypes.
          axis: a mesh axis, or a tuple of them. Selects collectives over at least one of these
            axes, alone or together with other axes.
          reducer: the reducer, such as `"add"`, or a tuple of them.
          between_slices: True for what goes from one TPU slice to another, False for the rest.

        Returns:
          The report.

        Raises:
          ValueError: for an unknown name, or for an axis if no mesh is known.
        """
        tests: list[Callable[[CompiledCollective], bool]] = []
        if kind is not None:
            kinds = [_valid_name(name, KINDS, "kind") for name in _as_list(kind)]
            tests.append(lambda row: row.kind in kinds)
        if dtype is not None:
            dtypes = [any_dtype_name(name) for name in _as_list(dtype)]
            tests.append(lambda row: row.dtype in dtypes)
        if axis is not None:
            # Without this a test that names an axis would pass on a program whose axes are unknown.
            if not self.mesh_axes:
                raise ValueError(f"no mesh axis is known: {self.no_mesh}. Give the mesh as mesh=")
            names = tuple(name for name, _ in self.mesh_axes)
            axes = {_valid_name(name, names, "mesh axis") for name in _as_list(axis)}
            tests.append(lambda row: bool(axes.intersection(row.axes or ())))
        if reducer is not None:
            reducers = [_valid_name(name, REDUCERS, "reducer") for name in _as_list(reducer)]
            tests.append(lambda row: row.reducer in reducers)
        if between_slices is not None:
            tests.append(lambda row: row.between_slices == between_slices)
        rows = tuple(row for row in self.rows if all(test(row) for test in tests))
        return dataclasses.replace(self, rows=rows)

    def bytes(
        self,
        kind: Any = None,
        dtype: Any = None,
        axis: Any = None,
        reducer: Any = None,
        between_slices: bool | None = None,
    ) -> int:
        """Returns how many bytes all collectives carry, or some of them.

        Args:
          kind: as in `select`.
          dtype: as in `select`.
          axis: as in `select`.
          reducer: as in `select`.
          between_slices: as in `select`.

        Returns:
          The sum of `bytes` of the rows.

        Raises:
          ValueError: as `select` does.
        """
        return sum(row.bytes for row in self.select(kind, dtype, axis, reducer, between_slices))

    def __rich__(self) -> Any:
        from jaxmp._tools.inspect.sections import compiled_tables

        return compiled_tables(self)


def _as_list(names: Any) -> list[Any]:
    return list(names) if isinstance(names, (tuple, list, set, frozenset)) else [names]


def _valid_name(name: Any, valid: Sequence[str], noun: str) -> str:
    if name not in valid:
        near = suggestion(str(name), list(valid))
        raise ValueError(f"unknown {noun} {name!r}.{near} Valid: {', '.join(valid)}")
    return str(name)
