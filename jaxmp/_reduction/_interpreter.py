"""Runs a program again, with the gradients of what is made of params in float32.

The values that it computes are those that it computed before. What is made of params alone is
followed beside it in float32, for its derivative only, until it meets activations: there the sum
over the batch begins that a gradient is, and over the devices among which the batch is divided.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from jaxmp import _compat
from jaxmp._float32_gradients import held, product, varying_alike, varying_axes
from jaxmp._float32_sums import gather, gathers
from jaxmp._op_lists import ARRANGEMENTS, CLASSES, CONTRACTIONS, OpClass
from jaxmp._reduction._control_flow import RULES as CONTROL_FLOW
from jaxmp._reduction._gradient_of import gradient_of
from jaxmp._reduction._layout import moved
from jaxmp._reduction._values import (
    FLOAT32,
    Value,
    flat,
    is_float,
    is_half,
    is_ours,
    is_short,
    like_param,
    unflat,
)
from jaxmp._reduction._weights import (
    adjusts,
    aval_of,
    compared,
    is_arrangement,
    known_of,
    of_params_only,
    without_data,
    without_params,
)
from jaxmp._trilinear import Gather

Rule = Callable[[core.JaxprEqn, list[Value]], list[Value] | None]

# Linear in their first operand, which they only move; further ones are integers.
_MOVES = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "rev", "slice"}
    | {"dynamic_slice", "gather", "split", "tile", "unstack", "copy", "copy_p"}
    | {"sharding_constraint", "pcast"}
)
_REPEATS = frozenset({"broadcast_in_dim", "tile"})
_MULTIPLIES = frozenset({*CONTRACTIONS, "held", "float32_gradient"})
# Those whose operands may have other shapes than the result, for other reasons than spreading.
_MIXED_SHAPES = frozenset({*ARRANGEMENTS, "clamp", "select_n"})
# Smooth functions of floats, which can be evaluated in any float dtype.
_ELEMENTWISE = frozenset({OpClass.PROMOTE, OpClass.FLOAT32, OpClass.RANGE})
_ARITHMETIC = _ELEMENTWISE | {OpClass.SUM}


def evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
    """What a program returns.

    Args:
      jaxpr: the program, an open jaxpr.
      consts: its constants.
      arguments: its arguments.

    Returns:
      The results. Those made of params are returned as such.
    """
    env: dict[Any, Value] = {}
    env.update(zip(jaxpr.invars, arguments, strict=True))
    for var, x in zip(jaxpr.constvars, consts, strict=True):
        env[var] = Value(x, fixed=isinstance(x, np.ndarray))
    for equation in jaxpr.eqns:
        source = equation.source_info
        with _compat.where(equation, source.name_stack, source.traceback):
            if equation.primitive.name in _MULTIPLIES:
                _gather_once(equation, env)
            values = [_read(atom, env) for atom in equation.invars]
            made = _run(equation, values)
        env.update(zip(equation.outvars, made, strict=True))
    return [_returned(atom, env) for atom in jaxpr.outvars]


def _returned(atom: Any, env: dict[Any, Value]) -> Value:
    """A number of the program that it returns is an array to who gets it."""
    is_number = isinstance(atom, core.Literal)
    return Value(_compat.number(atom), fixed=True) if is_number else env[atom]


def _read(atom: Any, env: dict[Any, Value]) -> Value:
    return Value(atom.val, fixed=True) if isinstance(atom, core.Literal) else env[atom]


def _gather_once(equation: core.JaxprEqn, env: dict[Any, Value]) -> None:
    """Gathers what a product multiplies, for all its uses, where it need not be let go between."""
    for atom in equation.invars:
        value = _read(atom, env)
        if value.layout is not None and value.layout.recomputed and is_half(value.array):
            env[atom] = value.in_place()


def _run(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    if jax.sharding.get_abstract_mesh().manual_axes:
        values = _varying_as_traced(equation, values)
    name = equation.primitive.name
    entered = name == "pvary" or (name in CONTROL_FLOW and gathers(equation))
    if not any(value.of_params for value in values) and not entered:
        bind = gather if name == "gather" else _compat.bind
        found = bind(equation, _arrays(values))
        return [without_params(x, equation, values) for x in found]
    rule = RULES.get(name)
    alone = of_params_only(values)
    like_params = alone or adjusts(equation, values)
    if alone and is_arrangement(equation):
        # Put together as they lie, parts of params would wander from device to device.
        values = [value.in_place() for value in values]
    elif not alone and like_params and name not in ("mul", "div"):
        # What is added may be activations, which do not lie as the params do. What multiplies is
        # a mask or a scale, more likely.
        values = [value.in_place() for value in values]
    if rule is None and like_params and CLASSES.get(name) in _ARITHMETIC:
        rule = _arithmetic
    made = None if rule is None else rule(equation, values)
    if made is None:
        made = (_made_of_params if like_params else _used)(equation, values)
    return made


def _varying_as_traced(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """In a `shard_map`: operands that vary alike, if they did when the program was traced.

    In a branch params vary as what chooses the branch does; then numbers of the program must too.
    """
    if len({varying_axes(atom.aval) for atom in equation.invars}) > 1:
        return values
    arrays = _arrays(values)
    alike = zip(values, varying_alike(arrays), strict=True)
    return [
        value.varying_as(x) if value.of_params else value._replace(array=x) for value, x in alike
    ]


def _arrays(values: Sequence[Value]) -> list[Any]:
    return [value.array for value in values]


def _floats(values: Sequence[Value]) -> list[Any]:
    return [value.array for value in values if is_float(value.array)]


def _used(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """An operation that params meet activations in."""
    name = equation.primitive.name
    shape: Any = getattr(aval_of(equation), "shape", None)
    spreads = CLASSES.get(name) in _ELEMENTWISE and name not in _MIXED_SHAPES
    if not (spreads and any(v.of_params and v.array.shape != shape for v in values)):
        # A program within takes them as it was traced, and makes them vary itself.
        others = [] if _compat.sub_jaxprs(equation) else _floats(values)
        made = _compat.bind(equation, [value.used(others) for value in values])
        return [Value(x, met=True) for x in made]

    # A bias may have dimensions of size 1: its gradient is a sum over them.
    arrays, forms = flat(values)

    def spread(*arrays: Any) -> list[Any]:
        inside = [value.in_place() for value in unflat(arrays, forms)]
        others = _floats(inside)
        return _compat.bind(equation, [v.spread(shape).used(others) for v in inside])

    # A product keeps its operands for its derivative: of a scale not what was laid out.
    keeps = name not in ("add", "sub")
    made = jax.checkpoint(spread, prevent_cse=False)(*arrays) if keeps else spread(*arrays)
    return [Value(x, met=True) for x in made]


def _made_of_params(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """An operation on params alone: what it makes is like a param."""
    known = known_of(equation, values)
    made: list[Value] = []
    for x in _compat.bind(equation, [value.bare() for value in values]):
        is_one = is_ours(x) and not _compat.is_ref(x)
        made.append(like_param(x)._replace(**known) if is_one else compared(x, values))
    return made


def _convert(equation: core.JaxprEqn, values: list[Value]) -> list[Value] | None:
    (value,) = values
    target = equation.params["new_dtype"]
    if not (is_short(value.array.dtype) and is_short(target)):
        return None
    (array,) = _compat.bind(equation, [value.array])
    return [value._replace(array=array if value.array.dtype == target else held(array))]


def _move(equation: core.JaxprEqn, values: list[Value]) -> list[Value] | None:
    name, value = equation.primitive.name, values[0]
    if not value.of_params or any(other.of_params for other in values[1:]):
        return None
    layout = moved(value.layout, equation)
    if layout is None and value.layout is not None:
        value = value.in_place()
    rest = _arrays(values[1:])
    rows = value.rows or (name == "gather" and not all(other.fixed for other in values[1:]))

    def bind(x: Any) -> list[Any]:
        return _compat.bind(equation, [x, *rest])

    arrays = bind(value.array)
    wides = arrays if value.exact else bind(value.wide)
    repeated = value.repeated or (name in _REPEATS and arrays[0].size > value.array.size)
    value = value._replace(layout=layout, rows=rows, repeated=repeated)
    return [value._replace(array=x, wide=wide) for x, wide in zip(arrays, wides, strict=True)]


def _arithmetic(equation: core.JaxprEqn, values: list[Value]) -> list[Value] | None:
    """Arithmetic of params alone: done twice, for the value and in float32 for its gradient."""
    if not any(is_half(value.array) for value in values):
        return None
    if not all(is_half(x) or not is_float(x) for x in _arrays(values)):
        return None
    if equation.params.get("out_dtype") is not None:
        return None
    arrays = _compat.bind(equation, _arrays(values))
    if not all(map(is_half, arrays)):
        return None if any(map(is_float, arrays)) else [compared(x, values) for x in arrays]
    wides = _compat.bind(equation, [_widened(value) for value in values])
    known = known_of(equation, values)
    return [Value(x, wide, **known) for x, wide in zip(arrays, wides, strict=True)]


def _widened(value: Value) -> Any:
    """As float32, for its derivative: at the point that is computed, where the wide one is not."""
    x = value.array
    if not is_float(x):
        return x
    widened = lax.convert_element_type(x, FLOAT32)
    return gradient_of(widened, value.wide) if value.of_params else widened


def _contraction(equation: core.JaxprEqn, values: list[Value]) -> list[Value] | None:
    lhs, rhs, *rest = values
    dtypes = {x.dtype for x in _arrays(values[:2])}
    made = aval_of(equation).dtype
    if len(dtypes) != 1 or not _is_ours(values[:2]) or made not in (FLOAT32, *dtypes):
        return None
    params = {**equation.params, "preferred_element_type": made}
    both = [value.product_operand() for value in (lhs, rhs)]
    operands, sources, gathers = zip(*both, strict=True)
    arrays = [*operands, *_arrays(rest)]
    result = product(equation.primitive, params, arrays, sources, gathers)
    return [like_param(result) if without_data(values) else Value(result, met=True)]


def _is_ours(operands: Sequence[Value]) -> bool:
    """Whether a product is to have other gradients than JAX gives it, or other residuals."""
    if is_half(operands[0].array):
        return True
    layouts = [value.layout for value in operands if value.layout is not None]
    return operands[0].array.dtype == FLOAT32 and any(x.dtype in (None, FLOAT32) for x in layouts)


def _held(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """An operand of a product that has its gradient from another equation."""
    (value,) = values
    return [Value(*_compat.bind(equation, [value.in_place().array]))]


def _float32_gradient(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """What autocast has made of a product: operands and sources, of which params are gathered.

    An operand that was computed from params has its source here: autocast knows of none.
    """
    form, wide = equation.params["form"], equation.params["wide"]
    end = len(values) - sum(wide)
    given = iter(values[end:])
    arrays, sources, gathers = [values[0].used()], [], []
    for value, has_source in zip(values[1:3], wide, strict=True):
        operand, source, gather = value.product_operand()
        if has_source:
            source = _source(next(given), gather)
        arrays.append(operand)
        sources.append(source)
        gathers.append(gather)
    arrays += _arrays(values[3:end]) + [source for source in sources if source is not None]
    changed = {"wide": tuple(source is not None for source in sources)}
    if any(gathers):
        changed["form"] = form.gathering(tuple(gathers))
    (made,) = _compat.bind(equation, arrays, **changed)
    alone = without_data([*values[1:3], *values[end:]])
    return [like_param(made) if alone else Value(made, met=True)]


def _source(value: Value, gather: Gather) -> Any:
    """The source of an operand; not gathered where the product does that."""
    if not value.of_params:
        return value.array
    return value.wide if gather else value.in_place().wide


def _named(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    (value,) = values
    (array,) = _compat.bind(equation, [value.array])
    return [value._replace(array=array, wide=array if value.exact else value.wide)]


def _vary(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    """In a branch of a shard_map, what is made of params may vary over the devices already."""
    (value,) = values
    varying = jax.typeof(value.array).mat.varying
    axes = tuple(axis for axis in equation.params["axes"] if axis not in varying)
    if not axes:
        return [value]
    (array,) = _compat.bind(equation, [value.array], axes=axes)
    wide = value.wide
    if value.of_params:
        wide = array if value.exact else _compat.bind(equation, [value.wide], axes=axes)[0]
    return [value._replace(array=array, wide=wide)]


def _barrier(equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    arrays = _compat.bind(equation, _arrays(values))
    return [
        value._replace(array=x, wide=x if value.exact else value.wide)
        for x, value in zip(arrays, values, strict=True)
    ]


def _control(name: str) -> Rule:
    return functools.partial(CONTROL_FLOW[name], evaluate)


RULES: dict[str, Rule] = {
    "convert_element_type": _convert,
    "held": _held,
    "float32_gradient": _float32_gradient,
    "name": _named,
    "pvary": _vary,
    "optimization_barrier": _barrier,
    **dict.fromkeys(_MOVES, _move),
    **dict.fromkeys(CONTRACTIONS, _contraction),
    **{name: _control(name) for name in CONTROL_FLOW},
}
