"""Runs a program again, with each operation at its place known.

Under the trace of the caller nothing runs at once: what comes out can be compiled. Subclasses
differ in what they do at an operation; `one_by_one` also turns loops in Python.
"""

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxmp._inspect.equations import Site, site_of
from jaxmp._numerics.histograms import zeros_as
from jaxmp._primitives.varying import varying_axes
from jaxmp._program import compat
from jaxmp._program.control_flow import scan_again
from jaxmp._program.op_classes import CLASSES, OpClass
from jaxmp._program.program import read as read_program

# The place of a value: the numbers of the equations around it, of its own, and of the result.
Key = tuple[int, ...]
# The results of a program, and what was kept of the values in it.
Made = tuple[list[Any], dict[Key, Any]]


class Rerun:
    """Runs a program again. Subclasses say what an operation does, and what is kept of values.

    Attributes:
      join: makes one of what turns or devices kept, which is stacked along first axes of all
        arrays; zeros stand for nothing. Without it, nothing is kept in a `while`, and a
        `shard_map` is an operation.
    """

    join: Callable[[Any], Any] | None = None

    def run(self, program: Any, args: Sequence[Any], key: Key, outer: Site | None) -> Made:
        """Runs a program.

        Args:
          program: a jaxpr, closed or open.
          args: its arguments.
          key: the place of the equation that it is in.
          outer: that equation; None for the whole program.

        Returns:
          Its results, and what was kept, by place.
        """
        jaxpr = compat.open_jaxpr(program)
        consts = map(self.given, compat.consts_of(program))
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        last = _last_reads(jaxpr)
        sites = [site_of(op, outer) for op in read_program(program).ops]
        keep = self.keeping(jaxpr, sites, outer)
        found: dict[Key, Any] = {}

        def read(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                return self.given(compat.number(atom))
            return env[atom]

        for number, (equation, site) in enumerate(zip(jaxpr.eqns, sites, strict=True)):
            with self.where(equation):
                operands = list(map(read, equation.invars))
                made, inside = self._equation(site, operands, (*key, 2 * number))
                env.update(zip(equation.outvars, made, strict=True))
                # What is inside of an equation comes before its results.
                found |= inside | keep(number, made, (*key, 2 * number + 1))
            for variable in last[number]:
                env.pop(variable, None)
        return [read(atom) for atom in jaxpr.outvars], found

    def given(self, value: Any) -> Any:
        """Returns a constant of the program as it is in the new one."""
        return value

    def where(self, equation: core.JaxprEqn) -> contextlib.AbstractContextManager[None]:
        """Returns the context that an equation runs in."""
        source = equation.source_info
        return compat.where(equation, source.name_stack, source.traceback)

    def operation(self, site: Site, values: list[Any]) -> list[Any]:
        """Runs an equation without looking into it."""
        return compat.bind(site.equation, values)

    def keeping(
        self, jaxpr: core.Jaxpr, sites: Sequence[Site], outer: Site | None
    ) -> Callable[[int, list[Any], Key], dict[Key, Any]]:
        """Returns what says, by the number of an equation, what to keep of its results."""
        return lambda number, values, key: {}

    def program_of_call(self, site: Site) -> Any:
        """Returns the program that an equation runs once; None if it is no call."""
        programs = compat.bodies_of(site.equation)
        return programs[0] if CLASSES.get(site.name) is OpClass.CONTROL and programs else None

    def _equation(self, site: Site, values: list[Any], key: Key) -> Made:
        followed = {
            "scan": self.scan,
            "while": self.while_loop,
            "cond": self.cond,
            "shard_map": self.shard_map,
        }
        if site.name in followed:
            return followed[site.name](site, values, key)
        if (program := self.program_of_call(site)) is not None:
            return self.run(program, values, key, site)
        return self.operation(site, values), {}

    def scan(self, site: Site, values: list[Any], key: Key) -> Made:
        """Runs a scan again; what its turns keep is stacked."""
        (body,) = compat.bodies_of(site.equation)
        return scan_again(
            site.equation, values, lambda arguments, _: self.run(body, arguments, key, site)
        )

    def while_loop(self, site: Site, values: list[Any], key: Key) -> Made:
        """Runs a while loop again; what its turns keep is joined, as their number is not known."""
        params = site.equation.params
        tested, consts = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body = values[:tested], values[tested : tested + consts]

        def goes_on(state: Made) -> Any:
            program = params["cond_jaxpr"]
            return self.run(program, [*of_test, *state[0]], (*key, -1), site)[0][0]

        def once(carry: list[Any]) -> Made:
            made, found = self.run(params["body_jaxpr"], [*of_body, *carry], key, site)
            return made, {} if self.join is None else found

        def turn(state: Made) -> Made:
            made, found = once(state[0])
            return made, self._joined(jax.tree.map(lambda *x: jnp.stack(x), state[1], found))

        carry = values[tested + consts :]
        return lax.while_loop(goes_on, turn, (carry, zeros_as(once, carry)[1]))

    def cond(self, site: Site, values: list[Any], key: Key) -> Made:
        """Runs a conditional again; what a branch that was not taken would keep is zeros."""
        index, *operands = values
        makers = [
            lambda args, program=program, i=i: self.run(program, args, (*key, i), site)
            for i, program in enumerate(site.equation.params["branches"])
        ]
        nothing: dict[Key, Any] = {}
        for make in makers:
            nothing |= zeros_as(make, operands)[1]

        def branch(make: Any) -> Any:
            def run(args: list[Any]) -> Made:
                made, found = make(args)
                return made, nothing | found

            return run

        return lax.switch(index, [branch(make) for make in makers], operands)

    def shard_map(self, site: Site, values: list[Any], key: Key) -> Made:
        """Runs a program on each device again, and joins what they keep."""
        if self.join is None:
            return self.operation(site, values), {}
        params = site.equation.params
        (body,) = compat.bodies_of(site.equation)
        axes = tuple(sorted(params["newly_manual_axes"]))

        def local(*args: Any) -> tuple[Any, ...]:
            made, found = self.run(body, args, key, site)
            return (*made, jax.tree.map(lambda x: _of_device(x, axes, params["check_vma"]), found))

        mapped = params | {"out_specs": (*params["out_specs"], jax.P(axes))}
        *made, found = compat.shard_map_again(mapped, local)(*values)
        return made, self._joined(found)

    def _joined(self, found: dict[Key, Any]) -> dict[Key, Any]:
        return {} if self.join is None else {key: self.join(kept) for key, kept in found.items()}


def _last_reads(jaxpr: core.Jaxpr) -> dict[int, list[Any]]:
    """Returns by the number of each equation the variables that nothing reads after it."""
    seen: set[Any] = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    last: dict[int, list[Any]] = collections.defaultdict(list)
    for number, equation in reversed(list(enumerate(jaxpr.eqns))):
        for atom in (*equation.invars, *equation.outvars):
            if not isinstance(atom, core.Literal) and atom not in seen:
                seen.add(atom)
                last[number].append(atom)
    return last


def _of_device(x: Any, axes: tuple[str, ...], checked: bool) -> Any:
    """Returns an array as a part of one over devices; zeros where another device has the same."""
    same = [axis for axis in axes if checked and axis not in varying_axes(x)]
    for axis in same:
        x = jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
    return x[None]
