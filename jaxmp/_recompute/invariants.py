"""Keeps small what the turns of a loop share: a mask that is broadcast stays in the loop.

JAX runs before a loop what no turn changes, and hands it in (`_scan_known_hoisting` in jax 0.10).
An array that was broadcast is then written once, and read in each turn, though the compiler would
make it in the kernel that needs it: for an H100, the mask of a causal attention and the constant
behind it are a third of what the product of queries and keys moves.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax

from jaxmp._numerics.dtypes import nbytes_of
from jaxmp._primitives.tied import tied
from jaxmp._program import compat
from jaxmp._program.evaluate import Interpreter, evaluate
from jaxmp._program.op_classes import REPEATS, Cost
from jaxmp._program.program import Op, Program, numbers, plain_call, read
from jaxmp._recompute.storage import cost_of

# In bytes. What is smaller takes less time to move than a kernel to start.
_SMALLEST = 2**16


def with_invariants_inside(body: Any, count: int, avals: Sequence[Any]) -> Any:
    """Returns the body of a loop, in which what repeats the loop's constants depends on the turn.

    Args:
      body: the body, whose first `count` arguments no turn changes.
      count: how many these are.
      avals: the types of the arguments.
    """
    program = read(body, plain_call)
    repeats = _repeats(program, count)
    # The smallest argument that changes from turn to turn: keys have no plain arrays.
    sizes = {i: nbytes_of(x) for i, x in enumerate(avals) if i >= count}
    if not repeats or not sizes:
        return body
    turn = min(sizes, key=lambda i: sizes[i])

    def run(*arrays: Any) -> list[Any]:
        return evaluate(program, arrays, _TiedRepeats(repeats, arrays[turn]))

    return compat.trace(run, avals)


def _repeats(program: Program, count: int) -> set[int]:
    """Returns the operations that make large arrays of smaller ones that no turn changes."""
    invariant = {*program.inputs[:count], *(number for number, _ in program.consts)}
    ops = []
    for op in program.ops:
        if not op.equation.effects and invariant.issuperset(numbers(op.inputs)):
            invariant.update(op.outputs)
            ops.append(op)
    # What a dear operation needs runs before the loop, with it.
    needed = set[int]()
    repeats = set[int]()
    for op in reversed(ops):
        if cost_of(op.equation) is not Cost.CHEAP or not needed.isdisjoint(op.outputs):
            needed.update(numbers(op.inputs))
        elif op.name == "iota" or op.name in REPEATS:
            before = sum(nbytes_of(program.avals[number]) for number in set(numbers(op.inputs)))
            after = sum(nbytes_of(program.avals[number]) for number in op.outputs)
            if after >= max(_SMALLEST, 2 * before):
                repeats.add(op.number)
    return repeats


@dataclasses.dataclass(frozen=True)
class _TiedRepeats(Interpreter[Any]):
    """Runs a body; ties what is repeated in these operations to an array of the turn."""

    repeats: set[int]
    turn: Any

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        if op.number not in self.repeats:
            return compat.bind(op.equation, operands)
        if op.name == "iota":
            shape, axis = op.params["shape"], op.params["dimension"]
            counted = tied(lax.iota(op.params["dtype"], shape[axis]), self.turn)
            return [lax.broadcast_in_dim(counted, shape, (axis,))]
        return compat.bind(op.equation, [tied(x, self.turn) for x in operands])
