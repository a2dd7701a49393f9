"""The collectives of a compiled program: what each carries, between whom, and how often."""

import dataclasses
import itertools
import re
from typing import NamedTuple

from jaxmp._hlo._devices import OnDevices
from jaxmp._hlo._flow import Flow, Value
from jaxmp._hlo._groups import Groups, read_groups
from jaxmp._hlo._shapes import Array, Shape, arrays_in, read_shape
from jaxmp._hlo._text import Frame, Instruction, Module

KINDS = (
    *("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"),
    "collective-broadcast",
)
_OPCODES = {kind: kind for kind in KINDS} | {"ragged-all-to-all": "all-to-all"}
_REDUCERS = {
    **{"add": "add", "maximum": "max", "minimum": "min", "multiply": "mul"},
    **{"and": "and", "or": "or", "xor": "xor"},
}
# In a reducing computation, what is not the reduction.
_NO_REDUCERS = ("parameter", "convert", "copy", "bitcast", "constant", "reduce-precision")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What one collective carries in one dtype.

    Attributes:
      kind: one of `KINDS`.
      dtype: what it carries.
      arrays: how many arrays it carries; compilers combine collectives.
      elements: the numbers of the whole arrays, in one run: the operand of an all-reduce and of a
        reduce-scatter, the result of an all-gather, what each device sends in the others.
      bytes: the size of these.
      runs: how often it runs; loops of unknown length count once.
      is_exact: whether there is no such loop around it.
      groups: which positions of the device assignment take part together.
      reducer: `"add"`, `"max"`, ...; `"mixed"` if it is more than one operation; `"select"` for an
        addition in which all but one device put in zeros; `""` where nothing is reduced.
      op_name: JAX's name of the operation, with its scopes.
      frames: its source lines, the innermost first.
    """

    kind: str
    dtype: str
    arrays: int
    elements: int
    bytes: int
    runs: int
    is_exact: bool
    groups: Groups
    reducer: str
    op_name: str
    frames: tuple[Frame, ...]


class Program(NamedTuple):
    """What was read from the text of a program.

    Attributes:
      devices: how many devices it runs on.
      transfers: its collectives, in the order of the text.
      unknown_loops: how many loops around collectives have an unknown length.
      conditionals: how many conditionals have collectives in a branch.
      sends: how many sends to other devices there are beside the collectives.
    """

    devices: int
    transfers: tuple[Transfer, ...]
    unknown_loops: int
    conditionals: int
    sends: int


def read_program(text: str) -> Program:
    """Reads the collectives from the text of a compiled program.

    Args:
      text: as `compiled.as_text()` or a dump of the compiler has it.

    Returns:
      What was found.

    Raises:
      ValueError: for replica groups that are written in an unknown way.
    """
    module = Module(text)
    reader = _Reader(module)
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
    return Program(
        devices=module.devices,
        transfers=tuple(reader.transfers),
        unknown_loops=sum(reader.flow.trips(loop) is None for loop in loops),
        conditionals=sum(i.opcode == "conditional" for i in around.values()),
        sends=len(sends),
    )


class _Reader:
    """Collects transfers, each once."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.flow = Flow(module)
        self.on_devices = OnDevices(self.flow)
        self.transfers: list[Transfer] = []
        self.homes: dict[str, None] = {}  # the computations with collectives
        self._chains: set[tuple[str, ...]] = set()

    def read(self, instruction: Instruction) -> None:
        """Adds a transfer for each thing that an instruction does, if it is a collective."""
        kind = _OPCODES.get(instruction.opcode.removesuffix("-start"))
        if kind is None or self._is_repeated(instruction):
            return
        self.homes[instruction.computation] = None
        groups = read_groups(instruction.structure, self.module.devices)
        # The operand of a reduce-scatter, from its result.
        factor = len(groups[0]) if kind == "reduce-scatter" else 1
        if kind == "all-reduce" and instruction.computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # as the compiler for TPUs writes it
        runs, is_exact = self.flow.runs(instruction.computation)
        carried: dict[tuple[str, str, str], list[tuple[Array, Value | None]]] = {}
        for array, sent in self._parts(instruction):
            key = (*self._meaning(kind, instruction, sent, groups), array.dtype)
            carried.setdefault(key, []).append((array, sent))
        for (meant, reducer, dtype), parts in carried.items():
            arrays = [array for array, _ in parts]
            op_name, frames = self._origin(instruction, parts)
            self.transfers.append(
                Transfer(
                    kind=meant,
                    dtype=dtype,
                    arrays=len(arrays),
                    elements=factor * sum(array.elements for array in arrays),
                    bytes=factor * sum(array.bytes for array in arrays),
                    runs=runs,
                    is_exact=is_exact,
                    groups=groups,
                    reducer=reducer,
                    op_name=op_name,
                    frames=frames,
                )
            )

    def _parts(self, instruction: Instruction) -> list[tuple[Array, Value | None]]:
        """The arrays that a collective carries, each with how its operand was computed."""
        arrays = arrays_in(_result(instruction))
        if len(instruction.operands) != len(arrays):
            return [(array, None) for array in arrays]
        return [self._part(instruction, i, array) for i, array in enumerate(arrays)]

    def _part(
        self, instruction: Instruction, position: int, array: Array
    ) -> tuple[Array, Value | None]:
        value = self.flow.operand(instruction, position)
        if value is not None and value.instruction.opcode == "pad":
            # Zeros that make it divide by the number of devices do not count.
            value = self.flow.operand(value.instruction)
            shape = read_shape(value.instruction.shape) if value is not None else array
            if instruction.opcode.startswith("all-reduce") and isinstance(shape, Array):
                array = shape
        return array, value and self.flow.source(value)

    def _meaning(
        self, kind: str, instruction: Instruction, sent: Value | None, groups: Groups
    ) -> tuple[str, str]:
        """The kind and the reducer of a collective, as far as one of its operands goes."""
        if kind not in ("all-reduce", "reduce-scatter"):
            return kind, ""
        reducer = self._reducer(instruction)
        if reducer == "add" and sent is not None:
            if kind == "all-reduce" and self._is_own_slice(sent, groups):
                return "all-gather", ""
            if self._is_picked(sent, groups):
                return kind, "select"
        return kind, reducer

    def _is_repeated(self, instruction: Instruction) -> bool:
        """Whether this is another step of a collective that was counted.

        The compiler for TPUs spreads one over several fusions, between which it computes.
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

    def _is_own_slice(self, sent: Value, groups: Groups) -> bool:
        """Whether each device puts a slice of its own into zeros, so that the sum gathers.

        The compiler for TPUs gathers small arrays over many devices in this way. Devices that put
        theirs into the same place, as gradients of a slice, are summed.
        """
        update = sent.instruction
        if update.opcode != "dynamic-update-slice" or not self._is_zero(update, 0):
            return False
        indices = [self.flow.operand(update, i) for i in range(2, len(update.operands))]
        return any(self._differs(index, groups) for index in indices)

    def _differs(self, index: Value | None, groups: Groups) -> bool:
        """Whether a number is another one on each device of a group."""
        found = [self.on_devices.numbers(index, group) for group in groups]
        return all(each is not None and len(set(each)) == len(each) for each in found)

    def _is_picked(self, sent: Value, groups: Groups) -> bool:
        """Whether all but one device put in zeros, so that the sum rounds nothing.

        So the partitioner looks up numbers in a table that is split, and takes a slice of which
        one device has all. Its selects have the name of the lookup.
        """
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
        self, instruction: Instruction, parts: list[tuple[Array, Value | None]]
    ) -> tuple[str, tuple[Frame, ...]]:
        """The name and the lines of a collective, or of what it carries or is inside of.

        One that was combined of several has a name made of theirs, or any of them: of these the
        largest array counts.
        """
        _, largest = max(parts, key=lambda part: part[0].bytes)
        sent = [largest.instruction] if largest is not None else []
        behind = (at.instruction for at in (self.flow.behind(largest) if largest else ()))
        callers = self.module.callers.get(instruction.computation, [])
        inline = [caller for caller in callers if caller.opcode != "while"]
        is_combined = len(instruction.operands) > 1
        own = (*(sent if is_combined else []), instruction, *inline)
        found = ("", ())
        for at in itertools.chain(own, behind, callers):
            if at.op_name and (frames := tuple(self.module.frames(at))):
                return at.op_name, frames
            found = found if found[0] else (at.op_name, ())
        return found

    def around(self, computation: str) -> list[Instruction]:
        """All instructions that run a computation, directly or not."""
        found: dict[tuple[str, str], Instruction] = {}
        todo = [computation]
        while todo:
            for caller in self.module.callers.get(todo.pop(), []):
                if (caller.computation, caller.name) not in found:
                    found[caller.computation, caller.name] = caller
                    todo.append(caller.computation)
        return list(found.values())


def _result(instruction: Instruction) -> Shape:
    """The shape of what a collective gives, also where its start is an operation of its own.

    Such a start gives `(operands, results, ...)`; only that of an all-reduce can be the result.
    """
    shape = read_shape(instruction.shape)
    if not instruction.opcode.endswith("-start") or isinstance(shape, Array) or len(shape) < 2:
        return shape
    if instruction.opcode == "all-reduce-start" and isinstance(shape[0], Array):
        return shape
    return shape[1]
