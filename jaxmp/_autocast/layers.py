"""Finds the carries of a loop that go through layers, as in a loop over the blocks of a network."""

import enum
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jaxmp._autocast.kinds import is_weight
from jaxmp._autocast.steps import States
from jaxmp._program import compat
from jaxmp._program.derivatives import has_tangent
from jaxmp._program.facts import NONE, Labels, made_of
from jaxmp._program.op_classes import CONTRACTIONS
from jaxmp._program.wiring import Wiring


class _MadeOf(enum.Enum):
    """The way in which a value is made of a carry."""

    OF = "of what the last turn made"
    BY_LAYER = "of a product of that with a weight that is another in each turn"


# Labels of values that change from turn to turn, as the weights of layers and the counter do, and
# of results of earlier products: keys and values of a recurrence are not weights.
_TURN, _TOUCHED = "turn", "touched"


# This is a heuristic, as a jaxpr does not say which loop runs over layers. It separates scans over
# stacked weights (Flax, Equinox, hand-written GPTs) and `fori_loop` with sliced weights from the
# recurrences of tests/autocast/test_recurrence.py: solvers, RNNs, linear attention.
def through_layers(body: Any, wiring: Wiring, states: States) -> frozenset[int]:
    """Returns the carries that are multiplied by different weights in each turn.

    A loop over layers has such carries, whether it scans over the weights or slices them by its
    counter. A recurrence has the same weights in each turn: a solver, an RNN over time. A carry
    that is summed beside the layers is a recurrence, too.

    Args:
      body: the body of the loop.
      wiring: what its operands are.
      states: the states of its operands.

    Returns:
      The numbers of the operands that are such carries.
    """
    jaxpr, arguments, carry = compat.open_jaxpr(body), wiring.arguments[-1], wiring.carry
    given: list[Labels] = []
    for i, var in zip(arguments, jaxpr.invars, strict=True):
        state = states[i]
        if i in carry and has_tangent(var.aval):
            given.append(frozenset({(_MadeOf.OF, i)}))
        # The keys and values of a linear attention are others in each turn, too. A product made
        # them, so they are not weights, and their sum is a recurrence.
        elif state is not None and not is_weight(state):
            given.append(frozenset({_TOUCHED}))
        else:
            given.append(frozenset({_TURN}) if i >= carry.start else NONE)
    first = arguments.index(carry.start) if carry else 0
    made = made_of(body, given, _rule, lambda aval: True, range(first, first + len(carry)))
    each = zip(carry, made, strict=False)
    return frozenset(i for i, labels in each if (_MadeOf.BY_LAYER, i) in labels)


def _rule(equation: core.JaxprEqn, found: Sequence[Labels]) -> Labels:
    labels = NONE.union(*found)
    if equation.primitive.name not in CONTRACTIONS:
        return labels
    if all(map(_is_weight, found[:2])):
        return labels  # a merge of weights: a @ b is added to w later
    layered = (_layered(*operands) for operands in (found[:2], found[1::-1]))
    return labels.union({_TOUCHED}, *layered)


def _layered(carried: Labels, weight: Labels) -> Labels:
    """Returns the labels that a product adds if its second operand is a weight."""
    if not _is_weight(weight):
        return NONE
    return frozenset((_MadeOf.BY_LAYER, number) for number in _carries(carried))


def _is_weight(labels: Labels) -> bool:
    return _TURN in labels and _TOUCHED not in labels and not _carries(labels)


def _carries(labels: Labels) -> set[int]:
    pairs = (each for each in labels if isinstance(each, tuple))
    return {number for made, number in pairs if made is _MadeOf.OF}
