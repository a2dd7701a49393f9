"""Divides a program into parts, of which equal ones, such as layers, run as one jitted function.

JAX traces, differentiates, transposes and lowers a jitted function once for all its calls.
Compilers put its program in the place of each call, and see the same program as without parts, but
for one order: the gradients of a value that a part reads several times are added up before they
join those of other parts.

Two parts are equal if their operations do the same in the same order, for the same lines of the
user's code, with the same scopes inside of those that each part is in.
"""

import collections
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jaxmp._program.compat import bodies_of, is_of_jax, open_jaxpr, where
from jaxmp._program.derivatives import derivative_of
from jaxmp._program.op_classes import CONTRACTIONS, CUSTOM_DERIVATIVES, VIEWS
from jaxmp._program.program import Memo, Op, Program, equations_in, numbers, read
from jaxmp._program.source_lines import innermost_lines

# Fewer operations cost less than a call.
_FEWEST = 3


class PartCache(Memo):
    """What the equal parts of all programs of a call share: functions, plans and jaxprs."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Hashable, int] = {}

    def op_key(self, op: Op, key: Hashable) -> int | None:
        """Returns a number for what an operation does, whichever values it reads.

        Args:
          op: the operation.
          key: how it runs, beyond its equation.

        Returns:
          The number; None if an effect or a missing key makes it unlike all others.
        """
        if op.equation.effects or key is None:
            return None
        params, bodies = op.params, bodies_of(op.equation)
        if op.name == "custom_jvp_call" and is_of_jax(bodies[0], ""):
            # Such as `relu`: JAX makes a new object for the derivative in each call.
            rule = self.once(("rule", id(op.equation)), op, lambda: self._rule(op))
            params = {"call": bodies[0], "rule": rule}
        return self._key(op, key, params)

    def _key(self, op: Op, key: Hashable, params: dict[str, Any]) -> int:
        items = tuple((name, self._param(value)) for name, value in sorted(params.items()))
        literals = tuple(map(_literal, op.inputs))
        context = self._param(op.equation.ctx), innermost_lines(op.traceback)
        return self._number((op.equation.primitive, items, literals, *op.in_avals, key, context))

    def ops_key(
        self,
        ops: Sequence[Op],
        op_keys: Sequence[int | None],
        inputs: Sequence[int],
        outputs: Sequence[Any],
        depth: int = 0,
    ) -> int | None:
        """Returns a number that operations have in common with others that are alike.

        Args:
          ops: the operations.
          op_keys: their keys, of `op_key`.
          inputs: the numbers of the values that they read.
          outputs: the values that they make for others, and literals.
          depth: how many of their outer scopes do not count.

        Returns:
          The number; None if one of the operations is unlike all others.
        """
        if None in op_keys:
            return None
        # Numbers of values differ from part to part; the places where they first stand do not.
        places = {number: place for place, number in enumerate(inputs)}
        text: list[Hashable] = []
        for op, key in zip(ops, op_keys, strict=True):
            for number in (*numbers(op.inputs), *op.outputs):
                places.setdefault(number, len(places))
            text.append((key, *(places[x] for x in numbers(op.inputs)), op.stack.stack[depth:]))
        results = ((_literal(x), places.get(x) if isinstance(x, int) else None) for x in outputs)
        return self._number((len(inputs), *text, *results))

    def _rule(self, op: Op) -> Hashable:
        """Returns what the derivatives of equal calls have in common."""
        try:
            # JAX keeps the lines of the first trace of its helpers.
            with where(op.equation, op.stack, op.traceback):
                derivative = derivative_of(op.equation)
        except Exception:  # any error of the rule: whoever differentiates is told
            return object()
        calls = [x for x in equations_in([derivative]) if x.primitive.name in CUSTOM_DERIVATIVES]
        direct = [x.equation for x in read(derivative).ops if x.name == op.name]
        bodies = {str(bodies_of(x)[0]) for x in (op.equation, *direct)}
        # It may call the function itself once. Other derivatives in it would have to be equal too.
        if op.params["symbolic_zeros"] or len(calls) > min(1, len(direct)) or len(bodies) > 1:
            return object()
        known = set(map(id, direct))
        return self.once(
            ("program", id(derivative)), derivative, lambda: self._program(derivative, known)
        )

    def _param(self, value: Any) -> Hashable:
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
            return self.once(("program", id(value)), value, lambda: self._program(value))
        if isinstance(value, tuple):
            return tuple(map(self._param, value))
        if isinstance(value, (float, complex, np.generic)):
            return type(value), np.asarray(value).tobytes()  # zeros have signs
        try:
            hash(value)
        except TypeError:  # such as an array, known by its identity
            return self.once(("value", id(value)), value, lambda: id(value))
        return type(value), value

    def _program(self, jaxpr: Any, known: Collection[int] = ()) -> Hashable:
        program = read(jaxpr)
        if len(open_jaxpr(jaxpr).constvars) > len(program.consts):
            return id(jaxpr)  # its constants are out of sight
        inputs = (*program.inputs, *(number for number, _ in program.consts))
        op_keys = [
            self._key(op, (), {}) if id(op.equation) in known else self.op_key(op, ())
            for op in program.ops
        ]
        key = self.ops_key(program.ops, op_keys, inputs, program.outputs)
        consts = tuple(self._param(const) for _, const in program.consts)
        avals = tuple(program.avals[number] for number in inputs)
        return (id(jaxpr) if key is None else key), avals, consts

    def _number(self, text: Hashable) -> int:
        return self._numbers.setdefault(text, len(self._numbers))


class ProgramPart(NamedTuple):
    """Operations that run together.

    Attributes:
      ops: the operations.
      key: what equal parts share; None if the operations run one by one.
      depth: how many of their outer scopes all operations share.
      inputs: the numbers of the values that they read, in the order in which they do.
      outputs: the numbers of the values that they make for other readers.
    """

    ops: Sequence[Op]
    key: int | None
    depth: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def divide_program(
    program: Program, key_of: Callable[[Op], Hashable], shared: PartCache
) -> list[ProgramPart]:
    """Divides a program into parts, in an order in which they can run.

    Args:
      program: the program.
      key_of: says how an operation runs, beyond its equation; None for one that runs by itself.
      shared: what its parts share with those of other programs.
    """
    if sum(op.size for op in program.ops) < 2 * _FEWEST:
        return [ProgramPart(program.ops, None, 0, (), ())]
    # Slices of stacked weights, which are all different, would make layers different.
    views = views_of_arguments(program)
    ops = [op for place, op in enumerate(program.ops) if place not in views]
    division = _Partition(ops, program.outputs, key_of, shared)
    parts = division.smallest()
    while len(joined := division.join(parts)) < len(parts):
        parts = joined
    counts = collections.Counter(part.key for part in parts)
    divided = [ProgramPart([program.ops[place] for place in views], None, 0, (), ())]
    for part in parts:
        size = sum(op.size for op in part.ops)
        is_shared = counts[part.key] > 1 and size >= _FEWEST
        divided.append(part if is_shared else part._replace(key=None))
    return divided


class _Partition:
    def __init__(
        self,
        ops: Sequence[Op],
        outputs: Sequence[Any],
        key_of: Callable[[Op], Hashable],
        shared: PartCache,
    ) -> None:
        self.ops, self.shared = ops, shared
        self.op_keys = [shared.op_key(op, key_of(op)) for op in ops]
        self.last_reader = {n: i for i, op in enumerate(ops) for n in numbers(op.inputs)}
        self.last_reader.update(dict.fromkeys(numbers(outputs), len(ops)))

    def smallest(self) -> list[ProgramPart]:
        """Returns parts that end before products, where scopes change, and around what is alone."""
        counts = collections.Counter(self.op_keys)
        are_alone = [key is None or counts[key] == 1 for key in self.op_keys]
        starts = [
            place
            for place, op in enumerate(self.ops)
            if place == 0
            or op.name in CONTRACTIONS
            or op.size > 1
            or op.stack != self.ops[place - 1].stack
            or op.equation.ctx != self.ops[place - 1].equation.ctx
            or any(are_alone[place - 1 : place + 1])
        ]
        return [self._part(*ends) for ends in itertools.pairwise([*starts, len(self.ops)])]

    def join(self, parts: Sequence[ProgramPart]) -> list[ProgramPart]:
        """Joins neighbours that are only found together, if what they make is equal too."""
        counts = collections.Counter(part.key for part in parts)
        starts = [0, *itertools.accumulate(len(part.ops) for part in parts)]
        places = collections.defaultdict(list)
        for place, (first, second) in enumerate(itertools.pairwise(parts)):
            if first.key != second.key and None not in (first.key, second.key):
                places[first.key, second.key].append(place)
        joined: dict[int, ProgramPart] = {}
        for keys, found in places.items():
            is_free = joined.keys().isdisjoint(x + i for x in found for i in (-1, 0, 1))
            # A call runs where its operations do: on the host, for example.
            contexts = {parts[found[0] + i].ops[0].equation.ctx for i in (0, 1)}
            is_only_together = len(found) == counts[keys[0]] == counts[keys[1]] > 1
            if is_only_together and is_free and len(contexts) == 1:
                pairs = [self._part(starts[place], starts[place + 2]) for place in found]
                if len({pair.key for pair in pairs}) == 1:
                    joined.update(zip(found, pairs, strict=True))
        return [
            joined.get(place, part) for place, part in enumerate(parts) if place - 1 not in joined
        ]

    def _part(self, start: int, stop: int) -> ProgramPart:
        ops, op_keys = self.ops[start:stop], self.op_keys[start:stop]
        depth = common_depth(ops)
        made = dict.fromkeys(number for op in ops for number in op.outputs)
        read = dict.fromkeys(number for op in ops for number in numbers(op.inputs))
        inputs = tuple(number for number in read if number not in made)
        outputs = tuple(number for number in made if self.last_reader.get(number, -1) >= stop)
        key = self.shared.ops_key(ops, op_keys, inputs, outputs, depth)
        return ProgramPart(ops, key, depth, inputs, outputs)


def common_depth(ops: Sequence[Op]) -> int:
    """Returns how many of their outer scopes all operations share."""
    common = ops[0].stack.stack
    while any(op.stack.stack[: len(common)] != common for op in ops):
        common = common[:-1]
    return len(common)


def views_of_arguments(program: Program) -> dict[int, None]:
    """Returns the places of operations that are views of arguments, or of such views, in order."""
    computed = {*program.inputs, *(number for number, _ in program.consts)}
    views: dict[int, None] = {}
    for place, op in enumerate(program.ops):
        if op.size == 1 and op.name in VIEWS and computed.issuperset(numbers(op.inputs)):
            computed.update(op.outputs)
            views[place] = None
    return views


def _literal(atom: Any) -> Hashable:
    if not isinstance(atom, core.Literal):
        return None
    return atom.aval, np.asarray(atom.val).tobytes()
