"""The most bytes that a program holds at one time on one device, found without compiling it.

A buffer lives from the operation that writes it to the last one that reads it. What an elementwise
operation or an update writes takes over the buffer of an operand that is read for the last time,
and a loop its carry's. A loop holds its operands, all that it stacks, and one turn. Results have
room all the time, unless they replace arguments.
"""

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxmp._jaxpr.compat import scan_counts
from jaxmp._jaxpr.op_classes import CLASSES, OpClass
from jaxmp._planning.buffers import Fusion, buffer_sizes
from jaxmp._planning.flat_program import FlatOp
from jaxmp._planning.schedule import Run, memory_order, waiting_order
from jaxmp._planning.value_sizes import SizedProgram, is_cheap, is_dear, is_view


class Live(NamedTuple):
    """What a program holds beside its arguments at the time when it holds most.

    Attributes:
      total: bytes.
      kinds: the same, by what it is: "results", "activations", "gradients", "accumulators" or
        "temporaries".
    """

    total: int
    kinds: Counter[str]


def most_live(sized: SizedProgram, fusion: Fusion, replacing: Iterable[int] = ()) -> Live:
    """Finds the time when a program holds the most bytes.

    Args:
      sized: the program, with the sizes of its values.
      fusion: how the compiler fuses.
      replacing: the places of results that take no room: they replace arguments, or are written to
        where there is room already.

    Returns:
      What it then holds, its results included and its arguments not.
    """
    sizes = buffer_sizes(sized, fusion)
    places = {i: sized.root(v) for i, v in enumerate(sized.program.outputs) if v is not None}
    sizes |= {places[i]: 0 for i in replacing if i in places}
    results = set(places.values()) & set(sizes)
    runs, kept = _runs(sized, sizes)
    order = runs
    if fusion.frees_early:
        order = memory_order(runs, sizes, kept)
    elif math.prod(sized.mesh.values()) > 1:
        order = waiting_order(runs, lambda number: is_dear(sized.program.ops[number]))
    unwritten, most, at_most, beside = set(results), 0, set[int](), Counter[str]()
    for run, live in _moments(sized, order, sizes, kept):
        unwritten -= run.writes
        room = sum(sizes[v] for v in unwritten)
        if room and fusion.shares_results:
            room -= _fitting((sizes[v] for v in unwritten), (sizes[v] for v in live - results))
        turn = _one_turn(sized, run.number, fusion)
        total = sum(sizes[v] for v in live) + room + turn.total
        if total > most:
            most, at_most, beside = total, set(live), turn.kinds + Counter(results=room)
    last = {v: run.number for run in runs for v in (*run.writes, *run.reads)}
    last |= dict.fromkeys(kept, len(sized.program.ops))
    return Live(most, beside + _kinds_of(sized, {v: sizes[v] for v in at_most}, last))


def _moments(
    sized: SizedProgram, order: Sequence[Run], sizes: Mapping[int, int], kept: set[int]
) -> Iterator[tuple[Run, set[int]]]:
    """Runs the operations in this order: yields each with the buffers that are there meanwhile."""
    end = {v: at for at, run in enumerate(order) for v in (*run.writes, *run.reads)}
    end |= dict.fromkeys(kept & set(end), len(order))
    stops = defaultdict(set)
    for v, at in end.items():
        stops[at].add(v)
    live = set[int]()
    for at, run in enumerate(order):
        op = sized.program.ops[run.number]
        for v in run.writes:
            ending = stops[at] & live - run.writes
            if _is_in_place(op, v):
                live -= set(itertools.islice((u for u in ending if sizes[u] == sizes[v]), 1))
            live.add(v)
        yield run, live
        live -= stops[at]


def _fitting(rooms: Iterable[int], sizes: Iterable[int]) -> int:
    """Returns the bytes of the arrays that lie in rooms: in each the largest that fits."""
    waiting, found = sorted(sizes), 0
    for room in sorted(rooms):
        fits = bisect.bisect_right(waiting, room)
        found += waiting.pop(fits - 1) if fits else 0
    return found


def _one_turn(sized: SizedProgram, number: int, fusion: Fusion) -> Live:
    """Returns what the programs inside of an operation hold: the largest of them."""
    none = Live(0, Counter())
    inner = sized.inner.get(number, ())
    # Their results are written to where the operation's own results are.
    found = [most_live(each, fusion, range(len(each.program.outputs))) for each in inner]
    return max(found, key=lambda live: live.total, default=none)


def _is_in_place(op: FlatOp, v: int) -> bool:
    """Whether a result may take over the buffer of an operand that is read for the last time."""
    if op.name == "scan":
        return op.outputs.index(v) < scan_counts(op.equation.params).carry
    return is_cheap(op) or CLASSES.get(op.name) is OpClass.UPDATE or op.name == "while"


def _runs(sized: SizedProgram, sizes: Mapping[int, int]) -> tuple[list[Run], set[int]]:
    """Returns the operations that run, as traced, and the buffers that are read after them."""
    runs: list[Run] = []
    # The buffers that are read for each value: of a value that is not written, several.
    behind: dict[int, frozenset[int]] = {}
    for number, op in enumerate(sized.program.ops):
        if not sized.starts_anew(op):
            continue
        read = frozenset[int]().union(*(behind.get(v, ()) for v in sized.operands(op)))
        written = frozenset(v for v in op.outputs if v in sizes)
        behind |= {v: frozenset({v}) if v in written else read for v in op.outputs}
        if written or not (is_cheap(op) or is_view(op)):
            runs.append(Run(number, read, written))
    results = [sized.root(v) for v in sized.program.outputs if v is not None]
    return runs, set[int]().union(*(behind.get(v, ()) for v in results))


def _kinds_of(sized: SizedProgram, sizes: dict[int, int], end: dict[int, int]) -> Counter[str]:
    """Says of buffers what they are, by the transformations that their operations were made by."""
    ops = sized.program.ops
    makers = {v: op for op in ops for v in op.outputs}
    results = {sized.root(v) for v in sized.program.outputs if v is not None}
    backward = [number for number, op in enumerate(ops) if "transpose(" in op.scope]
    passed = max(backward, default=0)
    kinds: Counter[str] = Counter()
    for v, size in sizes.items():
        op = makers[v]
        if v in results:
            kind = "results"
        elif "transpose(" in op.scope:
            kind = "gradients" if end[v] > passed else "temporaries"
        elif "jvp(" in op.scope:
            kind = "activations"
        else:
            kind = "accumulators" if op.name == "scan" else "temporaries"
        kinds[kind] += size
    return kinds
