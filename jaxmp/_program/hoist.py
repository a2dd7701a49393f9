"""Computes before a loop what each turn would compute again from the same arrays.

Compilers do so for what a loop does not change at all. They do not for a loop in a loop: a scan
over microbatches around a scan over layers rounds each weight to float8 once for each microbatch.
Only operations of `HOISTED` move, with the moves of data before them, so that nothing large is kept
which was cheap to compute.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxmp._program import compat
from jaxmp._program.control_flow import call_again, entered, scan_again
from jaxmp._program.evaluate import Rules, evaluate
from jaxmp._program.op_classes import HOISTED, PLAIN_MOVES
from jaxmp._program.program import Op, read
from jaxmp._program.wiring import Wiring, loop_of


class _Hoisted(NamedTuple):
    """The results of an operation that runs before the loop.

    Attributes:
      arrays: the results.
      stacked: for each scan inside the loop that the operation was in, outermost first, whether
        they are those of all turns of it, stacked.
    """

    arrays: list[Any]
    stacked: tuple[bool, ...] = ()


# By the number of the operation, in the order of the program and of the programs inside.
_Ready = dict[int, _Hoisted]


def with_hoisted(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of pytrees whose scans find ready what is the same in each turn.

    >>> import jax.numpy as jnp
    >>> with_hoisted(lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), 0.0, x))(jnp.ones(3))[0]
    Array(3., dtype=float32)
    """

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = evaluate(read(closed), jax.tree.leaves(args), _Hoisting())
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call


class _Hoisting(Rules[Any]):
    """Runs a program; of its own scans, what is the same in each turn runs before."""

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        loop = loop_of(op.equation)
        if loop is None or not _count_movable([op.equation]):
            return compat.bind(op.equation, operands)
        known = [x if i < loop.carry.start else None for i, x in enumerate(operands)]
        return _again_scan(op.equation, operands, _along_a_scan(op.equation, loop, known))


def _count_movable(equations: Sequence[core.JaxprEqn]) -> int:
    """Returns how many operations may move."""
    bodies = [compat.open_jaxpr(body) for each in equations for body in entered(each)]
    inside = sum(_count_movable(body.eqns) for body in bodies)
    return sum(each.primitive.name in HOISTED for each in equations) + inside


class _Computing(Rules[Any]):
    """Computes what may move of a program, from the values that are known; others are None."""

    def __init__(self) -> None:
        self.number = 0
        self.ready: _Ready = {}

    def where(self, op: Op) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        is_ready = all(value is not None for value in operands)
        if op.name in HOISTED or (op.name in PLAIN_MOVES and is_ready):
            results = compat.bind(op.equation, operands) if is_ready else [None] * len(op.outputs)
            if op.name in HOISTED:
                self.ready |= {self.number: _Hoisted(results)} if is_ready else {}
                self.number += 1
            return results
        loop = loop_of(op.equation)
        for body in entered(op.equation):
            inside = (
                _computed(body, operands)
                if loop is None
                else _along_a_scan(op.equation, loop, operands)
            )
            self.ready |= {self.number + i: each for i, each in inside.items()}
            self.number += _count_movable(compat.open_jaxpr(body).eqns)
        return [None] * len(op.outputs)


def _computed(body: Any, known: Sequence[Any]) -> _Ready:
    """Computes what may move of a program, from those of its arguments that are not None."""
    rules = _Computing()
    evaluate(read(body), known, rules)
    return rules.ready


def _along_a_scan(equation: core.JaxprEqn, loop: Wiring, known: Sequence[Any]) -> _Ready:
    """Computes it for all turns of an inner scan, stacked; once where the turns do not differ."""
    (body,) = compat.bodies_of(equation)
    fixed = [x if i < loop.carry.start else None for i, x in enumerate(known)]
    alike = _computed(body, fixed)
    ready = {i: _Hoisted(each.arrays, (False, *each.stacked)) for i, each in alike.items()}
    stacks = [known[i] for i in loop.slices if known[i] is not None]
    stacked: dict[int, tuple[bool, ...]] = {}

    def turn(slices: list[Any]) -> dict[int, list[Any]]:
        arguments, left = list(fixed), iter(slices)
        for i in loop.slices:
            arguments[i] = None if known[i] is None else next(left)
        each_turn = _computed(body, arguments)
        stacked.update((i, each.stacked) for i, each in each_turn.items())
        return {i: each.arrays for i, each in each_turn.items() if i not in alike}

    of_turns = jax.vmap(turn)(stacks) if stacks else {}
    return ready | {i: _Hoisted(x, (True, *stacked[i])) for i, x in of_turns.items()}


class _WithReady(Rules[Any]):
    """Runs a program, without what was computed before."""

    def __init__(self, ready: _Ready) -> None:
        self.number, self.ready = 0, ready

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        first, count = self.number, _count_movable([op.equation])
        self.number += count
        ready = {i - first: x for i, x in self.ready.items() if first <= i < first + count}
        if not ready:
            return compat.bind(op.equation, operands)
        if op.name in HOISTED:
            return ready[0].arrays
        again = _again if loop_of(op.equation) is None else _again_scan
        return again(op.equation, operands, ready)


def _again(equation: core.JaxprEqn, operands: Sequence[Any], ready: _Ready) -> list[Any]:
    """Runs a jit or a checkpoint again, with what was computed before as arguments."""
    (body,) = compat.bodies_of(equation)

    def function(operands: Sequence[Any], arrays: dict[int, list[Any]]) -> list[Any]:
        inside = {i: each._replace(arrays=arrays[i]) for i, each in ready.items()}
        return evaluate(read(body), operands, _WithReady(inside))

    arrays = {i: each.arrays for i, each in ready.items()}
    return list(call_again(equation, operands, arrays, function))


def _again_scan(equation: core.JaxprEqn, operands: Sequence[Any], ready: _Ready) -> list[Any]:
    """Runs a scan again, with what was computed before: stacked, or the same in each turn."""
    (body,) = compat.bodies_of(equation)
    stacks = {i: each.arrays for i, each in ready.items() if each.stacked[:1] == (True,)}

    def turn(arguments: list[Any], slices: dict[int, list[Any]]) -> tuple[list[Any], Any]:
        inside = {
            i: _Hoisted(slices.get(i, each.arrays), each.stacked[1:]) for i, each in ready.items()
        }
        return evaluate(read(body), arguments, _WithReady(inside)), ()

    return scan_again(equation, operands, turn, stacks)[0]
