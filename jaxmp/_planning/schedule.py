"""The orders in which compilers run operations: a program is traced in one of many.

`memory_order` holds little. What frees at least as much as it writes can only lower what is held if
it runs earlier, so that it is moved to where its operands are there: a gradient is added to its sum
before the next one is made. What writes more than it frees stays where it was.

`waiting_order` leaves work to do while devices send each other arrays. The gradients of a chain of
layers wait for each other, and for collectives between; those of params wait for nothing, and come
after them. Their operands are held until then.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def waiting_order(runs: Sequence[Run], can_wait: Callable[[int], bool]) -> list[Run]:
    """Returns the operations in the order in which they run, if expensive ones wait.

    An expensive operation runs when no more operations are left than those that follow from it, one
    after another: the longest chain is never kept waiting. Others run where they were traced among
    these, or after what they read.

    Args:
      runs: the operations as they were traced.
      can_wait: whether the operation of this number is an expensive one.
    """
    # When an operation runs at the latest: minus the length of the longest chain from it on.
    readers, latest = dict[int, int](), list[int]()
    for run in reversed(runs):
        latest.append(min((readers.get(v, 0) for v in run.writes), default=0) - 1)
        readers |= {v: min(readers.get(v, 0), latest[-1]) for v in run.reads}
    traced = list(itertools.accumulate(latest, min))
    made, times = dict[int, int](), list[int]()
    for run, last, at in zip(runs, reversed(latest), reversed(traced), strict=True):
        times.append(
            last if can_wait(run.number) else max([at, *(made[v] for v in run.reads & made.keys())])
        )
        made |= dict.fromkeys(run.writes, times[-1])
    return [runs[i] for i in sorted(range(len(runs)), key=times.__getitem__)]
