"""Follows values through a program: where they come from, and how often loops run."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxmp._hlo._text import Instruction, Module, Operand

# What hands a value on without computing anything new.
_PASSED_ON = (
    *("bitcast", "copy", "reshape", "transpose", "convert", "copy-start", "copy-done"),
    *("opt-barrier", "optimization-barrier"),
)
_INLINE = ("fusion", "call")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_STEPS = 500


class Value(NamedTuple):
    """The result of an instruction, or one element of it."""

    instruction: Instruction
    element: int | None = None

    def of(self, element: int | None) -> "Value":
        """An element of this, if this is a whole value."""
        return Value(self.instruction, element) if self.element is None else self


class Runs(NamedTuple):
    """How often a computation runs in one execution of the program.

    Attributes:
      times: the number, with every loop of unknown length counted once.
      is_exact: whether there is no such loop around it.
    """

    times: int
    is_exact: bool


class Flow:
    """Answers questions about values of a program.

    Args:
      module: the program.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._runs: dict[str, Runs] = {}
        self._trips: dict[tuple[str, str], int | None] = {}

    def operand(self, instruction: Instruction, position: int = 0) -> Value | None:
        """One operand of an instruction."""
        operands = instruction.operands
        return self._of(instruction, operands[position]) if position < len(operands) else None

    def _of(self, user: Instruction, operand: Operand) -> Value | None:
        found = self.module.find(user.computation, operand.name)
        return Value(found, operand.element) if found else None

    def source(self, value: Value, *, leave_loops: bool = True) -> Value:
        """The value that was computed, behind casts, copies, tuples, calls and fusions.

        Args:
          value: where to start.
          leave_loops: whether what a loop never changes is looked up before the loop.

        Returns:
          The last value that can be followed.
        """
        for _ in range(_STEPS):
            before = self._step(value, leave_loops)
            if before is None:
                break
            value = before
        return value

    def _step(self, value: Value, leave_loops: bool) -> Value | None:
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
            return Value(root, element) if root else None
        if instruction.opcode == "parameter":
            return self._argument(value, leave_loops)
        return None

    def _argument(self, value: Value, leave_loops: bool) -> Value | None:
        """What the one caller of a computation hands to it."""
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

    def _initial(self, loop: Instruction, element: int | None) -> Value | None:
        operand = self.operand(loop)
        return operand.of(element) if operand and operand.element is None else None

    def _is_kept(self, loop: Instruction, element: int | None) -> bool:
        """Whether a loop hands on an element of its state as it is."""
        body = _attribute(loop, "body")
        root = self.module.root(body)
        if root is None or element is None:
            return False
        last = self.source(Value(root, element), leave_loops=False)
        is_state = last.instruction.opcode == "parameter" and last.element == element
        return is_state and last.instruction.computation == body

    def behind(self, value: Value) -> Iterator[Value]:
        """All values that a value is computed from, itself first."""
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

    def number(self, value: Value | None) -> float | None:
        """The number that a value is, if it is a constant, also where it fills an array."""
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
        """How often a while loop runs its body, or None if the program does not say.

        The compiler for GPUs writes it down. The one for TPUs does not, and a program just after
        partitioning does not have it yet: there the loops of scans are recognised, which count up
        to a constant.
        """
        if known := _TRIP_COUNT.search(loop.attributes):
            return int(known.group(1))
        root = self.module.root(_attribute(loop, "condition"))
        compare = root and self.source(Value(root), leave_loops=False).instruction
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
        step = self._step_of(Value(body, counter.element))
        if start is None or step is None or step <= 0:
            return None
        return max(0, math.ceil((limit - start) / step))

    def _step_of(self, counter: Value) -> float | None:
        """By how much a loop's counter grows."""
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
        """How often a computation runs."""
        if computation not in self._runs:
            self._runs[computation] = Runs(1, True)  # for a program that calls itself
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
        """As `trip_count`, each loop looked into once."""
        key = (loop.computation, loop.name)
        if key not in self._trips:
            self._trips[key] = self.trip_count(loop)
        return self._trips[key]


def _attribute(instruction: Instruction, name: str) -> str:
    found = re.search(rf"\b{name}=%?([\w.\-]+)", instruction.structure)
    return found.group(1) if found else ""
