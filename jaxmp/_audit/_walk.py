"""The equations of a program, with how often each of them runs and what encloses it."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxmp._audit._branches import Choice, choices
from jaxmp._compat import open_jaxpr
from jaxmp._flops import product_flops, programs_inside


@dataclasses.dataclass(eq=False, slots=True)
class Site:
    """An equation at one place of the program; a function that is called twice has two.

    Attributes:
      equation: the equation.
      name: the name of its primitive.
      runs: how often it runs: the product of the lengths of the scans around it.
      outer: the equation that it is inside of.
      branches: the branches of conditionals that it is inside of, the innermost last.
      bodies: the programs inside of it that are counted.
      flops: those of one run, if it is a product.
      bit: the upcast that it is, as a power of two; 0 if it is none.
      fed_by: the upcasts from which the wide operands of a product come, as bits.
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
    """A program: the whole one, or one inside of an equation.

    Attributes:
      jaxpr: the program.
      sites: its equations in order.
    """

    jaxpr: Any
    sites: list[Site]

    def all_sites(self) -> Iterator[Site]:
        """All equations, nested ones too: an equation before those inside of it."""
        for site in self.sites:
            yield site
            for body in site.bodies:
                yield from body.all_sites()


def walk(jaxpr: Any) -> Body:
    """The program with everything inside of it that runs.

    Args:
      jaxpr: an open or closed jaxpr.

    Returns:
      The program. Of a conditional every branch is inside of it, of a while loop the condition and
      the body, once each.
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
