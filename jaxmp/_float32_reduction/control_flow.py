"""Rules for operations that contain programs: params go in, float32 gradients come out."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmp._float32_reduction.values import (
    Traits,
    Value,
    common_traits,
    flat,
    is_float,
    unflat,
    with_traits,
)
from jaxmp._jaxpr import compat
from jaxmp._mesh.layout import stacked_layout, unstacked_layout
from jaxmp._numerics.user_warnings import warn
from jaxmp._primitives.mixed_product import varying_as

Evaluate = Callable[[Any, Sequence[Any], Sequence[Value]], list[Value]]


class BodyOfArrays:
    """A program inside an operation, as a function of arrays.

    Args:
      evaluate: runs a program.
      jaxpr: the program, closed or open. The caller keeps it alive. This object holds only a weak
        reference, so that caches for a program are freed with it.
      forms: the traits of its arguments.

    Attributes:
      results: the traits of its last results.
    """

    def __init__(self, evaluate: Evaluate, jaxpr: Any, forms: Sequence[Traits]) -> None:
        self._evaluate = evaluate
        self._program = weakref.ref(jaxpr)
        self._forms = forms
        self.results: tuple[Traits, ...] = ()

    def __call__(self, *arrays: Any) -> list[Any]:
        jaxpr = self._program()
        made = self._evaluate(
            compat.open_jaxpr(jaxpr), compat.consts_of(jaxpr), unflat(arrays, self._forms)
        )
        out, self.results = flat(made)
        return out


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Results:
    """The traits of the results of a jitted function; JAX caches them with its trace."""

    forms: tuple[Traits, ...]


# The rewritten versions of each jitted function in a program. A layer that is called many times has
# one version, which is traced and compiled once.
_JITTED: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def jit(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    params = equation.params
    if not compat.is_plain_jit(params):
        return _pinned_jit(evaluate, equation, values)
    arrays, forms = flat(values)
    made = _JITTED.setdefault(params["jaxpr"], {})
    key = (forms, params["name"], params["inline"])
    if key not in made:
        made[key] = _jitted(BodyOfArrays(evaluate, params["jaxpr"], forms), *key[1:])
    out, results = made[key](*arrays)
    return unflat(out, results.forms)


def _jitted(body: BodyOfArrays, name: str, inline: Any) -> Callable[..., Any]:
    def call(*arrays: Any) -> tuple[list[Any], _Results]:
        out = body(*arrays)
        return out, _Results(body.results)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call, inline=inline)


def _pinned_jit(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Runs the program of a jit with shardings, between equivalent sharding constraints."""
    given, wanted = compat.jit_shardings(equation.params)
    arrays, forms = flat(_pinned(values, given))
    body = BodyOfArrays(evaluate, equation.params["jaxpr"], forms)
    made = body(*arrays)
    return _pinned(unflat(made, body.results), wanted)


def _pinned(values: Sequence[Value], shardings: Sequence[Any]) -> list[Value]:
    return [
        value if value.of_params else value._replace(array=_pin(value.array, sharding))
        for value, sharding in zip(values, shardings, strict=True)
    ]


def _pin(x: Any, sharding: Any) -> Any:
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def remat(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    params = equation.params
    arrays, forms = flat([_gathered_again(value, True) for value in values])
    body = BodyOfArrays(evaluate, params["jaxpr"], forms)
    if params["differentiated"]:  # the backward pass of a gradient within the function
        traced = compat.trace(body, [compat.type_of(x) for x in arrays])
        made = compat.bind(equation, arrays, jaxpr=compat.without_consts(traced))
    else:
        again = jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])
        made = again(*arrays)
    return [_gathered_again(value, False) for value in unflat(made, body.results)]


def _gathered_again(value: Value, recomputed: bool) -> Value:
    if value.layout is None:
        return value
    return value._replace(layout=value.layout._replace(recomputed=recomputed))


