"""Rules for operations that contain programs: params go in, float32 gradients come out."""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmp._float32_reduction.open_sums import Sums
from jaxmp._float32_reduction.values import (
    FLOAT32,
    Origin,
    Traits,
    Value,
    common_traits,
    with_traits,
)
from jaxmp._float32_reduction.weights import calls_back
from jaxmp._mesh.layout import stacked_layout, unstacked_layout
from jaxmp._numerics.dtypes import is_half_or_float32, is_inexact
from jaxmp._numerics.user_warnings import warn
from jaxmp._primitives.varying import varying_as, varying_axes
from jaxmp._program import compat
from jaxmp._program.control_flow import call_again, scan_again
from jaxmp._program.evaluate import Interpreter, evaluate
from jaxmp._program.facts import NONE, Labels, made_of
from jaxmp._program.mesh_axes import free_sharding
from jaxmp._program.op_classes import CHECKPOINTS, CONTROL_FLOW, JITS
from jaxmp._program.program import Op, Program, read
from jaxmp._program.wiring import Wiring

_OF_PARAMS: Labels = frozenset({"params"})
_OF_DATA: Labels = frozenset({"data"})
# Runs an operation with programs inside, which run by the same rules.
ProgramRule = Callable[[Interpreter[Value], Op, list[Value]], list[Value] | None]


def rule_of(op: Op) -> ProgramRule | None:
    """Returns the rule for control flow; None for other operations, and for `while`."""
    if op.name not in CONTROL_FLOW or op.wiring.turns is None:
        return None
    if op.name in JITS:
        return jit_rule if compat.is_plain_jit(op.params) else pinned_jit_rule
    if op.name in CHECKPOINTS:
        return checkpoint_rule
    if op.name == "shard_map":
        return shard_map_rule
    return cond_rule if op.wiring.chooses else scan_rule


# The rewritten versions of each jitted function in a program. A layer that is called many times is
# traced and compiled once for values of the same traits, which are a part of their tree structure.
_JITTED: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def jit_rule(interpreter: Interpreter[Value], op: Op, values: list[Value]) -> list[Value]:
    (body,) = compat.bodies_of(op.equation)
    options = op.params["name"], op.params["inline"]
    versions = _JITTED.setdefault(body, {})
    program = weakref.ref(body)  # the caller keeps it alive, and caches for it are freed with it
    fresh = type(interpreter)  # these here remember programs

    def call(values: list[Value]) -> list[Value]:
        return evaluate(read(program()), values, fresh())

    if options not in versions:
        call.__name__ = call.__qualname__ = op.params["name"]
        versions[options] = jax.jit(call, inline=op.params["inline"])
    results: list[Value] = versions[options](values)
    return results


def pinned_jit_rule(interpreter: Interpreter[Value], op: Op, values: list[Value]) -> list[Value]:
    """Runs the program of a jit with shardings, between equivalent sharding constraints.

    The shardings of the `jit` itself are for its traced arguments; here some come in two arrays.
    """
    (body,) = compat.bodies_of(op.equation)
    before, after = compat.jit_shardings(op.params)
    return _constrain_values(interpreter.inside(op, body, _constrain_values(values, before)), after)


def _constrain_values(values: Sequence[Value], shardings: Sequence[Any]) -> list[Value]:
    return [
        value
        if value.of_params or sharding is None
        else value._replace(
            array=lax.with_sharding_constraint(value.array, free_sharding(sharding))
        )
        for value, sharding in zip(values, shardings, strict=True)
    ]


def checkpoint_rule(interpreter: Interpreter[Value], op: Op, values: list[Value]) -> list[Value]:
    (body,), params = compat.bodies_of(op.equation), op.params

    def function(values: Sequence[Value], _: Any = None) -> list[Value]:
        return interpreter.inside(op, body, values)

    values = [_set_recomputed(value, True) for value in values]
    # The backward pass of a gradient within the function.
    if params["differentiated"]:
        results = call_again(op.equation, values, None, function)
    else:
        remat = jax.checkpoint(function, prevent_cse=params["prevent_cse"], policy=params["policy"])
        results = remat(values)
    return [_set_recomputed(value, False) for value in results]


def _set_recomputed(value: Value, recomputed: bool) -> Value:
    if value.layout is None:
        return value
    return value._replace(layout=value.layout._replace(recomputed=recomputed))


def scan_rule(interpreter: Interpreter[Value], op: Op, values: list[Value]) -> list[Value]:
    (body,), loop = compat.bodies_of(op.equation), op.wiring
    end = loop.carry.stop
    count, initial = len(loop.carry), values[loop.carry.start : end]
    stacks = [_gather_if_split(value) for value in values[end:]]
    unchanged = _unchanged_params(read(body), loop, [*values[:end], *stacks])
    are_summed = Sums().through(op, [value.summed for value in values])
    pairs = zip(_carry_traits(body, values, loop.carry), are_summed, strict=False)
    traits = [common._replace(summed=is_summed) for common, is_summed in pairs]

    def turn(operands: list[Any], _: Any) -> tuple[list[Any], Any]:
        arguments = [value if x is None else x for x, value in zip(operands, values, strict=True)]
        results = interpreter.inside(op, body, arguments)

        # The gradient of a stacked lookup would be stacked in float32, for each token.
        def without_rows(value: Value) -> Value:
            return Value(value.operand()) if value.origin is Origin.ROWS else value

        stacked = _map_except(unchanged[count:], without_rows, results[count:])
        return [*_map_except(unchanged[:count], with_traits, results[:count], traits), *stacked], ()

    initial = _map_except(unchanged[:count], Value.whole, initial)
    initial = _map_except(unchanged[:count], with_traits, initial, traits)
    slices = [value._replace(layout=unstacked_layout(value.layout)) for value in stacks]
    results, _ = scan_again(op.equation, [*values[: end - count], *initial, *slices], turn)
    stacked = (x and x._replace(layout=stacked_layout(x.layout)) for x in results[count:])
    results = [*results[:count], *stacked]
    return [x if param is None else param for x, param in zip(results, unchanged, strict=True)]


