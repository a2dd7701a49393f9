"""Runs a program with the scales of its float8 products given from outside.

A product with one scale for each array rounds each operand in the forward pass, and the cotangent
of its result. These places are numbered in the order of the program, through jit, checkpoint and
scan; one in a scan over layers stands for all layers, along a leading axis.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from jaxmp._delayed_scaling.probed import largest_over_devices, probed
from jaxmp._delayed_scaling.product import attached_by, encoded_by
from jaxmp._numerics.float8_codes import largest_magnitude
from jaxmp._primitives.float8_product import Float8Map
from jaxmp._program import compat
from jaxmp._program.control_flow import call_again, entered, scan_again
from jaxmp._program.evaluate import Rules, evaluate
from jaxmp._program.program import Op, read
from jaxmp._program.wiring import loop_of


class Places(NamedTuple):
    """The places of a program where it rounds to float8, each as the lengths of the scans around.

    Attributes:
      forward: where operands are rounded.
      backward: where cotangents are.
    """

    forward: list[tuple[int, ...]]
    backward: list[tuple[int, ...]]


class Given(NamedTuple):
    """What is given for the places of a program, in their order.

    Attributes:
      forward: the largest magnitudes to expect of operands; None for those that are there.
      backward: the same of cotangents.
      probes: zeros, whose gradients are the largest magnitudes of the cotangents.
    """

    forward: list[Any]
    backward: list[Any]
    probes: list[Any]


def places_of(equations: Sequence[core.JaxprEqn]) -> Places:
    """Returns the places in equations, and in the programs that can run again inside of them."""
    places, codes = Places([], []), _codes_of_products(equations)
    for equation in equations:
        counts = _own_places(equation, codes)
        for into, count in zip(places, counts, strict=True):
            into += [()] * count
        loop = loop_of(equation)
        stack = () if loop is None else (loop.turns,)
        for body in entered(equation):
            inside = places_of(compat.open_jaxpr(body).eqns)
            for into, inner in zip(places, inside, strict=True):
                into += [(*stack, *place) for place in inner]
    return places


def left_out(equations: Sequence[core.JaxprEqn]) -> Iterator[str]:
    """Yields the operations with products inside that cannot run again with given scales."""
    for equation in equations:
        again = entered(equation)
        for body in compat.bodies_of(equation):
            inner = compat.open_jaxpr(body).eqns
            if again:
                yield from left_out(inner)
            elif any(places_of(inner)) or [*left_out(inner)]:
                yield equation.primitive.name


def run_with_scales(
    closed: Any, arguments: Sequence[Any], given: Given
) -> tuple[list[Any], list[Any]]:
    """Runs a program, with what is given for its places.

    Args:
      closed: the program, closed or open.
      arguments: its arguments.
      given: what is given.

    Returns:
      Its results, and the largest magnitudes of what it rounded in the forward pass.
    """
    rules = _WithScales(given, _codes_of_products(compat.open_jaxpr(closed).eqns))
    return evaluate(read(closed), arguments, rules), rules.seen


# The results of an equation, and what was seen in it.
_Both = tuple[list[Any], list[Any]]


class _WithScales(Rules[Any]):
    """One run of a program: which places are done, and what was seen there."""

    def __init__(self, given: Given, codes: frozenset[Any]) -> None:
        self.left = given
        self.codes = codes
        self.seen: list[Any] = []

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        equation = op.equation
        forward, backward = _own_places(equation, self.codes)
        rule: Callable[[core.JaxprEqn, list[Any], Given], _Both]
        if forward or backward:
            rule = _round if forward else _attach
        elif any(inside := places_of([equation])):
            forward, backward = map(len, inside)
            rule = _run_again
        else:
            return compat.bind(equation, operands)
        pairs = list(zip(self.left, (forward, backward, backward), strict=True))
        given = Given(*(each[:count] for each, count in pairs))
        self.left = Given(*(each[count:] for each, count in pairs))
        results, seen = rule(equation, operands, given)
        self.seen += seen
        return results


def _codes_of_products(equations: Sequence[core.JaxprEqn]) -> frozenset[Any]:
    """Returns the variables that hold the codes of operands, for products with places."""
    return frozenset(x for each in equations if _attaches(each) for x in each.invars[1:3])


def _own_places(equation: core.JaxprEqn, codes: frozenset[Any]) -> tuple[int, int]:
    """Returns how many operands an equation itself rounds, and how many cotangents."""
    rounds = equation.primitive.name == "float8_encode" and equation.outvars[0] in codes
    return int(rounds), int(_attaches(equation))


def _attaches(equation: core.JaxprEqn) -> bool:
    """Whether an equation attaches the derivatives of a product with one scale for each array."""
    form = equation.params.get("form") if equation.primitive.name == "float32_gradient" else None
    return isinstance(form, Float8Map) and form.recipe.keeps_codes


def _round(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (x,), (expected,) = values, given.forward
    if expected is None:
        seen = largest_magnitude(x, tuple(range(x.ndim))).reshape(())
        return compat.bind(equation, values), [seen]
    coded, seen = encoded_by(equation, x, expected)
    return coded, [largest_over_devices(seen, expected)]


def _attach(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (expected,), (probe,) = given.backward, given.probes
    if expected is None:
        (out,) = compat.bind(equation, values)
    else:
        out = attached_by(equation, values, expected)
    return [out if probe is None else probed(out, probe)], []


def _run_again(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (body,) = compat.bodies_of(equation)

    def function(values: Sequence[Any], given: Given) -> _Both:
        return run_with_scales(body, values, given)

    if loop_of(equation) is not None:
        return scan_again(equation, values, function, given)
    both: _Both = call_again(equation, values, given, function)
    return both
