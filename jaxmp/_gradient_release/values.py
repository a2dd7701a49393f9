"""The values of a train step, and what each comes from. Nothing is computed here."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmp._numerics.dtypes import is_floating
from jaxmp._program import compat
from jaxmp._program.evaluate import Interpreter, evaluate
from jaxmp._program.mesh_axes import free_sharding
from jaxmp._program.op_classes import CALLS, CHECKPOINTS, JITS
from jaxmp._program.program import (
    Op,
    Program,
    equations_in,
    numbers,
    plain_call,
    read,
    without_dead_code,
)
from jaxmp._program.wiring import loop_of

# Loops of at most this many turns, which iterate on gradients, are unrolled: Muon's have five.
_UNROLLED_TURNS = 16
# This part of the bytes of gradients may stay whole, such as those of norms, and may be sums of
# layers: those for a norm have few, those for a mean over layers as many as the gradients.
_SMALL = 1 / 16


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class StepValue:
    """A value of the step.

    Attributes:
      aval: its type.
      gradients: the stacked gradients that it depends on.
    """

    aval: Any
    gradients: frozenset["LayerGradient"] = frozenset()


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Argument(StepValue):
    """An argument of the step."""


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Constant(StepValue):
    """An array that the program holds."""

    array: Any


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Result(StepValue):
    """A result of an operation."""

    operation: "Operation"


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class LoopResult(StepValue):
    """A result of a loop over layers, by its number."""

    loop: "Loop"
    number: int


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class LayerGradient(LoopResult):
    """A stack of gradients, to which a loop over layers adds one layer in each turn."""

    def __post_init__(self) -> None:
        self.gradients = frozenset([self])


@dataclasses.dataclass(eq=False, repr=False)
class Operation:
    """An operation, and the function that runs it on arrays.

    Attributes:
      number: its number among the operations of the step.
      op: the operation as the program has it.
      operands: the values that the function takes.
      run: the function.
      results: the values that it returns.
    """

    number: int
    op: Op
    operands: Sequence[StepValue]
    run: Callable[[list[Any]], list[Any]]
    results: list[Result] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """A scan whose stacked results are gradients of layers.

    Attributes:
      number: its number among the loops of the step.
      op: the scan.
      operands: its operands.
      results: its results, the gradients among them.
    """

    number: int
    op: Op
    operands: Sequence[StepValue]
    results: list[LoopResult] = dataclasses.field(default_factory=list)

    @property
    def turns(self) -> int:
        return self.op.wiring.known_turns

    @property
    def carried(self) -> list[LoopResult]:
        return self.results[: len(self.op.wiring.carry)]

    @property
    def stacked(self) -> list[LoopResult]:
        return self.results[len(self.op.wiring.carry) :]

    @property
    def gradients(self) -> list[LayerGradient]:
        return [result for result in self.results if isinstance(result, LayerGradient)]


@dataclasses.dataclass
class WholeStep:
    """A step as values.

    Attributes:
      arguments: the values of its arguments.
      results: the values of its results.
      operations: the operations between them, in order.
      loops: its loops over layers with gradients to release.
    """

    arguments: list[Argument]
    results: list[StepValue]
    operations: list[Operation]
    loops: list[Loop]

    def small_bytes(self, least: float = 2.0**13) -> float:
        """Returns how many bytes are few beside its gradients; of a small model, the least."""
        return max(least, sum(nbytes(x) for loop in self.loops for x in loop.gradients) * _SMALL)


def nbytes(value: StepValue) -> int:
    """Returns the bytes of a value."""
    return math.prod(value.aval.shape) * value.aval.dtype.itemsize


class _InTheOpen(Interpreter[Any]):
    """Runs what is inside of checkpoints, and of functions with shardings, if it has loops."""

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        if not _hides_loops(op):
            return compat.bind(op.equation, operands)
        before, after = compat.jit_shardings(op.params) if op.name in JITS else ([], [])
        if op.params.get("prevent_cse"):
            # As JAX does. Otherwise the compiler would keep what it computed before.
            operands = list(lax.optimization_barrier(operands))
        body = _inlined(compat.bodies_of(op.equation)[0])
        return _constrained(evaluate(body, _constrained(operands, before), self), after)


def _constrained(arrays: list[Any], shardings: Sequence[Any]) -> list[Any]:
    pairs = itertools.zip_longest(arrays, shardings)
    return [x if s is None else lax.with_sharding_constraint(x, free_sharding(s)) for x, s in pairs]


def _hides_loops(op: Op) -> bool:
    inside = equations_in(compat.bodies_of(op.equation))
    return op.name in JITS | CHECKPOINTS and any(map(loop_of, inside))


def in_the_open(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns the program of a step in which no call hides a loop."""
    program = _inlined(closed)
    if not any(map(_hides_loops, program.ops)):
        return closed
    return compat.trace(lambda *arrays: evaluate(program, arrays, _InTheOpen()), closed.in_avals)


