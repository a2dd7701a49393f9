"""Traces values back to their sources, counts loop runs, and evaluates integers per device."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jaxmp._tools.hlo.parser import Array, Instruction, Module, Operand, read_shape

# Opcodes that pass a value on without computing a new one.
_PASSED_ON = (
    *("bitcast", "copy", "reshape", "transpose", "convert", "copy-start", "copy-done"),
    *("opt-barrier", "optimization-barrier"),
)
_INLINE = ("fusion", "call")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_STEPS = 500


class HloValue(NamedTuple):
    """The result of an instruction, or one element of it."""

    instruction: Instruction
    element: int | None = None

    def of(self, element: int | None) -> "HloValue":
        """Returns an element of this value, or the value itself if it is an element already."""
        return HloValue(self.instruction, element) if self.element is None else self


class Runs(NamedTuple):
    """The number of runs of a computation in one execution of the program.

    Attributes:
      times: the number of runs; every loop of unknown length counts once.
      is_exact: whether no loop of unknown length encloses the computation.
    """

    times: int
    is_exact: bool


class Flow:
    """The dataflow of a program.

    Args:
      module: the program.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._runs: dict[str, Runs] = {}
        self._trips: dict[tuple[str, str], int | None] = {}

    def operand(self, instruction: Instruction, position: int = 0) -> HloValue | None:
        """Returns one operand of an instruction, or None if it is unknown."""
        operands = instruction.operands
        return self._of(instruction, operands[position]) if position < len(operands) else None

    def _of(self, user: Instruction, operand: Operand) -> HloValue | None:
        found = self.module.find(user.computation, operand.name)
        return HloValue(found, operand.element) if found else None

    def source(self, value: HloValue, *, leave_loops: bool = True) -> HloValue:
        """Follows a value back through casts, copies, tuples, calls and fusions.

        Args:
          value: where to start.
          leave_loops: whether to follow loop-invariant values to before the loop.

        Returns:
          The value where the trail ends, usually the one that was computed.
        """
        for last in self.trail(value, leave_loops=leave_loops):
            value = last
        return value

    def trail(self, value: HloValue, *, leave_loops: bool = True) -> Iterator[HloValue]:
        """Yields a value, and then what `source` goes back through, up to where it ends."""
        at: HloValue | None = value
        for _ in range(_STEPS):
            if at is None:
                return
            yield at
            at = self._step(at, leave_loops)

    def _step(self, value: HloValue, leave_loops: bool) -> HloValue | None:
        instruction, element = value
        if instruction.opcode in _PASSED_ON:
            operand = self.operand(instruction)
            return operand and operand.of(element)
        if instruction.opcode == "get-tuple-element" and element is None:
            operand = self.operand(instruction)
            number = re.search(r"\bindex=(\d+)", instruction.attributes)
            if operand is None or number is None or operand.element is not None:
                return None
            return operand.of(int(number.group(1)))
        if instruction.opcode == "tuple" and element is not None:
            return self.operand(instruction, element)
        if instruction.opcode in _INLINE and instruction.called:
            root = self.module.root(instruction.called[0])
            return HloValue(root, element) if root else None
        if instruction.opcode == "parameter":
            return self._argument(value, leave_loops)
        return None

    def _argument(self, value: HloValue, leave_loops: bool) -> HloValue | None:
        """Returns the argument that a computation gets, if it has a single caller."""
        parameter, element = value
        callers = self.module.callers.get(parameter.computation, [])
        if len(callers) != 1 or not parameter.argument.isdigit():
            return None
        (caller,) = callers
        if caller.opcode in _INLINE:
            operand = self.operand(caller, int(parameter.argument))
            return operand and operand.of(element)
        if caller.opcode == "while" and leave_loops and self._is_kept(caller, element):
            return self._initial(caller, element)
        return None

    def _initial(self, loop: Instruction, element: int | None) -> HloValue | None:
        operand = self.operand(loop)
        return operand.of(element) if operand and operand.element is None else None

    def _is_kept(self, loop: Instruction, element: int | None) -> bool:
        """Whether a loop leaves an element of its state unchanged."""
        body = _attribute(loop, "body")
        root = self.module.root(body)
        if root is None or element is None:
            return False
        last = self.source(HloValue(root, element), leave_loops=False)
        is_state = last.instruction.opcode == "parameter" and last.element == element
        return is_state and last.instruction.computation == body

    def behind(self, value: HloValue) -> Iterator[HloValue]:
        """Yields a value, and then all values that it is computed from."""
        seen: set[tuple[str, str, int | None]] = set()
        todo = [value]
        while todo and len(seen) < _STEPS:
            at = self.source(todo.pop())
            key = (at.instruction.computation, at.instruction.name, at.element)
            if key not in seen:
                seen.add(key)
                yield at
                operands = at.instruction.operands if at.instruction.opcode != "while" else ()
                todo += [v for o in operands if (v := self._of(at.instruction, o))]

    def number(self, value: HloValue | None) -> float | None:
        """Returns the number of a constant, or of an array filled with one; otherwise None."""
        if value is None:
            return None
        at = self.source(value)
        while at.instruction.opcode == "broadcast" and (found := self.operand(at.instruction)):
            at = self.source(found)
        if at.instruction.opcode != "constant":
            return None
        try:
            return float(at.instruction.argument)
        except ValueError:
            return None

    def trip_count(self, loop: Instruction) -> int | None:
        """Returns how often a while loop runs its body, or None if that is unknown.

        The GPU compiler writes the count into the program. The TPU compiler does not, and neither
        does a program right after partitioning. There, loops of scans are recognised: their
        counter goes up to a constant.
        """
        if known := _TRIP_COUNT.search(loop.attributes):
            return int(known.group(1))
        root = self.module.root(_attribute(loop, "condition"))
        compare = root and self.source(HloValue(root), leave_loops=False).instruction
        if compare is None or "direction=LT" not in compare.attributes:
            return None
        counter, limit = self.operand(compare), self.number(self.operand(compare, 1))
        if counter is None or limit is None:
            return None
        counter = self.source(counter)
        body = self.module.root(_attribute(loop, "body"))
        if counter.instruction.opcode != "parameter" or counter.element is None or body is None:
            return None
        start = self.number(self._initial(loop, counter.element))
        step = self._step_of(HloValue(body, counter.element))
        if start is None or step is None or step <= 0:
            return None
        return max(0, math.ceil((limit - start) / step))

    def _step_of(self, counter: HloValue) -> float | None:
        """Returns the increment of a loop's counter."""
        last = self.source(counter, leave_loops=False).instruction
        if last.opcode != "add":
            return None
        parts = [self.operand(last, 0), self.operand(last, 1)]
        numbers = [self.number(part) for part in parts]
        for number, other in zip(numbers, reversed(parts), strict=True):
            if number is not None and other is not None:
                state = self.source(other, leave_loops=False)
                if state.instruction.opcode == "parameter" and state.element == counter.element:
                    return number
        return None

    def runs(self, computation: str) -> Runs:
        """Returns how often a computation runs."""
        if computation not in self._runs:
            self._runs[computation] = Runs(1, True)  # ends the recursion if it calls itself
            callers = self.module.callers.get(computation, [])
            if callers:
                each = [self._runs_of(caller) for caller in callers]
                total = sum(runs.times for runs in each)
                self._runs[computation] = Runs(total, all(runs.is_exact for runs in each))
        return self._runs[computation]

    def _runs_of(self, caller: Instruction) -> Runs:
        times, is_exact = self.runs(caller.computation)
        if caller.opcode != "while":
            return Runs(times, is_exact)
        trips = self.trips(caller)
        return Runs(times, False) if trips is None else Runs(times * trips, is_exact)

    def trips(self, loop: Instruction) -> int | None:
        """Returns the cached `trip_count` of a loop."""
        key = (loop.computation, loop.name)
        if key not in self._trips:
            self._trips[key] = self.trip_count(loop)
        return self._trips[key]


