"""The most bytes that a program holds at one time on one device, found without compiling it.

A buffer lives from the operation that writes it to the last one that reads it, in the order of the
program. What an elementwise operation or an update writes takes over the buffer of an operand that
is read for the last time. A loop holds its operands, all that it stacks, and one turn.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from jaxmp._jaxpr.op_classes import CLASSES, OpClass
from jaxmp._planning.buffers import Fusion, buffer_sizes
from jaxmp._planning.flat_program import FlatOp
from jaxmp._planning.value_sizes import SizedProgram, is_cheap, is_view


class Live(NamedTuple):
    """What a program holds beside its arguments at the time when it holds most.

    Attributes:
      total: bytes.
      kinds: the same, by what it is: "activations", "gradients", "accumulators", "temporaries".
    """

    total: int
    kinds: collections.Counter[str]


def most_live(sized: SizedProgram, fusion: Fusion, free: Sequence[bool] = ()) -> Live:
    """Finds the time when a program holds the most bytes.

    Args:
      sized: the program, with the sizes of its values.
      fusion: how the compiler fuses.
      free: for each result, whether it takes no room: it replaces an argument, or its room is
        counted elsewhere.

    Returns:
      What it then holds, its results included and its arguments not.
    """
    sizes = buffer_sizes(sized, fusion)
    for v, is_free in zip(sized.program.outputs, free, strict=False):
        if v is not None and is_free:
            sizes[sized.root(v)] = 0
    begin, end = _lives(sized, sizes)
    starts, stops = collections.defaultdict(list), collections.defaultdict(list)
    for v in sizes:
        if v in begin:
            starts[begin[v]].append(v)
            stops[end[v]].append(v)
    ops, live, now = sized.program.ops, set[int](), 0
    most, at_most, inside = 0, set[int](), Live(0, collections.Counter())
    for number, op in enumerate(ops):
        for v in starts[number]:
            reused = _reused(op, v, sizes, stops[number], live)
            if reused is not None:
                live.remove(reused)
                now -= sizes[reused]
            live.add(v)
            now += sizes[v]
        turn = _one_turn(sized, number, fusion)
        if now + turn.total > most:
            most, at_most, inside = now + turn.total, set(live), turn
        for v in stops[number]:
            if v in live:
                live.remove(v)
                now -= sizes[v]
    kinds = _kinds_of(sized, {v: sizes[v] for v in at_most}, end)
    return Live(most, kinds + inside.kinds)


def _one_turn(sized: SizedProgram, number: int, fusion: Fusion) -> Live:
    """Returns what the programs inside of an operation hold: the largest of them."""
    none = Live(0, collections.Counter())
    inner = sized.inner.get(number, ())
    # Their results are written to where the operation's own results are.
    found = [most_live(each, fusion, [True] * len(each.program.outputs)) for each in inner]
    return max(found, key=lambda live: live.total, default=none)


def _reused(
    op: FlatOp, v: int, sizes: dict[int, int], ending: list[int], live: set[int]
) -> int | None:
    """Returns the buffer that the result of an operation takes over, if there is one."""
    if not is_cheap(op) and CLASSES.get(op.name) is not OpClass.UPDATE:
        return None
    fits = (u for u in ending if u in live and u != v and sizes[u] == sizes[v])
    return next(fits, None)


def _lives(sized: SizedProgram, sizes: dict[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Returns the numbers of the operations that write each buffer first and read it last."""
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    # The buffers that are read for each value: of a value that is not written, several.
    behind: dict[int, set[int]] = {}
    for number, op in enumerate(sized.program.ops):
        if not sized.starts_anew(op):
            continue
        read = set[int]().union(*(behind.get(v, set()) for v in sized.operands(op)))
        runs = not (is_cheap(op) or is_view(op))
        for v in op.outputs:
            behind[v] = {v} if v in sizes else read
            if v in sizes:
                begin[v] = end[v] = number
                runs = True
        if runs:
            end.update(dict.fromkeys(read, number))
    for out in sized.program.outputs:
        if out is not None:
            end.update(dict.fromkeys(behind.get(sized.root(out), set()), len(sized.program.ops)))
    return begin, end


def _kinds_of(
    sized: SizedProgram, sizes: dict[int, int], end: dict[int, int]
) -> collections.Counter[str]:
    """Says of buffers what they are, by the transformations that their operations were made by."""
    ops = sized.program.ops
    makers = {v: op for op in ops for v in op.outputs}
    backward = [number for number, op in enumerate(ops) if "transpose(" in op.scope]
    passed = max(backward, default=0)
    kinds: collections.Counter[str] = collections.Counter()
    for v, size in sizes.items():
        op = makers[v]
        if "transpose(" in op.scope:
            kind = "gradients" if end[v] > passed else "temporaries"
        elif "jvp(" in op.scope:
            kind = "activations"
        else:
            kind = "accumulators" if op.name == "scan" else "temporaries"
        kinds[kind] += size
    return kinds
