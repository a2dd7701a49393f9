"""Runs a step by its plan: the passes of its loops over layers, and what comes between them."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._gradient_release.plan import LayerPart, ReleasePlan, Turn
from jaxmp._gradient_release.slices import run_on_slices
from jaxmp._gradient_release.values import (
    Constant,
    LayerGradient,
    Loop,
    Operation,
    Result,
    StepValue,
    WholeStep,
)
from jaxmp._program import compat
from jaxmp._program.program import Op


def run_released(step: WholeStep, plan: ReleasePlan, arrays: Iterable[Any]) -> list[Any]:
    """Returns the results of a step, of which the released ones are computed layer by layer."""
    wholes = _Wholes(step, arrays)
    wholes.compute(plan.operations.get(-1, ()))
    for event in range(max([len(step.loops) - 1, *plan.operations, *plan.turns]) + 1):
        loop = step.loops[event % len(step.loops)]
        if event == loop.number or event in plan.turns:
            with _where(loop.op):
                _Pass(wholes, loop, plan.turns.get(event), event == loop.number).run()
        wholes.compute(plan.operations.get(event, ()))
    return list(map(wholes.get, step.results))


class _Wholes:
    """Holds the values of a step that are computed whole."""

    def __init__(self, step: WholeStep, arrays: Iterable[Any]) -> None:
        self._arrays: dict[StepValue, Any] = dict(zip(step.arguments, arrays, strict=True))

    def get(self, value: StepValue) -> Any:
        return value.array if isinstance(value, Constant) else self._arrays[value]

    def add(self, values: Iterable[StepValue], arrays: Iterable[Any]) -> None:
        self._arrays.update(zip(values, arrays, strict=True))

    def compute(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            with _where(operation.op):
                arrays = operation.run(list(map(self.get, operation.operands)))
            self.add(operation.results, arrays)


def _where(op: Op) -> Any:
    return compat.where(op.equation, op.stack, op.traceback)


_NOTHING = Turn({}, LayerPart([], []), [], {})


class _Pass:
    """Runs a loop over layers, with sums over layers and results of the step in its body.

    Attributes:
      others: results of the loop that are stacked as before, in its first pass.
      stacked: the results of the step that are stacked.
    """

    def __init__(self, wholes: _Wholes, loop: Loop, turn: Turn | None, is_first: bool) -> None:
        self.wholes, self.loop, self.plan, self.is_first = wholes, loop, turn or _NOTHING, is_first
        self.wiring = loop.op.wiring
        self.body = core.jaxpr_as_fun(loop.op.params["jaxpr"])
        stacks = loop.stacked if is_first else []
        self.others = [x for x in stacks if not isinstance(x, LayerGradient)]
        results = [x for part in self.plan.updates for x, _ in part.results]
        self.stacked = [x for x in results if x not in self.plan.written]

    def run(self) -> None:
        """Runs the loop, and adds its results to the values that are whole."""
        wiring, operands, whole = self.wiring, self.loop.operands, self.wholes.get
        arguments = list(self.plan.written.values())
        init = [whole(operands[i]) for i in wiring.carry], list(map(whole, arguments))
        # A slice of what the loop writes to must be read from there, or it is copied.
        sliced = {i: whole(operands[i]) for i in wiring.slices if operands[i] not in arguments}
        layers = jnp.arange(self.loop.turns, dtype=jnp.int32), sliced
        unroll = self.loop.op.params["unroll"]
        results = lax.scan(self.turn, init, layers, reverse=wiring.reverse, unroll=unroll)
        (carry, arrays), (others, parts, stacked) = results
        if self.is_first:
            self.wholes.add(self.loop.carried, carry)
        self.wholes.add(self.others, others)
        for value, part in zip(self.plan.sums, parts, strict=True):
            self.wholes.add([value], [_run_sum(value, part, axes=(0,))])
        self.wholes.add(self.plan.written, arrays)
        self.wholes.add(self.stacked, stacked)

    def turn(self, carry: Any, layer: Any) -> Any:
        """Runs a turn of the loop, then what is computed of its layer."""
        (carry, arrays), (number, sliced) = carry, layer
        stacks: dict[StepValue, Any] = dict(zip(self.plan.written.values(), arrays, strict=True))

        def operand(i: int) -> Any:
            value = self.loop.operands[i]
            if i in self.wiring.carry:
                return carry[i - self.wiring.carry.start]
            if i in sliced:
                return sliced[i]
            if i in self.wiring.slices:
                return lax.dynamic_index_in_dim(stacks[value], number, keepdims=False)
            return self.wholes.get(value)

        results = self.body(*map(operand, range(len(self.loop.operands))))
        slices = _Slices(self.wholes, number, stacks)
        for gradient in self.loop.gradients:
            slices.add(gradient, 0, results[gradient.number][None])
        operands = slices.compute(self.plan.operands)
        parts = [_run_sum(value, x) for value, x in zip(self.plan.sums, operands, strict=True)]
        updates: dict[StepValue, Any] = {}
        update: list[Any] = []
        for part in self.plan.updates:
            # One param after the other: its float32 state is gone before the next one's is there.
            # And a TPU's compiler fails where it merges the 8-bit codes of two params.
            slices.wait(part.gradient, update)
            update = slices.compute(part)
            updates.update((x, y) for (x, _), y in zip(part.results, update, strict=True))
        for value, stack in self.plan.written.items():
            stacks[stack] = lax.dynamic_update_slice_in_dim(
                stacks[stack], updates[value], number, 0
            )
        others = [results[x.number] for x in self.others]
        stacked = [updates[x][0] for x in self.stacked]
        new_carry = results[: len(self.wiring.carry)], list(stacks.values())
        return new_carry, (others, parts, stacked)


def _run_sum(value: Result, operand: Any, **changed: Any) -> Any:
    """Runs the operation of a sum over layers."""
    with _where(value.operation.op):
        return compat.bind(value.operation.op.equation, [operand], **changed)[0]


class _Slices:
    """Holds slices of values in one turn of a loop: arrays with one entry along an axis.

    Attributes:
      wholes: the values that are computed whole.
      layer: the number of the layer.
      stacks: the arguments of the step that the loop carries.
    """

    def __init__(self, wholes: _Wholes, layer: Any, stacks: dict[StepValue, Any]) -> None:
        self.wholes, self.layer, self.stacks = wholes, layer, stacks
        self._slices: dict[tuple[StepValue, int], Any] = {}

    def add(self, value: StepValue, axis: int, array: Any) -> None:
        self._slices[value, axis] = array

    def get(self, value: StepValue, axis: int) -> Any:
        if (value, axis) not in self._slices:
            is_carried = axis == 0 and value in self.stacks
            stack = self.stacks[value] if is_carried else self.wholes.get(value)
            self.add(value, axis, lax.dynamic_slice_in_dim(stack, self.layer, 1, axis))
        return self._slices[value, axis]

    def wait(self, gradient: StepValue | None, arrays: list[Any]) -> None:
        """Lets a gradient wait for other arrays."""
        if arrays and gradient is not None:
            waiting = lax.optimization_barrier((self.get(gradient, 0), *arrays))
            self.add(gradient, 0, waiting[0])

    def compute(self, part: LayerPart) -> list[Any]:
        """Returns the slices of the results of a part."""
        for operation, axis, axes in part.operations:
            operands = [
                self.wholes.get(operand) if place is None else self.get(operand, place)
                for operand, place in zip(operation.operands, axes, strict=True)
            ]
            with _where(operation.op):
                slices = run_on_slices(operation.op.equation, operands, axis, self.layer)
            for result, array in zip(operation.results, slices, strict=True):
                self.add(result, axis, array)
        return [self.get(value, axis) for value, axis in part.results]
