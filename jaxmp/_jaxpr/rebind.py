"""Runs an operation that contains programs again, around other programs.

The operands and results keep their number, and may have other dtypes: each program is made for the
types that reach it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend import core

from jaxmp._jaxpr import compat

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
