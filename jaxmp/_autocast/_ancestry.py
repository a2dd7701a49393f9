"""What the values of a program are made of: labels that go from operands to results."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax.extend import core

from jaxmp import _compat
from jaxmp._op_lists import CLASSES, OpClass

Labels = frozenset[Hashable]
NONE: Labels = frozenset()
# From an equation without programs and the labels of its operands to those of its results.
Rule = Callable[[core.JaxprEqn, Sequence[Labels]], Labels]


def follow(
    jaxpr: core.Jaxpr, given: Sequence[Labels], rule: Rule, has_some: Callable[[Any], bool]
) -> list[Labels]:
    """Follows labels through a program and through those in it.

    Args:
      jaxpr: the program.
      given: the labels of its arguments.
      rule: what operations without programs do with labels.
      has_some: whether a variable can have labels.

    Returns:
      The labels of its results.
    """
    return _Follower(rule, has_some).follow(jaxpr, given)


class _Follower:
    def __init__(self, rule: Rule, has_some: Callable[[Any], bool]) -> None:
        self.rule = rule
        self.has_some = has_some
        # A function that is called many times is followed once for each way that it is called.
        self.known: dict[Any, list[Labels]] = {}

    def follow(self, jaxpr: core.Jaxpr, given: Sequence[Labels]) -> list[Labels]:
        key = id(jaxpr), tuple(given)
        if key not in self.known:
            self.known[key] = self._followed(jaxpr, given)
        return self.known[key]

    def _followed(self, jaxpr: core.Jaxpr, given: Sequence[Labels]) -> list[Labels]:
        known: dict[Any, Labels] = dict(zip(jaxpr.invars, given, strict=True))

        def labels_of(atom: Any) -> Labels:
            if isinstance(atom, core.Literal) or not self.has_some(atom):
                return NONE
            return known.get(atom, NONE)

        for equation in jaxpr.eqns:
            found = [labels_of(atom) for atom in equation.invars]
            if CLASSES.get(equation.primitive.name) is OpClass.CONTROL:
                made = self._inside(equation, found)
            else:
                made = [self.rule(equation, found)] * len(equation.outvars)
            known.update(zip(equation.outvars, made, strict=True))
        return [labels_of(atom) for atom in jaxpr.outvars]

    def _inside(self, equation: core.JaxprEqn, found: list[Labels]) -> list[Labels]:
        """Programs get the last operands of an equation, and most give its results."""
        made = [NONE] * len(equation.outvars)
        for jaxpr in _compat.sub_jaxprs(equation):
            given = found[-len(jaxpr.invars) :] if jaxpr.invars else []
            given = [NONE] * (len(jaxpr.invars) - len(given)) + given
            begin = len(given) - len(made)
            if equation.primitive.name == "scan":
                begin, count = _compat.scan_counts(equation.params)
            else:
                count = len(made) if equation.primitive.name == "while" else 0
            while True:
                out = self.follow(jaxpr, given)
                carry = slice(begin, begin + count)
                turned = [a | b for a, b in zip(given[carry], out, strict=False)]
                if turned == given[carry] or len(out) < count:  # fewer are of a while's condition
                    break
                given = [*given[:begin], *turned, *given[begin + count :]]
            if len(out) == len(made):
                made = [a | b for a, b in zip(made, out, strict=True)]
        return made
