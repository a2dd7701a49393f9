"""Follows wide values from the cast that made them to the products that they make wide."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jaxmp._audit._walk import Body, Site
from jaxmp._compat import scan_counts
from jaxmp._flops import PRODUCTS


def mark_upcasts(body: Body) -> list[Site]:
    """Finds what makes wide values of narrow ones, and which products multiply such values.

    A value is wide if it is a float of 32 bits or more, or complex. It comes from an upcast if
    it was computed from that one's result through wide values only: a cast to 16 bits ends it.
    Values of a single number are not followed: they make no product wide, and a loss, a loss scale
    or a norm of the gradients would connect everything with everything.

    Args:
      body: a whole program; of its sites, `bit` and `fed_by` are filled in.

    Returns:
      The equations that may be upcasts, the first one with bit 1, the second with 2, and so on.
    """
    flow = _Flow()
    flow.run(body, [0] * len(body.jaxpr.invars))
    return flow.sources


def is_wide(aval: Any) -> bool:
    """Whether an abstract value is a float of at least 32 bits, or complex."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return False
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize >= 4


def is_narrow(aval: Any) -> bool:
    """Whether an abstract value is a float of fewer than 32 bits."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4


def widens_inside(site: Site) -> bool:
    """Whether a product has both narrow and wide operands, and so widens one of them itself."""
    left, right = (variable.aval for variable in site.equation.invars[:2])
    return (is_narrow(left) and is_wide(right)) or (is_wide(left) and is_narrow(right))


class _Flow:
    def __init__(self) -> None:
        self.sources: list[Site] = []
        self._wide: dict[Any, bool] = {}

    def run(self, body: Body, inputs: Sequence[int]) -> list[int]:
        """From which upcasts the results of a program come, given the same of its inputs."""
        known = dict(zip(body.jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> int:
            return 0 if isinstance(atom, core.Literal) else known.get(atom, 0)

        for site in body.sites:
            operands = [read(atom) for atom in site.equation.invars]
            results = self._inside(site, operands) if site.bodies else self._step(site, operands)
            for variable, result in zip(site.equation.outvars, results, strict=True):
                if result:
                    known[variable] = result
        return [read(atom) for atom in body.jaxpr.outvars]

    def _step(self, site: Site, operands: list[int]) -> list[int]:
        equation = site.equation
        if site.name in PRODUCTS:
            came_from = self._product(site, operands)
        elif site.name == "convert_element_type" and is_narrow(equation.invars[0].aval):
            came_from = self._bit(site) if self._is_wide(equation.outvars[0].aval) else 0
        else:
            came_from = 0
            for mask in operands:
                came_from |= mask
        if not came_from:
            return [0] * len(equation.outvars)
        return [self._kept(variable.aval, came_from) for variable in equation.outvars]

    def _product(self, site: Site, operands: list[int]) -> int:
        came_from = operands[0] | operands[1]
        wide = [self._is_wide(variable.aval) for variable in site.equation.invars[:2]]
        if widens_inside(site) or (not any(wide) and self._is_wide(site.equation.outvars[0].aval)):
            came_from |= self._bit(site)
        if any(wide):
            site.fed_by |= came_from
        return came_from

    def _inside(self, site: Site, operands: list[int]) -> list[int]:
        """The same for an equation with programs inside; loops until nothing new comes around."""
        if site.name == "scan":
            return self._scan(site, operands)
        if site.name == "while":
            return self._while(site, operands)
        if site.name == "cond":
            return self._branches(site, operands[1:])
        (body, *more) = site.bodies
        if not more and len(body.jaxpr.invars) == len(operands):
            results = self.run(body, operands)
            if len(results) == len(site.equation.outvars):
                return results
        return self._blurred(site, operands)

    def _branches(self, site: Site, operands: list[int]) -> list[int]:
        """Any of the branches may have run."""
        results = [0] * len(site.equation.outvars)
        for body in site.bodies:
            results = _merged(results, self.run(body, operands))
        return results

    def _scan(self, site: Site, operands: list[int]) -> list[int]:
        (body,) = site.bodies
        start, carried = scan_counts(site.equation.params)
        while True:
            results = self.run(body, operands)
            merged = _merged(operands[start : start + carried], results[:carried])
            if merged == operands[start : start + carried]:
                return results
            operands = [*operands[:start], *merged, *operands[start + carried :]]

    def _while(self, site: Site, operands: list[int]) -> list[int]:
        condition, body = site.bodies
        for_condition = site.equation.params["cond_nconsts"]
        start = for_condition + site.equation.params["body_nconsts"]
        carry = operands[start:]
        while True:
            self.run(condition, [*operands[:for_condition], *carry])
            results = self.run(body, [*operands[for_condition:start], *carry])
            merged = _merged(carry, results)
            if merged == carry:
                return carry
            carry = merged

    def _blurred(self, site: Site, operands: list[int]) -> list[int]:
        """Where it is not known which operand goes where: all of them go everywhere."""
        came_from = 0
        for mask in operands:
            came_from |= mask
        for body in site.bodies:
            inputs = [self._kept(v.aval, came_from) for v in body.jaxpr.invars]
            for result in self.run(body, inputs):
                came_from |= result
        return [self._kept(variable.aval, came_from) for variable in site.equation.outvars]

    def _bit(self, site: Site) -> int:
        if not site.bit:
            site.bit = 1 << len(self.sources)
            self.sources.append(site)
        return site.bit

    def _kept(self, aval: Any, came_from: int) -> int:
        return came_from if self._is_wide(aval) and aval.size > 1 else 0

    def _is_wide(self, aval: Any) -> bool:
        dtype = getattr(aval, "dtype", None)
        if dtype not in self._wide:
            self._wide[dtype] = is_wide(aval)
        return self._wide[dtype]


def _merged(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a | b for a, b in zip(left, right, strict=True)]
