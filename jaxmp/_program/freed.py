"""Runs a program that was traced on explicit mesh axes on automatic ones.

What it says about shardings becomes constraints: `jax.reshard`, `out_sharding`, and constraints on
the axes that were automatic before.
"""

import contextlib
import dataclasses
from typing import Any, NamedTuple, cast

import jax
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmp._program import compat
from jaxmp._program.evaluate import Cells, Rules, evaluate
from jaxmp._program.mesh_axes import (
    ANY,
    automatic,
    free_sharding,
    named_axes,
    on_current_axes,
    only_axes,
)
from jaxmp._program.op_classes import CONTROL_FLOW, CUSTOM_DERIVATIVES
from jaxmp._program.program import Op, read


class _Later(NamedTuple):
    """An array that is to be resharded, but not before a cast that makes it narrower."""

    array: Any
    sharding: NamedSharding


def run_freed(closed: core.ClosedJaxpr, *arrays: Any) -> list[Any]:
    """Runs a program that was traced on explicit axes on automatic ones."""
    return evaluate(read(closed), arrays, _Freed())


class _Freed(Rules[Any]):
    """Runs operations that were traced on explicit axes on automatic ones."""

    def constant(self, value: Any) -> Any:
        return on_current_axes(value)

    def literal(self, literal: core.Literal) -> Any:
        return literal.val

    def where(self, op: Op) -> contextlib.AbstractContextManager[None]:
        return compat.where(op.equation, op.stack, op.traceback, mesh=False)

    def read(self, atom: int | core.Literal, cells: Cells[Any]) -> Any:
        if not isinstance(atom, core.Literal) and isinstance(cells[atom], _Later):
            cells[atom] = _as_asked(*cells[atom])
        return super().read(atom, cells)

    def operands(self, op: Op, cells: Cells[Any]) -> list[Any]:
        # A cast commutes with a reshard. First the cast: a gather then carries 16 bits.
        source = op.inputs[0] if op.inputs else None
        if isinstance(source, int) and isinstance(cells[source], _Later) and _narrows(op):
            return [cells[source]]
        return super().operands(op, cells)

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        equation = op.equation
        avals: list[Any] = op.out_avals
        if operands and isinstance(operands[0], _Later):
            (array,) = compat.bind(equation, [operands[0].array])
            return [operands[0]._replace(array=array)]
        if op.name == "reshard":
            return [_Later(operands[0], avals[0].sharding)]
        if op.name in CONTROL_FLOW:
            op = dataclasses.replace(op, equation=_on_automatic_mesh(equation))
            return super().operation(op, operands)
        if op.name in CUSTOM_DERIVATIVES:
            return super().operation(op, operands)
        inner: list[Any] = [x.aval for each in compat.sub_jaxprs(equation) for x in each.invars]
        if any(x.sharding.mesh.explicit_axes for x in inner if hasattr(x, "sharding")):
            # Inside, shardings may be asked for; the function may do without them on automatic
            # axes.
            raise NotImplementedError(f"{op.name} on explicit mesh axes, with a program inside")
        if op.name == "sharding_constraint":
            return [_constrained_alike(equation, operands[0])]
        asked = [key for key in ("out_sharding", "sharding") if op.params.get(key) is not None]
        unasked = equation.replace(params=op.params | dict.fromkeys(asked))
        results = compat.bind(_on_automatic_mesh(unasked), operands)
        if not asked:
            return results
        return [
            _as_asked(x, aval.sharding) if any(aval.sharding.spec.partitions) else x
            for x, aval in zip(results, avals, strict=True)
        ]


def _narrows(op: Op) -> bool:
    if op.name != "convert_element_type":
        return False
    return bool(op.params["new_dtype"].itemsize < op.in_avals[0].dtype.itemsize)


def _as_asked(x: Any, sharding: NamedSharding) -> Any:
    """Constrains what a sharding on explicit axes says; other axes are left to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(sharding.mesh.explicit_axes) & set(mesh.auto_axes)
    whole = set(mesh.auto_axes) <= axes
    spec = only_axes(sharding.spec, axes, None if whole else ANY)
    if not spec or not axes or all(entry is ANY for entry in spec):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _constrained_alike(equation: core.JaxprEqn, x: Any) -> Any:
    """Constrains automatic axes as an equation does, and explicit ones as its type says."""
    asked, aval = equation.params["sharding"], cast(Any, equation.outvars[0].aval)
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(asked, NamedSharding):
        return compat.bind(equation, [x])[0]
    entries = zip(
        _entries_of(asked.spec, x.ndim), _entries_of(aval.sharding.spec, x.ndim), strict=True
    )
    spec = [
        free if free is ANY or not named else (*named_axes(named), *named_axes(free))
        for free, named in entries
    ]
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _entries_of(spec: PartitionSpec, ndim: int) -> list[Any]:
    return [*spec.partitions, *[None] * (ndim - len(spec.partitions))]


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
