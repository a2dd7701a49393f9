"""Runs functions of arrays on explicit mesh axes with these axes automatic.

JAX makes meshes with explicit axes unless told otherwise. There the type of each array says how it
is sharded, and an operation without a rule for shardings is an error. A rewritten function runs on
automatic axes inside: the partitioner chooses, and arrays come out in the shardings of their types.
What the program says about shardings becomes constraints: `jax.reshard`, `out_sharding`, and
constraints on the axes that were automatic before.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmp._numerics.user_warnings import warn
from jaxmp._program import compat
from jaxmp._program.evaluate import Cells, Rules, evaluate
from jaxmp._program.facts import Labels, made_of
from jaxmp._program.mesh_axes import (
    ANY,
    automatic,
    explicit_mesh,
    free_sharding,
    free_spec,
    named_axes,
    on_current_axes,
    only_axes,
)
from jaxmp._program.op_classes import CONTROL_FLOW, CUSTOM_DERIVATIVES, IDENTITIES
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


class Axes(NamedTuple):
    """The explicit axes that a function is called on, and how its results lie on them.

    Attributes:
      mesh: the mesh of its arguments; None if no axis of it is explicit.
      specs: the spec of each result, or of the arrays in it.
    """

    mesh: AbstractMesh | None
    specs: tuple[Any, ...] = ()

    def run(self, function: Callable[..., list[Any]], arrays: Sequence[Any]) -> list[Any]:
        """Calls a function of arrays or trees, on automatic axes; results lie as `specs` says.

        Results that are arguments come back as they were given.
        """
        if self.mesh is None:
            return function(*arrays)
        same: dict[int, Any] = {}

        def inside(*arguments: Any) -> list[Any]:
            results = list(function(*arguments))
            outside = {id(x): array for x, array in zip(arguments, arrays, strict=True)}
            same.update((i, outside[id(x)]) for i, x in enumerate(results) if id(x) in outside)
            return results

        with jax.sharding.use_abstract_mesh(self.mesh):
            axes = tuple(self.mesh.explicit_axes)  # others may be those of a shard_map
            freed = jax.sharding.auto_axes(inside, axes=axes, out_sharding=list(self.specs))
            results = freed(*arrays)
        return [same.get(i, x) for i, x in enumerate(results)]


# Traces a function for arrays or types, to a program and whatever else the caller needs.
Trace = Callable[[Sequence[Any]], tuple[core.ClosedJaxpr, Any]]


def on_automatic_axes(trace: Trace, arrays: Sequence[Any]) -> tuple[core.ClosedJaxpr, Any, Axes]:
    """Traces a function to a program for automatic axes.

    The function is traced as it is called, on explicit axes. Shardings that it asks for by
    `jax.reshard` or `out_sharding` become constraints, and the types of its results say how they
    lie. Where JAX has no rule for shardings, the function is traced on automatic axes instead. If
    it cannot be traced on either kind, the error is that of the explicit axes.

    Returned are the program, what else `trace` returns, and the axes.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return *trace(arrays), Axes(None)
    inside = automatic(mesh)
    free = [_freed(compat.type_or_given(x), inside) for x in arrays]
    try:
        with jax.sharding.use_abstract_mesh(mesh), _TRACED_EXPLICITLY(True):
            closed, rest = trace(arrays)
        with jax.sharding.use_abstract_mesh(inside):
            program = compat.trace(functools.partial(run_freed, closed), free)
    except Exception as refused:  # JAX has several errors for shardings
        # Of a function in a function, the outer one is traced again: its results are fewer.
        if _TRACED_EXPLICITLY.value:
            raise
        program, rest = _traced_without_rules(trace, free, inside, refused)
        return program, rest, Axes(mesh, _specs_without_rules(program, arrays, refused))
    return program, rest, Axes(mesh, tuple(aval.sharding.spec for aval in closed.out_avals))


# Whether a function is traced on explicit axes by `on_automatic_axes`. A part of the key of every
# trace cache.
_TRACED_EXPLICITLY: Any = jax.make_user_context(default_value=False)


def _traced_without_rules(
    trace: Trace, free: Sequence[Any], mesh: AbstractMesh, refused: Exception
) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a function on automatic axes, if JAX refuses it on explicit ones."""
    with jax.sharding.use_abstract_mesh(mesh):
        try:
            return trace(free)
        except Exception as error:
            if (type(error), str(error)) != (type(refused), str(refused)):
                refused.add_note(
                    f"On automatic mesh axes it fails too: {type(error).__name__}: {error}\nArrays "
                    "that the function closes over stay on explicit axes: make them arguments"
                )
            raise refused from None  # the first error is about the mesh that the user made


def _freed(aval: Any, mesh: AbstractMesh) -> Any:
    """Returns a type without what it says about explicit axes."""
    return aval.update(sharding=NamedSharding(mesh, free_spec(aval.sharding.spec, mesh)))


# Elements of a result that every device may hold whole without a word: statistics, losses.
_LARGE = 2**16


def _specs_without_rules(
    closed: core.ClosedJaxpr, arrays: Sequence[Any], refused: Exception
) -> tuple[PartitionSpec, ...]:
    """Returns the specs of results, where JAX has none: arguments lie as they came, others whole.

    Warns of other results that are large.
    """
    types = [compat.type_or_given(x) for x in arrays]
    labels = made_of(closed, [frozenset({i}) for i in range(len(types))], _same, lambda aval: True)
    specs: list[Any] = [None] * len(labels)
    for i, (same, aval) in enumerate(zip(labels, closed.out_avals, strict=True)):
        sources = [types[j] for j in same if isinstance(j, int)]
        if len(same) == 1 and sources and sources[0].shape == aval.shape:
            specs[i] = sources[0].sharding.spec
    pairs = zip(closed.out_avals, specs, strict=True)
    large = [x.str_short() for x, spec in pairs if spec is None and x.size > _LARGE]
    if large:
        reason = str(refused).partition("\n")[0]
        warn(
            f"results come back whole on each device: {', '.join(large[:3])}"
            f"{', ...' if len(large) > 3 else ''}. How they lie is not known, since JAX has no "
            f"rule for an operation on explicit mesh axes ({type(refused).__name__}: {reason}). "
            "Give that operation its out_sharding, or leave out results that are not needed"
        )
    return tuple(PartitionSpec() if spec is None else spec for spec in specs)


_NEW: Labels = frozenset({"new"})


def _same(equation: core.JaxprEqn, labels: Sequence[Labels]) -> Labels:
    """Returns the argument whose numbers a result has."""
    return labels[0] if equation.primitive.name in IDENTITIES else _NEW
