"""Rules for operations that contain programs: each is bound again around programs in pieces.

The user's own checkpoints stay as they are, and so do functions with their own derivative. A
`while` keeps nothing: it has no backward pass.
"""

import dataclasses
from typing import Any

from jaxmp._jaxpr import compat
from jaxmp._jaxpr.program import JITS, Op
from jaxmp._recompute.run import Rule, Settings, run_in_pieces
from jaxmp._recompute.storage import names_of


def _traced(context: Settings, closed: Any) -> Any:
    """Returns the program in pieces, with the same arguments and results; made once per program."""
    key = ("traced", id(closed), context.barriers)
    if key not in context.memo:
        jaxpr = compat.open_jaxpr(closed)
        avals = [var.aval for var in jaxpr.invars]
        context.memo[key] = (
            compat.trace(lambda *args: run_in_pieces(context, closed, args), avals),
            closed,
        )
    return context.memo[key][0]


def _jit(context: Settings, op: Op, values: list[Any]) -> list[Any]:
    """Runs a jit with shardings in pieces; a jit that is named as dear runs as it is."""
    if not names_of(op.equation).isdisjoint(context.dear):
        return compat.bind(op.equation, values)
    # The pieces inside keep arguments for the backward pass, so that none may be donated.
    kept = (False,) * len(values)
    body = _traced(context, op.params["jaxpr"])
    return compat.bind(op.equation, values, jaxpr=body, donated_invars=kept)


def _scan(context: Settings, op: Op, values: list[Any]) -> list[Any]:
    # The two passes of a loop are two programs, which a compiler cannot merge: no barriers.
    inside = dataclasses.replace(context, barriers=False)
    return compat.bind(op.equation, values, jaxpr=_traced(inside, op.params["jaxpr"]))


def _cond(context: Settings, op: Op, values: list[Any]) -> list[Any]:
    branches = tuple(_traced(context, branch) for branch in op.params["branches"])
    return compat.bind(op.equation, values, branches=branches)


def _shard_map(context: Settings, op: Op, values: list[Any]) -> list[Any]:
    jaxpr = op.params["jaxpr"]
    mapped = compat.shard_map(op.params, lambda *args: tuple(run_in_pieces(context, jaxpr, args)))
    return list(mapped(*values))


RULES: dict[str, Rule] = {
    **dict.fromkeys(JITS, _jit),
    "scan": _scan,
    "cond": _cond,
    "shard_map": _shard_map,
}
