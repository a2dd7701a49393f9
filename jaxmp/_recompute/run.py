"""Runs a program again, with each piece in a checkpoint that keeps the planned values.

With `codes=`, the derivative of a piece reads the codes of some values, in place of the values.
"""

import dataclasses
import functools
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jaxmp._numerics.dtypes import is_half, is_inexact, nbytes_of
from jaxmp._numerics.rounding import widen_rounded
from jaxmp._program import compat
from jaxmp._program.evaluate import Cells, Interpreter, evaluate
from jaxmp._program.facts import ForwardAnalysis, propagate, shared_programs
from jaxmp._program.op_classes import (
    CHECKPOINTS,
    CONTRACTIONS,
    CONTROL_FLOW,
    CUSTOM_DERIVATIVES,
    JITS,
    Cost,
)
from jaxmp._program.parts import PartCache, common_depth
from jaxmp._program.program import Op, Program, numbers, plain_call, read, without_dead_code
from jaxmp._program.wiring import loop_of, wiring_of
from jaxmp._recompute.codes import (
    RowCodes,
    RowFormat,
    encode_rows,
    has_codes,
    with_coded_derivative,
)
from jaxmp._recompute.invariants import with_invariants_inside
from jaxmp._recompute.lookups import Lookup, look_up, lookups_in, reads_numbers
from jaxmp._recompute.pieces import Piece, divide
from jaxmp._recompute.storage import Price, Storage, names_of, price_of

