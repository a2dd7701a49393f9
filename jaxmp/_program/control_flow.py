"""Runs an operation that contains programs again: around other programs, or around a function.

Around programs, operands and results are arrays. Their number stays, and their dtypes may be
others: each program is made for the types that reach it. Around a function, they are any trees of
arrays, and there may be more of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmp._program import compat
from jaxmp._program.op_classes import CHECKPOINTS, JITS
from jaxmp._program.wiring import argument_types, loop_of

# Makes a program for arguments of these types (avals).
Make = Callable[[list[Any]], core.ClosedJaxpr]


def rebind(
    equation: core.JaxprEqn, values: Sequence[Any], makers: Sequence[Make], **changed: Any
) -> list[Any]:
    """Binds an operation again around other programs.

    Args:
      equation: the equation of jit, checkpoint, scan, while, cond, a plain call or `shard_map`.
      values: its operands.
      makers: make its programs, in the order of `compat.sub_jaxprs`.
      **changed: other params to change.

    Returns:
      Its results.
    """
    params = equation.params
    if equation.primitive.name == "shard_map":

        def local(*args: Any) -> tuple[Any, ...]:
            made = makers[0]([compat.type_of(x) for x in args])
            return tuple(core.jaxpr_as_fun(made)(*args))

        return list(compat.shard_map_again(params, local)(*values))
    avals = argument_types(equation, [compat.type_of(x) for x in values])
    programs = iter([make(each) for make, each in zip(makers, avals, strict=True)])
    new = {
        name: compat.with_programs(param, programs)
        for name, param in params.items()
        if compat.programs_of(param)
    }
    return compat.bind(equation, values, **new, **changed)


def is_call(equation: core.JaxprEqn) -> bool:
    """Whether an equation has one program, with the types of its operands and results."""
    if len(programs := compat.sub_jaxprs(equation)) != 1:
        return False
    (program,) = programs
    inside: list[Any] = [*program.invars, *program.outvars]
    outside: list[Any] = [*equation.invars, *equation.outvars]
    return [_type(atom) for atom in inside] == [_type(atom) for atom in outside]


def _type(atom: Any) -> tuple[Any, Any]:
    return getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)


# Runs one turn of a scan: from the arguments of its body, and slices of further trees, to the
# results of the body, and further trees to stack.
Turn = Callable[[list[Any], Any], tuple[Sequence[Any], Any]]


def scan_again(
    equation: core.JaxprEqn, operands: Sequence[Any], turn: Turn, along: Any = ()
) -> tuple[list[Any], Any]:
    """Runs a scan again around another function.

    Args:
      equation: the equation.
      operands: its operands, or trees in place of them.
      turn: the function of one turn.
      along: further trees to slice.

    Returns:
      Its results, and what the turns return beside them, stacked.
    """
    consts, carries = compat.scan_counts(equation.params)
    end = consts + carries

    def one(carry: list[Any], slices: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        results, more = turn([*operands[:consts], *carry, *slices[0]], slices[1])
        return list(results[:carries]), (list(results[carries:]), more)

    init, slices = list(operands[consts:end]), (list(operands[end:]), along)
    carry, (stacked, more) = scan_with_options(equation.params, one, init, slices)
    return [*carry, *stacked], more


def scan_with_options(
    params: dict[str, Any], turn: Callable[[Any, Any], tuple[Any, Any]], init: Any, stacked: Any
) -> tuple[Any, Any]:
    """Runs `jax.lax.scan` as often and in the order that the params of an equation say."""
    names = {"length", "reverse", "unroll", "_split_transpose"}.intersection(params)
    return lax.scan(turn, init, stacked, **{name: params[name] for name in names})


def entered(equation: core.JaxprEqn) -> list[Any]:
    """Returns the programs of an equation that can run again with arrays from outside.

    Those are the programs of jit, if it asks for nothing, of checkpoint and of scan.
    """
    name = equation.primitive.name
    plain = name in JITS and compat.is_plain_jit(equation.params)
    is_one = plain or name in CHECKPOINTS or loop_of(equation) is not None
    return compat.bodies_of(equation) if is_one else []


def call_again(
    equation: core.JaxprEqn,
    values: Sequence[Any],
    given: Any,
    function: Callable[[Sequence[Any], Any], Any],
) -> Any:
    """Runs a jit or a checkpoint again around another function.

    Args:
      equation: the equation.
      values: its operands.
      given: a tree of further arrays.
      function: a function of both, which returns a tree of arrays.
    """
    if equation.primitive.name in JITS:
        # Named, as audits and profiles show it.
        function.__name__ = function.__qualname__ = equation.params["name"]
        return jax.jit(function, inline=equation.params["inline"])(list(values), given)
    leaves, structure = jax.tree.flatten((list(values), given))
    types = jax.tree.unflatten(structure, [compat.type_of(x) for x in leaves])
    program, shape = compat.trace_trees(function, *types)
    results = compat.bind(equation, leaves, jaxpr=compat.without_consts(program))
    return jax.tree.unflatten(jax.tree.structure(shape), results)
