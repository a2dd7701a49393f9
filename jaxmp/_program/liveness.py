"""Finds the arguments that a program reads for its results.

An equation may list operands that its own program never reads: the float32 sources of products,
which only second derivatives ask for, or what a loop hands on to such an equation. Compilers drop
what is not read.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jaxmp._program.compat import scan_counts
from jaxmp._program.dataflow import AnyBody, AnySite


def arguments_read(body: AnyBody, wanted: Sequence[bool]) -> list[bool]:
    """Returns which arguments of a program the wanted results depend on.

    Args:
      body: the program.
      wanted: for each result, whether anyone reads it.

    Returns:
      For each argument, whether it is read. Equations with effects always run, and read all of
      their operands. So does every equation with programs that are neither calls nor loops.

    >>> import jax
    >>> from jaxmp._program.dataflow import nested
    >>> program = jax.make_jaxpr(jax.jit(lambda x, y: (2 * x, 3 * y)))(1.0, 2.0)
    >>> arguments_read(nested(program), [True, False])
    [True, False]
    """
    read = _atoms(body.jaxpr.outvars, wanted)
    for site in reversed(body.sites):
        asked = [out in read for out in site.equation.outvars]
        if site.equation.effects or any(asked):
            read |= _atoms(site.equation.invars, _operands_read(site, asked))
    return [argument in read for argument in body.jaxpr.invars]


def _atoms(atoms: Sequence[Any], chosen: Sequence[bool]) -> set[Any]:
    pairs = zip(atoms, chosen, strict=True)
    return {atom for atom, is_chosen in pairs if is_chosen and not isinstance(atom, core.Literal)}


def _operands_read(site: AnySite, asked: list[bool]) -> list[bool]:
    """Returns which operands of an equation are read for the results that are asked for."""
    equation, bodies = site.equation, site.bodies
    name, count = equation.primitive.name, len(equation.invars)
    if not bodies or equation.effects:
        return [True] * count
    if name == "scan":
        return _read_by_scan(site, asked)
    if name == "while":
        return _read_by_while(site, asked)
    if name == "cond":
        each = [arguments_read(body, asked) for body in bodies]
        return [True, *map(any, zip(*each, strict=True))]
    if [(len(each.jaxpr.invars), len(each.jaxpr.outvars)) for each in bodies] == [
        (count, len(asked))
    ]:
        return arguments_read(bodies[0], asked)
    return [True] * count


def _read_by_scan(site: AnySite, asked: list[bool]) -> list[bool]:
    (body,) = site.bodies
    begin, count = scan_counts(site.equation.params)
    carry, stacked = asked[:count], asked[count:]
    while True:
        read = arguments_read(body, [*carry, *stacked])
        # What one turn reads, the turn before has to make.
        more = [a or b for a, b in zip(carry, read[begin : begin + count], strict=True)]
        if more == carry:
            return [*read[:begin], *carry, *read[begin + count :]]
        carry = more


def _read_by_while(site: AnySite, asked: list[bool]) -> list[bool]:
    condition, body = site.bodies
    params = site.equation.params
    tested, begin = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition = arguments_read(condition, [True])
    carry = [a or b for a, b in zip(asked, of_condition[tested:], strict=True)]
    while True:
        read = arguments_read(body, carry)
        more = [a or b for a, b in zip(carry, read[begin - tested :], strict=True)]
        if more == carry:
            return [*of_condition[:tested], *read[: begin - tested], *carry]
        carry = more
