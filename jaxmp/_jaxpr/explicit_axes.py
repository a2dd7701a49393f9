"""Runs functions of arrays on explicit mesh axes with these axes automatic.

JAX makes meshes with explicit axes unless told otherwise. There the type of each array says how it
is sharded, and an operation without a rule for shardings is an error. A rewritten function runs on
automatic axes inside: the partitioner chooses, and arrays come out in the shardings of their types.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmp._jaxpr import compat
from jaxmp._jaxpr.dataflow import Labels, made_of
from jaxmp._jaxpr.derivatives import Behind, with_derivative, with_passes
from jaxmp._jaxpr.op_classes import CONTROL_FLOW, IDENTITIES
from jaxmp._jaxpr.rebind import rebind
from jaxmp._numerics.user_warnings import warn

_ANY = PartitionSpec.UNCONSTRAINED


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
        kept: dict[int, Any] = {}

        def inside(*given: Any) -> list[Any]:
            made = list(function(*given))
            outside = {id(x): array for x, array in zip(given, arrays, strict=True)}
            kept.update((i, outside[id(x)]) for i, x in enumerate(made) if id(x) in outside)
            return made

        with jax.sharding.use_abstract_mesh(self.mesh):
            axes = tuple(self.mesh.explicit_axes)  # others may be those of a shard_map
            freed = jax.sharding.auto_axes(inside, axes=axes, out_sharding=list(self.specs))
            made = freed(*arrays)
        return [kept.get(i, x) for i, x in enumerate(made)]


def named_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a spec names, major to minor."""
    if entry is None or entry is _ANY:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def explicit_mesh(arrays: Iterable[Any]) -> AbstractMesh | None:
    """Returns the mesh of arrays or types, or of the context, if any axis of it is explicit."""
    types = [compat.type_or_given(x) for x in arrays]
    meshes = [aval.sharding.mesh for aval in types if hasattr(aval, "sharding")]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if mesh.explicit_axes:
            return mesh
    return None


def automatic(mesh: Any) -> Any:
    """Returns the mesh with automatic axes in place of explicit ones."""
    types = mesh.axis_types
    if AxisType.Explicit not in types:
        return mesh
    free = tuple(AxisType.Auto if kind is AxisType.Explicit else kind for kind in types)
    return mesh.abstract_mesh.update(axis_types=free)


def free_sharding(sharding: Any) -> Any:
    """Returns a sharding on the mesh with automatic axes in place of explicit ones."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(automatic(sharding.mesh), sharding.spec)


def placed(x: Any, sharding: NamedSharding) -> Any:
    """Constrains an array to a sharding, on axes of either kind."""
    axes = set(sharding.mesh.explicit_axes)
    if not axes:
        return lax.with_sharding_constraint(x, sharding)
    free = _only(sharding.spec, set(sharding.mesh.axis_names) - axes)
    if any(free):
        x = lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, PartitionSpec(*free)))
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*_only(sharding.spec, axes))))


def _only(spec: PartitionSpec, axes: set[str], other: Any = None) -> list[Any]:
    """Returns the entries of a spec with these axes alone, and `other` where none is left."""
    left = [tuple(name for name in named_axes(entry) if name in axes) for entry in spec.partitions]
    return [each[0] if len(each) == 1 else each or other for each in left]


def on_current_axes(x: Any) -> Any:
    """Returns an array that a function holds, on automatic axes if the function runs on them."""
    mesh = jax.sharding.get_abstract_mesh()
    inside = mesh.auto_axes and not mesh.explicit_axes
    if not inside or not isinstance(x, jax.Array) or not jax.typeof(x).sharding.mesh.explicit_axes:
        return x
    return jax.reshard(x, _free_spec(jax.typeof(x).sharding.spec, mesh))


def on_axes_of(x: Any, like: Any) -> Any:
    """Returns an array on the explicit axes of another one: as it lies where its type says so."""
    sharding = jax.typeof(like).sharding
    if not sharding.mesh.explicit_axes or jax.typeof(x).sharding == sharding:
        return x
    return jax.reshard(x, sharding)


# Traces a function for arrays or types, to a program and whatever else the caller needs.
Trace = Callable[[Sequence[Any]], tuple[core.ClosedJaxpr, Any]]


def on_automatic_axes(trace: Trace, arrays: Sequence[Any]) -> tuple[core.ClosedJaxpr, Any, Axes]:
    """Traces a function to a program for automatic axes.

    The function is traced as it is called, on explicit axes. Shardings that it asks for by
    `jax.reshard` or `out_sharding` become constraints, and the types of its results say how they
    lie. Where JAX has no rule for shardings, the function is traced on automatic axes instead.

    Args:
      trace: traces the function.
      arrays: its arguments, arrays or types.

    Returns:
      The program, what else `trace` returns, and the axes.

    Raises:
      Exception: what JAX raises on explicit axes, if the function cannot be traced on either kind.
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
            program = compat.trace(functools.partial(_evaluate, closed.jaxpr, closed.consts), free)
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
    return aval.update(sharding=NamedSharding(mesh, _free_spec(aval.sharding.spec, mesh)))


