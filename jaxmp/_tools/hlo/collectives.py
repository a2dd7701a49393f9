"""Reads the collectives of a compiled program: their data, device groups and number of runs."""

import dataclasses
import itertools
import re
from typing import NamedTuple

from jaxmp._tools.hlo.dataflow import Flow, HloValue, OnDevices
from jaxmp._tools.hlo.parser import Array, Frame, Instruction, Module, Shape, arrays_in, read_shape
from jaxmp._tools.hlo.products import HloCodeProduct, code_products
from jaxmp._tools.hlo.replica_groups import Groups, read_groups
from jaxmp._tools.hlo.slices import Exchange, Slices

KINDS = (
    *("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"),
    "collective-broadcast",
)
_OPCODES = {kind: kind for kind in KINDS} | {"ragged-all-to-all": "all-to-all"}
_REDUCERS = {
    **{"add": "add", "maximum": "max", "minimum": "min", "multiply": "mul"},
    **{"and": "and", "or": "or", "xor": "xor"},
}
# Opcodes in a reducing computation that do not reduce.
# The promotion of 16-bit sums adds converts, and the TPU compiler adds reduce-precision.
_NO_REDUCERS = ("parameter", "convert", "copy", "bitcast", "constant", "reduce-precision")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The arrays of one dtype that a collective carries.

    Attributes:
      kind: one of `KINDS`.
      dtype: the dtype of the arrays.
      arrays: the number of arrays; compilers combine collectives.
      elements: the number of elements of the whole arrays in one run. Counts the operand of an
        all-reduce or reduce-scatter, the result of an all-gather, and what each device sends in
        the other kinds.
      bytes: the size of these elements.
      runs: how often the collective runs; loops of unknown length count once.
      groups: the devices that communicate with each other, by position in the device assignment;
        `Exchange` says which ones where there are several TPU slices.
      between_slices: whether it goes from one TPU slice to another.
      reducer: `"add"`, `"max"`, ...; `"mixed"` for more than one operation; `"select"` for an
        addition in which all but one device contribute zeros; `""` if nothing is reduced.
      op_name: JAX's name of the operation, with its scopes.
      frames: the source lines, innermost first.
    """

    kind: str
    dtype: str
    arrays: int
    elements: int
    bytes: int
    runs: int
    groups: Groups
    between_slices: bool
    reducer: str
    op_name: str
    frames: tuple[Frame, ...]


class CompiledProgram(NamedTuple):
    """The collectives and 8-bit products of a program, read from its text.

    Attributes:
      devices: how many devices the program runs on; of several TPU slices, the devices of one.
      slices: how many TPU slices communicate with each other.
      transfers: the collectives, in the order of the text.
      unknown_loops: how many loops around collectives have an unknown length.
      conditionals: how many conditionals have collectives in a branch.
      sends: how many sends to other devices the program has besides the collectives.
      float8: the products with 8-bit operands, in the order of the text.
    """

    devices: int
    slices: int
    transfers: tuple[Transfer, ...]
    unknown_loops: int
    conditionals: int
    sends: int
    float8: tuple[HloCodeProduct, ...]


def read_program(text: str) -> CompiledProgram:
    """Reads the collectives from the output of `compiled.as_text()`, or from a compiler dump.

    Raises:
      ValueError: if the replica groups have an unknown syntax, or a collective between slices.
    """
    module = Module(text)
    reader = _TransferReader(module)
    for instruction in module.instructions():
        reader.read(instruction)
    around = reader.around_collectives()
    # A callback sends to the host, and reaches no other device.
    sends = [
        instruction
        for instruction in module.instructions()
        if instruction.opcode == "send" and "is_host_transfer=true" not in instruction.attributes
    ]
    # Few programs have codes, and a search of the text costs less than one of the dataflow.
    float8 = tuple(code_products(reader.flow)) if "f8e" in text or "s8[" in text else ()
    return CompiledProgram(
        devices=module.devices,
        slices=reader.slices.count,
        transfers=tuple(reader.transfers),
        unknown_loops=sum(i.opcode == "while" and reader.flow.trips(i) is None for i in around),
        conditionals=sum(i.opcode == "conditional" for i in around),
        sends=len(sends),
        float8=float8,
    )


class _TransferReader:
    """A reader that collects each transfer once."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.flow = Flow(module)
        self.on_devices = OnDevices(self.flow)
        self.slices = Slices(module)
        self.transfers: list[Transfer] = []
        self.homes: dict[str, None] = {}  # the computations that contain collectives
        self._chains: set[tuple[str, ...]] = set()  # of asynchronous fusions, one for each

    def read(self, instruction: Instruction) -> None:
        """Adds the transfers of an instruction, if it is a collective.

        Adds one for each kind, reducer and dtype among its operands.
        """
        exchange = self.slices.sent(instruction) or self._within_slice(instruction)
        if exchange is None or self._is_repeated(instruction):
            return
        self.homes[instruction.computation] = None
        # Compilers combine collectives, also of different meaning: a sum, and a lookup's zeros.
        by_key: dict[tuple[str, str, str], list[tuple[Array, HloValue | None]]] = {}
        for array, source in self._parts(instruction):
            key = (*self._meaning(exchange, source), array.dtype)
            by_key.setdefault(key, []).append((array, source))
        for (kind, reducer, dtype), parts in by_key.items():
            arrays = [array for array, _ in parts]
            op_name, frames = self._origin(instruction, parts)
            self.transfers.append(
                Transfer(
                    kind=kind,
                    dtype=dtype,
                    arrays=len(arrays),
                    elements=exchange.factor * sum(array.elements for array in arrays),
                    bytes=exchange.factor * sum(array.bytes for array in arrays),
                    runs=self.flow.runs(instruction.computation),
                    groups=exchange.groups,
                    between_slices=exchange.between_slices,
                    reducer=reducer,
                    op_name=op_name,
                    frames=frames,
                )
            )

    def _within_slice(self, instruction: Instruction) -> Exchange | None:
        """Reads a collective of the devices of one slice; None for other instructions."""
        kind = _OPCODES.get(instruction.opcode.removesuffix("-start"))
        if kind is None:
            return None
        groups = read_groups(instruction.structure, self.module.devices)
        # The operand of a reduce-scatter is larger than its result by this factor.
        factor = len(groups[0]) if kind == "reduce-scatter" else 1
        if kind == "all-reduce" and instruction.computation.startswith("all-reduce-scatter"):
            # The TPU compiler writes a reduce-scatter as a fusion of this name: an all-reduce, and
            # the slice of it that the device keeps.
            kind = "reduce-scatter"
        reducer = "mixed" if kind in ("all-reduce", "reduce-scatter") else ""
        for name in instruction.called if reducer else ():
            computation = self.module.computations.get(name)
            opcodes = {i.opcode for i in computation.instructions.values()} if computation else ()
            operations = set(opcodes).difference(_NO_REDUCERS)
            if len(operations) == 1:
                reducer = _REDUCERS.get(operations.pop(), "mixed")
                break
        return Exchange(kind, reducer, groups, factor, between_slices=False)

    def _parts(self, instruction: Instruction) -> list[tuple[Array, HloValue | None]]:
        """Returns the arrays that a collective carries, each with the source of its operand."""
        arrays = arrays_in(_result(instruction))
        if len(instruction.operands) != len(arrays) and instruction.opcode != "send":
            return [(array, None) for array in arrays]
        parts: list[tuple[Array, HloValue | None]] = []
        for i, array in enumerate(arrays):
            value = self.flow.operand(instruction, i)
            if value is not None and value.instruction.opcode == "pad":
                # Do not count the zeros that pad the array to a multiple of the number of devices.
                value = self.flow.operand(value.instruction)
                shape = read_shape(value.instruction.shape) if value is not None else array
                if instruction.opcode.startswith("all-reduce") and isinstance(shape, Array):
                    array = shape
            parts.append((array, value and self.flow.source(value)))
        return parts

    def _meaning(self, exchange: Exchange, source: HloValue | None) -> tuple[str, str]:
        """Returns the effective kind and reducer of a collective for one of its operands."""
        if exchange.reducer != "add" or source is None:
            return exchange.kind, exchange.reducer
        groups = exchange.groups
        # All slices do the same, and the numbers below count devices through all of them.
        if not exchange.between_slices:
            starts = range(0, self.slices.count * self.module.devices, self.module.devices)
            groups = tuple(tuple(start + i for i in group) for start in starts for group in groups)
        if exchange.kind == "all-reduce" and self._is_own_slice(source, groups):
            return "all-gather", ""
        is_picked = self._is_picked(source, groups, exchange.between_slices)
        return exchange.kind, "select" if is_picked else "add"

    def _is_repeated(self, instruction: Instruction) -> bool:
        """Whether this is a further step of a collective that was counted already."""
        # The TPU compiler spreads a collective over several fusions, with computation between them.
        if '"async_collective_fusion_config"' not in instruction.attributes:
            return False
        chain = re.search(r'chain_id="(\d+)"', instruction.structure)
        number = re.search(r"channel_id=(\d+)", instruction.structure)
        groups = instruction.structure.partition("replica_groups=")[2].partition(", dim")[0]
        callers = [i.computation for i in self.module.callers.get(instruction.computation, [])]
        ids = [match.group() if match else "" for match in (chain, number)]
        key = (instruction.opcode, *ids, groups, *callers[:1])
        is_repeated = key in self._chains
        self._chains.add(key)
        return is_repeated

    def _is_own_slice(self, source: HloValue, groups: Groups) -> bool:
        """Whether each device writes its own slice into zeros, so that the sum is a gather."""
        # The TPU compiler gathers small arrays over many devices this way.
        update = source.instruction
        if update.opcode != "dynamic-update-slice" or not self._is_zero(update, 0):
            return False
        # If devices write to the same place, as for gradients of a slice, the sum is a real sum.
        for i in range(2, len(update.operands)):
            index = self.flow.operand(update, i)
            places = [self.on_devices.numbers(index, group) for group in groups]
            if all(row is not None and len(set(row)) == len(row) for row in places):
                return True
        return False

    def _is_picked(self, source: HloValue, groups: Groups, between_slices: bool) -> bool:
        """Whether all but one device contribute zeros, so that the sum rounds nothing.

        The partitioner writes this to look up numbers in a sharded table, and to take a slice that
        one device has.
        """
        # Each slice first picks among its own devices, and then sends the result to the others.
        while between_slices and source.instruction.opcode in ("all-reduce", "reduce-scatter"):
            operand = self.flow.operand(source.instruction)
            if operand is None:
                return False
            source = self.flow.source(operand)
            groups = (tuple(range(self.slices.count * self.module.devices)),)
        select = source.instruction
        zeros = [self._is_zero(select, i) for i in (1, 2)] if select.opcode == "select" else []
        if not any(zeros):
            return False
        # A lookup's mask depends on the indices, which are data. Its select has the lookup's name.
        if select.op_name.endswith("/gather"):
            return True
        mask = self.flow.operand(select)
        masks = [self.on_devices.numbers(mask, group) for group in groups]
        value_branch = 1 if zeros[1] else 0
        return all(row is not None and row.count(value_branch) <= 1 for row in masks)

    def _is_zero(self, instruction: Instruction, position: int) -> bool:
        return self.flow.number(self.flow.operand(instruction, position)) == 0

    def _origin(
        self, instruction: Instruction, parts: list[tuple[Array, HloValue | None]]
    ) -> tuple[str, tuple[Frame, ...]]:
        """Returns the name and the source lines of a collective.

        Falls back to those of its operand, then to those of its callers.
        """
        _, largest = max(parts, key=lambda part: part[0].bytes)
        operand = [largest.instruction] if largest is not None else []
        sources = (value.instruction for value in (self.flow.behind(largest) if largest else ()))
        callers = self.module.callers.get(instruction.computation, [])
        inline = [caller for caller in callers if caller.opcode != "while"]
        # A combined collective has a merged or arbitrary name, and a send has none of its own.
        is_combined = len(instruction.operands) > 1
        own = (*(operand if is_combined else []), instruction, *inline)
        fallback = ("", ())
        # A name without source lines is only a fallback.
        for candidate in itertools.chain(own, sources, callers):
            if candidate.op_name and (frames := tuple(self.module.frames(candidate))):
                return candidate.op_name, frames
            fallback = fallback if fallback[0] else (candidate.op_name, ())
        return fallback

    def around_collectives(self) -> set[Instruction]:
        """Returns all instructions that run collectives, directly or indirectly."""
        found: set[Instruction] = set()
        stack = list(self.homes)
        while stack:
            for caller in self.module.callers.get(stack.pop(), []):
                if caller not in found:
                    found.add(caller)
                    stack.append(caller.computation)
        return found


def _result(instruction: Instruction) -> Shape:
    """Returns the shape of the result of a collective or of its `-start` operation."""
    shape = read_shape(instruction.shape)
    # A send returns `(operand, ...)`.
    if instruction.opcode == "send":
        return shape if isinstance(shape, Array) else shape[0]
    if not instruction.opcode.endswith("-start") or isinstance(shape, Array) or len(shape) < 2:
        return shape
    # A start returns `(operands, results, ...)`; only that of an all-reduce may return its results.
    if instruction.opcode == "all-reduce-start" and isinstance(shape[0], Array):
        return shape
    return shape[1]
