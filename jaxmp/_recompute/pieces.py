"""Divides a program into pieces between the values that are kept."""

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jaxmp._program.op_classes import VIEWS, Cost
from jaxmp._program.program import Program, numbers
from jaxmp._recompute.storage import Analysis, Storage


class Piece(NamedTuple):
    """Operations that run together, from kept values to kept values.

    Attributes:
      ops: their numbers, in order.
      inputs: the numbers of the values that they read.
      outputs: the numbers of the values that they make for other readers.
      recomputes: whether a derivative asks for values that are made inside the piece.
    """

    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputes: bool


def divided(
    program: Program, dear: Collection[str] = (), *, views: bool
) -> tuple[Storage, list[Piece]]:
    """Returns the kept values of a program, and its pieces, in an order in which they can run.

    An operation of cost `APART` is a piece of its own. Dear operations that read the same value
    form one piece, unless one of them waits for another: then the values that both need are kept.

    Args:
      program: the program, without dead code.
      dear: names of primitives and of jitted functions that are never to be computed again.
      views: whether slices of arguments are made outside of the pieces that are computed again, so
        that the layers of a stack are alike.
    """
    analysis = Analysis(program, dear)
    # Products that wait for each other are in different pieces. Both pieces may need the same
    # value, and only the pieces show it.
    while True:
        storage = analysis.storage()
        pieces = list(_Division(program, storage, views).pieces())
        for number in _shared(program, pieces):
            if number in analysis.touched:
                analysis.keep(number)
        if analysis.stored == storage.stored:
            return storage, pieces


def _shared(program: Program, pieces: Sequence[Piece]) -> Iterator[int]:
    """Yields the values that several pieces make, each for its own operations."""
    makers = collections.Counter(i for piece in pieces for i in piece.ops)
    read = dict[int, int]()  # by value, the fewest pieces that one of its readers runs in
    for i, op in enumerate(program.ops):
        for number in numbers(op.inputs):
            read[number] = min(read.get(number, makers[i]), makers[i])
    for i, count in makers.items():
        if count > 1:
            yield from (n for n in program.ops[i].outputs if read.get(n, count) < count)


class _Root(NamedTuple):
    """Kept values, and the operations and inputs that lead to them."""

    outputs: tuple[int, ...]
    ops: frozenset[int]
    inputs: frozenset[int]


