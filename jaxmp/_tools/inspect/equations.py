"""Walks the operations of a program: how often each runs, and what encloses it."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxmp._program.flops import is_elementwise, product_flops, programs_inside
from jaxmp._program.op_classes import TIMES
from jaxmp._program.program import Op, Program, read
from jaxmp._tools.inspect.branches import Choice, choices


# Compared by identity: two calls of one function share equations, and have different sites.
@dataclasses.dataclass(eq=False, slots=True)
class Site(Op):
    """An operation at one place of the program.

    If a function is called twice, each of its operations has two sites.

    Attributes:
      runs: how often it runs: the product of the lengths of the scans around it.
      outer: the site of the enclosing operation.
      branches: the enclosing branches of conditionals, innermost last.
      bodies: the programs inside of the operation that are counted.
      flops: the FLOPs of one run, if it is a product.
      bit: a distinct power of two if it is an upcast; otherwise 0.
      fed_by: the bits of the upcasts that the wide operands of a product come from.
    """

    runs: int = 1
    outer: "Site | None" = None
    branches: tuple[Choice, ...] = ()
    bodies: tuple[Program, ...] = ()
    flops: int = 0
    bit: int = 0
    fed_by: int = 0

    @property
    def name(self) -> str:
        return TIMES if is_elementwise(self.equation) else Op.name.fget(self)  # type: ignore


def site_of(op: Op, outer: Site | None) -> Site:
    """Returns an operation at a place: inside of another one."""
    return Site(op.equation, op.number, op.inputs, op.outputs, op.stack, op.traceback, outer=outer)


def walk(jaxpr: Any) -> Program:
    """Reads an open or closed jaxpr with its operations, and those inside of them, at their places.

    It includes every branch of a conditional, and the condition and body of a while loop once each.
    """
    return _walk(jaxpr, 1, None, (), itertools.count())


def _walk(
    jaxpr: Any,
    runs: int,
    outer: Site | None,
    branches: tuple[Choice, ...],
    conditionals: Iterator[int],
) -> Program:
    program = read(jaxpr)
    sites = [site_of(op, outer) for op in program.ops]
    for site in sites:
        equation = site.equation
        site.runs, site.branches, site.flops = runs, branches, product_flops(equation)
        # Not every program of an equation runs: of a solver only the one that solves counts.
        programs = programs_inside(equation)
        if not programs:
            continue
        wiring, inside = site.wiring, [branches] * len(programs)
        if wiring.chooses:
            # Conditionals are numbered, so that two with the same branches are not taken for one.
            inside = [(*branches, choice) for choice in choices(equation, next(conditionals))]
        site.bodies = tuple(
            # The turns of a while loop are not known: they count as one.
            _walk(body, runs * wiring.known_turns, site, path, conditionals)
            for body, path in zip(programs, inside, strict=True)
        )
    return program._replace(ops=tuple(sites))


def all_sites(program: Program) -> Iterator[Site]:
    """Yields all operations of a walked program; each precedes those inside of it."""
    for site in program.ops:
        if isinstance(site, Site):
            yield site
            for body in site.bodies:
                yield from all_sites(body)
