"""Runs a backward pass that a user has written again, with the sums of its gradients in float32.

On the way back from a gradient, elementwise operations, moves and sums run in float32, up to the
products that they start from. These have float32 results, and 16-bit operands as before.
"""

import operator
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend import core

from jaxmp._float32_reduction.values import FLOAT32, is_half, may_be_param
from jaxmp._program import compat
from jaxmp._program.control_flow import Make, rebind
from jaxmp._program.op_classes import AFTER_PRODUCTS, CONTRACTIONS, CONTROL_FLOW, IDENTITIES

_Wanted = tuple[bool, ...]


def summed_in_float32(
    program: core.ClosedJaxpr, arguments: Sequence[Any], wanted: Sequence[bool]
) -> list[Any]:
    """Runs a program; wanted results are float32, and so are the sums that they are made by.

    Args:
      program: the program.
      arguments: its arguments.
      wanted: which results are gradients to be summed in float32.

    Returns:
      The results: float32 if they are wanted and have 16 bits, and in their own dtypes else.
    """
    return _Summed().run(program, arguments, tuple(wanted))


class _Summed:
    """A backward pass and the programs within it.

    A variable is wide if it is on the way back from a wanted result: it is computed in float32.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, _Wanted], set[Any]] = {}

    def run(self, program: Any, arguments: Sequence[Any], wanted: _Wanted) -> list[Any]:
        jaxpr = compat.open_jaxpr(program)
        wide = self.wide(jaxpr, wanted)
        env: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
        env.update(zip(jaxpr.constvars, compat.consts_of(program), strict=True))

        def read(atom: Any, in_float32: bool) -> Any:
            value = compat.number(atom) if isinstance(atom, core.Literal) else env[atom]
            if in_float32:
                return lax.convert_element_type(value, FLOAT32) if is_half(value) else value
            same = not is_half(atom.aval) or value.dtype == atom.aval.dtype
            return value if same else lax.convert_element_type(value, atom.aval.dtype)

        for equation in jaxpr.eqns:
            source = equation.source_info
            results = tuple(var in wide for var in equation.outvars)
            with compat.where(equation, source.name_stack, source.traceback):
                values = list(map(read, equation.invars, self.needed(equation, results)))
                made = self.made(equation, values, results)
            env.update(zip(equation.outvars, made, strict=True))
        return [read(atom, want) for atom, want in zip(jaxpr.outvars, wanted, strict=True)]

    def made(self, equation: core.JaxprEqn, values: list[Any], wanted: _Wanted) -> list[Any]:
        """Runs an equation on operands that are float32 where these results need it."""
        name, params = equation.primitive.name, equation.params
        if not any(wanted):
            return compat.bind(equation, values)
        if name in CONTROL_FLOW:
            turned = self.turned(equation, wanted)
            makers = [self.maker(each, turned) for each in compat.bodies_of(equation)]
            if name == "while":  # its condition is one truth value
                makers[0] = self.maker(params["cond_jaxpr"], (False,))
            return rebind(equation, values, makers)
        if name == "convert_element_type" and may_be_param(values[0]):
            return values
        if name.startswith("scatter"):  # its own function has the dtype of the trace
            scatter = lax.scatter if name == "scatter" else lax.scatter_add
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [scatter(*values, **{name: params[name] for name in names})]
        if name in CONTRACTIONS and is_half(equation.outvars[0].aval):
            return compat.bind(equation, values, preferred_element_type=FLOAT32)
        return compat.bind(equation, values)

    def maker(self, program: Any, wanted: _Wanted) -> Make:
        return lambda avals: compat.trace(lambda *args: self.run(program, args, wanted), avals)

    def wide(self, jaxpr: core.Jaxpr, wanted: _Wanted) -> set[Any]:
        """Returns the variables that are computed in float32 for these results."""
        key = id(jaxpr), wanted
        if key not in self.known:
            results = zip(jaxpr.outvars, wanted, strict=True)
            wide = {atom for atom, want in results if want and isinstance(atom, core.Var)}
            for equation in reversed(jaxpr.eqns):
                made = tuple(var in wide for var in equation.outvars)
                operands = zip(equation.invars, self.needed(equation, made), strict=True)
                wide.update(atom for atom, need in operands if need and isinstance(atom, core.Var))
            self.known[key] = wide
        return self.known[key]

    def needed(self, equation: core.JaxprEqn, wanted: _Wanted) -> Sequence[bool]:
        """Returns which operands are read in float32 for these results."""
        name = equation.primitive.name
        if any(wanted) and name in AFTER_PRODUCTS:
            return [may_be_param(atom.aval) for atom in equation.invars]
        nothing = [False] * len(equation.invars)
        if any(wanted) and name in IDENTITIES:
            return [may_be_param(equation.invars[0].aval), *nothing[1:]]
        if not any(wanted) or name not in CONTROL_FLOW:
            return nothing
        turned, bodies = self.turned(equation, wanted), compat.sub_jaxprs(equation)
        if carry := _carry_of(equation):
            needed = self.arguments(bodies[-1], turned)
            needed[carry] = turned[: carry.stop - carry.start]
        else:
            each = (self.arguments(body, turned) for body in bodies)
            needed = list(map(any, zip(*each, strict=True)))
        # The index of a branch, and the constants of a condition, are not arguments of a body.
        return [*nothing[len(needed) :], *needed]

    def arguments(self, jaxpr: core.Jaxpr, wanted: _Wanted) -> list[bool]:
        wide = self.wide(jaxpr, wanted)
        return [var in wide for var in jaxpr.invars]

    def turned(self, equation: core.JaxprEqn, wanted: _Wanted) -> _Wanted:
        """Returns which results are wanted; a carry of a loop also if a later turn needs it so."""
        carry = _carry_of(equation)
        if carry is None:
            return wanted
        body, count = compat.sub_jaxprs(equation)[-1], carry.stop - carry.start
        while True:
            turned = tuple(map(operator.or_, wanted[:count], self.arguments(body, wanted)[carry]))
            if turned == wanted[:count]:
                return wanted
            wanted = (*turned, *wanted[count:])


def _carry_of(equation: core.JaxprEqn) -> slice | None:
    """Returns which arguments of a loop's body are its carry; None if it is not a loop."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        return slice(params["body_nconsts"], params["body_nconsts"] + len(equation.outvars))
    if name == "scan":
        begin, count = compat.scan_counts(params)
        return slice(begin, begin + count)
    return None
