"""The evaluator: runs a program on cells, as an interpreter says.

A cell stands for a value of the program: the array that the program computes, that array and a
float32 one, or an array that comes later. The interpreter says what a cell is, and how one
operation runs on cells. Every transformation of jaxmp is such an interpreter, and all of them run
in this loop. docs/transformations.md writes one from scratch.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import jax
from jax.extend import core

from jaxmp._program import compat
from jaxmp._program.control_flow import rebind
from jaxmp._program.derivatives import Primal, with_derivative, with_passes
from jaxmp._program.op_classes import CONTROL_FLOW, CUSTOM_DERIVATIVES
from jaxmp._program.parts import PartCache, ProgramPart, divide_program
from jaxmp._program.program import PART, Op, Program, last_reads, read

Cell = TypeVar("Cell")
# The cells of one run of a program, by the numbers of its values.
Cells = dict[int, Cell]


class Interpreter(Generic[Cell]):
    """How operations run on cells. In this class cells are arrays, and all runs as it was traced.

    Control flow runs again around its programs, which run by the same interpreter. So do functions
    with derivatives of their own, and their derivatives. Where cells are not arrays, override both.

    Attributes:
      forgets: whether a cell is dropped once nothing reads it any more, to free its memory.
      shared: what equal parts of programs share, in interpreters that do not forget and whose
        cells are trees of arrays; None if each operation runs by itself.
    """

    forgets = False
    shared: PartCache | None = None

    def variant(self, op: Op) -> Hashable:
        """Returns how an operation runs, beyond its equation and its cells; None for unlike all."""
        return ()

    def constant(self, value: Any) -> Cell:
        """Returns the cell of an array that the program holds."""
        return value

    def literal(self, literal: core.Literal) -> Cell:
        """Returns the cell of a number that is written in the program."""
        return self.constant(compat.number(literal))

    def where(self, op: Op) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which an operation runs: its scopes, lines and mesh."""
        return compat.where(op.equation, op.stack, op.traceback)

    def read(self, atom: int | core.Literal, cells: Cells[Cell]) -> Cell:
        """Returns the cell of an operand."""
        return self.literal(atom) if isinstance(atom, core.Literal) else cells[atom]

    def operands(self, op: Op, cells: Cells[Cell]) -> list[Cell]:
        """Returns the cells that an operation reads."""
        return [self.read(atom, cells) for atom in op.inputs]

    def operation(self, op: Op, operands: list[Cell]) -> list[Cell]:
        """Runs an operation, and returns the cells of its results."""
        if op.name in CONTROL_FLOW:
            bodies = compat.bodies_of(op.equation)
            makers = [functools.partial(self.traced, op, body) for body in bodies]
            return rebind(op.equation, operands, makers)
        if op.name in CUSTOM_DERIVATIVES:
            return self.with_own_derivative(op)(operands)
        return compat.bind(op.equation, operands)

    def results(self, program: Program, cells: Cells[Cell]) -> list[Cell]:
        """Returns the cells of the results of a program."""
        return [self.read(atom, cells) for atom in program.outputs]

    def inside(self, op: Op, body: Any, arguments: Sequence[Cell]) -> list[Cell]:
        """Runs a program inside of an operation."""
        return evaluate(read(body), arguments, self)

    def traced(self, op: Op, body: Any, avals: list[Any]) -> core.ClosedJaxpr:
        """Traces a program inside of an operation, as this interpreter runs it on arrays."""
        return compat.trace(lambda *arrays: self.inside(op, body, arrays), avals)

    def with_own_derivative(self, op: Op) -> Primal:
        """Returns a call of a function whose own derivative runs by this interpreter too."""
        primal = functools.partial(self.inside, op, op.params["call_jaxpr"])

        def run(program: Any, by: Sequence[int], arguments: list[Any]) -> list[Any]:
            return self.inside(op, program, arguments)

        if op.name == "custom_jvp_call":
            return with_derivative(op.equation, primal, run)
        return with_passes(
            op.equation, primal, lambda program, arrays: (run(program, (), arrays), run)
        )


def evaluate(
    program: Program, arguments: Sequence[Cell], interpreter: Interpreter[Cell]
) -> list[Cell]:
    """Runs a program as the interpreter says: from cells of arguments to cells of results."""
    cells: Cells[Cell] = dict(zip(program.inputs, arguments, strict=True))
    cells.update((number, interpreter.constant(const)) for number, const in program.consts)
    # Outside of a trace, a function for each part would be compiled in each call. In a function, it
    # is not seen that JAX transposes it.
    if interpreter.shared is None or not compat.is_staged() or compat.is_transposed(arguments):
        _run_ops(program, cells, interpreter)
        return interpreter.results(program, cells)
    for part in divide_program(program, interpreter.variant, interpreter.shared):
        if part.key is None:
            _run_ops(part, cells, interpreter)
        else:
            _run_part(part, cells, interpreter, interpreter.shared)
    return interpreter.results(program, cells)


def _run_ops(
    part: Program | ProgramPart, cells: Cells[Cell], interpreter: Interpreter[Cell]
) -> None:
    last = last_reads(part) if interpreter.forgets else [()] * len(part.ops)
    for op, unread in zip(part.ops, last, strict=True):
        with interpreter.where(op):
            results = interpreter.operation(op, interpreter.operands(op, cells))
        cells.update(zip(op.outputs, results, strict=True))
        for number in unread:
            del cells[number]


def _run_part(
    part: ProgramPart, cells: Cells[Cell], interpreter: Interpreter[Cell], shared: PartCache
) -> None:
    function = shared.once(part.key, part, lambda: _function_of(part, interpreter))
    first = part.ops[0]
    with compat.where(first.equation, first.stack[: part.depth], first.traceback):
        results, changed = function([cells[number] for number in part.inputs])
    cells.update(zip(part.outputs, results, strict=True))
    cells.update((part.inputs[i], cell) for i, cell in changed.items())


def _function_of(part: ProgramPart, interpreter: Interpreter[Cell]) -> Callable[[list[Cell]], Any]:
    """Returns the jitted function of a part.

    It returns the cells of its results, and by their places those that it read and changed, such as
    by a cast that they hold. Arrays that it only hands on do not become results: JAX forwards them.
    """
    inner = [dataclasses.replace(op, stack=op.stack[part.depth :]) for op in part.ops]

    def run(given: list[Cell]) -> tuple[list[Cell], dict[int, Cell]]:
        before: list[Any] = list(map(jax.tree.structure, given))
        cells = dict(zip(part.inputs, given, strict=True))
        _run_ops(part._replace(ops=inner), cells, interpreter)
        after = (cells[number] for number in part.inputs)
        pairs = enumerate(zip(after, before, strict=True))
        changed = {i: cell for i, (cell, tree) in pairs if jax.tree.structure(cell) != tree}
        return [cells[number] for number in part.outputs], changed

    run.__name__ = run.__qualname__ = PART
    return jax.jit(run)
