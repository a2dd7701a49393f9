"""Adds up numbers over a program in which each conditional runs only one of its branches."""

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from jaxmp._program.compat import bodies_of


class Choice(NamedTuple):
    """One branch of a numbered conditional, which has `of` branches; its index, and its name."""

    conditional: int
    branch: int
    of: int
    name: str


class BranchPart(NamedTuple):
    """A part of a program that runs as a whole or not at all.

    Attributes:
      branches: the branches around the part, from the outermost to the innermost.
      counted: the amount that counts, such as the FLOPs in a wanted dtype.
      total: the whole amount.
    """

    branches: tuple[Choice, ...]
    counted: int
    total: int


def choices(equation: Any, number: int) -> list[Choice]:
    """Returns the branches of a conditional, in order."""
    platforms = equation.params.get("branches_platforms")
    count = len(bodies_of(equation))
    names = [f"branch {i} of {count}" for i in range(count)]
    # `platform_dependent` is a conditional too; the entry without platforms is its default.
    if platforms is not None:
        names = [f"branch for {', '.join(group or ['other platforms'])}" for group in platforms]
    return [Choice(number, i, count, name) for i, name in enumerate(names)]


def most(parts: Iterable[BranchPart]) -> int:
    """Returns the largest total over all choices of branches.

    >>> left, right = Choice(0, 0, 2, "left"), Choice(0, 1, 2, "right")
    >>> parts = [BranchPart((), 2, 2), BranchPart((left,), 0, 3), BranchPart((right,), 4, 4)]
    >>> most(parts)
    6
    """
    # Of branches that exclude each other the largest counts: their sum would run in no program.
    return _best_sums(list(parts), 0, lambda counted, total: total)[1]


def least_share(parts: Iterable[BranchPart]) -> float:
    """Returns the smallest ratio of counted to total over all choices of branches.

    Returns 0 if the total is 0.

    >>> left, right = Choice(0, 0, 2, "left"), Choice(0, 1, 2, "right")
    >>> least_share([BranchPart((), 1, 1), BranchPart((left,), 0, 3), BranchPart((right,), 4, 4)])
    0.25
    """
    parts = list(parts)
    counted, total = _best_sums(parts, 0, lambda counted, total: total)
    if not total:
        return 0.0
    # Dinkelbach's method. The ratio is a quotient of sums, so minimizing it in each conditional
    # alone would be wrong. But `share * total - counted`, with the smallest ratio so far as the
    # share, is a sum. The branches that maximize it have a smaller ratio, unless no branches do.
    while True:
        # An exact quotient: rounding would hide a tiny product of another dtype among large ones.
        share = Fraction(counted, total)

        def left_over(counted: int, total: int, share: Fraction = share) -> Fraction:
            return share * total - counted

        counted, total = _best_sums(parts, 0, left_over)
        if left_over(counted, total) <= 0:
            return float(share)


def _best_sums(
    parts: list[BranchPart], depth: int, gain: Callable[[int, int], int | Fraction]
) -> tuple[int, int]:
    """Returns counted and total for the branches with the largest gain, a linear function."""
    counted = total = 0
    inside: dict[int, dict[Choice, list[BranchPart]]] = {}
    for part in parts:
        if len(part.branches) == depth:
            counted += part.counted
            total += part.total
        else:
            choice = part.branches[depth]
            inside.setdefault(choice.conditional, {}).setdefault(choice, []).append(part)
    for branches in inside.values():
        sums = [_best_sums(inner, depth + 1, gain) for inner in branches.values()]
        # A branch without parts may run too.
        if len(sums) < next(iter(branches)).of:
            sums.append((0, 0))
        best = max(sums, key=lambda pair: gain(*pair))
        counted += best[0]
        total += best[1]
    return counted, total
