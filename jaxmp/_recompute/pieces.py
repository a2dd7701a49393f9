"""Divides a program into pieces between the values that are kept."""

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from jaxmp._program.op_classes import Cost
from jaxmp._program.parts import views_of_arguments
from jaxmp._program.program import Program, numbers
from jaxmp._recompute.storage import Analysis, Price, Storage


class Piece(NamedTuple):
    """Operations that run together, from kept values to kept values.

    Attributes:
      ops: their numbers, in order.
      inputs: the numbers of the values that they read.
      outputs: the numbers of the values that they make for other readers.
      recomputes: whether a derivative needs values that are made inside the piece.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputes: bool


def divide(
    program: Program, dear: Collection[str], again: Price | None, *, views: bool, in_codes: bool
) -> tuple[Storage, list[Piece]]:
    """Returns the kept values of a program, and its pieces, in an order in which they can run.

    An operation of cost `SEPARATE` is a piece of its own. Dear operations that read the same value
    form one piece, unless one of them waits for another: then the values that both need are kept.

    Args:
      program: the program, without dead code.
      dear: names of primitives and of jitted functions that are never to be computed again.
      again: the highest price of a product that may be computed again; None for no product.
      views: whether slices of arguments are made outside of the pieces that are computed again, so
        that the layers of a stack are alike.
      in_codes: whether values are kept in codes.
    """
    analysis = Analysis(program, dear, again, in_codes)
    # Products that wait for each other are in different pieces. Both pieces may need the same
    # value, and only the pieces show it.
    while True:
        storage = analysis.storage()
        pieces = list(_Division(program, storage, views).pieces())
        for number in _repeated_values(program, pieces):
            if number in analysis.after_product:
                analysis.store(number)
        if analysis.stored == storage.stored:
            return storage, pieces


def _repeated_values(program: Program, pieces: Sequence[Piece]) -> Iterator[int]:
    """Yields the values that several pieces make, each for its own operations."""
    counts = collections.Counter(i for piece in pieces for i in piece.ops)
    fewest = dict[int, int]()  # by value, the fewest pieces that one of its readers runs in
    for i, op in enumerate(program.ops):
        for number in numbers(op.inputs):
            fewest[number] = min(fewest.get(number, counts[i]), counts[i])
    # A chain that runs in two pieces as a whole has to be stored only where it ends.
    for i, count in counts.items():
        if count > 1:
            yield from (n for n in program.ops[i].outputs if fewest.get(n, count) < count)


class _Root(NamedTuple):
    """Kept values, and the operations and inputs that lead to them."""

    outputs: tuple[int, ...]
    ops: frozenset[int]
    inputs: frozenset[int]


class _Division:
    def __init__(self, program: Program, storage: Storage, views: bool) -> None:
        self.program, self.storage = program, storage
        self.made_by = {number: i for i, op in enumerate(program.ops) for number in op.outputs}
        self.views = views_of_arguments(program) if views else {}
        # The numbers of the values that exist when the next piece runs.
        self.computed = {*program.inputs, *(number for number, _ in program.consts)}
        self.computed.update(number for i in self.views for number in program.ops[i].outputs)

    def pieces(self) -> Iterator[Piece]:
        # Outside of the pieces, slices of stacked weights leave equal layers alike: 20 layers are
        # traced as 2 pieces.
        for i in self.views:
            yield self._single_piece(i)
        roots = self._roots()
        places: dict[int, list[int]] = {}  # by operation, the places of the roots that need it
        for place, root in roots.items():
            for i in root.ops:
                places.setdefault(i, []).append(place)
        finished = set[int]()
        for place in range(len(self.program.ops) + 1):
            if place in roots and place not in finished:
                group = self._group(place, roots, places, finished)
                finished.update(group)
                members = [roots[member] for member in sorted(group)]
                ops = tuple(sorted(frozenset().union(*(root.ops for root in members))))
                inputs = tuple(sorted(frozenset().union(*(root.inputs for root in members))))
                outputs = tuple(dict.fromkeys(n for root in members for n in root.outputs))
                self.computed.update(outputs)
                yield Piece(ops, inputs, outputs, self._recomputes(ops))
            if place < len(self.program.ops) and self.storage.costs[place] is Cost.SEPARATE:
                yield self._single_piece(place)

    def _roots(self) -> dict[int, _Root]:
        """Returns the values to compute, by the operation that needs or makes them."""
        ops, costs = self.program.ops, self.storage.costs
        stored = self.storage.stored
        computed = set(self.computed)
        roots = {}
        for i, op in enumerate(ops):
            if i in self.views:
                continue
            separate = costs[i] is Cost.SEPARATE
            targets = [n for n in (op.inputs if separate else op.outputs) if isinstance(n, int)]
            targets = [n for n in dict.fromkeys(targets) if n not in computed]
            if targets := [n for n in targets if separate or n in stored]:
                roots[i] = self._root(targets, computed)
                computed.update(targets)
            if separate:
                computed.update(op.outputs)
        results = dict.fromkeys(numbers(self.program.outputs))
        if targets := [number for number in results if number not in computed]:
            roots[len(ops)] = self._root(targets, computed)
        return roots

    def _root(self, targets: Sequence[int], computed: set[int]) -> _Root:
        ops, inputs, queue = set[int](), set[int](), list(targets)
        while queue:
            number = queue.pop()
            if number in computed:
                inputs.add(number)
            elif (i := self.made_by[number]) not in ops:
                ops.add(i)
                queue += numbers(self.program.ops[i].inputs)
        return _Root(tuple(targets), frozenset(ops), frozenset(inputs))

    def _group(
        self, first: int, roots: dict[int, _Root], places: dict[int, list[int]], finished: set[int]
    ) -> set[int]:
        """Returns a root, and later roots that share operations with it and can run now too."""
        group, queue = {first}, [first]
        while queue:
            for i in roots[queue.pop()].ops:
                for place in places[i]:
                    is_new = place > first and place not in group and place not in finished
                    # A root with an input that is still missing waits for another product.
                    if is_new and self.computed.issuperset(roots[place].inputs):
                        group.add(place)
                        queue.append(place)
        return group

    def _recomputes(self, ops: Sequence[int]) -> bool:
        """Whether these operations make a cheap value that a derivative may need."""
        cheap_values = set[int]()
        for i in ops:
            op = self.program.ops[i]
            cheap = self.storage.costs[i] is Cost.CHEAP
            if cheap and not self.storage.linear[i]:
                return True
            # The derivative of a product needs its operands. Of linear operations only a choice
            # needs one, its mask.
            residuals = op.inputs[:1] if op.name == "select_n" else () if cheap else op.inputs
            if not cheap_values.isdisjoint(numbers(residuals)):
                return True
            cheap_values.update(op.outputs if cheap else ())
        return False

    def _single_piece(self, i: int) -> Piece:
        op = self.program.ops[i]
        self.computed.update(op.outputs)
        return Piece((i,), tuple(dict.fromkeys(numbers(op.inputs))), op.outputs, False)