def scan(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    params = equation.params
    closed = params["jaxpr"]
    jaxpr = compat.open_jaxpr(closed)
    consts, carries = compat.scan_counts(params)
    end = consts + carries
    carried = values[consts:end]
    stacks = [_whole_along_the_loop(value) for value in values[end:]]
    # Params that a loop passes on unchanged need not be carried,
    kept_carries = [
        value if value.of_params and jaxpr.outvars[i] is jaxpr.invars[consts + i] else None
        for i, value in enumerate(carried)
    ]
    # nor stacked again.
    passes = {var: x for var, x in zip(jaxpr.invars[end:], stacks, strict=True) if x.of_params}
    kept_stacks = [
        passes.get(var) if isinstance(var, core.Var) else None for var in jaxpr.outvars[carries:]
    ]
    xs, forms = flat([value._replace(layout=unstacked_layout(value.layout)) for value in stacks])
    returned: tuple[Traits, ...] = ()

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal returned
        given = _filled(kept_carries, map(_carried, carry))
        inside = [*values[:consts], *given, *unflat(xs, forms)]
        made = evaluate(jaxpr, compat.consts_of(closed), inside)
        ys = _without(kept_stacks, made[carries:])
        arrays, returned = flat([Value(y.used()) if y.rows else y for y in ys])
        return [value.bare() for value in _without(kept_carries, made[:carries])], arrays

    init = [value.used() for value in _without(kept_carries, carried)]
    names = {"length", "reverse", "unroll", "_split_transpose"}.intersection(params)
    options = {name: params[name] for name in names}
    carry, ys = lax.scan(step, init, xs, **options)
    made = unflat(ys, [form._replace(layout=stacked_layout(form.layout)) for form in returned])
    return [*_filled(kept_carries, map(_carried, carry)), *_filled(kept_stacks, made)]


def _carried(x: Any) -> Value:
    """Wraps a value that a loop carries and changes. Floats are activations, keys are not."""
    return Value(x, met=is_float(x))


def _whole_along_the_loop(value: Value) -> Value:
    """Returns an operand that a scan slices; gathered first if it is split along that dimension."""
    layout = value.layout
    if layout is None or not layout.axes[0]:
        return value
    if layout.splits(0):
        warn(
            f"a scan runs over the dimension along which a param of shape {value.array.shape} is "
            f"split (over {', '.join(layout.axes[0])}): its layers are gathered all at once. Split "
            "another dimension"
        )
    return value.in_place()


def _without(kept: Sequence[Value | None], values: Sequence[Value]) -> list[Value]:
    """Returns the values at the places where `kept` is None."""
    return [value for value, other in zip(values, kept, strict=True) if other is None]


def _filled(kept: Sequence[Value | None], values: Iterable[Value]) -> list[Value]:
    """Inverts `_without`: fills the places where `kept` is None with the values."""
    rest = iter(values)
    return [next(rest) if value is None else value for value in kept]


def cond(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    index = values[0].used()
    # In a shard_map, devices may take different branches: a branch must not sum over devices.
    arrays, given = flat([value.varying_as(index) for value in values[1:]])
    avals = [compat.type_of(x) for x in arrays]
    bodies = [BodyOfArrays(evaluate, branch, given) for branch in equation.params["branches"]]
    branches = [compat.trace(body, avals) for body in bodies]
    forms = [common_traits(each) for each in zip(*(body.results for body in bodies), strict=True)]
    if not values[0].fixed:
        forms = [form._replace(fixed=False) for form in forms]
    if not all(_have_traits(body.results, forms) for body in bodies):
        branches = [
            compat.trace(_in_forms(branch, body.results, forms), avals)
            for branch, body in zip(branches, bodies, strict=True)
        ]
    if len({_varying(branch.out_avals) for branch in branches}) > 1:
        likes = list(zip(*(branch.out_avals for branch in branches), strict=True))
        branches = [compat.trace(_varying_as(branch, likes), avals) for branch in branches]
    made = compat.bind(equation, [index, *arrays], branches=tuple(branches))
    return unflat(made, forms)


def _in_forms(
    program: Any, results: Sequence[Traits], forms: Sequence[Traits]
) -> Callable[..., Any]:
    """Returns a function that runs a program and converts its results to other traits."""
    run = core.jaxpr_as_fun(program)

    def function(*arrays: Any) -> list[Any]:
        return flat(list(map(with_traits, unflat(run(*arrays), results), forms)))[0]

    return function


def _varying(avals: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(aval.mat.varying for aval in avals)


def _varying_as(program: Any, likes: Sequence[Sequence[Any]]) -> Callable[..., Any]:
    """Returns a function whose results vary over each mesh axis that any branch varies over."""
    run = core.jaxpr_as_fun(program)

    def function(*arrays: Any) -> list[Any]:
        return [
            functools.reduce(varying_as, like, x)
            for x, like in zip(run(*arrays), likes, strict=True)
        ]

    return function


def _have_traits(results: Sequence[Traits], forms: Sequence[Traits]) -> bool:
    each = zip(results, forms, strict=True)
    return all(x == form for x, form in each if x.of_params or form.of_params)


RULES: dict[str, Callable[[Evaluate, core.JaxprEqn, list[Value]], list[Value]]] = {
    "jit": jit,
    "pjit": jit,
    "remat2": remat,
    "checkpoint": remat,
    "scan": scan,
    "cond": cond,
}
