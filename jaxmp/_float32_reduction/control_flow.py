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
    FLOAT32,
    Origin,
    Traits,
    Value,
    common_traits,
    flat,
    is_float,
    may_be_param,
    unflat,
    with_traits,
)
from jaxmp._float32_reduction.weights import calls_back
from jaxmp._mesh.layout import stacked_layout, unstacked_layout
from jaxmp._numerics.user_warnings import warn
from jaxmp._primitives.varying import varying_as, varying_axes
from jaxmp._program import compat
from jaxmp._program.control_flow import scan_with_options
from jaxmp._program.facts import NONE, Labels, made_of
from jaxmp._program.mesh_axes import free_sharding
from jaxmp._program.op_classes import CHECKPOINTS, JITS

_OF_PARAMS: Labels = frozenset({"params"})
_OF_DATA: Labels = frozenset({"data"})
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


def jit_rule(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
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
        value
        if value.of_params or sharding is None
        else value._replace(
            array=lax.with_sharding_constraint(value.array, free_sharding(sharding))
        )
        for value, sharding in zip(values, shardings, strict=True)
    ]


def remat_rule(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
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


def scan_rule(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
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
    carry_forms = _without(kept_carries, _carry_traits(jaxpr, values, slice(consts, end)))
    xs, forms = flat([value._replace(layout=unstacked_layout(value.layout)) for value in stacks])
    returned: tuple[Traits, ...] = ()

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal returned
        given = _filled(kept_carries, unflat(carry, carry_forms))
        inside = [*values[:consts], *given, *unflat(xs, forms)]
        made = evaluate(jaxpr, compat.consts_of(closed), inside)
        ys = _without(kept_stacks, made[carries:])
        arrays, returned = flat([Value(y.used()) if y.origin is Origin.ROWS else y for y in ys])
        return _in_traits(_without(kept_carries, made[:carries]), carry_forms), arrays

    begun = _without(kept_carries, carried)
    init = _in_traits([value.whole() for value in begun], carry_forms)
    carry, ys = scan_with_options(params, step, init, xs)
    made = unflat(ys, [form._replace(layout=stacked_layout(form.layout)) for form in returned])
    after = unflat(carry, carry_forms)
    return [*_filled(kept_carries, after), *_filled(kept_stacks, made)]


def _carry_traits(jaxpr: core.Jaxpr, values: Sequence[Value], carry: slice) -> list[Traits]:
    """Returns the traits of what a loop carries: a weight if each turn makes it of weights.

    Other floats are activations: also a weight to which each turn adds data.
    """
    made_from = {Origin.NUMBER: NONE, Origin.WEIGHT: _OF_PARAMS, Origin.REPEATED: _OF_PARAMS}
    given = [made_from.get(value.origin, _OF_DATA) for value in values]
    while True:
        made = made_of(jaxpr, given, _labelled, lambda _: True)
        turned = [a | b for a, b in zip(given[carry], made, strict=False)]
        if turned == given[carry]:
            return [_carried(*each) for each in zip(values[carry], turned, strict=True)]
        given[carry] = turned


def _labelled(equation: core.JaxprEqn, found: Sequence[Labels]) -> Labels:
    return NONE.union(*found, _OF_DATA if calls_back(equation) else NONE)


def _carried(value: Value, labels: Labels) -> Traits:
    if labels == NONE:
        return Traits(exact=False, origin=Origin.NUMBER)
    if labels == _OF_PARAMS and may_be_param(value.array):
        return Traits(value.array.dtype == FLOAT32, origin=max(Origin.WEIGHT, value.origin))
    return Traits(exact=False, origin=Origin.ACTIVATION if is_float(value.array) else Origin.DATA)


def _in_traits(values: Sequence[Value], forms: Sequence[Traits]) -> list[Any]:
    """Returns the arrays of values in other traits."""
    return flat(list(map(with_traits, values, forms)))[0]


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


def _without(kept: Sequence[Value | None], values: Sequence[Any]) -> list[Any]:
    """Returns the values at the places where `kept` is None."""
    return [value for value, other in zip(values, kept, strict=True) if other is None]


def _filled(kept: Sequence[Value | None], values: Iterable[Value]) -> list[Value]:
    """Inverts `_without`: fills the places where `kept` is None with the values."""
    rest = iter(values)
    return [next(rest) if value is None else value for value in kept]


def cond_rule(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    index = values[0].used()
    # In a shard_map, devices may take different branches: a branch must not sum over devices.
    arrays, given = flat([value.varying_as(index) for value in values[1:]])
    avals = [compat.type_of(x) for x in arrays]
    bodies = [BodyOfArrays(evaluate, branch, given) for branch in equation.params["branches"]]
    branches = [compat.trace(body, avals) for body in bodies]
    forms = [common_traits(each) for each in zip(*(body.results for body in bodies), strict=True)]
    if values[0].origin is not Origin.NUMBER:
        chosen = Origin.DATA
        forms = [form._replace(origin=max(form.origin, chosen)) for form in forms]
    if not all(_have_traits(body.results, forms) for body in bodies):
        branches = [
            compat.trace(_in_forms(branch, body.results, forms), avals)
            for branch, body in zip(branches, bodies, strict=True)
        ]
    if len({tuple(x.mat.varying for x in branch.out_avals) for branch in branches}) > 1:
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
        return _in_traits(unflat(run(*arrays), results), forms)

    return function


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


def shard_map_rule(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """Maps the program with float32 gradients: what the devices' gradients are summed in, too."""
    jaxpr = equation.params["jaxpr"]
    given = [flat([value.whole()]) for value in values]
    forms: list[Traits] = []

    def local(*pairs: list[Any]) -> tuple[list[Any], ...]:
        each = [unflat(pair, form)[0] for pair, (_, form) in zip(pairs, given, strict=True)]
        made = evaluate(jaxpr, compat.consts_of(jaxpr), each)
        made = [x if _varies_alike(x) else Value(x.used(), origin=Origin.ACTIVATION) for x in made]
        forms[:] = [flat([x])[1][0] for x in made]
        return tuple(flat([x])[0] for x in made)

    # A spec is that of both arrays of a param.
    out = compat.shard_map_again(equation.params, local)(*(pair for pair, _ in given))
    return unflat([x for pair in out for x in pair], forms)


def _varies_alike(value: Value) -> bool:
    return not value.of_params or varying_axes(value.array) == varying_axes(value.wide)


RULES: dict[str, Callable[[Evaluate, core.JaxprEqn, list[Value]], list[Value] | None]] = {
    **dict.fromkeys(JITS, jit_rule),
    **dict.fromkeys(CHECKPOINTS, remat_rule),
    "scan": scan_rule,
    "cond": cond_rule,
    "shard_map": shard_map_rule,
}
