"""Which carries of a loop are sums: they need float32, whatever they begin with."""

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmp import _compat
from jaxmp._program import JITS, Op, Program, read

_MOVES = frozenset(
    [
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "rev",
        "slice",
        "dynamic_slice",
        "gather",
        "split",
        "stack",
        "unstack",
        "tile",
        "concatenate",
        "pad",
        "sort",
        "dynamic_update_slice",
        "scatter",
        "select_n",
        "copy",
        "name",
        "stop_gradient",
        "neg",
        "abs",
        "convert_element_type",
        "reduce_precision",
        "sharding_constraint",
        "layout_constraint",
        "reshard",
        "device_put",
        "pvary",
        "pcast",
    ]
)
_BOUNDS = frozenset({"max", "min", "clamp"})
# Operations that run a program on just what they are given.
_JAXPRS = frozenset({*JITS, "remat2", "checkpoint", "shard_map"})
_CALLS = frozenset({"closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})


class Part(enum.IntEnum):
    """What part a carry has in a value of the next turn."""

    NONE = 0
    MOVED = 1  # it is in there as it was, but for its place and a factor
    SUMMED = 2  # with terms added that do not depend on it
    MIXED = 3  # in any other way


def adds_up(program: Program, index: int, result: int) -> bool:
    """Whether a carry only has terms added to it: `total + x`, `decay * state + x`.

    The terms may not depend on it, as those of a residual stream do: `x + layer(x)`. It is all the
    same whether they are added in the body itself, or in a function, a checkpoint or a branch.

    Args:
      program: the body of the loop.
      index: which of its arguments the carry is.
      result: which of its results becomes the next carry.

    Returns:
      Whether it does.
    """
    given = [Part.MOVED if i == index else Part.NONE for i in range(len(program.inputs))]
    return _parts(program, given)[result] is Part.SUMMED


def _parts(program: Program, given: Sequence[Part]) -> list[Part]:
    """The part of a carry in the results of a program, of that in its arguments."""
    known = dict(zip(program.inputs, given, strict=True))

    def part(atom: Any) -> Part:
        return known.get(atom, Part.NONE) if isinstance(atom, int) else Part.NONE

    for op in program.ops:
        found = [part(atom) for atom in op.inputs]
        if any(found):
            known.update(zip(op.outputs, _of_operation(op, found), strict=True))
    return [part(atom) for atom in program.outputs]


def _of_operation(op: Op, found: list[Part]) -> list[Part]:
    """The part that a carry has in the results of an operation, of that in its operands."""
    if op.name in _JAXPRS:
        return _parts(read(op.params["jaxpr"]), found)
    if op.name in _CALLS:
        return _parts(read(op.params["call_jaxpr"]), found)
    if op.name == "optimization_barrier":
        return found
    if op.name == "cond":
        branches = [_parts(read(branch), found[1:]) for branch in op.params["branches"]]
        return [max(each) for each in zip(*branches, strict=True)]
    if op.name == "scan":
        consts, carries = _compat.scan_counts(op.params)
        return _of_loop(read(op.params["jaxpr"]), found, slice(consts, consts + carries))
    if op.name == "while":
        tested, of_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        return _of_loop(read(op.params["body_jaxpr"]), found[tested:], slice(of_body, None))
    part = max(_by_itself(op, found), *found)
    # What a carry decides, such as whether it is finite, is no part of it.
    return [
        Part.NONE if getattr(aval, "dtype", None) == np.bool_ else part for aval in op.out_avals
    ]


def _of_loop(body: Program, found: list[Part], carry: slice) -> list[Part]:
    """The part in what a loop returns: each turn of it can only add to the part in a carry."""
    found = list(found)
    while True:
        made = _parts(body, found)
        begun = found[carry]
        found[carry] = [max(pair) for pair in zip(begun, made, strict=False)]
        if found[carry] == begun:
            return [*begun, *made[len(begun) :]]


def _by_itself(op: Op, found: list[Part]) -> Part:
    """The part that an operation without programs gives to a carry."""
    alone = sum(map(bool, found)) == 1
    if op.name in ("add", "sub", "add_any"):
        return Part.SUMMED
    if op.name in ("scatter-add", "scatter-sub"):
        return Part.SUMMED if alone and found[0] else Part.MIXED
    scales = op.name == "mul" and alone
    divides = op.name == "div" and not found[1]
    bounds = op.name in _BOUNDS and alone
    moves = op.name in _MOVES or scales or divides or bounds
    return Part.MOVED if moves else Part.MIXED
