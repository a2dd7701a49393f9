"""Finds the carries of a loop that go through layers, as in a loop over the blocks of a network."""

import enum
from collections.abc import Sequence

from jax.extend import core

from jaxmp._autocast.kinds import is_weight
from jaxmp._autocast.steps import States
from jaxmp._numerics.dtypes import is_inexact
from jaxmp._program import compat
from jaxmp._program.facts import NONE, Labels, made_of
from jaxmp._program.op_classes import CONTRACTIONS
from jaxmp._program.program import Op


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
def through_layers(op: Op, states: States) -> frozenset[int]:
    """Returns the carries of a loop that are multiplied by other weights in each turn.

    A loop over layers has such carries, whether it scans over the weights or slices them by its
    counter. A recurrence has the same weights in each turn: a solver, an RNN over time. A carry
    that is summed beside the layers is a recurrence, too.
    """
    body, arguments, carry = (
        compat.bodies_of(op.equation)[-1],
        op.wiring.arguments[-1],
        op.wiring.carry,
    )
    labels: list[Labels] = []
    for i, var in zip(arguments, compat.open_jaxpr(body).invars, strict=True):
        state = states[i]
        if i in carry and is_inexact(var.aval):
            labels.append(frozenset({(_MadeOf.OF, i)}))
        # The keys and values of a linear attention are others in each turn, too. A product made
        # them, so they are not weights, and their sum is a recurrence.
        elif state is not None and not is_weight(state):
            labels.append(frozenset({_TOUCHED}))
        else:
            labels.append(frozenset({_TURN}) if i >= carry.start else NONE)
    first = arguments.index(carry.start) if carry else 0
    results = made_of(body, labels, _rule, lambda aval: True, range(first, first + len(carry)))
    each = zip(carry, results, strict=False)
    return frozenset(i for i, labels in each if (_MadeOf.BY_LAYER, i) in labels)


def _rule(equation: core.JaxprEqn, operands: Sequence[Labels]) -> Labels:
    labels = NONE.union(*operands)
    if equation.primitive.name not in CONTRACTIONS:
        return labels
    if all(map(_is_weight, operands[:2])):
        return labels  # a merge of weights: a @ b is added to w later
    pairs = (operands[:2], operands[1::-1])
    carried = set().union(*(_carries(one) for one, other in pairs if _is_weight(other)))
    return labels.union({_TOUCHED}, ((_MadeOf.BY_LAYER, number) for number in carried))


def _is_weight(labels: Labels) -> bool:
    return _TURN in labels and _TOUCHED not in labels and not _carries(labels)


def _carries(labels: Labels) -> set[int]:
    pairs = (each for each in labels if isinstance(each, tuple))
    return {number for made, number in pairs if made is _MadeOf.OF}