def step_of(closed: core.ClosedJaxpr, kept: Iterable[tuple[int, int]]) -> WholeStep:
    """Reads the program of a step.

    Args:
      closed: the program.
      kept: gradients that stay whole: the numbers of their scans in the program, and their numbers
        among the results of these.
    """
    program = _inlined(closed)
    arguments = [Argument(aval=program.avals[input]) for input in program.inputs]
    reader = _StepReader(program, frozenset(kept))
    results = evaluate(program, arguments, reader)
    return WholeStep(arguments, results, reader.operations, reader.loops)


class _StepReader(Interpreter[StepValue]):
    """Reads a program: a cell is the value that an operation would return."""

    def __init__(self, program: Program, kept: frozenset[tuple[int, int]]) -> None:
        self.kept = kept
        self.loops: list[Loop] = []
        self.operations: list[Operation] = []
        # A stack of gradients has the shape of params. Others are activations and metrics.
        self.shapes = {program.avals[number].shape for number in program.inputs}
        # Stacks that another loop reads are residuals, if it is not one of the optimizer. Who reads
        # a loss or a norm reads no stack.
        self.top_ops, self.read_by_loops = set(map(id, program.ops)), set[int]()
        for op in reversed(program.ops):
            is_reader = op.wiring.loops and not _is_iteration(op)
            stacks = {x for x in op.outputs if program.avals[x].ndim}
            if is_reader or not self.read_by_loops.isdisjoint(stacks):
                self.read_by_loops.update(numbers(op.inputs))

    def constant(self, value: Any) -> StepValue:
        return Constant(aval=jax.typeof(value), array=value)

    def where(self, op: Op) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # nothing runs

    def operation(self, op: Op, operands: list[StepValue]) -> list[StepValue]:
        """Returns the results of an operation: what is inside of it, if that reads gradients."""
        run = functools.partial(compat.bind, op.equation)
        if op.name == "optimization_barrier":
            # A value and its own next value may not wait for each other in one turn.
            return [self.add(op, [x], run, [x.aval])[0] for x in operands]
        if any(operand.gradients for operand in operands):
            if op.name in CALLS:
                return evaluate(_inlined(compat.bodies_of(op.equation)[0]), operands, self)
            if op.wiring.chooses and not op.equation.effects:
                return self.choices(op, operands)
            if _is_iteration(op) and not any(operands[i].gradients for i in op.wiring.slices):
                return self.iterations(op, operands)
        elif op.wiring.counted and id(op) in self.top_ops and (loop := self.loop(op, operands)):
            return list(loop.results)
        return self.add(op, operands, run, op.out_avals)

    def loop(self, op: Op, operands: list[StepValue]) -> Loop | None:
        """Returns the loop, if it stacks gradients."""
        loop = Loop(len(self.loops), op, list(map(_behind_barriers, operands)))
        for number, (output, aval) in enumerate(zip(op.outputs, op.out_avals, strict=True)):
            is_stack = number >= len(op.wiring.carry) and output not in self.read_by_loops
            is_gradient = is_stack and is_floating(aval) and aval.shape in self.shapes
            released = is_gradient and (op.number, number) not in self.kept
            kind = LayerGradient if released else LoopResult
            loop.results.append(kind(aval=aval, loop=loop, number=number))
        if not loop.gradients or not _may_run_again(op):
            return None
        self.loops.append(loop)
        return loop

    def choices(self, op: Op, operands: list[StepValue]) -> list[StepValue]:
        """Returns the results of a conditional: those with gradients are selections."""
        branches = [_inlined(body) for body in compat.bodies_of(op.equation)]
        index, arguments = operands[0], operands[1:]
        cases = zip(*(evaluate(branch, arguments, self) for branch in branches), strict=True)
        results: list[StepValue] = [self.selection(op, index, values) for values in cases]
        plain = [i for i, result in enumerate(results) if not result.gradients]
        chosen = [
            _without_waits(branch._replace(outputs=tuple(branch.outputs[i] for i in plain)))
            for branch in branches
        ]
        reads = sorted({n for branch in chosen for n in _reads(branch)})

        def run(arrays: list[Any]) -> list[Any]:
            def runs(branch: Program) -> Callable[[dict[int, Any]], list[Any]]:
                inputs = range(len(branch.inputs))
                return lambda arrays: evaluate(branch, list(map(arrays.get, inputs)), Interpreter())

            places = dict(zip(reads, arrays[1:], strict=True))
            return list(lax.switch(arrays[0], list(map(runs, chosen)), places))

        used = [index, *(arguments[i] for i in reads)]
        avals = [op.out_avals[i] for i in plain]
        for i, result in zip(plain, self.add(op, used, run, avals), strict=True):
            results[i] = result
        return results

    def selection(self, op: Op, index: StepValue, cases: Sequence[StepValue]) -> StepValue:
        """Returns the value that is one of several, as a conditional chooses."""

        def select(index: Any, *cases: Any) -> Any:
            return lax.select_n(index.astype(bool) if len(cases) == 2 else index, *cases)

        avals = [value.aval for value in (index, *cases)]
        with compat.where(op.equation, op.stack, op.traceback):
            program = _inlined(compat.trace(select, avals))
        return evaluate(program, [index, *cases], self)[0]

    def iterations(self, op: Op, operands: list[StepValue]) -> list[StepValue]:
        """Returns the results of a scan that carries gradients for a few turns."""
        wiring, body = op.wiring, _inlined(compat.bodies_of(op.equation)[0])
        turns = range(wiring.known_turns)
        for turn in reversed(turns) if wiring.reverse else turns:
            arguments = list(operands)
            for i in wiring.slices:
                run = functools.partial(_slice_of_turn, turn)
                aval = compat.unstacked(operands[i].aval)
                arguments[i] = self.add(op, [operands[i]], run, [aval])[0]
            operands = list(operands)
            operands[wiring.carry.start : wiring.carry.stop] = evaluate(body, arguments, self)
        return [operands[i] for i in wiring.carry]

    def add(
        self,
        op: Op,
        operands: Sequence[StepValue],
        run: Callable[[list[Any]], list[Any]],
        avals: Iterable[Any],
    ) -> list[StepValue]:
        """Returns the results of an operation, which have these types."""
        operation = Operation(len(self.operations), op, operands, run)
        self.operations.append(operation)
        gradients = frozenset[LayerGradient]().union(*(x.gradients for x in operands))
        operation.results += [
            Result(aval=aval, operation=operation, gradients=gradients) for aval in avals
        ]
        return list(operation.results)