def _unchanged_params(body: Program, loop: Wiring, values: Sequence[Value]) -> list[Value | None]:
    """Returns the params that a loop passes on unchanged, for each result; None for the others."""
    # They need not be carried, nor stacked again, with a gradient for each turn.
    params = {number: i for i, number in enumerate(body.inputs) if values[i].of_params}
    sources = [params.get(atom) if isinstance(atom, int) else None for atom in body.outputs]
    places = [*([i] for i in loop.carry), *[loop.slices] * (len(sources) - len(loop.carry))]
    pairs = zip(sources, places, strict=True)
    return [None if i is None or i not in allowed else values[i] for i, allowed in pairs]


def _map_except(
    unchanged: Sequence[Value | None], function: Callable[..., Value], *values: Iterable[Any]
) -> list[Any]:
    """Maps a function over values; gives None for those that stay unchanged."""
    rows = zip(unchanged, *values, strict=True)
    return [function(*arguments) if param is None else None for param, *arguments in rows]


def _carry_traits(body: Any, values: Sequence[Value], carry: range) -> list[Traits]:
    """Returns the traits of what a loop carries: a weight if each turn makes it of weights.

    Other floats are activations: also a weight to which each turn adds data.
    """
    labels_of = {Origin.NUMBER: NONE, Origin.WEIGHT: _OF_PARAMS, Origin.REPEATED: _OF_PARAMS}
    labels = [labels_of.get(value.origin, _OF_DATA) for value in values]

    def rule(equation: core.JaxprEqn, operands: Sequence[Labels]) -> Labels:
        return NONE.union(*operands, _OF_DATA if calls_back(equation) else NONE)

    traits = []
    results = made_of(body, labels, rule, lambda _: True, carry)
    for i, label in zip(carry, results, strict=False):
        array, origin = values[i].array, values[i].origin
        # Newton-Schulz steps in a `fori_loop` make a weight of a weight: its gradient is a sum over
        # the batch, which would be in 16 bits if the loop made activations.
        if label == _OF_PARAMS and is_half_or_float32(array):
            traits.append(Traits(array.dtype == FLOAT32, origin=max(Origin.WEIGHT, origin)))
        else:
            other = Origin.ACTIVATION if is_inexact(array) else Origin.DATA
            traits.append(Traits(exact=False, origin=Origin.NUMBER if label == NONE else other))
    return traits


def _gather_if_split(value: Value) -> Value:
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


def cond_rule(interpreter: Interpreter[Value], op: Op, values: list[Value]) -> list[Value]:
    index = values[0].operand()
    # In a shard_map, devices may take different branches: a branch must not sum over devices.
    arguments = [value.varying_as(index) for value in values[1:]]
    bodies = [
        functools.partial(interpreter.inside, op, body) for body in compat.bodies_of(op.equation)
    ]
    branches = [compat.trace_trees(body, arguments) for body in bodies]
    arrays = jax.tree.leaves(arguments)
    types = [compat.type_of(x) for x in arrays]
    traits = list(map(common_traits, zip(*(results for _, results in branches), strict=True)))
    # A number that data chose is data.
    least = Origin.NUMBER if values[0].origin is Origin.NUMBER else Origin.DATA
    traits = [common._replace(origin=max(common.origin, least)) for common in traits]

    def convert(program: Any, results: list[Value], *arrays: Any) -> list[Value]:
        own = core.jaxpr_as_fun(program)(*arrays)
        return list(map(with_traits, jax.tree.unflatten(jax.tree.structure(results), own), traits))

    pairs = [(x.traits, y) for _, xs in branches for x, y in zip(xs, traits, strict=True)]
    if any(x != y for x, y in pairs if x.of_params or y.of_params):
        converted = (functools.partial(convert, *branch) for branch in branches)
        branches = [compat.trace_trees(branch, *arrays) for branch in converted]
    programs = [program for program, _ in branches]

    def vary(program: Any, likes: list[Any], *arrays: Any) -> list[Any]:
        pairs = zip(core.jaxpr_as_fun(program)(*arrays), likes, strict=True)
        return [functools.reduce(varying_as, like, x) for x, like in pairs]

    # All branches of a `cond` must vary over the same mesh axes.
    if len({tuple(x.mat.varying for x in program.out_avals) for program in programs}) > 1:
        likes = list(zip(*(program.out_avals for program in programs), strict=True))
        varying = (functools.partial(vary, program, likes) for program in programs)
        programs = [compat.trace(program, types) for program in varying]
    results = compat.bind(op.equation, [index, *arrays], branches=tuple(programs))
    outputs = zip(jax.tree.map(results.__getitem__, branches[0][1]), traits, strict=True)
    return [value._replace(origin=common.origin, summed=common.summed) for value, common in outputs]


def shard_map_rule(interpreter: Interpreter[Value], op: Op, values: list[Value]) -> list[Value]:
    """Maps the program with float32 gradients: what the devices' gradients are summed in, too."""
    (body,) = compat.bodies_of(op.equation)

    def local(*values: Value) -> tuple[Value, ...]:
        results = interpreter.inside(op, body, values)
        return tuple(
            Value(x.operand(), origin=Origin.ACTIVATION)
            if x.of_params and varying_axes(x.array) != varying_axes(x.source)
            else x
            for x in results
        )

    # A spec is that of both arrays of a param.
    return list(compat.shard_map_again(op.params, local)(*(value.whole() for value in values)))
