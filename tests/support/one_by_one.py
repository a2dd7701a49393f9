"""Runs a program operation by operation, each compiled alone: without the roundings of fusions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmp._program import compat

CALLS = ("jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")


def run_one_by_one(closed: Any, arrays: list[Any]) -> list[Any]:
    """Returns the results of a program; its loops run turn by turn."""
    jaxpr = compat.open_jaxpr(closed)
    env = dict(zip(jaxpr.invars, arrays, strict=True))
    env |= dict(zip(jaxpr.constvars, compat.consts_of(closed), strict=True))

    def value(atom: Any) -> Any:
        return compat.number(atom) if isinstance(atom, core.Literal) else env[atom]

    for equation in jaxpr.eqns:
        results = _results(equation, list(map(value, equation.invars)))
        env.update(zip(equation.outvars, results, strict=True))
    return list(map(value, jaxpr.outvars))


def _results(equation: Any, operands: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if name == "scan":
        return _scan(equation, operands)
    if name == "cond":
        branch = equation.params["branches"][int(operands[0])]
        return run_one_by_one(branch, operands[1:])
    if name in CALLS:
        return run_one_by_one(compat.bodies_of(equation)[0], operands)
    assert name not in ("while", "shard_map"), name
    return compat.bind(equation, operands)


def _scan(equation: Any, operands: list[Any]) -> list[Any]:
    params, (consts, carries) = equation.params, compat.scan_counts(equation.params)
    fixed, carry, stacks = (
        operands[:consts],
        operands[consts:][:carries],
        operands[consts + carries :],
    )
    turns = list(range(params["length"]))
    slices: dict[int, list[Any]] = {}
    for turn in reversed(turns) if params["reverse"] else turns:
        results = run_one_by_one(params["jaxpr"], [*fixed, *carry, *(x[turn] for x in stacks)])
        carry, slices[turn] = results[:carries], results[carries:]
    return [*carry, *(jnp.stack(x) for x in zip(*(slices[turn] for turn in turns), strict=True))]


def one_by_one(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, traced once and then run operation by operation."""
    programs: list[Any] = []

    def call(*args: Any) -> Any:
        if not programs:
            programs.append(jax.make_jaxpr(fun, return_shape=True)(*args))
        closed, shapes = programs[0]
        results = run_one_by_one(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call
