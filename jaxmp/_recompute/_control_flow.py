"""Operations that contain programs: each is bound again around programs in pieces.

A checkpoint of the user's own stays what it is, and so does a function with its own derivative. A
`while` keeps nothing: it has no backward pass.
"""

import dataclasses
from typing import Any

from jaxmp import _compat
from jaxmp._program import JITS, Op
from jaxmp._recompute._interpreter import Context, Rule, run
from jaxmp._recompute._storage import names_of


def _traced(context: Context, closed: Any) -> Any:
    """The program in pieces, of arguments and results as before; made once for each program."""
    key = ("traced", id(closed), context.barriers)
    if key not in context.memo:
        jaxpr = _compat.open_jaxpr(closed)
        avals = [var.aval for var in jaxpr.invars]
        context.memo[key] = _compat.trace(lambda *args: run(context, closed, args), avals), closed
    return context.memo[key][0]


def _jit(context: Context, op: Op, values: list[Any]) -> list[Any]:
    """One that asks for shardings; one that is named as dear is not looked into."""
    if not names_of(op.equation).isdisjoint(context.dear):
        return _compat.bind(op.equation, values)
    # Pieces within keep its arguments for the backward pass, so that none may be given away.
    kept = (False,) * len(values)
    body = _traced(context, op.params["jaxpr"])
    return _compat.bind(op.equation, values, jaxpr=body, donated_invars=kept)


def _scan(context: Context, op: Op, values: list[Any]) -> list[Any]:
    # The two passes of a loop are two programs, of which a compiler can merge nothing.
    inside = dataclasses.replace(context, barriers=False)
    return _compat.bind(op.equation, values, jaxpr=_traced(inside, op.params["jaxpr"]))


def _cond(context: Context, op: Op, values: list[Any]) -> list[Any]:
    branches = tuple(_traced(context, branch) for branch in op.params["branches"])
    return _compat.bind(op.equation, values, branches=branches)


def _shard_map(context: Context, op: Op, values: list[Any]) -> list[Any]:
    jaxpr = op.params["jaxpr"]
    mapped = _compat.shard_map(op.params, lambda *args: tuple(run(context, jaxpr, args)))
    return list(mapped(*values))


RULES: dict[str, Rule] = {
    **dict.fromkeys(JITS, _jit),
    "scan": _scan,
    "cond": _cond,
    "shard_map": _shard_map,
}
