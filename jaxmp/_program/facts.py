"""Follows facts about values through a program and the programs inside it.

Examples: which arguments make a value, is it zero, which cast is it from? Each analysis has its own
facts, and a transfer function that makes the facts of results from the facts of operands. Facts
pass through branches, loops and calls in the same way for all analyses; this file does that part.
A `BackwardAnalysis` goes the other way, from results to arguments.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from jax.extend import core

from jaxmp._program.flops import programs_inside
from jaxmp._program.op_classes import CLASSES, OpClass
from jaxmp._program.program import Memo, Op, Program, read
from jaxmp._program.wiring import Wiring, wiring_of

Fact = TypeVar("Fact")
Labels = frozenset[Hashable]
NONE: Labels = frozenset()
# Returns the programs inside of an operation that facts go through.
Inside = Callable[[Any], Sequence[Program]]


def shared_programs(jaxprs_of: Callable[[core.JaxprEqn], list[Any]] = programs_inside) -> Inside:
    """Returns a function that reads each of these programs of operations once."""
    programs = Memo()

    def program_of(jaxpr: Any) -> Program:
        return programs.once(id(jaxpr), jaxpr, lambda: read(jaxpr))

    return lambda op: list(map(program_of, jaxprs_of(op.equation)))


@dataclasses.dataclass(frozen=True)
class ForwardAnalysis(Generic[Fact]):
    """An analysis of the values of a program, as in a compiler.

    Attributes:
      bottom: the fact of a value of which nothing is known, such as a constant.
      join: returns the fact of a value that is one of two values: of two branches, or two turns. It
        must be associative, commutative and idempotent, with no infinite chains, or loops do not
        end.
      transfer: returns the facts of the results of an operation without programs, given those of
        its operands.
      literal: the fact of a number that is written in the program; `bottom` if this is None.
      restrict: returns the part of a fact that values of a type can have; None leaves it whole.
    """

    bottom: Fact
    join: Callable[[Fact, Fact], Fact]
    transfer: Callable[[Any, Sequence[Fact]], Sequence[Fact]]
    literal: Callable[[core.Literal], Fact] | None = None
    restrict: Callable[[Any, Fact], Fact] | None = None


def propagate(
    program: Program,
    facts: Sequence[Fact],
    analysis: ForwardAnalysis[Fact],
    inside: Inside | None = None,
) -> list[Fact]:
    """Returns the facts of the results of a program, given those of its arguments.

    A program inside of operations is followed once for each set of argument facts. So calls of one
    function cost no more than one call if `inside` returns the same program for them, as it does by
    default.
    """
    return Propagation(analysis, inside or shared_programs()).run(program, facts)


def made_of(
    jaxpr: Any,
    labels: Sequence[Labels],
    rule: Callable[[core.JaxprEqn, Sequence[Labels]], Labels],
    can_have: Callable[[Any], bool],
    carry: range = range(0),
) -> list[Labels]:
    """Returns the labels of the results of a program, given those of its arguments.

    Args:
      jaxpr: an open or closed jaxpr.
      labels: the labels of its arguments.
      rule: returns the labels of the results of an equation without programs, given the labels of
        its operands.
      can_have: whether values of this type (an abstract value) can have labels.
      carry: the arguments that its first results replace after each turn, if a loop runs it. These
        results have the labels of the arguments too.
    """
    analysis = ForwardAnalysis(
        bottom=NONE,
        join=operator.or_,
        transfer=lambda op, operands: [rule(op.equation, operands)] * len(op.outputs),
        restrict=lambda aval, label: label if can_have(aval) else NONE,
    )
    turns = Propagation(analysis, shared_programs(_inside_control_flow))
    return turns.along(Wiring((range(len(labels)),), carry, turns=None), [read(jaxpr)], labels)


def _inside_control_flow(equation: core.JaxprEqn) -> list[Any]:
    """Returns the programs of control flow; kernels and solvers count as one operation."""
    is_control = CLASSES.get(equation.primitive.name) is OpClass.CONTROL
    return programs_inside(equation) if is_control else []


class Propagation(Generic[Fact]):
    """Follows the facts of one analysis; remembers those of programs it has been through."""

    def __init__(self, analysis: ForwardAnalysis[Fact], inside: Inside) -> None:
        self.analysis, self.inside = analysis, inside
        self.memo = Memo()

    def run(self, program: Program, facts: Sequence[Fact]) -> list[Fact]:
        key = id(program), tuple(facts)
        return self.memo.once(key, program, lambda: self._run(program, facts))

    def _run(self, program: Program, facts: Sequence[Fact]) -> list[Fact]:
        bottom, literal = self.analysis.bottom, self.analysis.literal
        facts_by_number: dict[int, Fact] = dict(zip(program.inputs, facts, strict=True))

        def fact_of(atom: Any) -> Fact:
            if not isinstance(atom, core.Literal):
                return self._restrict(program.avals[atom], facts_by_number.get(atom, bottom))
            return bottom if literal is None else literal(atom)

        for op in program.ops:
            results = self.through(op, list(map(fact_of, op.inputs)))
            facts_by_number.update(zip(op.outputs, results, strict=True))
        return list(map(fact_of, program.outputs))

    def through(self, op: Op, operands: list[Fact]) -> Sequence[Fact]:
        """Returns the facts of the results of an operation."""
        if not (programs := self.inside(op)):
            return self.analysis.transfer(op, operands)
        if (wiring := _wiring(op, programs)).arguments:
            return self.along(wiring, programs, operands)
        return self._join_operands(op, programs, operands)

    def _restrict(self, aval: Any, fact: Fact) -> Fact:
        restrict = self.analysis.restrict
        return fact if restrict is None else restrict(aval, fact)

    def along(
        self, wiring: Wiring, programs: Sequence[Program], operands: Sequence[Fact]
    ) -> list[Fact]:
        """Returns the facts of the results of programs that are connected in this way."""
        carry = wiring.carry
        while True:
            pairs = zip(programs, wiring.arguments, strict=True)
            facts = [
                self.run(program, [operands[i] for i in arguments]) for program, arguments in pairs
            ]
            results = functools.reduce(self._join_all, facts[wiring.tests :])
            before = [operands[i] for i in carry]
            after = self._join_all(before, results[: len(carry)])
            if after == before:
                # Only a loop without turns returns its operands.
                return results if wiring.turns else [*after, *results[len(carry) :]]
            operands = [*operands[: carry.start], *after, *operands[carry.stop :]]

    def _join_all(self, facts: Sequence[Fact], others: Sequence[Fact]) -> list[Fact]:
        return list(map(self.analysis.join, facts, others))

    def _join_operands(
        self, op: Op, programs: Sequence[Program], operands: list[Fact]
    ) -> list[Fact]:
        """Joins the facts of all operands, if it is not known which operand goes where."""
        join = self.analysis.join
        fact = functools.reduce(join, operands, self.analysis.bottom)
        for program in programs:
            facts = [self._restrict(program.avals[i], fact) for i in program.inputs]
            fact = functools.reduce(join, self.run(program, facts), fact)
        return [fact] * len(op.outputs)


def _wiring(op: Op, programs: Sequence[Program]) -> Wiring:
    return wiring_of(
        op.equation, [(len(program.inputs), len(program.outputs)) for program in programs]
    )


# Returns which operands of an operation are needed, given which of its results are.
Demand = Callable[[Op, Sequence[bool]], Sequence[bool]]


class BackwardAnalysis:
    """Follows demands from the results of a program back to its arguments.

    Args:
      transfer: returns which operands an operation without programs needs.
      inside: the programs inside of operations, as in `propagate`.
      decisions: whether results also need the values that choose a branch or end a loop.
    """

    def __init__(self, transfer: Demand, inside: Inside, *, decisions: bool) -> None:
        self.transfer, self.inside, self.decisions = transfer, inside, decisions
        self.memo = Memo()

    def values(self, program: Program, demanded: Sequence[bool]) -> set[int]:
        """Returns the values of a program that these results need."""
        key = id(program), tuple(demanded)
        return self.memo.once(key, program, lambda: self._values(program, demanded))

    def _values(self, program: Program, demanded: Sequence[bool]) -> set[int]:
        values = _atoms_where(program.outputs, demanded)
        for op in reversed(program.ops):
            results = [number in values for number in op.outputs]
            values |= _atoms_where(op.inputs, self.through(op, results)[0])
        return values

    def arguments(self, program: Program, demanded: Sequence[bool]) -> list[bool]:
        """Returns whether these results need each argument of a program."""
        values = self.values(program, demanded)
        return [number in values for number in program.inputs]

    def through(
        self, op: Op, demanded: Sequence[bool]
    ) -> tuple[Sequence[bool], list[tuple[Program, Sequence[bool]]]]:
        """Returns which operands are needed, and which results of each program inside."""
        programs = self.inside(op)
        wiring = _wiring(op, programs)
        if not programs or not wiring.arguments:
            return self.transfer(op, demanded), []
        if not any(demanded):
            return [False] * len(op.inputs), []
        carry, of_programs = wiring.carry, set().union(*wiring.arguments)
        while True:
            tests = [[self.decisions]] * wiring.tests
            demands = list(zip(programs, [*tests, *[demanded] * len(programs)], strict=False))
            # What decides between branches reaches none of them.
            reads = [self.decisions and i not in of_programs for i in range(len(op.inputs))]
            for arguments, demand in zip(wiring.arguments, demands, strict=True):
                for i, is_read in zip(arguments, self.arguments(*demand), strict=True):
                    reads[i] |= is_read
            # What one turn reads, the turn before has to make.
            carried = [a or reads[i] for a, i in zip(demanded, carry, strict=False)]
            if carried == list(demanded[: len(carry)]):
                return [*reads[: carry.start], *carried, *reads[carry.stop :]], demands
            demanded = [*carried, *demanded[len(carry) :]]


def arguments_read(
    program: Program, demanded: Sequence[bool], inside: Inside | None = None
) -> list[bool]:
    """Returns which arguments of a program the wanted results depend on.

    An operation may list operands that its own program never reads: the float32 sources of
    products, which only second derivatives need, or the operands that a loop hands on to such
    products. Compilers drop values that nothing reads. Operations with effects always run, and read
    all of their operands. So does every operation with programs that are neither calls nor loops.

    >>> import jax
    >>> closed = jax.make_jaxpr(jax.jit(lambda x, y: (2 * x, 3 * y)))(1.0, 2.0)
    >>> arguments_read(read(closed), [True, False])
    [True, False]
    """
    return _demands_of_results(inside or shared_programs()).arguments(program, demanded)


def operations_read(
    program: Program, inside: Inside, demanded: Sequence[bool] | None = None
) -> Iterator[Op]:
    """Yields the operations that the demanded results depend on (by default all), at any depth."""
    demands = _demands_of_results(inside)
    values = demands.values(program, demanded or [True] * len(program.outputs))
    for op in program.ops:
        results = [number in values for number in op.outputs]
        if any(results) or op.equation.effects:
            yield op
            wholes = [(body, [True] * len(body.outputs)) for body in inside(op)]
            for body, wanted in demands.through(op, results)[1] or wholes:
                yield from operations_read(body, inside, wanted)


def _demands_of_results(inside: Inside) -> BackwardAnalysis:
    def transfer(op: Op, demanded: Sequence[bool]) -> list[bool]:
        return [bool(op.equation.effects) or any(demanded)] * len(op.inputs)

    def without_effects(op: Op) -> Sequence[Program]:
        return [] if op.equation.effects else inside(op)

    return BackwardAnalysis(transfer, without_effects, decisions=True)


def _atoms_where(atoms: Sequence[Any], flags: Sequence[bool]) -> set[int]:
    pairs = zip(atoms, flags, strict=True)
    return {atom for atom, flag in pairs if flag and not isinstance(atom, core.Literal)}