def _attribute(instruction: Instruction, name: str) -> str:
    found = re.search(rf"\b{name}=%?([\w.\-]+)", instruction.structure)
    return found.group(1) if found else ""


_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": lambda a, b: a // b if b else 0,
    "remainder": lambda a, b: a % b if b else 0,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shift-left": lambda a, b: a << min(b, 64),
    "shift-right-logical": lambda a, b: a >> min(b, 64),
}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    **{"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt},
    **{"LE": operator.le, "GT": operator.gt, "GE": operator.ge},
}
_DEPTH = 60


class OnDevices:
    """An evaluator of integers that depend only on the device number.

    Args:
      flow: the dataflow of the program.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def numbers(self, value: HloValue | None, devices: Iterable[int]) -> list[int] | None:
        """Computes a number on several devices.

        Args:
          value: a scalar, or an array filled with one.
          devices: positions of devices.

        Returns:
          The numbers, or None if they depend on anything but the device number.
        """
        found = [self._compute(value, device, _DEPTH) for device in devices]
        numbers = [each[0] for each in found if each is not None and len(each) == 1]
        return numbers if len(numbers) == len(found) else None

    def _compute(self, value: HloValue | None, device: int, depth: int) -> list[int] | None:
        """Computes a number (as a list of one), or the numbers of a table; None if unknown."""
        if value is None or depth == 0:
            return None
        at = self.flow.source(value).instruction
        # Devices are numbered partition by partition. `jax.jit` makes a single replica of them.
        partitions = self.flow.module.partitions
        if at.opcode == "partition-id":
            return [device % partitions]
        if at.opcode == "replica-id":
            return [device // partitions]
        if at.opcode == "custom-call" and 'custom_call_target="SliceId"' in at.structure:
            return [device // partitions]
        if at.opcode == "constant":
            return _constant(at.argument)
        if at.opcode not in (*_BINARY, "broadcast", "compare", "select", "clamp", "dynamic-slice"):
            return None
        operands = [self.flow.operand(at, i) for i in range(len(at.operands))]
        inner = [self._compute(operand, device, depth - 1) for operand in operands]
        if at.opcode == "broadcast":
            return inner[0]
        if at.opcode == "dynamic-slice":
            return _looked_up(inner, read_shape(at.shape))
        scalars = [each[0] for each in inner if each is not None and len(each) == 1]
        if len(scalars) != len(inner):
            return None
        return _scalar(at.opcode, at.attributes, scalars)


def _scalar(opcode: str, attributes: str, numbers: list[int]) -> list[int] | None:
    if opcode in _BINARY and len(numbers) == 2:
        return [_BINARY[opcode](*numbers)]
    direction = re.search(r"\bdirection=(\w\w)", attributes)
    if opcode == "compare" and direction and len(numbers) == 2:
        return [int(_COMPARED[direction.group(1)](*numbers))]
    if opcode == "select" and len(numbers) == 3:
        return [numbers[1] if numbers[0] else numbers[2]]
    if opcode == "clamp" and len(numbers) == 3:
        return [min(max(numbers[0], numbers[1]), numbers[2])]
    return None


def _looked_up(inner: list[list[int] | None], result: object) -> list[int] | None:
    """Looks up one number in a table; the partitioner keeps device coordinates in such tables."""
    is_one = isinstance(result, Array) and result.elements == 1
    if not is_one or len(inner) != 2 or inner[0] is None or inner[1] is None:
        return None
    table, (index,) = inner[0], inner[1][:1]
    return [table[min(max(index, 0), len(table) - 1)]]


def _constant(text: str) -> list[int] | None:
    """Parses a constant: `5`, `true` or `{0, 1, 0, 1}`."""
    words = re.findall(r"[^\s{},]+", text)
    numbers = [{"true": "1", "false": "0"}.get(word, word) for word in words]
    return [int(n) for n in numbers] if all(re.fullmatch(r"-?\d+", n) for n in numbers) else None
