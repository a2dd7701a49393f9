"""Computes before a loop what each turn would compute again from the same arrays.

Compilers do so for what a loop does not change at all. They do not for a loop in a loop: a scan
over microbatches around a scan over layers rounds each weight to float8 once for each microbatch.
Only operations of `HOISTED` move, with the moves of data before them, so that large arrays
that are cheap to compute are not stored.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxmp._program import compat
from jaxmp._program.control_flow import bodies_to_extend, call_again, scan_again
from jaxmp._program.evaluate import Interpreter, evaluate
from jaxmp._program.op_classes import HOISTED, PLAIN_MOVES
from jaxmp._program.program import Op, read
from jaxmp._program.wiring import Wiring, loop_of


class Invariant(NamedTuple):
    """The results of an operation that runs before the loop.

    Attributes:
      arrays: the results.
      stacked: for each scan inside the loop that the operation was in, outermost first, whether
        they are those of all turns of it, stacked.
    """

    arrays: list[Any]
    stacked: tuple[bool, ...] = ()


# By the number of the operation, in the order of the program and of the programs inside.
Invariants = dict[int, Invariant]


def with_hoisted(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of pytrees whose scans get their invariants from outside of the loop.

    >>> import jax.numpy as jnp
    >>> with_hoisted(lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), 0.0, x))(jnp.ones(3))[0]
    Array(3., dtype=float32)
    """

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = evaluate(read(closed), jax.tree.leaves(args), _HoistInterpreter())
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call


class _HoistInterpreter(Interpreter[Any]):
    """Runs a program, and the invariants of each of its scans before the scan."""

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        loop = loop_of(op.equation)
        if loop is None or not _count_hoistable([op.equation]):
            return compat.bind(op.equation, operands)
        consts = [x if i < loop.carry.start else None for i, x in enumerate(operands)]
        return _rerun_scan(op.equation, operands, _evaluate_in_scan(op.equation, loop, consts))


def _count_hoistable(equations: Sequence[core.JaxprEqn]) -> int:
    """Returns how many operations may move."""
    bodies = [compat.open_jaxpr(body) for eqn in equations for body in bodies_to_extend(eqn)]
    inside = sum(_count_hoistable(body.eqns) for body in bodies)
    return sum(eqn.primitive.name in HOISTED for eqn in equations) + inside


class _InvariantInterpreter(Interpreter[Any]):
    """Computes the invariants of a program. Values that vary from turn to turn are None."""

    def __init__(self) -> None:
        self.number = 0
        self.invariants: Invariants = {}

    def where(self, op: Op) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        is_ready = all(value is not None for value in operands)
        if op.name in HOISTED or (op.name in PLAIN_MOVES and is_ready):
            results = compat.bind(op.equation, operands) if is_ready else [None] * len(op.outputs)
            if op.name in HOISTED:
                self.invariants |= {self.number: Invariant(results)} if is_ready else {}
                self.number += 1
            return results
        loop = loop_of(op.equation)
        for body in bodies_to_extend(op.equation):
            if loop is None:
                invariants = _evaluate_invariants(body, operands)
            else:
                invariants = _evaluate_in_scan(op.equation, loop, operands)
            self.invariants |= {self.number + i: x for i, x in invariants.items()}
            self.number += _count_hoistable(compat.open_jaxpr(body).eqns)
        return [None] * len(op.outputs)


def _evaluate_invariants(body: Any, arguments: Sequence[Any]) -> Invariants:
    """Computes the invariants of a program, from those of its arguments that are not None."""
    interpreter = _InvariantInterpreter()
    evaluate(read(body), arguments, interpreter)
    return interpreter.invariants


def _evaluate_in_scan(equation: core.JaxprEqn, loop: Wiring, operands: Sequence[Any]) -> Invariants:
    """Computes the invariants of all turns of an inner scan, stacked; once if turns are alike."""
    (body,) = compat.bodies_of(equation)
    fixed = [x if i < loop.carry.start else None for i, x in enumerate(operands)]
    same = _evaluate_invariants(body, fixed)
    invariants = {i: Invariant(x.arrays, (False, *x.stacked)) for i, x in same.items()}
    stacks = [operands[i] for i in loop.slices if operands[i] is not None]
    stacked: dict[int, tuple[bool, ...]] = {}

    def turn(slices: list[Any]) -> dict[int, list[Any]]:
        arguments, slices_left = list(fixed), iter(slices)
        for i in loop.slices:
            arguments[i] = None if operands[i] is None else next(slices_left)
        each_turn = _evaluate_invariants(body, arguments)
        stacked.update((i, x.stacked) for i, x in each_turn.items())
        return {i: x.arrays for i, x in each_turn.items() if i not in same}

    arrays_of_turns = jax.vmap(turn)(stacks) if stacks else {}
    return invariants | {i: Invariant(x, (True, *stacked[i])) for i, x in arrays_of_turns.items()}


class _RerunInterpreter(Interpreter[Any]):
    """Runs a program whose invariants are there already."""

    def __init__(self, invariants: Invariants) -> None:
        self.number, self.invariants = 0, invariants

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        first, count = self.number, _count_hoistable([op.equation])
        self.number += count
        invariants = {
            i - first: x for i, x in self.invariants.items() if first <= i < first + count
        }
        if not invariants:
            return compat.bind(op.equation, operands)
        if op.name in HOISTED:
            return invariants[0].arrays
        rerun = _rerun_call if loop_of(op.equation) is None else _rerun_scan
        return rerun(op.equation, operands, invariants)


def _rerun_call(
    equation: core.JaxprEqn, operands: Sequence[Any], invariants: Invariants
) -> list[Any]:
    """Runs a jit or a checkpoint again, with its invariants as arguments."""
    (body,) = compat.bodies_of(equation)

    def function(operands: Sequence[Any], arrays: dict[int, list[Any]]) -> list[Any]:
        inside = {i: x._replace(arrays=arrays[i]) for i, x in invariants.items()}
        return evaluate(read(body), operands, _RerunInterpreter(inside))

    arrays = {i: x.arrays for i, x in invariants.items()}
    return list(call_again(equation, operands, arrays, function))


def _rerun_scan(
    equation: core.JaxprEqn, operands: Sequence[Any], invariants: Invariants
) -> list[Any]:
    """Runs a scan again, with its invariants: stacked, or the same in each turn."""
    (body,) = compat.bodies_of(equation)
    stacks = {i: x.arrays for i, x in invariants.items() if x.stacked[:1] == (True,)}

    def turn(arguments: list[Any], slices: dict[int, list[Any]]) -> tuple[list[Any], Any]:
        inside = {
            i: Invariant(slices.get(i, x.arrays), x.stacked[1:]) for i, x in invariants.items()
        }
        return evaluate(read(body), arguments, _RerunInterpreter(inside)), ()

    return scan_again(equation, operands, turn, stacks)[0]
