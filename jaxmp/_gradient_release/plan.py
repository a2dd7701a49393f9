"""What runs when: in each turn of a loop over layers, and between the loops."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from jaxmp._gradient_release.events import Coupled, Events, loops_of
from jaxmp._gradient_release.values import (
    Argument,
    Constant,
    LayerGradient,
    Loop,
    Operation,
    Result,
    StepValue,
    WholeStep,
    nbytes,
)

SlicedOperation = tuple[Operation, int, list[int | None]]


@dataclasses.dataclass(frozen=True)
class LayerPart:
    """What one turn of a loop computes of its layer, from slices of values.

    Attributes:
      operations: the operations, in order; the axes of layers in their results, and in each of
        their operands, of which others are read whole.
      results: the values that are wanted of them, and their axes.
      gradient: the first gradient that they come from; None for sums.
    """

    operations: list[SlicedOperation]
    results: list[tuple[StepValue, int]]
    gradient: LayerGradient | None = None


@dataclasses.dataclass
class Turn:
    """What each turn of a loop computes in an event.

    Attributes:
      sums: the sums over layers of which each turn adds its part.
      operands: the operands of these.
      updates: the results of the step, param by param.
      written: the results that are written over arguments of the step, and these.
    """

    sums: dict[Result, int]
    operands: LayerPart
    updates: list[LayerPart]
    written: dict[StepValue, Argument]


@dataclasses.dataclass
class ReleasePlan:
    """What runs when.

    Attributes:
      operations: the operations on whole arrays after each event; -1 is before the first loop.
      turns: what the loops compute of layers, for each event in which there is something.
      coupled: results that cannot be computed, and why.
    """

    operations: dict[int, list[Operation]]
    turns: dict[int, Turn]
    coupled: list[Coupled]


def plan_of(step: WholeStep) -> ReleasePlan:
    """Returns the plan of a step."""
    return _Planner(step).plan()


class _Planner:
    """Decides what is computed by layers, then follows what that needs, from the results back.

    Attributes:
      events: when values can be there.
      released: the results of the step that each loop computes, and what they wait for.
      wholes: the values that are computed whole.
      slices: the axes and loops in which a value is computed by layers.
    """

    def __init__(self, step: WholeStep) -> None:
        self.step, self.events = step, Events(step)
        self.released: dict[Loop, dict[StepValue, int]] = {loop: {} for loop in step.loops}
        self.wholes: set[StepValue] = set()
        self.slices: dict[StepValue, set[tuple[int, Loop]]] = defaultdict(set)

    def plan(self) -> ReleasePlan:
        coupled = [x for value in dict.fromkeys(self.step.results) for x in self.decide(value)]
        for operation in self.step.operations:
            if operation.op.equation.effects:
                self.wholes.update(operation.operands)
                event = self.events.operations[operation]
                coupled += [event] if isinstance(event, Coupled) else []
        for loop in self.step.loops:
            coupled += self.delays(loop)
        if coupled:
            return ReleasePlan({}, {}, coupled)
        for loop in self.step.loops:
            self.wholes.update(loop.operands)
        for operation in reversed(self.step.operations):
            self.follow(operation)
        turns, coupled = self.turns()
        return ReleasePlan(self.operations(), turns, coupled)

    def decide(self, value: StepValue) -> list[Coupled]:
        """Decides how a result of the step is computed; returns why it cannot be."""
        if isinstance(value, LayerGradient):
            return [Coupled(value, value.gradients)]
        obstacles = []
        for loop in loops_of(value):
            if self.events.first_gradient(value, 0, loop) is not None:
                event = self.events.slice(value, 0, loop)
                if not isinstance(event, Coupled):
                    self.released[loop][value] = event
                    self.slices[value].add((0, loop))
                    return []
                obstacles.append(event)
        event = self.events.whole(value)
        if isinstance(event, Coupled):
            return [*obstacles, event][:1]
        self.wholes.add(value)
        return []

    def delays(self, loop: Loop) -> list[Coupled]:
        """Returns why a loop cannot run in its turn: what it reads comes too late, or never."""
        coupled = []
        for event in map(self.events.whole, loop.operands):
            if isinstance(event, Coupled):
                coupled.append(event)
            elif event >= loop.number:
                gradients = frozenset(x for loop in self.step.loops for x in loop.gradients)
                why = "waits for an effect, such as a print, which waits for them"
                coupled.append(Coupled(loop, gradients, why))
        return coupled

    def follow(self, operation: Operation) -> None:
        """Asks for the operands of an operation, if its results are asked for."""
        for result in operation.results:
            for axis, loop in self.slices.get(result, ()):
                axes = self.events.operand_axes(operation, axis)
                if axes is None:
                    self.wholes.add(result)
                    continue
                for operand, place in zip(operation.operands, axes, strict=True):
                    if place is None:
                        self.wholes.add(operand)
                    else:
                        self.ask(operand, place, loop)
        for result in (x for x in operation.results if x in self.wholes):
            layer_sum = self.events.sums.get(result)
            if layer_sum is None:
                self.wholes.update(operation.operands)
            else:
                self.ask(operation.operands[0], layer_sum.axis, layer_sum.loop)

    def ask(self, value: StepValue, axis: int, loop: Loop) -> None:
        """Asks for one layer of a value."""
        self.slices[value].add((axis, loop))
        if isinstance(value, (Result, LayerGradient, Constant)):
            return
        if not (isinstance(value, Argument) and axis == 0):
            self.wholes.add(value)

    def operations(self) -> dict[int, list[Operation]]:
        """Returns the operations on whole arrays."""
        operations: dict[int, list[Operation]] = defaultdict(list)
        for operation in self.step.operations:
            is_read = not self.wholes.isdisjoint(operation.results)
            is_sum = not self.events.sums.keys().isdisjoint(operation.results)
            if (is_read or operation.op.equation.effects) and not is_sum:
                event = self.events.operations[operation]
                if isinstance(event, int):  # as of all that is read, when nothing is coupled
                    operations[event].append(operation)
        return operations

    def turns(self) -> tuple[dict[int, Turn], list[Coupled]]:
        """Returns what loops compute in each event, and sums that are too large."""
        sums: dict[int, dict[Result, int]] = defaultdict(dict)
        last = {
            loop: self.events.next(loop, max([-1, *waits.values()]))
            for loop, waits in self.released.items()
        }
        most, size = self.step.small_bytes(), 0
        coupled: list[Coupled] = []
        for value, layer_sum in self.events.sums.items():
            if value in self.wholes:
                sums[layer_sum.event][value] = layer_sum.axis
                # Results are written over arguments, so no later pass may read these.
                last[layer_sum.loop] = max(last[layer_sum.loop], layer_sum.event)
                size += nbytes(value) * layer_sum.loop.turns
                if size > most:
                    why = f"makes the sums of all layers {size:,} bytes, of at most {most:,.0f}"
                    coupled.append(Coupled(value.operation, value.gradients, why))
        events = {event: self.step.loops[event % len(self.step.loops)] for event in sums}
        events |= {event: loop for loop, event in last.items()}
        turns = {
            event: self.turn(loop, sums[event], event == last[loop])
            for event, loop in sorted(events.items(), key=lambda x: x[0])
        }
        return turns, coupled

    def turn(self, loop: Loop, sums: dict[Result, int], is_last: bool) -> Turn:
        known: set[tuple[Operation, int]] = set()
        operands = [(x.operation.operands[0], axis) for x, axis in sums.items()]
        part = LayerPart(self.operations_of(operands, known), operands)
        released = list(self.released[loop]) if is_last else []
        first = {x: self.events.first_gradient(x, 0, loop) for x in released}
        updates = []
        for gradient in loop.gradients:
            values = [(x, 0) for x in released if first[x] is gradient]
            if values:
                updates.append(LayerPart(self.operations_of(values, known), values, gradient))
        return Turn(sums, part, updates, self.written(loop, released))

    def written(self, loop: Loop, released: Iterable[StepValue]) -> dict[StepValue, Argument]:
        """Returns the argument of the step that each result is written over, of the same type.

        Results and arguments come in the order of the step, in which JAX pairs donated arguments
        with results too.
        """
        read = [x for x in self.step.arguments if (0, loop) in self.slices.get(x, ())]
        written: dict[StepValue, Argument] = {}
        for result in released:
            types = result.aval.shape, result.aval.dtype
            fitting = [x for x in read if (x.aval.shape, x.aval.dtype) == types]
            free = [x for x in fitting if x not in written.values()]
            if free:
                written[result] = free[0]
        return written

    def operations_of(
        self, values: list[tuple[StepValue, int]], known: set[tuple[Operation, int]]
    ) -> list[SlicedOperation]:
        """Returns the operations that make slices of values, in order, without those known."""
        waiting, operations = list(values), list[SlicedOperation]()
        while waiting:
            value, axis = waiting.pop()
            if not isinstance(value, Result) or (value.operation, axis) in known:
                continue
            axes = self.events.operand_axes(value.operation, axis)
            if axes is None:
                continue
            known.add((value.operation, axis))
            operations.append((value.operation, axis, axes))
            pairs = zip(value.operation.operands, axes, strict=True)
            waiting += [(operand, place) for operand, place in pairs if place is not None]
        return sorted(operations, key=lambda x: x[0].number)