# The name of values that are kept within a piece.
STORED = "jaxmp.stored"
# The policies of `jax.checkpoint` that keep the operands, and no value inside.
_KEEP_OPERANDS = (None, jax.checkpoint_policies.nothing_saveable)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a whole call.

    Attributes:
      barriers: whether the compiler may not merge values that are computed twice.
      only_loops: whether operations outside of scans stay as they are.
      save: names of primitives and jitted functions that are never computed again.
      codes: the dtype of the codes that the backward pass reads in place of values; None for no
        codes.
      shared: what equal parts share: the pieces and jaxprs made so far.
      again: the highest price of a product that runs again; None for no product.
      types_in_codes: the types of the values in codes so far.
      bytes_again: for each piece so far, the bytes of the products that it runs again.
    """

    barriers: bool
    only_loops: bool
    save: frozenset[str]
    codes: RowFormat | None
    shared: PartCache = dataclasses.field(default_factory=PartCache)
    again: Price | None = None
    types_in_codes: list[Any] = dataclasses.field(default_factory=list)
    bytes_again: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class _PieceOp(Op):
    """A piece as one operation.

    Attributes:
      program: its operations, with their scopes inside of those that all of them share.
      statistics: the numbers of the statistics that it makes.
      recomputes: whether a derivative needs values that are made inside.
      keeps_operands: whether it is one operation whose own derivative decides what is kept.
      reads: whether its derivative is ours, and reads operands.
    """

    program: Program
    statistics: frozenset[int]
    recomputes: bool
    keeps_operands: bool
    reads: bool

    @property
    def size(self) -> int:
        return len(self.program.ops)


def run_in_pieces(
    settings: Settings, closed: Any, arguments: Sequence[Any], carry: range = range(0)
) -> list[Any]:
    """Runs a program, closed or open, in pieces, and returns its results.

    Args:
      settings: the settings of the whole call.
      closed: the program.
      arguments: its arguments.
      carry: which of them a loop carries from turn to turn.
    """
    if settings.only_loops:
        program = read(closed)
        return evaluate(program, arguments, _Operations(settings, lookups_in(program)))
    program = without_dead_code(
        read(closed, lambda x: plain_call(x) if _is_open(x, settings.save) else None)
    )
    views, in_codes = not settings.barriers, settings.codes is not None
    storage, pieces = divide(program, settings.save, settings.again, views=views, in_codes=in_codes)
    settings.bytes_again.extend(_bytes_again(piece, program, storage) for piece in pieces)
    ops = tuple(_piece_op(piece, program, storage) for piece in pieces)
    coded = _coded_values(program, storage, ops, carry) if in_codes else frozenset[int]()
    settings.types_in_codes.extend(program.avals[number] for number in coded)
    interpreter = _Pieces(settings, coded, lookups_in(program), settings.shared)
    readers = {number: op for op in reversed(ops) for number in op.inputs}
    cells = [
        interpreter.cell(number, x, readers.get(number))
        for number, x in zip(program.inputs, arguments, strict=True)
    ]
    return [cell.value for cell in evaluate(program._replace(ops=ops), cells, interpreter)]


def _coded_values(
    program: Program, storage: Storage, ops: Sequence[_PieceOp], carry: range
) -> frozenset[int]:
    """Returns the values that derivatives read as codes.

    Not the arguments of the function, which its caller holds anyway, except what a loop carries: of
    that it would keep a copy for each turn. Nor operands that a kernel or a loop keeps by itself,
    since both copies would be in memory then.
    """
    values = {*storage.stored, *(program.inputs[i] for i in carry)} - storage.statistics
    values &= {number for op in ops if op.reads for number in op.inputs}
    for op in ops:
        if op.keeps_operands:
            inner = op.program.ops[0]
            loop = loop_of(inner.equation)
            saved = (x for i, x in enumerate(inner.inputs) if loop is None or i not in loop.carry)
            values.difference_update(numbers(saved))
    return frozenset(number for number in values if has_codes(program.avals[number]))


def _bytes_again(piece: Piece, program: Program, storage: Storage) -> int:
    """Returns the size of the products in a piece that run again."""
    cheap = (program.ops[i] for i in piece.ops if storage.costs[i] is Cost.CHEAP)
    products = [op for op in cheap if price_of(op.equation)]
    return sum(nbytes_of(program.avals[number]) for op in products for number in op.outputs)


def _keeps_operands(piece: Piece, program: Program, storage: Storage) -> bool:
    """Whether a piece is one operation whose own derivative decides what is kept for it."""
    i = piece.ops[0]
    if len(piece.ops) > 1 or storage.costs[i] is not Cost.SEPARATE or storage.linear[i]:
        return False
    # The user's checkpoint of a whole block keeps its operands alone: these may be codes. But a
    # callback in it would run once more than without codes.
    op = program.ops[i]
    is_whole = op.name in CHECKPOINTS and op.params["policy"] in _KEEP_OPERANDS
    return not is_whole or bool(op.equation.effects)


def _is_open(equation: core.JaxprEqn, dear: Collection[str]) -> bool:
    return names_of(equation).isdisjoint(dear)


def _piece_op(piece: Piece, program: Program, storage: Storage) -> _PieceOp:
    ops = [program.ops[i] for i in piece.ops]
    # Equal layers differ in their outer scopes only: without these they share one trace. Reports
    # need the inner ones.
    depth = common_depth(ops)
    inside = tuple(dataclasses.replace(op, stack=op.stack[depth:]) for op in ops)
    first, inputs, outputs = ops[0], piece.inputs, piece.outputs
    # The derivative of linear operations reads nothing.
    is_linear = all(storage.linear[i] for i in piece.ops)
    keeps_operands = _keeps_operands(piece, program, storage)
    outer = first.equation, first.number, inputs, outputs, first.stack[:depth], first.traceback
    return _PieceOp(
        *outer,
        program=Program(inside, program.avals, inputs, (), outputs),
        statistics=storage.statistics.intersection(n for op in ops for n in op.outputs),
        recomputes=piece.recomputes,
        keeps_operands=keeps_operands,
        reads=not keeps_operands and (piece.recomputes or not is_linear),
    )


class _Cell(NamedTuple):
    """A value, and the codes that derivatives read in its place."""

    value: Any
    codes: RowCodes | None = None


@dataclasses.dataclass(frozen=True)
class _Pieces(Interpreter[_Cell]):
    """Runs the pieces of a program; `coded` are the values that derivatives read as codes."""

    settings: Settings
    coded: frozenset[int]
    lookups: Mapping[int, Lookup]
    shared: PartCache

    def constant(self, value: Any) -> _Cell:
        return _Cell(value)

    def cell(self, number: int, value: Any, op: Op | None) -> _Cell:
        """Returns the cell of a new value; `op` makes it, or is the first that reads it."""
        if op is None or self.settings.codes is None or number not in self.coded:
            return _Cell(value)
        with super().where(op):
            return _Cell(value, encode_rows(value, self.settings.codes))

    def variant(self, op: Any) -> Hashable:
        ops, inputs, outputs = op.program.ops, op.program.inputs, op.program.outputs
        # Equal pieces are so in what is kept of them, too, and in what is known of their indices.
        kept = [tuple(n in op.statistics for n in inner.outputs) for inner in ops]
        known = [
            (each, self.lookups.get(inner.number)) for each, inner in zip(kept, ops, strict=True)
        ]
        op_keys = list(map(self.shared.op_key, ops, known))
        key = self.shared.ops_key(ops, op_keys, inputs, outputs)
        coded = tuple(number in self.coded for number in outputs)
        derivative = op.recomputes, op.reads, op.keeps_operands, self.settings.barriers
        return op if key is None else (key, coded, *derivative)

    def operation(self, op: Any, operands: list[_Cell]) -> list[_Cell]:
        def piece_of(*arrays: Any) -> list[Any]:
            # In the forward pass XLA may hand a piece a product before it is rounded. The maximum
            # of such scores, and their sum of exponentials, do not fit the exponentials that the
            # backward pass makes of the stored scores: gradients of a softmax were off by a factor
            # of two (jax 0.10, CPU). So both passes read rounded values.
            leading = _read_by(op.program, op.statistics) if op.recomputes else ()
            pairs = zip(op.program.inputs, arrays, strict=True)
            rounded = {
                i: widen_rounded(x).astype(x.dtype) for i, x in pairs if i in leading and is_half(x)
            }
            saved = op.statistics.difference(op.outputs)
            inside = _Operations(self.settings, self.lookups, saved, rounded)
            return evaluate(op.program, arrays, inside)

        values = [cell.value for cell in operands]
        barriers, key = self.settings.barriers, self.variant(op)
        dtypes = tuple(x.value.dtype if op.reads and x.codes else None for x in operands)
        if any(dtypes):
            reached = functools.partial(_reached, op.program)
            new = functools.partial(with_coded_derivative, piece_of, dtypes, reached, barriers)
            codes = [x.codes for x, dtype in zip(operands, dtypes, strict=True) if dtype]
            results = self.shared.once((dtypes, key), op, new)(values, codes)
        elif op.recomputes:
            # Operations with effects are pieces of their own, so that no reference or token is in
            # here.
            policy = jax.checkpoint_policies.save_only_these_names(STORED)
            new = functools.partial(jax.checkpoint, piece_of, policy=policy, prevent_cse=barriers)
            # JAX traces a checkpoint once for each function object: equal pieces share one.
            results = self.shared.once(key, op, new)(*values)
        else:
            results = piece_of(*values)
        makers = {number: inner for inner in op.program.ops for number in inner.outputs}
        pairs = zip(op.outputs, results, strict=True)
        return [self.cell(number, x, makers[number]) for number, x in pairs]


def _read_by(program: Program, values: Collection[int]) -> set[int]:
    """Returns the values that lead to these without a product in between."""
    found = set(values)
    for op in reversed(program.ops):
        if op.name not in CONTRACTIONS and not found.isdisjoint(op.outputs):
            found.update(numbers(op.inputs))
    return found


def _reached(program: Program, moving: Sequence[bool]) -> list[bool]:
    """Returns which results a derivative by some of the arguments reaches."""

    def rule(op: Any, facts: Sequence[bool]) -> list[bool]:
        return [any(facts) and op.name != "stop_gradient"] * len(op.outputs)

    # The derivative of a function with a rule of its own is what its author says, which may be
    # straight through a rounding: its program says nothing of it.
    programs = shared_programs()

    def inside(op: Any) -> Sequence[Program]:
        return [] if op.name in CUSTOM_DERIVATIVES else programs(op)

    by_type = lambda aval, fact: fact and is_inexact(aval)  # noqa: E731
    return propagate(
        program, moving, ForwardAnalysis(False, operator.or_, rule, restrict=by_type), inside
    )


@dataclasses.dataclass(frozen=True)
class _Operations(Interpreter[Any]):
    """Runs the operations of a piece, and the programs inside of them in pieces.

    Attributes:
      settings: the settings of the whole call.
      lookups: the lookups of one number in each row, by the numbers of their operations.
      saved: the numbers of the values that a checkpoint around the piece saves.
      rounded: what operations read in place of some values, unless they are products.
    """

    settings: Settings
    lookups: Mapping[int, Lookup]
    saved: Collection[int] = ()
    rounded: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    def operands(self, op: Op, cells: Cells[Any]) -> list[Any]:
        rounded = {} if op.name in CONTRACTIONS else self.rounded
        return [
            atom.val if isinstance(atom, core.Literal) else rounded.get(atom, cells[atom])
            for atom in op.inputs
        ]

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        is_entered = _is_entered(op.equation) and _is_open(op.equation, self.settings.save)
        if is_entered and not (self.settings.only_loops and not _is_changed(op.equation)):
            if op.name in JITS:
                # The pieces inside store arguments for the backward pass: none may be donated.
                params = op.params | {"donated_invars": (False,) * len(operands)}
                op = dataclasses.replace(op, equation=op.equation.replace(params=params))
            results = super().operation(op, operands)
        elif op.number in self.lookups and "gather" not in self.settings.save:
            results = [look_up(op.equation, self.lookups[op.number], *operands)]
        else:
            results = compat.bind(op.equation, operands)
        pairs = zip(op.outputs, results, strict=True)
        return [checkpoint_name(x, STORED) if n in self.saved else x for n, x in pairs]

    def traced(self, op: Op, body: Any, avals: list[Any]) -> core.ClosedJaxpr:
        """Returns the program in pieces; made once per program."""
        inside, carry = self.settings, range(0)
        if (loop := loop_of(op.equation)) is not None:
            carry = loop.carry
            # The two passes of a loop are two programs, which a compiler cannot merge: no barriers.
            inside = dataclasses.replace(inside, barriers=False, only_loops=False)

        def run(*arrays: Any) -> list[Any]:
            program = body
            if loop is not None:
                program = with_invariants_inside(body, carry.start, list(map(jax.typeof, arrays)))
            return run_in_pieces(inside, program, arrays, carry)

        key = id(body), inside.barriers, inside.only_loops, carry
        program: core.ClosedJaxpr = inside.shared.once(key, body, lambda: compat.trace(run, avals))
        return program


def _is_entered(equation: core.JaxprEqn) -> bool:
    """Whether the programs of an operation run in pieces too.

    The user's own checkpoints stay as they are, and so do functions with their own derivative. A
    loop whose turns are not counted keeps nothing: it has no backward pass.
    """
    is_entered = equation.primitive.name in CONTROL_FLOW - CHECKPOINTS
    return is_entered and wiring_of(equation).turns is not None


def _is_changed(equation: core.JaxprEqn) -> bool:
    if not _is_entered(equation):
        return equation.primitive.name == "gather" and reads_numbers(equation)
    return loop_of(equation) is not None or any(map(is_changed, compat.bodies_of(equation)))


def is_changed(jaxpr: Any) -> bool:
    """Whether a program may have what the mode "loops" changes: scans, and lookups of labels."""
    return any(map(_is_changed, compat.open_jaxpr(jaxpr).eqns))
