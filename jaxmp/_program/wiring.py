"""How the programs inside of an operation are connected to its operands and results.

This is the one place that knows what the operands of each kind of control flow are. Whatever goes
through a program, facts or types, forward or backward, follows these wires.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from jaxmp._program.compat import bodies_of, lacks_constants, scan_counts, sub_jaxprs, unstacked

_NONE = range(0)


class Wiring(NamedTuple):
    """The connections of an operation with programs inside. Operands are named by their numbers.

    Attributes:
      arguments: for each program, the operands that are its arguments.
      carry: the operands that a loop replaces after each turn. The first results of its last
        program replace them.
      slices: the operands of which each turn gets one slice. A loop with slices stacks its results
        behind the carry.
      loops: whether the programs run turn by turn.
      reverse: whether the first turn gets the last slices.
      turns: how often they run; None if that is known only when they run.
      tests: how many of the programs only say whether there is another turn. They come first.
      chooses: whether only one of the programs runs.
    """

    arguments: tuple[range | tuple[int, ...], ...]
    carry: range = _NONE
    slices: range = _NONE
    loops: bool = False
    reverse: bool = False
    turns: int | None = 1
    tests: int = 0
    chooses: bool = False

    @property
    def known_turns(self) -> int:
        """How often the programs run; 1 if that is not known."""
        return 1 if self.turns is None else self.turns

    @property
    def counted(self) -> bool:
        """Whether the programs run turn by turn, and how often is known."""
        return self.loops and self.turns is not None


def wiring_of(equation: core.JaxprEqn, counts: Sequence[tuple[int, int]] | None = None) -> Wiring:
    """Returns the connections of an equation with the programs inside it.

    Args:
      equation: the equation.
      counts: how many arguments and results each of its programs has, if not all programs in its
        params are meant.

    Returns:
      The connections; without arguments where it is not known which operand is which argument, as
      in a linear solve.
    """
    name, params, count = equation.primitive.name, equation.params, len(equation.invars)
    if name == "scan":
        consts, carries = scan_counts(params)
        carry = range(consts, consts + carries)
        slices, turns = range(carry.stop, count), int(params["length"])
        reverse = bool(params["reverse"])
        return Wiring((range(count),), carry, slices, loops=True, reverse=reverse, turns=turns)
    if name == "while":
        consts, begin = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = range(begin, count)
        condition = (*range(consts), *carry)
        body = range(consts, count)
        return Wiring((condition, body), carry, loops=True, turns=None, tests=1)
    if name == "cond":
        return Wiring((range(1, count),) * len(params["branches"]), chooses=True)
    # A program with as many arguments and results as its equation is that of a call.
    if counts is None:
        counts = [(len(body.invars), len(body.outvars)) for body in sub_jaxprs(equation)]
    is_call = counts == [(count, len(equation.outvars))]
    is_call = is_call and not any(map(lacks_constants, bodies_of(equation)))
    return Wiring((range(count),) if is_call else ())


def loop_of(equation: core.JaxprEqn) -> Wiring | None:
    """Returns the connections of a loop whose turns are counted; None for other equations."""
    wiring = wiring_of(equation)
    return wiring if wiring.counted else None


def argument_types(equation: core.JaxprEqn, avals: Sequence[Any]) -> list[list[Any]]:
    """Returns the types of the arguments of each program, given those of the operands."""
    wiring = wiring_of(equation)
    types = [unstacked(x) if i in wiring.slices else x for i, x in enumerate(avals)]
    return [[types[i] for i in numbers] for numbers in wiring.arguments or [range(len(avals))]]
