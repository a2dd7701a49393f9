"""Walks the equations of a program: how often each runs, and what encloses it."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxmp._inspect.branches import Choice, choices
from jaxmp._program.compat import open_jaxpr
from jaxmp._program.flops import product_flops, programs_inside


@dataclasses.dataclass(eq=False, slots=True)
class Site:
    """An equation at one place of the program.

    If a function is called twice, each of its equations has two sites.

    Attributes:
      equation: the equation.
      name: the name of its primitive.
      runs: how often it runs: the product of the lengths of the scans around it.
      outer: the site of the enclosing equation.
      branches: the enclosing branches of conditionals, innermost last.
      bodies: the programs inside of the equation that are counted.
      flops: the FLOPs of one run, if it is a product.
      bit: a distinct power of two if it is an upcast; otherwise 0.
      fed_by: the bits of the upcasts that the wide operands of a product come from.
    """

    equation: Any
    name: str
    runs: int
    outer: "Site | None"
    branches: tuple[Choice, ...] = ()
    bodies: "tuple[Body, ...]" = ()
    flops: int = 0
    bit: int = 0
    fed_by: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class Body:
    """A program: the whole program, or a program inside of an equation.

    Attributes:
      jaxpr: the program.
      sites: its equations in order.
    """

    jaxpr: Any
    sites: list[Site]

    def all_sites(self) -> Iterator[Site]:
        """Yields all equations, including nested ones; an equation precedes those inside of it."""
        for site in self.sites:
            yield site
            for body in site.bodies:
                yield from body.all_sites()


def walk(jaxpr: Any) -> Body:
    """Collects all equations of a program that run, including nested ones.

    Args:
      jaxpr: an open or closed jaxpr.

    Returns:
      The program. It includes every branch of a conditional, and the condition and body of a while
      loop once each.
    """
    return _walk(jaxpr, 1, None, (), itertools.count())


def _walk(
    jaxpr: Any,
    runs: int,
    outer: Site | None,
    branches: tuple[Choice, ...],
    conditionals: Iterator[int],
) -> Body:
    body = Body(open_jaxpr(jaxpr), [])
    for equation in body.jaxpr.eqns:
        name = equation.primitive.name
        site = Site(equation, name, runs, outer, branches, flops=product_flops(equation))
        times = runs * (int(equation.params["length"]) if name == "scan" else 1)
        programs = programs_inside(equation)
        inside = [branches] * len(programs)
        if name == "cond":
            inside = [(*branches, choice) for choice in choices(equation, next(conditionals))]
        site.bodies = tuple(
            _walk(program, times, site, path, conditionals)
            for program, path in zip(programs, inside, strict=True)
        )
        body.sites.append(site)
    return body
