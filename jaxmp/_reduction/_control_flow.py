"""Operations that contain programs: params go in, and their gradients come out in float32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmp import _compat
from jaxmp._reduction._layout import unstacked
from jaxmp._reduction._values import Form, Value, flat, unflat

Evaluate = Callable[[Any, Sequence[Any], Sequence[Value]], list[Value]]


class Body:
    """A program inside of an operation, as a function of arrays.

    Args:
      evaluate: what runs a program.
      jaxpr: the program, closed or open.
      values: its arguments.
    """

    def __init__(self, evaluate: Evaluate, jaxpr: Any, values: Sequence[Value]) -> None:
        self._evaluate = evaluate
        self._jaxpr = jaxpr
        self.arrays, self._forms = flat(values)
        self.results: tuple[Form, ...] = ()

    def __call__(self, *arrays: Any) -> list[Any]:
        made = self.evaluate(*arrays)
        out, self.results = flat(made)
        return out

    def evaluate(self, *arrays: Any) -> list[Value]:
        values = unflat(arrays, self._forms)
        return self._evaluate(
            _compat.open_jaxpr(self._jaxpr), _compat.consts_of(self._jaxpr), values
        )

    def plain(self, *arrays: Any) -> list[Any]:
        """What it returns, as arrays that have nothing to do with params any more."""
        return [value.bare() for value in self.evaluate(*arrays)]


def jit(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    params = equation.params
    body = Body(evaluate, params["jaxpr"], values)
    if not _compat.is_plain_jit(params):
        return _pinned_jit(equation, body, values)

    def call(*arrays: Any) -> list[Any]:
        return body(*arrays)

    call.__name__ = call.__qualname__ = params["name"]
    made = jax.jit(call, inline=params["inline"])(*body.arrays)
    return unflat(made, body.results)


def _pinned_jit(equation: core.JaxprEqn, body: Body, values: list[Value]) -> list[Value]:
    """A jit with shardings: its program, between the constraints that they are."""
    given, wanted = _compat.jit_shardings(equation.params)
    pinned = [
        value if value.of_params else value._replace(array=_pin(value.array, sharding))
        for value, sharding in zip(values, given, strict=True)
    ]
    made = unflat(body(*flat(pinned)[0]), body.results)
    return [
        value if value.of_params else value._replace(array=_pin(value.array, sharding))
        for value, sharding in zip(made, wanted, strict=True)
    ]


def _pin(x: Any, sharding: Any) -> Any:
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def remat(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    params = equation.params
    body = Body(evaluate, params["jaxpr"], [_recomputed(value, True) for value in values])
    if params["differentiated"]:  # the backward pass of a gradient within the function
        traced = _compat.trace(body, [_compat.type_of(x) for x in body.arrays])
        made = _compat.bind(equation, body.arrays, jaxpr=_compat.without_consts(traced))
    else:
        again = jax.checkpoint(body, prevent_cse=params["prevent_cse"], policy=params["policy"])
        made = again(*body.arrays)
    return [_recomputed(value, False) for value in unflat(made, body.results)]


def _recomputed(value: Value, recomputed: bool) -> Value:
    if value.layout is None:
        return value
    return value._replace(layout=value.layout._replace(recomputed=recomputed))


def scan(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    params = equation.params
    closed = params["jaxpr"]
    jaxpr = _compat.open_jaxpr(closed)
    consts, carries = _compat.scan_counts(params)
    end = consts + carries
    # Params that a loop hands on as they are need not be carried.
    same = [jaxpr.outvars[i] is jaxpr.invars[consts + i] for i in range(carries)]
    hands_on = [same[i] and values[consts + i].of_params for i in range(carries)]
    init = [value.used() for value, on in zip(values[consts:end], hands_on, strict=True) if not on]
    stacked = [_stacked(value) for value in values[end:]]
    xs, forms = flat([value._replace(layout=unstacked(value.layout)) for value in stacked])
    # What is stacked along a dimension that is not split passes through as it came.
    passes = dict(zip(jaxpr.invars[end:], stacked, strict=True))
    through = [
        passes.get(var) if isinstance(var, core.Var) else None for var in jaxpr.outvars[carries:]
    ]
    forwards = [value is not None and value.of_params for value in through]

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        carried = iter(carry)
        inside = [
            *values[:consts],
            *(
                value if on else Value(next(carried))
                for value, on in zip(values[consts:end], hands_on, strict=True)
            ),
            *unflat(xs, forms),
        ]
        made = evaluate(jaxpr, _compat.consts_of(closed), inside)
        new = [v.bare() for v, on in zip(made[:carries], hands_on, strict=True) if not on]
        ys = [v.bare() for v, on in zip(made[carries:], forwards, strict=True) if not on]
        return new, ys

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, init, xs, **options)
    last, rest = iter(carry), iter(ys)
    return [
        *(
            value if on else Value(next(last))
            for value, on in zip(values[consts:end], hands_on, strict=True)
        ),
        *(
            value if value is not None and on else Value(next(rest))
            for value, on in zip(through, forwards, strict=True)
        ),
    ]


def _stacked(value: Value) -> Value:
    """What a scan takes one by one: gathered before, if it is split along that dimension."""
    splits = value.layout is not None and value.layout.axes[0]
    return value.in_place() if splits else value


def cond(evaluate: Evaluate, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
    index, *operands = values
    bodies = [Body(evaluate, branch, operands) for branch in equation.params["branches"]]
    arrays = bodies[0].arrays
    avals = [_compat.type_of(x) for x in arrays]
    traced = [_compat.trace(body, avals) for body in bodies]
    alike = len({body.results for body in bodies}) == 1
    if not alike:
        traced = [_compat.trace(body.plain, avals) for body in bodies]
    made = _compat.bind(equation, [index.used(), *arrays], branches=tuple(traced))
    return unflat(made, bodies[0].results) if alike else [Value(x) for x in made]


RULES: dict[str, Callable[[Evaluate, core.JaxprEqn, list[Value]], list[Value]]] = {
    "jit": jit,
    "pjit": jit,
    "remat2": remat,
    "checkpoint": remat,
    "scan": scan,
    "cond": cond,
}
