"""Runs an operation that contains programs again, around other programs or around a function.

Around other programs, an operation has as many operands and results as before, and all are arrays.
Their dtypes may differ: each program is made for the types that reach it. Around a function,
operands and results are trees of arrays, and there may be more of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmp._numerics.histograms import zeros_as
from jaxmp._program import compat
from jaxmp._program.op_classes import CHECKPOINTS, JITS
from jaxmp._program.wiring import Wiring, argument_types, loop_of, wiring_of

# Makes a program for arguments of these types (avals).
Make = Callable[[list[Any]], core.ClosedJaxpr]


def rebind(equation: core.JaxprEqn, values: Sequence[Any], makers: Sequence[Make]) -> list[Any]:
    """Binds control flow or a plain call again around other programs, in their order."""
    if equation.primitive.name == "shard_map":

        def local(*args: Any) -> tuple[Any, ...]:
            program = makers[0]([compat.type_of(x) for x in args])
            return tuple(core.jaxpr_as_fun(program)(*args))

        return list(compat.shard_map_again(equation.params, local)(*values))
    avals = argument_types(equation, [compat.type_of(x) for x in values])
    programs = [make(types) for make, types in zip(makers, avals, strict=True)]
    return compat.bind(equation, values, **compat.params_with(equation, programs))


def is_call(equation: core.JaxprEqn) -> bool:
    """Whether an equation has one program, with the types of its operands and results."""
    if len(bodies := compat.bodies_of(equation)) != 1 or compat.lacks_constants(bodies[0]):
        return False
    program = compat.open_jaxpr(bodies[0])
    inside: list[Any] = [*program.invars, *program.outvars]
    outside: list[Any] = [*equation.invars, *equation.outvars]
    return [_type(atom) for atom in inside] == [_type(atom) for atom in outside]


def _type(atom: Any) -> tuple[Any, Any]:
    return getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)


# Runs one turn of a loop. It takes the arguments of the body, and further trees: of a scan, slices
# of them. It returns the results of the body, and further trees: of a scan, to be stacked.
Turn = Callable[[list[Any], Any], tuple[Sequence[Any], Any]]


def scan_again(
    equation: core.JaxprEqn, operands: Sequence[Any], turn: Turn, along: Any = ()
) -> tuple[list[Any], Any]:
    """Runs a scan again around another function of one turn; its operands may be trees.

    The turns get slices of the trees `along` too. Returned are the results, and the further trees
    of all turns, stacked.
    """
    wiring = wiring_of(equation)
    first, end = wiring.carry.start, wiring.carry.stop

    def one(carry: list[Any], slices: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        results, more = turn([*operands[:first], *carry, *slices[0]], slices[1])
        return list(results[: len(carry)]), (list(results[len(carry) :]), more)

    # Versions of JAX differ in which of these params a scan has.
    names = {"length", "reverse", "unroll", "_split_transpose"}.intersection(equation.params)
    options = {name: equation.params[name] for name in names}
    init, slices = list(operands[first:end]), (list(operands[end:]), along)
    carry, (stacked, more) = lax.scan(one, init, slices, **options)
    return [*carry, *stacked], more


def while_again(
    wiring: Wiring,
    operands: Sequence[Any],
    test: Callable[[list[Any]], Any],
    turn: Turn,
    more: Any = (),
) -> tuple[list[Any], Any]:
    """Runs a while loop again around other functions; its operands may be trees.

    The test says, from the arguments of the condition, whether there is another turn. A turn takes
    further trees, at first `more`, and returns them for the next one. Returned are the results, and
    these trees after the last turn.
    """

    def arguments(program: int, carry: list[Any]) -> list[Any]:
        values = [*operands[: wiring.carry.start], *carry]
        return [values[i] for i in wiring.arguments[program]]

    def one(state: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        results, more = turn(arguments(1, state[0]), state[1])
        return list(results), more

    init = (list(operands[wiring.carry.start :]), more)
    return lax.while_loop(lambda state: test(arguments(0, state[0])), one, init)


def cond_again(operands: Sequence[Any], branches: Sequence[Callable[[list[Any]], Any]]) -> Any:
    """Runs a conditional again around other functions; its operands may be trees.

    A branch returns its results, and a dict of further trees. Returned are the results, and the
    further trees of all branches: zeros for a branch that was not taken.
    """
    index, *arguments = operands
    zeros = {key: x for branch in branches for key, x in zeros_as(branch, arguments)[1].items()}

    def run(branch: Any, arguments: list[Any]) -> Any:
        results, more = branch(arguments)
        return results, zeros | more

    return lax.switch(index, [functools.partial(run, branch) for branch in branches], arguments)


def bodies_to_extend(equation: core.JaxprEqn) -> list[Any]:
    """Returns the program that can run again with more arguments: of a jit, checkpoint or scan."""
    # The shardings, layouts and donations that a jit names are for its own arguments.
    name = equation.primitive.name
    plain = name in JITS and compat.is_plain_jit(equation.params)
    is_one = plain or name in CHECKPOINTS or loop_of(equation) is not None
    return compat.bodies_of(equation) if is_one else []


def call_again(
    equation: core.JaxprEqn,
    values: Sequence[Any],
    more: Any,
    function: Callable[[Sequence[Any], Any], Any],
) -> Any:
    """Runs a jit or a checkpoint again around a function of its operands and of further arrays."""
    if equation.primitive.name in JITS:
        # Audits and profiles show its name.
        function.__name__ = function.__qualname__ = equation.params["name"]
        return jax.jit(function, inline=equation.params["inline"])(list(values), more)
    trees = list(values), more
    program, numbers = compat.trace_trees(function, *trees)
    leaves = jax.tree.leaves(trees)
    results = compat.bind(equation, leaves, jaxpr=compat.without_consts(program))
    return jax.tree.map(results.__getitem__, numbers)
