"""Which carries of a loop go through layers, as those of a loop over the blocks of a network do."""

import enum
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jaxmp import _compat
from jaxmp._autocast._ancestry import NONE, Labels, follow
from jaxmp._op_lists import CONTRACTIONS
from jaxmp._program import Op, has_tangent


class _Made(enum.Enum):
    """What a value in the body of a loop is made of."""

    OF_CARRY = "floats that the last turn made"
    OF_TURN = "what changes from turn to turn, as weights of layers and the number of the turn do"
    BY_LAYER = "a product of the one with the other"


def through_layers(op: Op, body: str, carry: slice) -> frozenset[int]:
    """The carries that a turn makes by products with weights that are others in each turn.

    A loop over layers has such, whether it scans over their weights or slices them by its counter.
    A recurrence has the same weights in each turn: a solver, an RNN over time.

    Args:
      op: the loop.
      body: the name of its body among its params.
      carry: which arguments of the body are carried.

    Returns:
      The numbers of these carries.
    """
    jaxpr = _compat.open_jaxpr(op.params[body])
    given = [NONE] * len(jaxpr.invars)
    for i, var in enumerate(jaxpr.invars[carry.start :], carry.start):
        floats = i < carry.stop and has_tangent(var.aval)
        given[i] = frozenset({_Made.OF_CARRY if floats else _Made.OF_TURN})
    while True:
        made = follow(jaxpr, given, _rule, lambda atom: True)[: carry.stop - carry.start]
        turned = [a | (b & _LAYER) for a, b in zip(given[carry], made, strict=True)]
        if turned == given[carry]:
            return frozenset(i for i, labels in enumerate(turned) if _Made.BY_LAYER in labels)
        given[carry] = turned


def _rule(equation: core.JaxprEqn, found: Sequence[Labels]) -> Labels:
    labels = NONE.union(*found)
    if equation.primitive.name not in CONTRACTIONS:
        return labels
    return (labels - {_Made.OF_TURN}) | (_LAYER if _is_layer(found[:2]) else NONE)


_LAYER: Labels = frozenset({_Made.BY_LAYER})


def _is_layer(operands: Sequence[Any]) -> bool:
    pairs = (operands, operands[::-1])
    return any(
        _Made.OF_CARRY in carried and _Made.OF_TURN in weight and _Made.OF_CARRY not in weight
        for carried, weight in pairs
    )
