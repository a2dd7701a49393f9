"""Runs a program again, with each piece in a checkpoint that keeps the planned values."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jaxmp._numerics.dtypes import is_half
from jaxmp._numerics.rounding import widen_rounded
from jaxmp._program import compat
from jaxmp._program.evaluate import Cells, Rules, evaluate
from jaxmp._program.op_classes import CHECKPOINTS, CONTRACTIONS, CONTROL_FLOW, JITS
from jaxmp._program.program import Memo, Op, Program, read, without_dead_code
from jaxmp._program.wiring import loop_of, wiring_of
from jaxmp._recompute.pieces import Piece, divide, key_of
from jaxmp._recompute.storage import names_of

# The name of values that are kept within a piece.
STORED = "jaxmp.stored"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a whole call.

    Attributes:
      barriers: whether the compiler may not merge values that are computed twice.
      only_loops: whether operations outside of scans stay as they are.
      dear: names of primitives and jitted functions that are never computed again.
      memo: the pieces and jaxprs made so far.
    """

    barriers: bool
    only_loops: bool
    dear: frozenset[str]
    memo: Memo = dataclasses.field(default_factory=Memo)


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class _PieceOp(Op):
    """A piece as one operation.

    Attributes:
      program: its operations, with their scopes inside of those that all of them share.
      statistics: the numbers of the statistics that it makes.
      recomputes: whether a derivative needs values that are made inside.
    """

    program: Program
    statistics: frozenset[int]
    recomputes: bool


def run_in_pieces(settings: Settings, closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """Runs a program, closed or open, in pieces, and returns its results."""
    if settings.only_loops:
        return evaluate(read(closed), arguments, _Operations(settings))
    program = without_dead_code(read(closed, lambda equation: _is_open(equation, settings.dear)))
    storage, pieces = divide(program, settings.dear, views=not settings.barriers)
    ops = tuple(_piece_op(piece, program, storage.statistics) for piece in pieces)
    return evaluate(program._replace(ops=ops), arguments, _Pieces(settings))


def _is_open(equation: core.JaxprEqn, dear: Collection[str]) -> bool:
    return names_of(equation).isdisjoint(dear)


def _piece_op(piece: Piece, program: Program, statistics: frozenset[int]) -> _PieceOp:
    ops = [program.ops[i] for i in piece.ops]
    # Equal layers differ in their outer scopes only: without these they share one trace. Reports
    # need the inner ones.
    levels = zip(*(op.stack.stack for op in ops), strict=False)
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    depth = len(list(shared)) if piece.recomputes else 0
    inside = tuple(dataclasses.replace(op, stack=op.stack[depth:]) for op in ops)
    first, inputs, outputs = ops[0], piece.inputs, piece.outputs
    outer = first.equation, first.number, inputs, outputs, first.stack[:depth], first.traceback
    return _PieceOp(
        *outer,
        program=Program(inside, program.avals, inputs, (), outputs),
        statistics=statistics.intersection(number for op in ops for number in op.outputs),
        recomputes=piece.recomputes,
    )


@dataclasses.dataclass(frozen=True)
class _Pieces(Rules[Any]):
    """Runs the pieces of a program."""

    settings: Settings

    def where(self, op: Any) -> contextlib.AbstractContextManager[None]:
        return super().where(op) if op.recomputes else contextlib.nullcontext()

    def operation(self, op: Any, operands: list[Any]) -> list[Any]:
        def piece_of(*arrays: Any) -> list[Any]:
            # In the forward pass XLA may hand a piece a product before it is rounded. The maximum
            # of such scores, and their sum of exponentials, do not fit the exponentials that the
            # backward pass makes of the stored scores: gradients of a softmax were off by a factor
            # of two (jax 0.10, CPU). So both passes read rounded values.
            rounds = op.recomputes and op.statistics
            pairs = zip(op.program.inputs, arrays, strict=True) if rounds else ()
            rounded = {i: widen_rounded(x).astype(x.dtype) for i, x in pairs if is_half(x)}
            saved = op.statistics.difference(op.outputs)
            return evaluate(op.program, arrays, _Operations(self.settings, saved, rounded))

        if not op.recomputes:
            return piece_of(*operands)
        barriers = self.settings.barriers
        # Operations with effects are pieces of their own, so that no reference or token is in here.
        policy = jax.checkpoint_policies.save_only_these_names(STORED)
        new = functools.partial(jax.checkpoint, piece_of, policy=policy, prevent_cse=barriers)
        # JAX traces a checkpoint once for each function object: pieces that are alike share one.
        key = barriers, *key_of(op.program, op.statistics)
        results: list[Any] = self.settings.memo.once(key, op, new)(*operands)
        return results


@dataclasses.dataclass(frozen=True)
class _Operations(Rules[Any]):
    """Runs the operations of a piece, and the programs inside of them in pieces.

    Attributes:
      settings: the settings of the whole call.
      saved: the numbers of the values that a checkpoint around the piece saves.
      rounded: what operations read in place of some values, unless they are products.
    """

    settings: Settings
    saved: Collection[int] = ()
    rounded: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    def operands(self, op: Op, cells: Cells[Any]) -> list[Any]:
        rounded = {} if op.name in CONTRACTIONS else self.rounded
        return [
            atom.val if isinstance(atom, core.Literal) else rounded.get(atom, cells[atom])
            for atom in op.inputs
        ]

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        is_entered = _is_entered(op.equation) and _is_open(op.equation, self.settings.dear)
        if is_entered and not (self.settings.only_loops and not _holds_scan(op.equation)):
            if op.name in JITS:
                # The pieces inside store arguments for the backward pass: none may be donated.
                params = op.params | {"donated_invars": (False,) * len(operands)}
                op = dataclasses.replace(op, equation=op.equation.replace(params=params))
            results = super().operation(op, operands)
        else:
            results = compat.bind(op.equation, operands)
        pairs = zip(op.outputs, results, strict=True)
        return [checkpoint_name(x, STORED) if n in self.saved else x for n, x in pairs]

    def traced(self, op: Op, body: Any, avals: list[Any]) -> core.ClosedJaxpr:
        """Returns the program in pieces; made once per program."""
        inside = self.settings
        if loop_of(op.equation) is not None:
            # The two passes of a loop are two programs, which a compiler cannot merge: no barriers.
            inside = dataclasses.replace(inside, barriers=False, only_loops=False)

        def run(*arrays: Any) -> list[Any]:
            return run_in_pieces(inside, body, arrays)

        key = id(body), inside.barriers, inside.only_loops
        program: core.ClosedJaxpr = inside.memo.once(key, body, lambda: compat.trace(run, avals))
        return program


def _is_entered(equation: core.JaxprEqn) -> bool:
    """Whether the programs of an operation run in pieces too.

    The user's own checkpoints stay as they are, and so do functions with their own derivative. A
    loop whose turns are not counted keeps nothing: it has no backward pass.
    """
    is_entered = equation.primitive.name in CONTROL_FLOW - CHECKPOINTS
    return is_entered and wiring_of(equation).turns is not None


def _holds_scan(equation: core.JaxprEqn) -> bool:
    return loop_of(equation) is not None or any(map(has_scan, compat.bodies_of(equation)))


def has_scan(jaxpr: Any) -> bool:
    """Whether a program has a scan that would run in pieces."""
    return any(_is_entered(x) and _holds_scan(x) for x in compat.open_jaxpr(jaxpr).eqns)
