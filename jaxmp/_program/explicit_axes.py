"""Runs functions of arrays on explicit mesh axes with these axes automatic.

JAX makes meshes with explicit axes by default. There the type of each array says how it
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
from jaxmp._program.evaluate import Cells, Interpreter, evaluate
from jaxmp._program.facts import Labels, made_of
from jaxmp._program.mesh_axes import (
    ANY,
    automatic,
    entries_of,
    explicit_mesh,
    free_sharding,
    free_spec,
    named_axes,
    on_current_axes,
    only_axes,
)
from jaxmp._program.op_classes import CONTROL_FLOW, CUSTOM_DERIVATIVES, IDENTITIES
from jaxmp._program.program import Op, read


class DeferredReshard(NamedTuple):
    """An array that is to be resharded, but not before a cast that makes it narrower."""

    array: Any
    sharding: NamedSharding


def run_on_auto_axes(closed: core.ClosedJaxpr, *arrays: Any) -> list[Any]:
    """Runs a program that was traced on explicit axes on automatic ones."""
    return evaluate(read(closed), arrays, _AutoAxesInterpreter())


class _AutoAxesInterpreter(Interpreter[Any]):
    """Runs operations that were traced on explicit axes on automatic ones."""

    def constant(self, value: Any) -> Any:
        return on_current_axes(value)

    def literal(self, literal: core.Literal) -> Any:
        return literal.val

    def where(self, op: Op) -> contextlib.AbstractContextManager[None]:
        return compat.where(op.equation, op.stack, op.traceback, mesh=False)

    def read(self, atom: int | core.Literal, cells: Cells[Any]) -> Any:
        if not isinstance(atom, core.Literal) and isinstance(cells[atom], DeferredReshard):
            cells[atom] = constrained(*cells[atom])
        return super().read(atom, cells)

    def operands(self, op: Op, cells: Cells[Any]) -> list[Any]:
        if op.name == "convert_element_type" and isinstance(source := op.inputs[0], int):
            narrows = op.params["new_dtype"].itemsize < op.in_avals[0].dtype.itemsize
            # A cast commutes with a reshard. First the cast: a gather then carries 16 bits.
            if narrows and isinstance(cells[source], DeferredReshard):
                return [cells[source]]
        return super().operands(op, cells)

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        equation = op.equation
        avals: list[Any] = op.out_avals
        if operands and isinstance(operands[0], DeferredReshard):
            (array,) = compat.bind(equation, [operands[0].array])
            return [operands[0]._replace(array=array)]
        if op.name == "reshard":
            return [DeferredReshard(operands[0], avals[0].sharding)]
        if op.name in CONTROL_FLOW:
            op = dataclasses.replace(op, equation=_on_automatic_mesh(equation))
            return super().operation(op, operands)
        if op.name in CUSTOM_DERIVATIVES:
            return super().operation(op, operands)
        programs = compat.sub_jaxprs(equation)
        inner: list[Any] = [var.aval for program in programs for var in program.invars]
        if any(x.sharding.mesh.explicit_axes for x in inner if hasattr(x, "sharding")):
            # The program inside may name shardings. On automatic axes the function may do without.
            raise NotImplementedError(f"{op.name} on explicit mesh axes, with a program inside")
        if op.name == "sharding_constraint":
            return [_constrain_like(equation, operands[0])]
        keys = [key for key in ("out_sharding", "sharding") if op.params.get(key) is not None]
        without_shardings = equation.replace(params=op.params | dict.fromkeys(keys))
        results = compat.bind(_on_automatic_mesh(without_shardings), operands)
        if not keys:
            return results
        return [
            constrained(x, aval.sharding) if any(aval.sharding.spec.partitions) else x
            for x, aval in zip(results, avals, strict=True)
        ]


def constrained(x: Any, sharding: NamedSharding) -> Any:
    """Constrains the explicit axes of a sharding; the partitioner chooses the others."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(sharding.mesh.explicit_axes) & set(mesh.auto_axes)
    whole = set(mesh.auto_axes) <= axes
    spec = only_axes(sharding.spec, axes, None if whole else ANY)
    if not spec or not axes or all(entry is ANY for entry in spec):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _constrain_like(equation: core.JaxprEqn, x: Any) -> Any:
    """Constrains automatic axes as an equation does, and explicit ones as its type says."""
    sharding, aval = equation.params["sharding"], cast(Any, equation.outvars[0].aval)
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(sharding, NamedSharding):
        return compat.bind(equation, [x])[0]
    entries = zip(
        entries_of(sharding.spec, x.ndim), entries_of(aval.sharding.spec, x.ndim), strict=True
    )
    spec = [
        free if free is ANY or not explicit else (*named_axes(explicit), *named_axes(free))
        for free, explicit in entries
    ]
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _on_automatic_mesh(equation: core.JaxprEqn) -> core.JaxprEqn:
    """Returns the equation with meshes in its params that have no explicit axes."""

    def on_automatic(param: Any) -> Any:
        if isinstance(param, (Mesh, AbstractMesh)):
            return automatic(param)
        if type(param) in (tuple, list):
            return type(param)(map(on_automatic, param))
        return free_sharding(param)

    params = {name: on_automatic(param) for name, param in equation.params.items()}
    return equation.replace(params=params)


