"""Reads the collectives of a compiled program: their data, device groups and number of runs."""

import dataclasses
import itertools
import re
from typing import NamedTuple

from jaxmp._tools.hlo.dataflow import Flow, HloValue, OnDevices
from jaxmp._tools.hlo.parser import Array, Frame, Instruction, Module, Shape, arrays_in, read_shape
from jaxmp._tools.hlo.products import HloFloat8Product, float8_products
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
      is_exact: whether no loop of unknown length encloses the collective.
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
    is_exact: bool
    groups: Groups
    between_slices: bool
    reducer: str
    op_name: str
    frames: tuple[Frame, ...]


class CompiledProgram(NamedTuple):
    """The collectives and float8 products of a program, read from its text.

    Attributes:
      devices: how many devices the program runs on; of several TPU slices, the devices of one.
      slices: how many TPU slices communicate with each other.
      transfers: the collectives, in the order of the text.
      unknown_loops: how many loops around collectives have an unknown length.
      conditionals: how many conditionals have collectives in a branch.
      sends: how many sends to other devices the program has besides the collectives.
      float8: the products with float8 operands, in the order of the text.
    """

    devices: int
    slices: int
    transfers: tuple[Transfer, ...]
    unknown_loops: int
    conditionals: int
    sends: int
    float8: tuple[HloFloat8Product, ...]


