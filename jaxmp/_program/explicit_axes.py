"""Runs functions of arrays on explicit mesh axes with these axes automatic.

JAX makes meshes with explicit axes unless told otherwise. There the type of each array says how it
is sharded, and an operation without a rule for shardings is an error. A rewritten function runs on
automatic axes inside: the partitioner chooses, and arrays come out in the shardings of their types.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxmp._numerics.user_warnings import warn
from jaxmp._program import compat
from jaxmp._program.facts import Labels, made_of
from jaxmp._program.freed import run_freed
from jaxmp._program.mesh_axes import automatic, explicit_mesh, free_spec
from jaxmp._program.op_classes import IDENTITIES


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