def _behind_barriers(value: StepValue) -> StepValue:
    """Returns the argument behind barriers: a loop that writes over it must read it there."""
    source = value
    while isinstance(source, Result) and source.operation.op.name == "optimization_barrier":
        (source,) = source.operation.operands
    return source if isinstance(source, Argument) else value


def _may_run_again(op: Op) -> bool:
    """Whether a loop may run in several passes: no effects in it but prints."""
    equations = equations_in(compat.bodies_of(op.equation))
    return all(
        str(equation.primitive.name).startswith("debug_")
        for equation in equations
        if equation.effects and not compat.bodies_of(equation)
    )


def _slice_of_turn(turn: int, arrays: list[Any]) -> list[Any]:
    return [lax.index_in_dim(arrays[0], turn, keepdims=False)]


def _is_iteration(op: Op) -> bool:
    """Whether an operation is a scan of few turns that stacks nothing."""
    return (
        op.wiring.counted
        and op.wiring.known_turns <= _UNROLLED_TURNS
        and len(op.outputs) == len(op.wiring.carry)
    )


def _inlined(body: Any) -> Program:
    return without_dead_code(read(body, plain_call))


def _without_waits(program: Program) -> Program:
    """Returns the program without dead code; barriers do not wait for values that nothing reads."""
    alive, ops = set(numbers(program.outputs)), []
    for op in reversed(program.ops):
        if op.name == "optimization_barrier":
            pairs = [pair for pair in zip(op.inputs, op.outputs, strict=True) if pair[1] in alive]
            inputs, outputs = zip(*pairs, strict=True) if pairs else ((), ())
            op = dataclasses.replace(op, inputs=inputs, outputs=outputs)
        if not alive.isdisjoint(op.outputs):
            alive.update(numbers(op.inputs))
            ops.append(op)
    return program._replace(ops=tuple(reversed(ops)))


def _reads(program: Program) -> list[int]:
    """Returns the numbers of the arguments that a program without dead code reads."""
    atoms = {atom for op in program.ops for atom in numbers(op.inputs)}
    atoms.update(numbers(program.outputs))
    return [i for i, number in enumerate(program.inputs) if number in atoms]
