"""Runs a program again, with each piece in a checkpoint that keeps the planned values."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jaxmp._numerics.rounding import widen_rounded
from jaxmp._program import compat
from jaxmp._program.control_flow import rebind
from jaxmp._program.op_classes import CHECKPOINTS, CONTRACTIONS, CONTROL_FLOW, JITS
from jaxmp._program.program import Op, Program, read, without_dead_code
from jaxmp._recompute.pieces import Piece, divided, key_of, whole
from jaxmp._recompute.storage import NOTHING_STORED, Storage, names_of

# The name of values that are kept within a piece.
STORED = "jaxmp.stored"
# Operations whose programs run in pieces too. The user's own checkpoints stay as they are, and so
# do functions with their own derivative. A `while` keeps nothing: it has no backward pass.
_ENTERED = CONTROL_FLOW - CHECKPOINTS - {"while"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a whole call.

    Attributes:
      barriers: whether the compiler may not merge values that are computed twice.
      only_loops: whether what is outside of scans stays as it is.
      dear: names of primitives and jitted functions that are never computed again.
      memo: the plans and jaxprs made so far.
    """

    barriers: bool
    only_loops: bool
    dear: frozenset[str]
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Divided:
    program: Program
    storage: Storage
    pieces: list[Piece]


def run_in_pieces(context: Settings, closed: Any, arguments: Sequence[Any]) -> list[Any]:
    """Runs a program in pieces, and returns its results.

    Args:
      context: the settings of this call.
      closed: the program, closed or open.
      arguments: its arguments.
    """
    plan = _planned(context, closed)
    program = plan.program
    values: dict[int, Any] = dict(zip(program.inputs, arguments, strict=True))
    values.update(program.consts)
    for piece in plan.pieces:
        given = [values[number] for number in piece.inputs]
        made = _run_piece(context, plan, piece, given)
        values.update(zip(piece.outputs, made, strict=True))
    return [_value_of(values, atom) for atom in program.outputs]


def _planned(context: Settings, closed: Any) -> _Divided:
    key = ("plan", id(closed), context.barriers, context.only_loops)
    if key not in context.memo:
        # The jaxpr is kept alive, so that no other one gets its id.
        context.memo[key] = _divide(context, closed), closed
    return context.memo[key][0]


def _divide(context: Settings, closed: Any) -> _Divided:
    if context.only_loops:
        program = read(closed)
        return _Divided(program, NOTHING_STORED, [whole(program)])
    program = without_dead_code(read(closed, lambda each: _is_open(each, context.dear)))
    return _Divided(program, *divided(program, context.dear, views=not context.barriers))


def _is_open(equation: core.JaxprEqn, dear: Collection[str]) -> bool:
    return names_of(equation).isdisjoint(dear)


def _value_of(values: dict[int, Any], atom: Any) -> Any:
    return compat.number(atom) if isinstance(atom, core.Literal) else values[atom]


def _run_piece(context: Settings, plan: _Divided, piece: Piece, given: list[Any]) -> list[Any]:
    ops = [plan.program.ops[i] for i in piece.ops]
    if not piece.recomputes:
        return _run_divided(context, plan, piece, [op.stack for op in ops], given)
    # Equal layers differ in their outer scopes only. Reports need the inner ones.
    depth = _shared_depth([op.stack for op in ops])
    inner = [_without_outer(op.stack, depth) for op in ops]
    key = context.barriers, *key_of(piece, plan.program, plan.storage, inner)
    if key not in context.memo:
        context.memo[key] = _checkpointed(context, plan, piece, inner), plan
    outer = _outer(ops[0].stack, depth)
    with compat.where(ops[0].equation, outer, ops[0].traceback):
        return context.memo[key][0](*given)


def _checkpointed(
    context: Settings, plan: _Divided, piece: Piece, stacks: list[Any]
) -> Callable[..., list[Any]]:
    def piece_of(*given: Any) -> list[Any]:
        return _run_divided(context, plan, piece, stacks, given)

    # Operations with effects are pieces of their own, so that no reference or token is in here.
    policy = jax.checkpoint_policies.save_only_these_names(STORED)
    return jax.checkpoint(piece_of, policy=policy, prevent_cse=context.barriers)


