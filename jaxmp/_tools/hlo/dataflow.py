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
# Opcodes that run a computation once, where they stand.
_INLINE = ("fusion", "call")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Limits the cost of a search, and ends circles, which only a damaged text has.
_STEPS = 500


class HloValue(NamedTuple):
    """The result of an instruction, or one element of it."""

    instruction: Instruction
    element: int | None = None

    def of(self, element: int | None) -> "HloValue":
        """Returns an element of this value, or the value itself if it is an element already."""
        return HloValue(self.instruction, element) if self.element is None else self


class Flow:
    """The dataflow of a program."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._runs: dict[str, int] = {}

    def operand(self, instruction: Instruction, position: int = 0) -> HloValue | None:
        """Returns one operand of an instruction, or None if it is unknown."""
        operands = instruction.operands
        return self._value(instruction, operands[position]) if position < len(operands) else None

    def _value(self, user: Instruction, operand: Operand) -> HloValue | None:
        instruction = self.module.find(user.computation, operand.name)
        return HloValue(instruction, operand.element) if instruction else None

    def source(self, value: HloValue, *, leave_loops: bool = True) -> HloValue:
        """Follows a value back through casts, copies, tuples, calls and fusions to its computation.

        `leave_loops` follows loop-invariant values to before the loop.
        """
        for last in self.trail(value, leave_loops=leave_loops):
            value = last
        return value

    def trail(self, value: HloValue, *, leave_loops: bool = True) -> Iterator[HloValue]:
        """Yields a value, and then what `source` goes back through, up to where it ends."""
        current: HloValue | None = value
        for _ in range(_STEPS):
            if current is None:
                return
            yield current
            current = self._previous(current, leave_loops)

    def _previous(self, value: HloValue, leave_loops: bool) -> HloValue | None:
        """Returns the value that an instruction passes on; None if it computes a new one."""
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
        callers = self.module.callers.get(instruction.computation, [])
        # With several callers, the argument of a parameter depends on which of them runs.
        if instruction.opcode != "parameter" or len(callers) != 1:
            return None
        (caller,) = callers
        if not instruction.argument.isdigit():
            return None
        if caller.opcode in _INLINE:
            operand = self.operand(caller, int(instruction.argument))
            return operand and operand.of(element)
        if caller.opcode == "while" and leave_loops and self._is_invariant(caller, element):
            return self._initial(caller, element)
        return None

    def _initial(self, loop: Instruction, element: int | None) -> HloValue | None:
        operand = self.operand(loop)
        return operand.of(element) if operand and operand.element is None else None

    def _is_invariant(self, loop: Instruction, element: int | None) -> bool:
        """Whether a loop leaves an element of its state unchanged."""
        # The params of a scan are such elements: what the body reads was computed before the loop.
        body = _attribute(loop, "body")
        root = self.module.root(body)
        if root is None or element is None:
            return False
        last = self.source(HloValue(root, element), leave_loops=False)
        is_state = last.instruction.opcode == "parameter" and last.element == element
        return is_state and last.instruction.computation == body

    def behind(self, value: HloValue) -> Iterator[HloValue]:
        """Yields a value, and then all values that it is computed from."""
        seen: set[HloValue] = set()
        stack = [value]
        while stack and len(seen) < _STEPS:
            current = self.source(stack.pop())
            if current not in seen:
                seen.add(current)
                yield current
                # The state of a loop is computed from all that goes into the loop.
                instruction = current.instruction
                operands = instruction.operands if instruction.opcode != "while" else ()
                stack += [v for o in operands if (v := self._value(instruction, o))]

    def number(self, value: HloValue | None) -> float | None:
        """Returns the number of a constant, or of an array filled with one; otherwise None."""
        if value is None:
            return None
        source = self.source(value).instruction
        while source.opcode == "broadcast" and (operand := self.operand(source)):
            source = self.source(operand).instruction
        if source.opcode != "constant":
            return None
        try:
            return float(source.argument)
        except ValueError:  # a table: {0, 1}
            return None

    def trips(self, loop: Instruction) -> int | None:
        """Returns how often a while loop runs its body, or None if that is unknown."""
        if match := _TRIP_COUNT.search(loop.attributes):
            return int(match.group(1))
        # Only the GPU compiler writes the count into the program. The TPU compiler does not, nor
        # does a program right after partitioning. A scan has a counter that goes up to a constant.
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
        step = self._increment(HloValue(body, counter.element))
        if start is None or step is None or step <= 0:
            return None
        return max(0, math.ceil((limit - start) / step))

    def _increment(self, counter: HloValue) -> float | None:
        last = self.source(counter, leave_loops=False).instruction
        if last.opcode != "add":
            return None
        # Compilers write the constant on either side.
        terms = [self.operand(last, 0), self.operand(last, 1)]
        numbers = [self.number(term) for term in terms]
        for number, other in zip(numbers, reversed(terms), strict=True):
            if number is not None and other is not None:
                state = self.source(other, leave_loops=False)
                if state.instruction.opcode == "parameter" and state.element == counter.element:
                    return number
        return None

    def runs(self, computation: str) -> int:
        """Returns how often a computation runs; loops of unknown length count once."""
        if computation not in self._runs:
            self._runs[computation] = 1  # ends the recursion if it calls itself
            if callers := self.module.callers.get(computation):
                self._runs[computation] = sum(map(self._runs_of_caller, callers))
        return self._runs[computation]

    def _runs_of_caller(self, caller: Instruction) -> int:
        trips = self.trips(caller) if caller.opcode == "while" else 1
        return self.runs(caller.computation) * (1 if trips is None else trips)


def _attribute(instruction: Instruction, name: str) -> str:
    match = re.search(rf"\b{name}=%?([\w.\-]+)", instruction.structure)
    return match.group(1) if match else ""


# Device numbers are not negative, so that `//` rounds as HLO does. Python's integers have no width:
# a shift by a large number would fill the memory.
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
    """An evaluator of integers that depend only on the device number."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def numbers(self, value: HloValue | None, devices: Iterable[int]) -> list[int] | None:
        """Computes a scalar, or the number that fills an array, on several devices.

        None if it depends on anything but the device number.
        """
        results = [self._compute(value, device, _DEPTH) for device in devices]
        numbers = [result[0] for result in results if result is not None and len(result) == 1]
        return numbers if len(numbers) == len(results) else None

    def _compute(self, value: HloValue | None, device: int, depth: int) -> list[int] | None:
        """Computes a number (as a list of one), or the numbers of a table; None if unknown."""
        if value is None or depth == 0:
            return None
        source = self.flow.source(value).instruction
        opcode = source.opcode
        # Devices are numbered partition by partition. `jax.jit` makes a single replica of them.
        partitions = self.flow.module.partitions
        if opcode == "partition-id":
            return [device % partitions]
        if opcode == "replica-id":
            return [device // partitions]
        if opcode == "custom-call" and 'custom_call_target="SliceId"' in source.structure:
            return [device // partitions]
        if opcode == "constant":  # `5`, `true` or `{0, 1, 0, 1}`
            words = re.findall(r"[^\s{},]+", source.argument)
            texts = [{"true": "1", "false": "0"}.get(word, word) for word in words]
            is_whole = all(re.fullmatch(r"-?\d+", text) for text in texts)
            return [int(text) for text in texts] if is_whole else None
        if opcode not in (*_BINARY, "broadcast", "compare", "select", "clamp", "dynamic-slice"):
            return None
        operands = [self.flow.operand(source, i) for i in range(len(source.operands))]
        values = [self._compute(operand, device, depth - 1) for operand in operands]
        if opcode == "broadcast":
            return values[0]
        if opcode == "dynamic-slice":
            # The partitioner keeps device coordinates in tables, and looks up one number in them.
            shape = read_shape(source.shape)
            is_number = isinstance(shape, Array) and shape.elements == 1
            if not is_number or len(values) != 2 or values[0] is None or values[1] is None:
                return None
            table, (index,) = values[0], values[1][:1]
            return [table[min(max(index, 0), len(table) - 1)]]
        scalars = [value[0] for value in values if value is not None and len(value) == 1]
        if len(scalars) != len(values):
            return None
        return _scalar(opcode, source.attributes, scalars)


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
