"""Runs a program that was traced on explicit mesh axes on automatic ones.

What it says about shardings becomes constraints: `jax.reshard`, `out_sharding`, and constraints on
the axes that were automatic before.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmp._program import compat
from jaxmp._program.derivatives import Behind, with_derivative, with_passes
from jaxmp._program.mesh_axes import (
    ANY,
    automatic,
    free_sharding,
    named_axes,
    on_current_axes,
    only_axes,
)
from jaxmp._program.op_classes import CONTROL_FLOW
from jaxmp._program.rebind import rebind


class _Later(NamedTuple):
    """An array that is to be resharded, but not before a cast that makes it narrower."""

    array: Any
    sharding: NamedSharding


def run_freed(jaxpr: core.Jaxpr, consts: Sequence[Any], *arrays: Any) -> list[Any]:
    """Runs a program that was traced on explicit axes on automatic ones."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, arrays, strict=True))
    env.update(zip(jaxpr.constvars, map(on_current_axes, consts), strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return atom.val
        if isinstance(env[atom], _Later):
            env[atom] = _as_asked(*env[atom])
        return env[atom]

    for equation in compat.open_jaxpr(jaxpr).eqns:
        source = equation.source_info
        with compat.where(equation, source.name_stack, source.traceback, mesh=False):
            later = [env.get(x) for x in equation.invars if not isinstance(x, core.Literal)]
            if _narrows(equation) and isinstance(later[0], _Later):
                # A cast commutes with a reshard. First the cast: a gather then carries 16 bits.
                (made,) = compat.bind(equation, [later[0].array])
                env[equation.outvars[0]] = later[0]._replace(array=made)
                continue
            results = _run(equation, [read(atom) for atom in equation.invars])
        env.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _narrows(equation: core.JaxprEqn) -> bool:
    if equation.primitive.name != "convert_element_type":
        return False
    given: Any = equation.invars[0].aval
    return bool(equation.params["new_dtype"].itemsize < given.dtype.itemsize)


def _run(equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
    name = equation.primitive.name
    made_of: list[Any] = [var.aval for var in equation.outvars]
    if name == "reshard":
        return [_Later(values[0], made_of[0].sharding)]
    if name in CONTROL_FLOW:
        makers = [functools.partial(_freed_program, body) for body in compat.bodies_of(equation)]
        return rebind(_on_automatic_mesh(equation), values, makers)
    if name == "custom_jvp_call":
        return _with_derivative(equation)(*values)
    if name == "custom_vjp_call":
        return _with_passes(equation)(*values)
    if any(var.aval.sharding.mesh.explicit_axes for var in _inner_arguments(equation)):
        # Inside, shardings may be asked for; the function may do without them on automatic axes.
        raise NotImplementedError(f"{name} on explicit mesh axes, with a program inside")
    if name == "sharding_constraint":
        return [_constrained_alike(equation, values[0])]
    asked = [key for key in ("out_sharding", "sharding") if equation.params.get(key) is not None]
    unasked = equation.replace(params=equation.params | dict.fromkeys(asked))
    made = compat.bind(_on_automatic_mesh(unasked), values)
    if not asked:
        return made
    return [
        _as_asked(x, aval.sharding) if any(aval.sharding.spec.partitions) else x
        for x, aval in zip(made, made_of, strict=True)
    ]


def _as_asked(x: Any, sharding: NamedSharding) -> Any:
    """Constrains what a sharding on explicit axes says; other axes are left to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(sharding.mesh.explicit_axes) & set(mesh.auto_axes)
    whole = set(mesh.auto_axes) <= axes
    spec = only_axes(sharding.spec, axes, None if whole else ANY)
    if not spec or not axes or all(entry is ANY for entry in spec):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _inner_arguments(equation: core.JaxprEqn) -> list[Any]:
    """Returns the arguments of the programs in an equation that have a sharding."""
    inner = [var for jaxpr in compat.sub_jaxprs(equation) for var in jaxpr.invars]
    return [var for var in inner if hasattr(var.aval, "sharding")]


def _constrained_alike(equation: core.JaxprEqn, x: Any) -> Any:
    """Constrains automatic axes as an equation does, and explicit ones as its type says."""
    asked, given = equation.params["sharding"], _type_of(equation)
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(asked, NamedSharding):
        return compat.bind(equation, [x])[0]
    entries = zip(
        _entries_of(asked.spec, x.ndim), _entries_of(given.sharding.spec, x.ndim), strict=True
    )
    spec = [
        free if free is ANY or not named else (*named_axes(named), *named_axes(free))
        for free, named in entries
    ]
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _type_of(equation: core.JaxprEqn) -> Any:
    return equation.outvars[0].aval


def _entries_of(spec: PartitionSpec, ndim: int) -> list[Any]:
    return [*spec.partitions, *[None] * (ndim - len(spec.partitions))]


def _freed_program(body: Any, avals: list[Any]) -> core.ClosedJaxpr:
    jaxpr, consts = compat.open_jaxpr(body), compat.consts_of(body)
    return compat.trace(functools.partial(run_freed, jaxpr, consts), avals)


def _on_automatic_mesh(equation: core.JaxprEqn) -> core.JaxprEqn:
    """Returns the equation with meshes in its params that have no explicit axes."""

    def freed(param: Any) -> Any:
        if isinstance(param, (Mesh, AbstractMesh)):
            return automatic(param)
        if type(param) in (tuple, list):
            return type(param)(map(freed, param))
        return free_sharding(param)

    params = {name: freed(param) for name, param in equation.params.items()}
    return equation.replace(params=params)


def _with_derivative(equation: core.JaxprEqn) -> Callable[..., list[Any]]:
    count = len(equation.outvars)

    def derivative(
        program: core.ClosedJaxpr, by: Sequence[int], arrays: Sequence[Any], tangents: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        made = run_freed(program.jaxpr, program.consts, *arrays, *tangents)
        return made[:count], made[count:]

    return with_derivative(equation, range(len(equation.invars)), _primal(equation), derivative)


def _with_passes(equation: core.JaxprEqn) -> Callable[..., list[Any]]:
    def behind(program: core.ClosedJaxpr, by: Sequence[int], given: list[Any]) -> list[Any]:
        return run_freed(program.jaxpr, program.consts, *given)

    def ahead(jaxpr: core.ClosedJaxpr, arrays: list[Any]) -> tuple[list[Any], Behind]:
        return run_freed(jaxpr.jaxpr, jaxpr.consts, *arrays), behind

    return with_passes(equation, range(len(equation.invars)), _primal(equation), ahead)


def _primal(equation: core.JaxprEqn) -> Callable[..., list[Any]]:
    body = equation.params["call_jaxpr"]
    return functools.partial(run_freed, compat.open_jaxpr(body), compat.consts_of(body))
