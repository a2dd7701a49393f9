"""Times and peaks of steps that take turns: compiled first, in threads, as far as time allows."""

import concurrent.futures
import dataclasses
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree
from lab.timing import Contender, planned_memory
from tables import Row

from jaxmp._tools.planning.devices import find_device
from on_device.recorder import Recorder

_ROUNDS = 2
# Marks of kernels in the text of a compiled program.
_CALLS = {"float8": "$f8", "attention": "fmha", "Triton": "__triton"}
# Products by cuBLAS: XLA's own kernels may widen float8, and nothing would say so.
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
_COMPILING = 0.55  # of the time of a part; the rest is for running


@dataclasses.dataclass(frozen=True)
class Case:
    """A contender in its table.

    Attributes:
      contender: how it starts, and its step.
      batch: what the step takes beside the state.
      facts: entries of its row that are known before: `baseline`, for example.
      items: how many of `unit` a step takes.
      unit: tokens or images.
      flops: floating-point operations that the model needs in a step.
      queued: how many steps run for each time, where one is too short to be timed.
      gpu_options: of the compiler for GPUs.
    """

    contender: Contender
    batch: PyTree
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    items: int | None = None
    unit: str = "items"
    flops: float | None = None
    queued: int = 1
    gpu_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the contender."""
        return self.contender.name


@dataclasses.dataclass
class _Entry:
    """A case with its compiled step and what was measured of it."""

    case: Case
    start: Callable[[], Any]
    run: Callable[[Any, PyTree], tuple[Any, PyTree]]
    planned: int | None  # bytes of the compiled peak
    facts: Row
    rounds: list[list[float]] = dataclasses.field(default_factory=list)
    peak: int | None = None
    is_bound: bool = False  # whether the step may have taken less
    is_disturbed: bool = False  # whether something else was compiled meanwhile
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


def measure(recorder: Recorder, cases: Sequence[Case], *, steps: int = 10) -> None:
    """Records a row for each case, in the order of the cases as long as there is time.

    A case that raises has a row that says so. What does not fit into the time is skipped, the last
    cases first.

    Args:
      recorder: where to, and how long.
      cases: the contenders, the most worthwhile first.
      steps: timed steps of each turn.
    """
    recorder.record_machine()
    steps = 2 if recorder.small else steps
    cases = [
        dataclasses.replace(case, facts={"order": number, **case.facts})
        for number, case in enumerate(cases)
        if not recorder.has_measured(case.name)
    ]
    entries, running = _compiled(recorder, cases)
    # The high-water mark only rises, so the smallest comes first, and later the last.
    entries.sort(key=lambda entry: entry.planned or 0)
    for number in range(_ROUNDS):
        slowest = 0.0
        for entry in list(entries if number == 0 else reversed(entries)):
            if recorder.seconds_left() < 2 + 2 * slowest:
                if not entry.rounds:
                    recorder.record_late(entry.case.name, **entry.case.facts)
                continue
            began = time.perf_counter()
            entry.is_disturbed |= not all(future.done() for future in running)
            try:
                _take_turn(entry, steps)
            except Exception as error:
                traceback.print_exc()
                # With the times of the first round, if it was in the second.
                row = _row(entry) if entry.rounds else entry.case.facts
                recorder.record_failure(entry.case.name, error, **row)
                entries.remove(entry)
                continue
            recorder.record(**_row(entry))
            slowest = max(slowest, time.perf_counter() - began)


_Future = concurrent.futures.Future[_Entry]


def _compiled(recorder: Recorder, cases: Sequence[Case]) -> tuple[list[_Entry], list[_Future]]:
    """Lowers one after the other, and compiles several at a time: both in the order of worth.

    Returns:
      What is compiled, and the compilations that no more time was left for, which go on.
    """
    began = time.time()
    until = began + _COMPILING * recorder.seconds_left()
    futures: dict[_Future, Case] = {}
    pool = concurrent.futures.ThreadPoolExecutor(max(2, min(6, (os.cpu_count() or 1) // 2)))
    for case in cases:
        if futures and time.time() > until:
            recorder.record_late(case.name, **case.facts)
            continue
        # XLA tunes kernels while it compiles. The first program has that time for itself, if it
        # does not take too much of it, and what is found serves all others.
        first, alone_until = list(futures)[:1], began + (until - began) / 3
        try:
            futures[pool.submit(_compile, first, alone_until, *_lower(case))] = case
        except Exception as error:
            traceback.print_exc()
            recorder.record_failure(case.name, error, **case.facts)
    concurrent.futures.wait(futures, timeout=max(0.1, until - time.time()))
    pool.shutdown(wait=False, cancel_futures=True)
    # Compilations in progress would disturb the times of the others, though less than no time.
    started = [future for future in futures if not future.cancelled()]
    running = list(concurrent.futures.wait(started, timeout=recorder.seconds_left() / 4).not_done)
    entries = []
    for future, case in futures.items():
        if future.cancelled() or future in running:
            recorder.record_late(case.name, **case.facts)
        elif failure := future.exception():
            traceback.print_exception(failure)
            recorder.record_failure(case.name, failure, **case.facts)
        else:
            entries.append(future.result())
    return entries, running


def _lower(case: Case) -> tuple[Case, Any, Any, float]:
    began = time.perf_counter()
    # Jitted, or the state would be made array by array, with more memory than the step takes.
    start = jax.jit(case.contender.start)
    with jax.default_matmul_precision(case.contender.precision):
        step = jax.jit(case.contender.step, donate_argnums=0)
        lowered = step.lower(start.eval_shape(), case.batch)
    return case, start.lower(), lowered, time.perf_counter() - began


def _compile(
    first: Sequence[_Future],
    alone_until: float,
    case: Case,
    start: Any,
    step: Any,
    trace_seconds: float,
) -> _Entry:
    concurrent.futures.wait(first, timeout=max(0.0, alone_until - time.time()))
    began = time.perf_counter()
    on_gpu = jax.default_backend() == "gpu"
    compiled = step.compile(dict(case.gpu_options) if on_gpu else None)
    facts = {
        "state_bytes": nbytes(start.out_info),
        "trace_seconds": trace_seconds,
        "compile_seconds": time.perf_counter() - began,
    }
    text = compiled.as_text() or ""
    facts |= {f"{name} calls": text.count(mark) for name, mark in _CALLS.items()}
    planned = planned_memory(compiled)
    return _Entry(case, start.compile(), compiled, planned and planned.peak, facts)


def _take_turn(entry: _Entry, steps: int) -> None:
    # What others hold is no part of what this step takes: their batches, above all.
    others = _allocated("bytes_in_use") - nbytes(entry.case.batch)
    state = jax.block_until_ready(entry.start())
    mark = _allocated("peak_bytes_in_use")
    state, metrics = entry.run(state, entry.case.batch)
    jax.block_until_ready((state, metrics))
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        for _ in range(entry.case.queued):
            metrics = None  # or the last ones would be alive beside the next
            state, metrics = entry.run(state, entry.case.batch)
        jax.block_until_ready((state, metrics))
        seconds.append((time.perf_counter() - began) / entry.case.queued)
    entry.rounds.append(seconds)
    entry.metrics = {name: float(x) for name, x in metrics.items() if jax.numpy.ndim(x) == 0}
    after = _allocated("peak_bytes_in_use")
    if after and entry.peak is None:
        # A step that does not raise the mark takes no more than that.
        entry.peak, entry.is_bound = after - others, after == mark


def _allocated(what: str) -> int:
    """What the allocator says; 0 on CPUs, whose allocator says nothing."""
    return (jax.devices()[0].memory_stats() or {}).get(what, 0)


def nbytes(tree: PyTree) -> int:
    """Bytes of all arrays, which may be abstract."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _row(entry: _Entry) -> Row:
    case = entry.case
    seconds = [second for turn in entry.rounds for second in turn]
    row = {"contender": case.name, **case.facts} | times(seconds)
    row |= entry.facts | {
        "medians_of_rounds_ms": [1e3 * statistics.median(turn) for turn in entry.rounds],
        "planned_bytes": entry.planned,
        "peak_bytes": entry.peak,
        # What tunes kernels takes memory, too.
        "peak_is_bound": entry.is_bound or entry.is_disturbed,
        **entry.metrics,
    }
    if entry.is_disturbed:
        row["remark"] = "while another contender was compiled"
    median = statistics.median(seconds)
    if case.items:
        row[f"{case.unit}_per_second"] = case.items / median
    if case.flops:
        row |= rates(case.flops, median)
    return row


def times(seconds: Sequence[float]) -> Row:
    """Entries of a row for its times."""
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "min_ms": 1e3 * min(seconds),
        "max_ms": 1e3 * max(seconds),
        "seconds": list(seconds),
        "count": len(seconds),
    }


def rates(flops: float, seconds: float) -> Row:
    """Entries of a row for what it computes in a second; the share is of the peak in bfloat16."""
    row: Row = {"teraflops": flops / seconds / 1e12}
    peak = peak_of("bfloat16")
    return row | ({"share_of_peak": flops / seconds / peak} if peak else {})


def peak_of(dtype: str, precision: str | None = None) -> float | None:
    """What the data sheet of this device says, in FLOP/s; None for a device that has none."""
    try:
        return find_device(jax.devices()[0]).peaks.of(dtype, precision)
    except ValueError:
        return None
