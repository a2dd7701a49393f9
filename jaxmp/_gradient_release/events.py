"""When values of a step can be there, whole or as slices of layers.

The loops over layers run in passes: each loop once, and again if an update waits for a sum over
all layers. An event is a loop in a pass: `pass * number of loops + number of the loop`. What is
there before the first loop has the event -1.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxmp._gradient_release.slices import Axes, operand_axes
from jaxmp._gradient_release.values import (
    LayerGradient,
    Loop,
    LoopResult,
    Operation,
    Result,
    StepValue,
    WholeStep,
)
from jaxmp._program.op_classes import CHOICES, REDUCTIONS


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Coupled:
    """In place of an event: the value needs gradients of all layers at once.

    Attributes:
      reader: what reads all of them; the gradients themselves if another loop reads them, or the
        step returns them.
      gradients: these.
      why: what the reader does with them.
    """

    reader: Operation | Loop | LayerGradient
    gradients: frozenset[LayerGradient]
    why: str = "reads them"


Event = int | Coupled


@dataclasses.dataclass(frozen=True)
class LayerSum:
    """A sum over layers: the loop that adds it up, the axis of layers, and the event."""

    loop: Loop
    axis: int
    event: int


class Events:
    """The events of all values of a step.

    Attributes:
      sums: the sums over layers.
      operations: the events after which the operations can run on whole arrays.
    """

    def __init__(self, step: WholeStep) -> None:
        self.step = step
        self.sums: dict[Result, LayerSum] = {}
        self.operations: dict[Operation, Event] = {}
        self._slices: dict[tuple[StepValue, int, Loop], Event] = {}
        self._first: dict[tuple[StepValue, int, Loop], LayerGradient] = {}
        # Operations come in order, so those of the operands are known.
        last_effect: Event = -1
        for operation in step.operations:
            layer_sum = self._layer_sum(operation)
            if layer_sum is not None:
                self.sums[operation.results[0]] = layer_sum
            for loop in loops_of(*operation.results):
                self._add_slices(operation, loop)
            # Effects stay in order.
            effects = operation.op.equation.effects
            event = self._of_operation(operation, last_effect if effects else -1)
            self.operations[operation] = event
            last_effect = event if effects else last_effect

    def whole(self, value: StepValue) -> Event:
        """Returns the event after which a value is there."""
        if isinstance(value, LayerGradient):
            return Coupled(value, value.gradients)
        if isinstance(value, Result):
            layer_sum = self.sums.get(value)
            return self.operations[value.operation] if layer_sum is None else layer_sum.event
        return value.loop.number if isinstance(value, LoopResult) else -1

    def slice(self, value: StepValue, axis: int, loop: Loop) -> Event:
        """Returns the event after which a loop can compute one layer of a value."""
        if isinstance(value, LayerGradient):
            is_here = axis == 0 and value.loop is loop
            return -1 if is_here else Coupled(value, value.gradients)
        return self._slices.get((value, axis, loop), self.whole(value))

    def first_gradient(
        self, value: StepValue, axis: int | None, loop: Loop
    ) -> LayerGradient | None:
        """Returns the first gradient whose layers lie along an axis of a value, or None.

        Where layers lie is followed from the gradients: other axes may be as long.
        """
        if isinstance(value, LayerGradient):
            return value if axis == 0 and value.loop is loop else None
        return None if axis is None else self._first.get((value, axis, loop))

    def of_layers(self, value: StepValue, axis: int, loop: Loop) -> int | None:
        """Returns the event of a slice along the axis of the layers; None along other axes."""
        event = self.slice(value, axis, loop)
        has_layers = self.first_gradient(value, axis, loop) is not None
        return event if has_layers and isinstance(event, int) else None

    def operand_axes(self, operation: Operation, axis: int) -> Axes:
        """Returns how the operands are cut for a slice of the results; None if these are whole."""
        return None if operation.results[0] in self.sums else operand_axes(operation, axis)

    def next(self, loop: Loop, event: int) -> int:
        """Returns the first event of a loop after an event."""
        return event + 1 + (loop.number - event - 1) % len(self.step.loops)

    def _add_slices(self, operation: Operation, loop: Loop) -> None:
        for axis in range(len(operation.results[0].aval.shape)):
            axes = self.operand_axes(operation, axis)
            if axes is None:
                continue
            pairs = list(zip(operation.operands, axes, strict=True))
            events = [
                self.whole(operand) if place is None else self.slice(operand, place, loop)
                for operand, place in pairs
            ]
            firsts = [self.first_gradient(operand, place, loop) for operand, place in pairs]
            gradients = [gradient for gradient in firsts if gradient is not None]
            for result in operation.results if gradients else ():
                key = result, axis, loop
                self._slices[key] = _latest(events)
                self._first[key] = min(gradients, key=lambda gradient: gradient.number)

    def _of_operation(self, operation: Operation, first: Event) -> Event:
        """Returns the event after which an operation can run, which is not before the first."""
        event = _latest([first, *map(self.whole, operation.operands)])
        if isinstance(event, Coupled):
            # What reads all layers of a value that is there layer by layer is what couples them.
            wholes = [self.whole(x) for x in operation.operands if self._is_in_slices(x)]
            coupled = [event for event in wholes if isinstance(event, Coupled)]
            gradients = frozenset[LayerGradient]().union(*(x.gradients for x in coupled))
            return Coupled(operation, gradients) if coupled else event
        return event

    def _is_in_slices(self, value: StepValue) -> bool:
        """Whether each layer of a value with gradients can be computed by itself."""
        axes = range(len(value.aval.shape))
        events = (self.of_layers(value, axis, x) for x in loops_of(value) for axis in axes)
        return any(event is not None for event in events)

    def _layer_sum(self, operation: Operation) -> LayerSum | None:
        if operation.op.name not in REDUCTIONS - CHOICES:
            return None
        (operand,) = operation.operands
        for loop in loops_of(operand):
            for axis in operation.op.params["axes"]:
                event = self.of_layers(operand, axis, loop)
                if event is not None:
                    return LayerSum(loop, axis, self.next(loop, event))
        return None


def loops_of(*values: StepValue) -> Sequence[Loop]:
    """Returns the loops whose gradients values depend on, in order."""
    loops = {gradient.loop for value in values for gradient in value.gradients}
    return sorted(loops, key=lambda loop: loop.number)


def _latest(events: Iterable[Event]) -> Event:
    """Returns the last event; if something is never there, why."""
    last = -1
    for event in events:
        if isinstance(event, Coupled):
            return event
        last = max(last, event)
    return last
