"""Times what Python does before a program runs: CPU time, without garbage, with room for frames."""

import cProfile
import functools
import gc
import time
from collections.abc import Callable
from typing import Any


def python_calls(fun: Callable[[], Any]) -> int:
    """How many Python functions are called: nearly the same on every run, where times are not."""
    profile = cProfile.Profile()
    profile.runcall(fun)
    return sum(entry.callcount for entry in profile.getstats())


def alternating(count: int, turn: int) -> list[int]:
    """The order of a round: every other one backwards, so that no place in it is better."""
    return list(range(count)) if turn % 2 else list(reversed(range(count)))


def timed(fun: Callable[[], Any]) -> float:
    """Seconds of CPU time, on a roomy stack."""
    roomy = make_room()
    gc.collect()
    gc.disable()  # or somebody pays for the garbage of all
    begin = time.process_time()
    roomy(fun)
    seconds = time.process_time() - begin
    gc.enable()
    return seconds


@functools.cache
def make_room() -> Callable[[Callable[[], Any]], None]:
    """Calls a function from a frame so large that CPython makes room for all frames in it at once.

    CPython's stack grows by 16 KiB, and asks the system for them anew each time that a call crosses
    the border: where a busy function happens to stand there, tracing takes up to twice as long, by
    hand and under rules, but not from the same callers.
    """
    names = " = ".join(f"x{i}" for i in range(66_000))  # over half a MiB, hence a whole one
    scope: dict[str, Any] = {}
    exec(f"def call(fun):\n    if fun is None:\n        {names} = 0\n    fun()", scope)
    return scope["call"]