def _free_spec(spec: Any, mesh: AbstractMesh) -> PartitionSpec:
    return PartitionSpec(*_only(spec, set(mesh.explicit_axes)))


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
    found: list[Any] = [None] * len(labels)
    for i, (same, aval) in enumerate(zip(labels, closed.out_avals, strict=True)):
        given = [types[j] for j in same if isinstance(j, int)]
        if len(same) == 1 and given and given[0].shape == aval.shape:
            found[i] = given[0].sharding.spec
    avals = zip(closed.out_avals, found, strict=True)
    large = [x.str_short() for x, spec in avals if spec is None and x.size > _LARGE]
    if large:
        reason = str(refused).partition("\n")[0]
        warn(
            f"results come back whole on each device: {', '.join(large[:3])}"
            f"{', ...' if len(large) > 3 else ''}. How they lie is not known, since JAX has no "
            f"rule for an operation on explicit mesh axes ({type(refused).__name__}: {reason}). "
            "Give that operation its out_sharding, or leave out results that are not needed"
        )
    return tuple(PartitionSpec() if spec is None else spec for spec in found)


_NEW: Labels = frozenset({"new"})


def _same(equation: core.JaxprEqn, labels: Sequence[Labels]) -> Labels:
    """Returns the argument whose numbers a result has."""
    return labels[0] if equation.primitive.name in IDENTITIES else _NEW


class _Later(NamedTuple):
    """An array that is to be resharded, but not before a cast that makes it narrower."""

    array: Any
    sharding: NamedSharding


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], *arrays: Any) -> list[Any]:
    """Runs a program that was traced on explicit axes on automatic ones."""
    env: dict[Any, Any] = dict(zip(jaxpr.invars, arrays, strict=True))
    env.update(zip(jaxpr.constvars, map(on_current_axes, consts), strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return atom.val
        if isinstance(env[atom], _Later):
            env[atom] = _as_asked(*env[atom])
        return env[atom]

    for equation in jaxpr.eqns:
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
    spec = _only(sharding.spec, axes, None if whole else _ANY)
    if not spec or not axes or all(entry is _ANY for entry in spec):
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
        free if free is _ANY or not named else (*named_axes(named), *named_axes(free))
        for free, named in entries
    ]
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _type_of(equation: core.JaxprEqn) -> Any:
    return equation.outvars[0].aval


def _entries_of(spec: PartitionSpec, ndim: int) -> list[Any]:
    return [*spec.partitions, *[None] * (ndim - len(spec.partitions))]


def _freed_program(body: Any, avals: list[Any]) -> core.ClosedJaxpr:
    jaxpr, consts = compat.open_jaxpr(body), compat.consts_of(body)
    return compat.trace(functools.partial(_evaluate, jaxpr, consts), avals)


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
        made = _evaluate(program.jaxpr, program.consts, *arrays, *tangents)
        return made[:count], made[count:]

    return with_derivative(equation, range(len(equation.invars)), _primal(equation), derivative)


def _with_passes(equation: core.JaxprEqn) -> Callable[..., list[Any]]:
    def behind(program: core.ClosedJaxpr, by: Sequence[int], given: list[Any]) -> list[Any]:
        return _evaluate(program.jaxpr, program.consts, *given)

    def ahead(jaxpr: core.ClosedJaxpr, arrays: list[Any]) -> tuple[list[Any], Behind]:
        return _evaluate(jaxpr.jaxpr, jaxpr.consts, *arrays), behind

    return with_passes(equation, range(len(equation.invars)), _primal(equation), ahead)


def _primal(equation: core.JaxprEqn) -> Callable[..., list[Any]]:
    body = equation.params["call_jaxpr"]
    return functools.partial(_evaluate, compat.open_jaxpr(body), compat.consts_of(body))
