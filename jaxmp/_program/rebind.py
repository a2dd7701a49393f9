"""Runs an operation that contains programs again, around other programs.

The operands and results keep their number, and may have other dtypes: each program is made for the
types that reach it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmp._program import compat
from jaxmp._program.op_classes import CHECKPOINTS, JITS

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
    avals = arguments_of(equation, [compat.type_of(x) for x in values])
    programs = iter([make(each) for make, each in zip(makers, avals, strict=True)])
    new = {
        name: compat.with_programs(param, programs)
        for name, param in params.items()
        if compat.programs_of(param)
    }
    return compat.bind(equation, values, **new, **changed)


def arguments_of(equation: core.JaxprEqn, avals: list[Any]) -> list[list[Any]]:
    """Returns the types of the arguments of each program, given those of the operands."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        end = sum(compat.scan_counts(params))
        return [[*avals[:end], *map(compat.unstacked, avals[end:])]]
    if name == "while":
        tested, consts = params["cond_nconsts"], params["body_nconsts"]
        return [[*avals[:tested], *avals[tested + consts :]], avals[tested:]]
    if name == "cond":
        return [avals[1:] for _ in params["branches"]]
    return [avals]


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


def scan_again(
    params: dict[str, Any], turn: Callable[[Any, Any], tuple[Any, Any]], init: Any, stacked: Any
) -> tuple[Any, Any]:
    """Runs a scan again around another function, with carries and stacks of its own.

    Args:
      params: the params of the equation, which say how often and in which order it runs.
      turn: the function of a carry and of a slice.
      init: the first carry.
      stacked: what is sliced.

    Returns:
      The last carry, and what the turns return, stacked.
    """
    names = {"length", "reverse", "unroll", "_split_transpose"}.intersection(params)
    return lax.scan(turn, init, stacked, **{name: params[name] for name in names})


def run_by_rule(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    rule: Callable[[core.JaxprEqn, list[Any]], list[Any]],
) -> list[Any]:
    """Runs a program; a rule makes the results of each equation from its operands."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return compat.number(atom) if isinstance(atom, core.Literal) else env[atom]

    for equation in compat.open_jaxpr(jaxpr).eqns:
        source = equation.source_info
        with compat.where(equation, source.name_stack, source.traceback):
            made = rule(equation, [read(atom) for atom in equation.invars])
        env.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def entered(equation: core.JaxprEqn) -> list[Any]:
    """Returns the programs of an equation that can run again with arrays from outside.

    Those are the programs of jit, if it asks for nothing, of checkpoint and of scan.
    """
    name = equation.primitive.name
    plain = name in JITS and compat.is_plain_jit(equation.params)
    return compat.bodies_of(equation) if plain or name in CHECKPOINTS or name == "scan" else []


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
    shapes: list[Any] = []

    def of_leaves(*leaves: Any) -> list[Any]:
        made, shape = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
        shapes[:] = [shape]
        return made

    traced = compat.trace(of_leaves, [compat.type_of(x) for x in leaves])
    made = compat.bind(equation, leaves, jaxpr=compat.without_consts(traced))
    return jax.tree.unflatten(shapes[0], made)
