"""Follows facts about values through a program and the programs inside it.

A question is, for example: what is a value made of, is it zero, which cast does it come from? Each
question has its own facts, and a rule that makes the facts of results from the facts of operands.
Facts pass through branches, loops and calls in the same way for all questions; this file does that
part.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jax.extend import core

from jaxmp._program.compat import open_jaxpr, scan_counts
from jaxmp._program.flops import programs_inside
from jaxmp._program.op_classes import CLASSES, OpClass

Fact = TypeVar("Fact")
Labels = frozenset[Hashable]
NONE: Labels = frozenset()


@runtime_checkable
class AnySite(Protocol):
    """An equation of a program, and the programs inside it."""

    @property
    def equation(self) -> core.JaxprEqn: ...

    @property
    def bodies(self) -> "Sequence[AnyBody]": ...


@runtime_checkable
class AnyBody(Protocol):
    """A program: its jaxpr, and its equations in order."""

    @property
    def jaxpr(self) -> core.Jaxpr: ...

    @property
    def sites(self) -> Sequence[Any]: ...


@dataclasses.dataclass(frozen=True)
class Question(Generic[Fact]):
    """A question about the values of a program.

    Attributes:
      nothing: the fact of a value of which nothing is known, such as a constant.
      join: the fact of a value that is one of two: from either branch, or any turn. It must be
        associative, commutative and idempotent, with no infinite chains, or loops do not end.
      rule: returns the facts of the results of an equation without programs, given the facts of its
        operands.
      literal: the fact of a number that is written in the program; `nothing` if this is None.
      keep: the part of a fact that a variable of an abstract value can have; all if this is None.
    """

    nothing: Fact
    join: Callable[[Fact, Fact], Fact]
    rule: Callable[[Any, Sequence[Fact]], Sequence[Fact]]
    literal: Callable[[core.Literal], Fact] | None = None
    keep: Callable[[Any, Fact], Fact] | None = None


def propagate(body: AnyBody, given: Sequence[Fact], question: Question[Fact]) -> list[Fact]:
    """Returns the facts of the results of a program.

    Args:
      body: the program. An inner program with several calls is followed once for each set of
        argument facts, if its calls share one `AnyBody`.
      given: the facts of its arguments.
      question: the question.

    Returns:
      The facts of its results.
    """
    return _Propagation(question).run(body, given)


def made_of(
    jaxpr: Any,
    given: Sequence[Labels],
    rule: Callable[[core.JaxprEqn, Sequence[Labels]], Labels],
    can_have: Callable[[Any], bool],
) -> list[Labels]:
    """Returns the labels of the results of a program; labels go from operands to results.

    Args:
      jaxpr: an open or closed jaxpr.
      given: the labels of its arguments.
      rule: returns the labels of the results of an equation without programs, given the labels of
        its operands.
      can_have: whether values of this type (an abstract value) can have labels.

    Returns:
      The labels of its results.
    """
    question = Question(
        nothing=NONE,
        join=lambda some, others: some | others,
        rule=lambda site, found: [rule(site.equation, found)] * len(site.equation.outvars),
        keep=lambda aval, labels: labels if can_have(aval) else NONE,
    )
    return propagate(Nested(open_jaxpr(jaxpr), _inside_control_flow), given, question)


def _inside_control_flow(equation: core.JaxprEqn) -> list[Any]:
    """Returns the programs of control flow; kernels and solvers count as one operation."""
    is_control = CLASSES.get(equation.primitive.name) is OpClass.CONTROL
    return programs_inside(equation) if is_control else []


@dataclasses.dataclass(frozen=True, eq=False)
class Nested:
    """A program whose calls of one function share the body of that function."""

    jaxpr: core.Jaxpr
    inside: Callable[[Any], list[Any]] = programs_inside

    @functools.cached_property
    def sites(self) -> list["NestedSite"]:
        return [NestedSite(equation, self.inside, self._bodies) for equation in self.jaxpr.eqns]

    # The bodies made so far, by the id of their jaxprs.
    _bodies: dict[int, "Nested"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class NestedSite:
    """An equation of a `Nested` program."""

    equation: core.JaxprEqn
    inside: Callable[[Any], list[Any]]
    _bodies: dict[int, Nested]

    @functools.cached_property
    def bodies(self) -> list[Nested]:
        return [
            self._bodies.setdefault(id(each), Nested(each, self.inside, self._bodies))
            for each in self.inside(self.equation)
        ]


def nested(jaxpr: Any) -> Nested:
    """Wraps a program for `propagate`.

    Args:
      jaxpr: an open or closed jaxpr.
    """
    return Nested(open_jaxpr(jaxpr))


class _Propagation(Generic[Fact]):
    def __init__(self, question: Question[Fact]) -> None:
        self.question = question
        self.known: dict[Any, list[Fact]] = {}

    def run(self, body: AnyBody, given: Sequence[Fact]) -> list[Fact]:
        key = id(body), tuple(given)
        if key not in self.known:
            self.known[key] = self._run(body, given)
        return self.known[key]

    def _run(self, body: AnyBody, given: Sequence[Fact]) -> list[Fact]:
        facts: dict[Any, Fact] = dict(zip(body.jaxpr.invars, given, strict=True))

        def fact_of(atom: Any) -> Fact:
            if not isinstance(atom, core.Literal):
                return self._kept(atom, facts.get(atom, self.question.nothing))
            literal = self.question.literal
            return self.question.nothing if literal is None else literal(atom)

        for site in body.sites:
            operands = [fact_of(atom) for atom in site.equation.invars]
            made = (
                self._inside(site, operands) if site.bodies else self.question.rule(site, operands)
            )
            facts.update(zip(site.equation.outvars, made, strict=True))
        return [fact_of(atom) for atom in body.jaxpr.outvars]

    def _kept(self, variable: Any, fact: Fact) -> Fact:
        keep = self.question.keep
        return fact if keep is None else keep(variable.aval, fact)

    def _inside(self, site: AnySite, operands: list[Fact]) -> Sequence[Fact]:
        name, bodies = site.equation.primitive.name, site.bodies
        if name == "scan":
            return self._scan(site, operands)
        if name == "while":
            return self._while(site, operands)
        if name == "cond":
            return functools.reduce(self._joined, (self.run(each, operands[1:]) for each in bodies))
        # A program with as many arguments and results as its equation is that of a call. For
        # others, such as linear solves, it is not known which operand is which argument.
        counts = len(operands), len(site.equation.outvars)
        if [(len(each.jaxpr.invars), len(each.jaxpr.outvars)) for each in bodies] == [counts]:
            return self.run(bodies[0], operands)
        return self._blurred(site, operands)

    def _joined(self, some: Sequence[Fact], others: Sequence[Fact]) -> list[Fact]:
        return list(map(self.question.join, some, others))

    def _scan(self, site: AnySite, operands: list[Fact]) -> list[Fact]:
        (body,) = site.bodies
        begin, count = scan_counts(site.equation.params)
        end = begin + count
        while True:
            made = self.run(body, operands)
            carry = self._joined(operands[begin:end], made[:count])
            if carry == operands[begin:end]:
                # Only a scan without turns returns what it was given.
                return made if site.equation.params["length"] else [*carry, *made[count:]]
            operands = [*operands[:begin], *carry, *operands[end:]]

    def _while(self, site: AnySite, operands: list[Fact]) -> list[Fact]:
        condition, body = site.bodies
        tested = site.equation.params["cond_nconsts"]
        begin = tested + site.equation.params["body_nconsts"]
        carry = operands[begin:]
        while True:
            self.run(condition, [*operands[:tested], *carry])
            turned = self._joined(carry, self.run(body, [*operands[tested:begin], *carry]))
            if turned == carry:
                return carry
            carry = turned

    def _blurred(self, site: AnySite, operands: list[Fact]) -> list[Fact]:
        """Joins the facts of all operands, if it is not known which operand goes where."""
        join = self.question.join
        fact = functools.reduce(join, operands, self.question.nothing)
        for body in site.bodies:
            given = [self._kept(variable, fact) for variable in body.jaxpr.invars]
            fact = functools.reduce(join, self.run(body, given), fact)
        return [fact] * len(site.equation.outvars)