def _run_divided(
    context: Settings, plan: _Divided, piece: Piece, stacks: Sequence[Any], given: Sequence[Any]
) -> list[Any]:
    values = dict(zip(piece.inputs, given, strict=True))
    rounded = values | _as_stored(plan, piece, values)
    for i, stack in zip(piece.ops, stacks, strict=True):
        op = plan.program.ops[i]
        with compat.where(op.equation, stack, op.traceback):
            read = values if op.name in CONTRACTIONS else rounded
            made = _run_op(context, op, [_operand(read, atom) for atom in op.inputs])
            for number, value in zip(op.outputs, made, strict=True):
                kept = number in plan.storage.statistics and number not in piece.outputs
                values[number] = checkpoint_name(value, STORED) if kept else value
                rounded[number] = values[number]
    return [values[number] for number in piece.outputs]


def _as_stored(plan: _Divided, piece: Piece, values: dict[int, Any]) -> dict[int, Any]:
    """Returns the 16-bit values that a piece with statistics reads, rounded in both passes.

    In the forward pass XLA may hand a piece a product before it is rounded. The maximum of such
    scores, and their sum of exponentials, do not fit the exponentials that the backward pass makes
    of the stored scores: gradients of a softmax were off by a factor of two (jax 0.10, CPU).
    """
    numbers = (number for i in piece.ops for number in plan.program.ops[i].outputs)
    if not piece.recomputes or plan.storage.statistics.isdisjoint(numbers):
        return {}
    halves = {number: x for number, x in values.items() if _is_half(x)}
    return {number: widen_rounded(x).astype(x.dtype) for number, x in halves.items()}


def _is_half(x: Any) -> bool:
    return jnp.result_type(x) in (jnp.bfloat16, jnp.float16)


def _operand(values: dict[int, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def _run_op(context: Settings, op: Op, inputs: list[Any]) -> list[Any]:
    is_entered = op.name in _ENTERED and _is_open(op.equation, context.dear)
    is_scan = op.name == "scan"
    if not is_entered or (context.only_loops and not (is_scan or _holds_scan(op.equation))):
        return compat.bind(op.equation, inputs)
    inside = context
    if is_scan:
        # The two passes of a loop are two programs, which a compiler cannot merge: no barriers.
        inside = dataclasses.replace(context, barriers=False, only_loops=False)
    programs = compat.bodies_of(op.equation)
    makers = [functools.partial(_traced_in_pieces, inside, program) for program in programs]
    # The pieces inside keep arguments for the backward pass, so that none may be donated.
    kept = {"donated_invars": (False,) * len(inputs)} if op.name in JITS else {}
    return rebind(op.equation, inputs, makers, **kept)


def has_scan(jaxpr: Any) -> bool:
    """Whether a program has a scan that would run in pieces."""
    entered = (x for x in compat.open_jaxpr(jaxpr).eqns if x.primitive.name in _ENTERED)
    return any(x.primitive.name == "scan" or _holds_scan(x) for x in entered)


def _holds_scan(equation: core.JaxprEqn) -> bool:
    return any(map(has_scan, compat.bodies_of(equation)))


def _traced_in_pieces(context: Settings, program: Any, avals: list[Any]) -> Any:
    """Returns the program in pieces, with the same arguments and results; made once per program."""
    key = ("traced", id(program), context.barriers, context.only_loops)
    if key not in context.memo:
        made = compat.trace(lambda *args: run_in_pieces(context, program, args), avals)
        context.memo[key] = made, program
    return context.memo[key][0]


def _shared_depth(stacks: Sequence[Any]) -> int:
    """Returns how many outer scopes all operations share."""
    elements = [stack.stack for stack in stacks]
    depth = min(map(len, elements))
    while depth and any(each[:depth] != elements[0][:depth] for each in elements):
        depth -= 1
    return depth


def _outer(stack: Any, depth: int) -> Any:
    return type(stack)(stack.stack[:depth])


def _without_outer(stack: Any, depth: int) -> Any:
    return type(stack)(stack.stack[depth:])
