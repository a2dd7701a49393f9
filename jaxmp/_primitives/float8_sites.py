"""Runs a program with the scales of its float8 products given from outside.

A product under a delayed recipe marks where it rounds: each operand in the forward pass, and the
cotangent of its result. The places are numbered in the order of the program, through jit,
checkpoint and scan; one in a scan over layers stands for all layers, along a leading axis.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from jaxmp._jaxpr import compat
from jaxmp._jaxpr.rebind import call_again, entered, run_by_rule, scan_again
from jaxmp._numerics.float8_codes import largest_magnitude
from jaxmp._primitives.float8_encode import encode_as_expected
from jaxmp._primitives.float8_product import Float8Map
from jaxmp._primitives.mixed_product import with_derivatives
from jaxmp._primitives.operands import operands_of
from jaxmp._primitives.probed import largest_over_devices, probed


class Float8Site(NamedTuple):
    """A place in a program where a product under a delayed recipe rounds to float8.

    Attributes:
      history: for how many steps its largest magnitudes are kept.
      stack: the lengths of the scans that it is in, outermost first.
    """

    history: int
    stack: tuple[int, ...] = ()


class Float8Sites(NamedTuple):
    """The places of a program where operands are rounded, and where cotangents are."""

    forward: list[Float8Site]
    backward: list[Float8Site]


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


def sites_of(equations: Sequence[core.JaxprEqn]) -> Float8Sites:
    """Returns the places in equations, and in the programs that can run again inside of them."""
    found = Float8Sites([], [])
    for equation in equations:
        if history := _rounds(equation):
            found.forward.append(Float8Site(history))
        elif history := _attaches(equation):
            found.backward.append(Float8Site(history))
        stack = (equation.params["length"],) if equation.primitive.name == "scan" else ()
        for body in entered(equation):
            for into, inner in zip(found, sites_of(compat.open_jaxpr(body).eqns), strict=True):
                into += [site._replace(stack=(*stack, *site.stack)) for site in inner]
    return found


def left_out(equations: Sequence[core.JaxprEqn]) -> Iterator[str]:
    """Yields the operations with marked products inside that cannot run again with given scales."""
    for equation in equations:
        again = entered(equation)
        for body in compat.bodies_of(equation):
            inner = compat.open_jaxpr(body).eqns
            if again:
                yield from left_out(inner)
            elif any(map(_attaches, inner)) or any(sites_of(inner)) or [*left_out(inner)]:
                yield equation.primitive.name


def run_with_scales(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], given: Given
) -> tuple[list[Any], list[Any]]:
    """Runs a program, with what is given for its places.

    Args:
      jaxpr: the program.
      consts: its constants.
      args: its arguments.
      given: what is given.

    Returns:
      Its results, and the largest magnitudes of what it rounded in the forward pass.
    """
    run = _Run(given)
    return run_by_rule(jaxpr, consts, args, run.rule), run.seen


class _Run:
    """One run of a program: which places are done, and what was seen there."""

    def __init__(self, given: Given) -> None:
        self.left = given
        self.seen: list[Any] = []

    def rule(self, equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
        sites = sites_of([equation])
        if not any(sites):
            return compat.bind(equation, values)
        forward, backward = map(len, sites)
        counts = (forward, backward, backward)
        pairs = list(zip(self.left, counts, strict=True))
        given = Given(*(each[:count] for each, count in pairs))
        self.left = Given(*(each[count:] for each, count in pairs))
        made, seen = _rule_of(equation)(equation, values, given)
        self.seen += seen
        return made


# The results of an equation, and what was seen in it.
_Both = tuple[list[Any], list[Any]]


def _rule_of(equation: core.JaxprEqn) -> Callable[[core.JaxprEqn, list[Any], Given], _Both]:
    if _rounds(equation):
        return _round
    if _attaches(equation):
        return _attach
    return _scan if equation.primitive.name == "scan" else _call


def _rounds(equation: core.JaxprEqn) -> int:
    """Returns the history of an equation that rounds an operand; 0 for all others."""
    fresh = equation.primitive.name == "float8_encode" and len(equation.invars) == 1
    return equation.params["history"] if fresh else 0


def _attaches(equation: core.JaxprEqn) -> int:
    """Returns the history of an equation whose cotangent is rounded; 0 for all others."""
    form = equation.params.get("form") if equation.primitive.name == "float32_gradient" else None
    if not isinstance(form, Float8Map) or not form.recipe.is_delayed:
        return 0
    done = any(each.expects for each in equation.params["kept"])
    return 0 if done else form.recipe.history


def _round(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (x,), (expected,) = values, given.forward
    names = ("dtype", "axes", "power_of_two", "is_weight")
    if expected is None:
        seen = largest_magnitude(x, tuple(range(x.ndim))).reshape(())
        return compat.bind(equation, values), [seen]
    params = {name: equation.params[name] for name in names}
    made, seen = encode_as_expected(x, expected=expected, **params)
    return list(made), [largest_over_devices(seen, expected)]


def _attach(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (expected,), (probe,) = given.backward, given.probes
    form, kept = equation.params["form"], equation.params["kept"]
    operands, others = operands_of(values[1:], kept)
    operands = [operand._replace(expected=expected) for operand in operands]
    out = with_derivatives(values[0], form, operands, others)
    return [out if probe is None else probed(out, probe)], []


def _call(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (body,) = compat.bodies_of(equation)

    def function(values: Sequence[Any], given: Given) -> _Both:
        return run_with_scales(compat.open_jaxpr(body), compat.consts_of(body), values, given)

    made: _Both = call_again(equation, values, given, function)
    return made


def _scan(equation: core.JaxprEqn, values: list[Any], given: Given) -> _Both:
    (body,) = compat.bodies_of(equation)
    consts, carry = compat.scan_counts(equation.params)

    def turn(carried: list[Any], slices: tuple[list[Any], Given]) -> Any:
        xs, part = slices
        args = [*values[:consts], *carried, *xs]
        made, seen = run_with_scales(compat.open_jaxpr(body), compat.consts_of(body), args, part)
        return made[:carry], (made[carry:], seen)

    init, xs = values[consts : consts + carry], values[consts + carry :]
    last, (ys, seen) = scan_again(equation.params, turn, init, (xs, given))
    return [*last, *ys], seen
