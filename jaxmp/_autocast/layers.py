"""Tells loops apart: carries that go through the layers of a network, and loops that floats end."""

import enum
from collections.abc import Sequence

from jax.extend import core

from jaxmp._autocast.op_plans import States
from jaxmp._autocast.strengths import is_weight
from jaxmp._numerics.dtypes import is_inexact
from jaxmp._program import compat
from jaxmp._program.facts import NONE, Labels, made_of
from jaxmp._program.op_classes import CONTRACTIONS, ORDERS
from jaxmp._program.program import Op
from jaxmp._program.wiring import wiring_of


class _CarryUse(enum.Enum):
    """How a value depends on a carry."""

    DIRECT = "on the result of the last turn, without a layer in between"
    THROUGH_LAYER = "on a product of that result with a weight that is another in each turn"


# Labels of values that change from turn to turn, as the weights of layers and the counter do, and
# of results of earlier products: keys and values of a recurrence are not weights.
_PER_TURN, _FROM_PRODUCT = "per turn", "from a product"


# This is a heuristic, as a jaxpr does not say which loop runs over layers. It separates scans over
# stacked weights (Flax, Equinox, hand-written GPTs) and `fori_loop` with sliced weights from the
# recurrences of tests/autocast/test_recurrence.py: solvers, RNNs, linear attention.
def through_layers(op: Op, states: States) -> frozenset[int]:
    """Returns the carries of a loop that are multiplied by other weights in each turn.

    A loop over layers has such carries, whether it scans over the weights or slices them by its
    counter. A recurrence has the same weights in each turn: a solver, an RNN over time. A carry
    that sums results of the layers, but that no layer reads, is a recurrence, too.
    """
    body = compat.bodies_of(op.equation)[-1]
    arguments, carry = op.wiring.arguments[-1], op.wiring.carry
    labels: list[Labels] = []
    for i, var in zip(arguments, compat.open_jaxpr(body).invars, strict=True):
        state = states[i]
        if i in carry and is_inexact(var.aval):
            labels.append(frozenset({(_CarryUse.DIRECT, i)}))
        # The keys and values of a linear attention are others in each turn, too. A product made
        # them, so they are not weights, and their sum is a recurrence.
        elif state is not None and not is_weight(state):
            labels.append(frozenset({_FROM_PRODUCT}))
        else:
            labels.append(frozenset({_PER_TURN}) if i >= carry.start else NONE)
    first = arguments.index(carry.start) if carry else 0
    places = range(first, first + len(carry))
    pairs = zip(carry, made_of(body, labels, _label_rule, lambda aval: True, places), strict=False)
    return frozenset(i for i, labels in pairs if (_CarryUse.THROUGH_LAYER, i) in labels)


def _label_rule(equation: core.JaxprEqn, operands: Sequence[Labels]) -> Labels:
    labels = NONE.union(*operands)
    if equation.primitive.name not in CONTRACTIONS:
        return labels
    if all(map(_is_weight, operands[:2])):
        return labels  # a merge of weights: a @ b is added to w later
    pairs = (operands[:2], operands[1::-1])
    carries = set().union(*(_carries(one) for one, other in pairs if _is_weight(other)))
    return labels.union({_FROM_PRODUCT}, ((_CarryUse.THROUGH_LAYER, number) for number in carries))


def _is_weight(labels: Labels) -> bool:
    return _PER_TURN in labels and _FROM_PRODUCT not in labels and not _carries(labels)


def _carries(labels: Labels) -> set[int]:
    pairs = (label for label in labels if isinstance(label, tuple))
    return {number for use, number in pairs if use is _CarryUse.DIRECT}


def ends_by_floats(equation: core.JaxprEqn) -> bool:
    """Whether this is a loop that runs until floats that it changes end it, as a solver does.

    In 16 bits an error may stay above its bound, and the loop does not end. A loop that counts its
    turns is none, nor one that a token ends, which the network chose.
    """
    if wiring_of(equation).turns is not None:
        return False
    condition, body = compat.sub_jaxprs(equation)
    consts, count = len(body.invars) - len(body.outvars), len(body.outvars)
    pairs = zip(body.invars[consts:], body.outvars, strict=True)
    changing = [is_inexact(before.aval) and before is not after for before, after in pairs]
    labels = [NONE] * consts + [frozenset({_PER_TURN}) if x else NONE for x in changing]
    carry = range(consts, consts + count)
    tested = made_of(body, labels, _of_floats, lambda aval: True, carry)
    others = [NONE] * (len(condition.invars) - count)
    (ended,) = made_of(condition, [*others, *tested], _of_floats, lambda aval: True)
    return bool(ended)


def _of_floats(equation: core.JaxprEqn, operands: Sequence[Labels]) -> Labels:
    return NONE if equation.primitive.name in ORDERS else NONE.union(*operands)
