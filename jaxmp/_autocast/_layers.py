"""Which carries of a loop go through layers, as those of a loop over the blocks of a network do."""

import enum
from collections.abc import Sequence

from jax.extend import core

from jaxmp import _compat
from jaxmp._autocast._ancestry import NONE, Labels, follow
from jaxmp._autocast._kinds import is_weight
from jaxmp._autocast._steps import States
from jaxmp._op_lists import CONTRACTIONS
from jaxmp._program import Op, has_tangent


class _Made(enum.Enum):
    """How a value is made of a carry."""

    OF = "of what the last turn made"
    BY_LAYER = "of a product of that with a weight that is another in each turn"


# Of what changes from turn to turn, as weights of layers and the number of the turn do, and of what
# products have touched before: keys and values of a recurrence are no weights.
_TURN, _TOUCHED = "turn", "touched"


def through_layers(op: Op, body: str, carry: slice, states: States) -> frozenset[int]:
    """The carries that products with weights, others in each turn, make of themselves.

    A loop over layers has such, whether it scans over their weights or slices them by its counter.
    A recurrence has the same weights in each turn: a solver, an RNN over time. What adds up beside
    layers is a recurrence, too.

    Args:
      op: the loop.
      body: the name of its body among its params.
      carry: which arguments of the body are carried.
      states: what is known of the arguments of the body.

    Returns:
      The numbers of these carries.
    """
    jaxpr = _compat.open_jaxpr(op.params[body])
    given: list[Labels] = []
    for i, (var, state) in enumerate(zip(jaxpr.invars, states, strict=True)):
        if carry.start <= i < carry.stop and has_tangent(var.aval):
            given.append(frozenset({(_Made.OF, i - carry.start)}))
        elif state is not None and not is_weight(state):
            given.append(frozenset({_TOUCHED}))
        else:
            given.append(frozenset({_TURN}) if i >= carry.start else NONE)
    while True:
        made = follow(jaxpr, given, _rule, lambda atom: True)[: carry.stop - carry.start]
        turned = [a | b for a, b in zip(given[carry], made, strict=True)]
        if turned == given[carry]:
            return frozenset(i for i, labels in enumerate(turned) if (_Made.BY_LAYER, i) in labels)
        given[carry] = turned


def _rule(equation: core.JaxprEqn, found: Sequence[Labels]) -> Labels:
    labels = NONE.union(*found)
    if equation.primitive.name not in CONTRACTIONS:
        return labels
    if all(map(_is_weight, found[:2])):
        return labels  # of a merge: a @ b, to be added to w
    layered = (_layered(*operands) for operands in (found[:2], found[1::-1]))
    return labels.union({_TOUCHED}, *layered)


def _layered(carried: Labels, weight: Labels) -> Labels:
    """What a product of two values is made of, if the second is a weight."""
    if not _is_weight(weight):
        return NONE
    return frozenset((_Made.BY_LAYER, number) for number in _carries(carried))


def _is_weight(labels: Labels) -> bool:
    return _TURN in labels and _TOUCHED not in labels and not _carries(labels)


def _carries(labels: Labels) -> set[int]:
    pairs = (each for each in labels if isinstance(each, tuple))
    return {number for made, number in pairs if made is _Made.OF}