def read_program(text: str) -> CompiledProgram:
    """Reads the collectives from the text of a compiled program.

    Args:
      text: the output of `compiled.as_text()`, or a compiler dump.

    Returns:
      The collectives and their context.

    Raises:
      ValueError: if the replica groups have an unknown syntax, or a collective between slices.
    """
    module = Module(text)
    reader = _TransferReader(module)
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            reader.read(instruction)
    around = {(i.computation, i.name): i for name in reader.homes for i in reader.around(name)}
    loops = [i for i in around.values() if i.opcode == "while"]
    sends = [
        instruction
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "send" and "is_host_transfer=true" not in instruction.attributes
    ]
    return CompiledProgram(
        devices=module.devices,
        slices=reader.slices.count,
        transfers=tuple(reader.transfers),
        unknown_loops=sum(reader.flow.trips(loop) is None for loop in loops),
        conditionals=sum(i.opcode == "conditional" for i in around.values()),
        sends=len(sends),
        float8=tuple(float8_products(reader.flow)) if "f8e" in text else (),
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
        self._chains: set[tuple[str, ...]] = set()

    def read(self, instruction: Instruction) -> None:
        """Adds the transfers of an instruction, if it is a collective.

        Adds one for each kind, reducer and dtype among its operands.
        """
        found = self.slices.sent(instruction) or self._within_slice(instruction)
        if found is None or self._is_repeated(instruction):
            return
        self.homes[instruction.computation] = None
        runs, is_exact = self.flow.runs(instruction.computation)
        carried: dict[tuple[str, str, str], list[tuple[Array, HloValue | None]]] = {}
        for array, sent in self._parts(instruction):
            key = (*self._meaning(found, sent), array.dtype)
            carried.setdefault(key, []).append((array, sent))
        for (meant, reducer, dtype), parts in carried.items():
            arrays = [array for array, _ in parts]
            op_name, frames = self._origin(instruction, parts)
            self.transfers.append(
                Transfer(
                    kind=meant,
                    dtype=dtype,
                    arrays=len(arrays),
                    elements=found.factor * sum(array.elements for array in arrays),
                    bytes=found.factor * sum(array.bytes for array in arrays),
                    runs=runs,
                    is_exact=is_exact,
                    groups=found.groups,
                    between_slices=found.between_slices,
                    reducer=reducer,
                    op_name=op_name,
                    frames=frames,
                )
            )

    def _within_slice(self, instruction: Instruction) -> Exchange | None:
        """Returns what an instruction does, if it is a collective of the devices of one slice."""
        kind = _OPCODES.get(instruction.opcode.removesuffix("-start"))
        if kind is None:
            return None
        groups = read_groups(instruction.structure, self.module.devices)
        # The operand of a reduce-scatter is larger than its result by this factor.
        factor = len(groups[0]) if kind == "reduce-scatter" else 1
        if kind == "all-reduce" and instruction.computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # the TPU compiler writes it this way
        reducer = self._reducer(instruction) if kind in ("all-reduce", "reduce-scatter") else ""
        return Exchange(kind, reducer, groups, factor, between_slices=False)

    def _parts(self, instruction: Instruction) -> list[tuple[Array, HloValue | None]]:
        """Returns the arrays that a collective carries, each with the source of its operand."""
        arrays = arrays_in(_result(instruction))
        if len(instruction.operands) != len(arrays) and instruction.opcode != "send":
            return [(array, None) for array in arrays]
        return [self._part(instruction, i, array) for i, array in enumerate(arrays)]

    def _part(
        self, instruction: Instruction, position: int, array: Array
    ) -> tuple[Array, HloValue | None]:
        value = self.flow.operand(instruction, position)
        if value is not None and value.instruction.opcode == "pad":
            # Do not count the zeros that pad the array to a multiple of the number of devices.
            value = self.flow.operand(value.instruction)
            shape = read_shape(value.instruction.shape) if value is not None else array
            if instruction.opcode.startswith("all-reduce") and isinstance(shape, Array):
                array = shape
        return array, value and self.flow.source(value)

    def _meaning(self, found: Exchange, sent: HloValue | None) -> tuple[str, str]:
        """Returns the effective kind and reducer of a collective for one of its operands."""
        if found.reducer == "add" and sent is not None:
            everywhere = self._in_all_slices(found)
            if found.kind == "all-reduce" and self._is_own_slice(sent, everywhere):
                return "all-gather", ""
            if self._is_picked(sent, everywhere, found.between_slices):
                return found.kind, "select"
        return found.kind, found.reducer

    def _in_all_slices(self, found: Exchange) -> Groups:
        """Returns the groups of a collective in every slice: each slice does the same."""
        if found.between_slices:
            return found.groups
        starts = range(0, self.slices.count * self.module.devices, self.module.devices)
        return tuple(tuple(start + i for i in group) for start in starts for group in found.groups)

    def _is_repeated(self, instruction: Instruction) -> bool:
        """Whether this is a further step of a collective that was counted already.

        The TPU compiler spreads a collective over several fusions, with other computation between.
        """
        if '"async_collective_fusion_config"' not in instruction.attributes:
            return False
        chain = re.search(r'chain_id="(\d+)"', instruction.structure)
        number = re.search(r"channel_id=(\d+)", instruction.structure)
        groups = instruction.structure.partition("replica_groups=")[2].partition(", dim")[0]
        around = [i.computation for i in self.module.callers.get(instruction.computation, [])]
        parts = [found.group() if found else "" for found in (chain, number)]
        key = (instruction.opcode, *parts, groups, *around[:1])
        is_repeated = key in self._chains
        self._chains.add(key)
        return is_repeated

    def _reducer(self, instruction: Instruction) -> str:
        for name in instruction.called:
            inside = self.module.computations.get(name)
            found = {i.opcode for i in inside.instructions.values()} if inside else set()
            reducers = found.difference(_NO_REDUCERS)
            if len(reducers) == 1:
                (one,) = reducers
                return _REDUCERS.get(one, "mixed")
        return "mixed"

    def _is_own_slice(self, sent: HloValue, groups: Groups) -> bool:
        """Whether each device writes its own slice into zeros, so that the sum is a gather.

        The TPU compiler gathers small arrays over many devices this way. If devices write to the
        same place, as for gradients of a slice, the sum is a real sum.
        """
        update = sent.instruction
        if update.opcode != "dynamic-update-slice" or not self._is_zero(update, 0):
            return False
        indices = [self.flow.operand(update, i) for i in range(2, len(update.operands))]
        return any(self._differs(index, groups) for index in indices)

    def _differs(self, index: HloValue | None, groups: Groups) -> bool:
        """Whether a number differs between all devices of each group."""
        found = [self.on_devices.numbers(index, group) for group in groups]
        return all(each is not None and len(set(each)) == len(each) for each in found)

    def _is_picked(self, sent: HloValue, groups: Groups, between_slices: bool) -> bool:
        """Whether all but one device contribute zeros, so that the sum rounds nothing.

        The partitioner does this to look up numbers in a sharded table, and to take a slice that
        lies on one device. The selects of a lookup are named after it.
        """
        # What slices send each other, they have picked among their own devices before.
        while between_slices and sent.instruction.opcode in ("all-reduce", "reduce-scatter"):
            before = self.flow.operand(sent.instruction)
            if before is None:
                return False
            sent = self.flow.source(before)
            groups = (tuple(range(self.slices.count * self.module.devices)),)
        select = sent.instruction
        zeros = [self._is_zero(select, i) for i in (1, 2)] if select.opcode == "select" else []
        if not any(zeros):
            return False
        if select.op_name.endswith("/gather"):
            return True
        mask = self.flow.operand(select)
        found = [self.on_devices.numbers(mask, group) for group in groups]
        putting_in = 1 if zeros[1] else 0
        return all(each is not None and each.count(putting_in) <= 1 for each in found)

    def _is_zero(self, instruction: Instruction, position: int) -> bool:
        return self.flow.number(self.flow.operand(instruction, position)) == 0

    def _origin(
        self, instruction: Instruction, parts: list[tuple[Array, HloValue | None]]
    ) -> tuple[str, tuple[Frame, ...]]:
        """Returns the name and the source lines of a collective.

        Falls back to those of its operand, then to those of its callers. A combined collective has
        a merged or arbitrary name, so the operand of its largest array comes first.
        """
        _, largest = max(parts, key=lambda part: part[0].bytes)
        sent = [largest.instruction] if largest is not None else []
        behind = (at.instruction for at in (self.flow.behind(largest) if largest else ()))
        callers = self.module.callers.get(instruction.computation, [])
        inline = [caller for caller in callers if caller.opcode != "while"]
        is_combined = len(instruction.operands) > 1  # or a send, which has no name of its own
        own = (*(sent if is_combined else []), instruction, *inline)
        found = ("", ())
        for at in itertools.chain(own, behind, callers):
            if at.op_name and (frames := tuple(self.module.frames(at))):
                return at.op_name, frames
            found = found if found[0] else (at.op_name, ())
        return found

    def around(self, computation: str) -> list[Instruction]:
        """Returns all instructions that run a computation, directly or indirectly."""
        found: dict[tuple[str, str], Instruction] = {}
        todo = [computation]
        while todo:
            for caller in self.module.callers.get(todo.pop(), []):
                if (caller.computation, caller.name) not in found:
                    found[caller.computation, caller.name] = caller
                    todo.append(caller.computation)
        return list(found.values())


def _result(instruction: Instruction) -> Shape:
    """Returns the shape of the result of a collective or of its `-start` operation.

    A start returns `(operands, results, ...)`; only an `all-reduce-start` may return the result
    directly. A send returns its operand first.
    """
    shape = read_shape(instruction.shape)
    if instruction.opcode == "send":
        return shape if isinstance(shape, Array) else shape[0]
    if not instruction.opcode.endswith("-start") or isinstance(shape, Array) or len(shape) < 2:
        return shape
    if instruction.opcode == "all-reduce-start" and isinstance(shape[0], Array):
        return shape
    return shape[1]
