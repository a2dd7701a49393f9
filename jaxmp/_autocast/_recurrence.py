"""Which carries of a loop are sums: they need float32, whatever they begin with."""

import enum

from jaxmp._autocast._program import Op, Program

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
        "copy",
        "convert_element_type",
        "neg",
        "pad",
        "concatenate",
        "dynamic_update_slice",
    ]
)


class _Part(enum.IntEnum):
    """What part a carry has in a value of the next turn; values without it are not in the map."""

    MOVED = 1
    SUMMED = 2
    MIXED = 3


def _part(op: Op, found: list[_Part | None]) -> _Part:
    """The part that a carry has in a result by this operation itself."""
    alone = sum(part is not None for part in found) == 1
    if op.name in ("add", "sub"):
        return _Part.SUMMED
    scales = op.name == "mul" and alone
    divides = op.name == "div" and found[1] is None
    chooses = op.name == "select_n" and found[0] is None
    return _Part.MOVED if op.name in _MOVES or scales or divides or chooses else _Part.MIXED


def adds_up(program: Program, index: int, result: int) -> bool:
    """Whether a carry only has terms added to it: `total + x`, `decay * state + x`.

    The terms may not depend on it, as those of a residual stream do: `x + layer(x)`.

    Args:
      program: the body of the loop.
      index: which of its arguments the carry is.
      result: which of its results becomes the next carry.

    Returns:
      Whether it does.
    """
    parts = {program.inputs[index]: _Part.MOVED}
    for op in program.ops:
        found = [parts.get(atom) if isinstance(atom, int) else None for atom in op.inputs]
        of_carry = [part for part in found if part is not None]
        if not of_carry:
            continue
        parts.update(dict.fromkeys(op.outputs, max(_part(op, found), *of_carry)))
    made = program.outputs[result]
    return isinstance(made, int) and parts.get(made) is _Part.SUMMED