class _Division:
    def __init__(self, program: Program, storage: Storage, views: bool) -> None:
        self.program, self.storage = program, storage
        self.made_by = {number: i for i, op in enumerate(program.ops) for number in op.outputs}
        known = {*program.inputs, *(number for number, _ in program.consts)}
        self.views = dict.fromkeys(self._views(set(known))) if views else {}
        self.known = known.union(*(program.ops[i].outputs for i in self.views))

    def _views(self, known: set[int]) -> Iterator[int]:
        for i, op in enumerate(self.program.ops):
            if op.name in VIEWS and known.issuperset(numbers(op.inputs)):
                known.update(op.outputs)
                yield i

    def pieces(self) -> Iterator[Piece]:
        # Outside of the pieces, slices of stacked weights leave equal layers alike: 20 layers are
        # traced as 2 pieces.
        for i in self.views:
            yield self._alone(i)
        roots = self._roots()
        sharing: dict[int, list[int]] = {}
        for at, root in roots.items():
            for i in root.ops:
                sharing.setdefault(i, []).append(at)
        done = set[int]()
        for at in range(len(self.program.ops) + 1):
            if at in roots and at not in done:
                together = self._together(at, roots, sharing, done)
                done.update(together)
                yield self._piece([roots[each] for each in sorted(together)])
            if at < len(self.program.ops) and self.storage.costs[at] is Cost.OPAQUE:
                yield self._alone(at)

    def _roots(self) -> dict[int, _Root]:
        """Returns the values to compute, by the operation that needs or makes them."""
        ops, costs = self.program.ops, self.storage.costs
        stored = self.storage.stored
        known = set(self.known)
        roots = {}
        for i, op in enumerate(ops):
            if i in self.views:
                continue
            if costs[i] is Cost.OPAQUE:
                wanted = [number for number in op.inputs if isinstance(number, int)]
            else:
                wanted = [number for number in op.outputs if number in stored]
            if wanted := [number for number in dict.fromkeys(wanted) if number not in known]:
                roots[i] = self._root(wanted, known)
                known.update(wanted)
            if costs[i] is Cost.OPAQUE:
                known.update(op.outputs)
        results = dict.fromkeys(numbers(self.program.outputs))
        if wanted := [number for number in results if number not in known]:
            roots[len(ops)] = self._root(wanted, known)
        return roots

    def _root(self, wanted: Sequence[int], known: set[int]) -> _Root:
        ops, inputs, waiting = set[int](), set[int](), list(wanted)
        while waiting:
            number = waiting.pop()
            if number in known:
                inputs.add(number)
            elif (i := self.made_by[number]) not in ops:
                ops.add(i)
                waiting += numbers(self.program.ops[i].inputs)
        return _Root(tuple(wanted), frozenset(ops), frozenset(inputs))

    def _together(
        self, at: int, roots: dict[int, _Root], sharing: dict[int, list[int]], done: set[int]
    ) -> set[int]:
        """Returns a root, and later roots that share operations with it and can run now too."""
        together, waiting = {at}, [at]
        while waiting:
            for i in roots[waiting.pop()].ops:
                for other in sharing[i]:
                    new = other > at and other not in together and other not in done
                    if new and self.known.issuperset(roots[other].inputs):
                        together.add(other)
                        waiting.append(other)
        return together

    def _piece(self, roots: Sequence[_Root]) -> Piece:
        ops = tuple(sorted(frozenset().union(*(root.ops for root in roots))))
        outputs = tuple(dict.fromkeys(number for root in roots for number in root.outputs))
        inputs = tuple(sorted(frozenset().union(*(root.inputs for root in roots))))
        self.known.update(outputs)
        return Piece(ops, inputs, outputs, self._recomputes(ops))

    def _recomputes(self, ops: Sequence[int]) -> bool:
        """Whether these operations make a cheap value that a derivative may ask for."""
        made = set[int]()
        for i in ops:
            op = self.program.ops[i]
            cheap = self.storage.costs[i] is Cost.CHEAP
            if cheap and not self.storage.linear[i]:
                return True
            # The derivative of a product asks for its operands. Of linear operations only a choice
            # asks, for its mask.
            asked = op.inputs[:1] if op.name == "select_n" else () if cheap else op.inputs
            if not made.isdisjoint(numbers(asked)):
                return True
            made.update(op.outputs if cheap else ())
        return False

    def _alone(self, i: int) -> Piece:
        op = self.program.ops[i]
        self.known.update(op.outputs)
        return Piece((i,), tuple(dict.fromkeys(numbers(op.inputs))), op.outputs, False)


def key_of(program: Program, statistics: frozenset[int]) -> Any:
    """Returns a key that pieces share if they are alike, such as the pieces of equal layers.

    The program of the piece must live as long as the key is used.
    """
    places: dict[int, int] = {number: place for place, number in enumerate(program.inputs)}
    lines = []
    for op in program.ops:
        reads = tuple(
            _of_literal(atom) if isinstance(atom, core.Literal) else places[atom]
            for atom in op.inputs
        )
        for number in op.outputs:
            places[number] = len(places)
        kept = tuple(number in statistics for number in op.outputs)
        # The context of an operation counts too: it says where the operation runs, for example.
        context = _hashable(op.equation.ctx)
        params = tuple((name, _hashable(value)) for name, value in sorted(op.params.items()))
        lines.append((op.equation.primitive, params, reads, kept, str(op.stack), context))
    avals = tuple(program.avals[number] for number in program.inputs)
    return tuple(lines), avals, tuple(places[number] for number in numbers(program.outputs))


def _of_literal(literal: core.Literal) -> Any:
    value = np.asarray(literal.val)
    return literal.aval, value.dtype.name, value.tobytes()


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