class Axes(NamedTuple):
    """The explicit axes that a function is called on, and the shardings of its results.

    Attributes:
      mesh: the mesh of its arguments; None if no axis of it is explicit.
      specs: the spec of each result, or of the arrays in it.
    """

    mesh: AbstractMesh | None
    specs: tuple[Any, ...] = ()

    def run(self, function: Callable[..., list[Any]], arrays: Sequence[Any]) -> list[Any]:
        """Calls a function of arrays or trees, on automatic axes; its results get `specs`.

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
            run = jax.sharding.auto_axes(inside, axes=axes, out_sharding=list(self.specs))
            results = run(*arrays)
        return [same.get(i, x) for i, x in enumerate(results)]


# Traces a function for arrays or types, to a program and whatever else the caller needs.
Trace = Callable[[Sequence[Any]], tuple[core.ClosedJaxpr, Any]]


def on_automatic_axes(trace: Trace, arrays: Sequence[Any]) -> tuple[core.ClosedJaxpr, Any, Axes]:
    """Traces a function to a program for automatic axes.

    The function is traced as it is called, on explicit axes. Shardings that it names by
    `jax.reshard` or `out_sharding` become constraints, and the types of its results have their
    shardings. Where JAX has no rule for shardings, the function is traced on automatic axes
    instead. If it cannot be traced on either kind, the error is that of the explicit axes.

    Returns the program, the other results of `trace`, and the axes.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return *trace(arrays), Axes(None)
    auto_mesh = automatic(mesh)
    avals = [compat.type_or_given(x) for x in arrays]
    shardings = [NamedSharding(auto_mesh, free_spec(x.sharding.spec, auto_mesh)) for x in avals]
    # What a type says about explicit axes, the partitioner chooses.
    types = [x.update(sharding=sharding) for x, sharding in zip(avals, shardings, strict=True)]
    try:
        with jax.sharding.use_abstract_mesh(mesh), _TRACED_EXPLICITLY(True):
            closed, extra = trace(arrays)
        with jax.sharding.use_abstract_mesh(auto_mesh):
            program = compat.trace(functools.partial(run_on_auto_axes, closed), types)
    except Exception as refusal:  # JAX has several errors for shardings
        # Of a function in a function, the outer one is traced again: its results are fewer.
        if _TRACED_EXPLICITLY.value:
            raise
        program, extra = _trace_without_rules(trace, types, auto_mesh, refusal)
        return program, extra, Axes(mesh, _specs_without_rules(program, arrays, refusal))
    return program, extra, Axes(mesh, tuple(aval.sharding.spec for aval in closed.out_avals))


# Whether a function is traced on explicit axes by `on_automatic_axes`. A part of the key of every
# trace cache.
_TRACED_EXPLICITLY: Any = jax.make_user_context(default_value=False)


def with_own_axes(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step whose parts are traced, and have their results in shardings, as they alone."""

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with _TRACED_EXPLICITLY(False):
            return fun(*args, **kwargs)

    return call


def _trace_without_rules(
    trace: Trace, types: Sequence[Any], mesh: AbstractMesh, refusal: Exception
) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a function on automatic axes, if JAX refuses it on explicit ones."""
    with jax.sharding.use_abstract_mesh(mesh):
        try:
            return trace(types)
        except Exception as error:
            if (type(error), str(error)) != (type(refusal), str(refusal)):
                refusal.add_note(
                    f"On automatic mesh axes it fails too: {type(error).__name__}: {error}\nArrays "
                    "that the function closes over stay on explicit axes: make them arguments"
                )
            raise refusal from None  # the first error is about the mesh that the user made


# Elements of a result that every device may hold whole without a word: statistics, losses.
_LARGE = 2**16


def _specs_without_rules(
    closed: core.ClosedJaxpr, arrays: Sequence[Any], refusal: Exception
) -> tuple[PartitionSpec, ...]:
    """Returns the specs of results, where JAX has none: arguments keep theirs, others are whole.

    Warns of other results that are large.
    """

    def same(equation: core.JaxprEqn, labels: Sequence[Labels]) -> Labels:
        return labels[0] if equation.primitive.name in IDENTITIES else frozenset({"new"})

    types = [compat.type_or_given(x) for x in arrays]
    labels = made_of(closed, [frozenset({i}) for i in range(len(types))], same, lambda aval: True)
    specs: list[Any] = [None] * len(labels)
    for i, (sources, aval) in enumerate(zip(labels, closed.out_avals, strict=True)):
        (source, *others) = sources or (None,)
        if isinstance(source, int) and not others and types[source].shape == aval.shape:
            specs[i] = types[source].sharding.spec
    pairs = zip(closed.out_avals, specs, strict=True)
    large = [x.str_short() for x, spec in pairs if spec is None and x.size > _LARGE]
    if large:
        reason = str(refusal).partition("\n")[0]
        warn(
            f"results come back whole on each device: {', '.join(large[:3])}"
            f"{', ...' if len(large) > 3 else ''}. How they lie is not known, since JAX has no "
            f"rule for an operation on explicit mesh axes ({type(refusal).__name__}: {reason}). "
            "Give that operation its out_sharding, or leave out results that are not needed"
        )
    return tuple(PartitionSpec() if spec is None else spec for spec in specs)
