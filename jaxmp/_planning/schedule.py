"""The order in which operations run, where a compiler looks for one that holds little.

A program is traced in one order of many. What frees at least as much as it writes can only lower
what is held if it runs earlier, so that it is moved to where its operands are there: a gradient is
added to its sum before the next one is made. What writes more than it frees stays where it was.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """An operation that runs, while others are fused into those that read their results.

    Attributes:
      number: its number in the program.
      reads: the values that it reads from memory.
      writes: the values that it writes there.
    """

    number: int
    reads: frozenset[int]
    writes: frozenset[int]


def memory_order(runs: Sequence[Run], sizes: Mapping[int, int], kept: Iterable[int]) -> list[Run]:
    """Returns the operations in the order in which they run.

    Args:
      runs: the operations as they were traced.
      sizes: the bytes of each value that is written. Arguments are not among them.
      kept: values that are still needed after the program.
    """
    unread = Counter(v for run in runs for v in run.reads)
    unread.update(kept)
    readers: dict[int, list[int]] = defaultdict(list)
    made = {v for run in runs for v in run.writes}
    missing = [len(run.reads & made) for run in runs]
    for i, run in enumerate(runs):
        for v in run.reads:
            readers[v].append(i)
    ready, order = {i for i, count in enumerate(missing) if not count}, list[Run]()

    def frees_memory(i: int) -> bool:
        freed = sum(sizes.get(v, 0) for v in runs[i].reads if unread[v] == 1)
        return freed >= sum(sizes[v] for v in runs[i].writes)

    while ready:
        chosen = next(filter(frees_memory, sorted(ready)), min(ready))
        ready.remove(chosen)
        order.append(runs[chosen])
        unread.subtract(runs[chosen].reads)
        for v in runs[chosen].writes:
            for i in readers[v]:
                missing[i] -= 1
                if not missing[i]:
                    ready.add(i)
    return order
