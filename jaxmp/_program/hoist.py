"""Computes before a loop what each turn would compute again from the same arrays.

Compilers do so for what a loop does not change at all. They do not for a loop in a loop: a scan
over microbatches around a scan over layers rounds each weight to float8 once for each microbatch.
Only operations of `HOISTED` move, with the moves of data before them, so that nothing large is kept
which was cheap to compute.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxmp._program import compat
from jaxmp._program.op_classes import HOISTED, PLAIN_MOVES
from jaxmp._program.rebind import call_again, entered, run_by_rule, scan_again


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
_Found = dict[int, _Hoisted]


def with_hoisted(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose scans find ready what is the same in each turn.

    Args:
      fun: a function of pytrees of arrays.

    Returns:
      A function of the same results. It traces `fun` once for each call.

    >>> import jax.numpy as jnp
    >>> with_hoisted(lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), 0.0, x))(jnp.ones(3))[0]
    Array(3., dtype=float32)
    """

    def call(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        made = _run_hoisted(compat.open_jaxpr(closed), closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), made)

    return call


def _run_hoisted(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Runs a program; of its own scans, what is the same in each turn runs before."""

    def rule(equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
        if equation.primitive.name != "scan" or not _count_movable([equation]):
            return compat.bind(equation, values)
        consts, _ = compat.scan_counts(equation.params)
        known = [*values[:consts], *[None] * (len(values) - consts)]
        (body,) = compat.bodies_of(equation)
        jaxpr = compat.open_jaxpr(body)
        found = _along_a_scan(equation, jaxpr, compat.consts_of(body), known)
        return _again_scan(equation, values, found)

    return run_by_rule(jaxpr, consts, args, rule)


def _count_movable(equations: Sequence[core.JaxprEqn]) -> int:
    """Returns how many operations may move."""
    inside = (
        _count_movable(compat.open_jaxpr(body).eqns) for each in equations for body in entered(each)
    )
    return sum(each.primitive.name in HOISTED for each in equations) + sum(inside)


def _computed(jaxpr: core.Jaxpr, consts: Sequence[Any], known: Sequence[Any]) -> _Found:
    """Computes what may move of a program, from those of its arguments that are known.

    Args:
      jaxpr: the program.
      consts: its constants.
      known: its arguments; None for those that are not known.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, known, strict=True))
    found: _Found = {}
    number = 0
    for equation in jaxpr.eqns:
        values = [
            compat.number(atom) if isinstance(atom, core.Literal) else env.get(atom)
            for atom in equation.invars
        ]
        name, ready = equation.primitive.name, all(value is not None for value in values)
        if name in HOISTED or (name in PLAIN_MOVES and ready):
            if ready:
                made = compat.bind(equation, values)
                env.update(zip(equation.outvars, made, strict=True))
                found |= {number: _Hoisted(made)} if name in HOISTED else {}
            number += name in HOISTED
            continue
        for body in entered(equation):
            inner = compat.open_jaxpr(body)
            run = _along_a_scan if name == "scan" else _computed_inside
            within = run(equation, inner, compat.consts_of(body), values)
            found |= {number + i: each for i, each in within.items()}
            number += _count_movable(inner.eqns)
    return found


def _computed_inside(
    equation: core.JaxprEqn, jaxpr: core.Jaxpr, consts: Sequence[Any], values: Sequence[Any]
) -> _Found:
    del equation
    return _computed(jaxpr, consts, values)


def _along_a_scan(
    equation: core.JaxprEqn, jaxpr: core.Jaxpr, consts: Sequence[Any], values: Sequence[Any]
) -> _Found:
    """Computes it for all turns of an inner scan, stacked; once where the turns do not differ."""
    counts = compat.scan_counts(equation.params)
    end = sum(counts)
    fixed = [*values[: counts.consts], *[None] * counts.carry]
    alike = _computed(jaxpr, consts, [*fixed, *[None] * (len(values) - end)])
    found = {i: _Hoisted(made.arrays, (False, *made.stacked)) for i, made in alike.items()}
    stacks = [value for value in values[end:] if value is not None]
    within: dict[int, tuple[bool, ...]] = {}

    def turn(slices: list[Any]) -> dict[int, list[Any]]:
        given = iter(slices)
        known = [*fixed, *(None if value is None else next(given) for value in values[end:])]
        made = _computed(jaxpr, consts, known)
        within.update((i, each.stacked) for i, each in made.items())
        return {i: each.arrays for i, each in made.items() if i not in alike}

    made = jax.vmap(turn)(stacks) if stacks else {}
    return found | {i: _Hoisted(x, (True, *within[i])) for i, x in made.items()}


def _with_found(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], found: _Found
) -> list[Any]:
    """Runs a program, without what was computed before."""
    number = 0

    def rule(equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
        nonlocal number
        first, count = number, _count_movable([equation])
        number += count
        given = {i - first: made for i, made in found.items() if first <= i < first + count}
        if not given:
            return compat.bind(equation, values)
        if equation.primitive.name in HOISTED:
            return given[0].arrays
        return (_again_scan if equation.primitive.name == "scan" else _again)(
            equation, values, given
        )

    return run_by_rule(jaxpr, consts, args, rule)


def _again(equation: core.JaxprEqn, values: Sequence[Any], found: _Found) -> list[Any]:
    """Runs a jit or a checkpoint again, with what was computed before as arguments."""
    (body,) = compat.bodies_of(equation)
    arrays = {i: made.arrays for i, made in found.items()}

    def function(values: Sequence[Any], arrays: dict[int, list[Any]]) -> list[Any]:
        given = {i: made._replace(arrays=arrays[i]) for i, made in found.items()}
        return _with_found(compat.open_jaxpr(body), compat.consts_of(body), values, given)

    return call_again(equation, values, arrays, function)


def _again_scan(equation: core.JaxprEqn, values: Sequence[Any], found: _Found) -> list[Any]:
    """Runs a scan again, with what was computed before: stacked, or the same in each turn."""
    (body,) = compat.bodies_of(equation)
    consts, carry = compat.scan_counts(equation.params)
    stacks = {i: made.arrays for i, made in found.items() if made.stacked[:1] == (True,)}

    def turn(carried: list[Any], slices: tuple[list[Any], dict[int, list[Any]]]) -> Any:
        xs, parts = slices
        given = {
            i: _Hoisted(parts.get(i, made.arrays), made.stacked[1:]) for i, made in found.items()
        }
        args = [*values[:consts], *carried, *xs]
        made = _with_found(compat.open_jaxpr(body), compat.consts_of(body), args, given)
        return made[:carry], made[carry:]

    end = consts + carry
    init, xs = list(values[consts:end]), list(values[end:])
    last, ys = scan_again(equation.params, turn, init, (xs, stacks))
    return [*last, *ys]
