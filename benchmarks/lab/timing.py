"""Times steps honestly: compiled once, warm, in turn, and compared within each round.

A machine is never quiet. Contenders are therefore timed one after the other within each round, so
that a disturbance hits neighbours alike, and are compared by the ratios within the rounds.
"""

import dataclasses
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to write a train step.

    Attributes:
      name: what the table calls it.
      start: makes a fresh state.
      step: `step(state, batch) -> (state, metrics)`; it need not be jitted.
      precision: the `jax.default_matmul_precision` to compile with; None for the device's own.
    """

    name: str
    start: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, Metrics]]
    precision: str | None = None


class PlannedMemory(NamedTuple):
    """Bytes that a compiled step needs, as the compiler planned them."""

    argument: int
    output: int
    temp: int
    alias: int

    @property
    def peak(self) -> int:
        """What is allocated during the step: an aliased output lives in its argument."""
        return self.argument + self.output + self.temp - self.alias


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A contender with its compiled step, whose state is donated.

    Attributes:
      contender: the contender.
      run: the compiled step.
      memory: what it needs.
    """

    contender: Contender
    run: Callable[[Any, Any], tuple[Any, Metrics]]
    memory: PlannedMemory


@dataclasses.dataclass
class Measurement:
    """What timing found out about one contender.

    Attributes:
      seconds: per step, one number for each round.
      metrics: of the last step of the last round.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def ratios(self, baseline: "Measurement") -> list[float]:
        """Times the baseline's, round by round."""
        return [a / b for a, b in zip(self.seconds, baseline.seconds, strict=True)]


def compile_step(contender: Contender, batch: Any) -> CompiledStep:
    """Compiles a contender's step for its own state, without making the state."""
    state = jax.eval_shape(contender.start)
    with jax.default_matmul_precision(contender.precision):
        compiled = jax.jit(contender.step, donate_argnums=0).lower(state, batch).compile()
    memory = planned_memory(compiled)
    if memory is None:
        raise RuntimeError(f"{jax.default_backend()} does not tell what memory a program needs")
    return CompiledStep(contender, compiled, memory)


def planned_memory(compiled: Any) -> PlannedMemory | None:
    """What the compiler says of a program's memory; None if it does not tell."""
    stats = compiled.memory_analysis()
    return stats and PlannedMemory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
    )


def time_in_turn(
    contenders: Sequence[CompiledStep], batch: Any, *, rounds: int, steps: int
) -> dict[str, Measurement]:
    """Times every contender once in each round; only one state is in memory at a time."""
    found = {c.contender.name: Measurement() for c in contenders}
    for _ in range(rounds):
        for contender in contenders:
            _take_turn(contender, batch, steps, found[contender.contender.name])
    return found


def _take_turn(compiled: CompiledStep, batch: Any, steps: int, into: Measurement) -> None:
    # The first step touches memory that was never used, and is not timed.
    state, metrics = compiled.run(compiled.contender.start(), batch)
    jax.block_until_ready((state, metrics))
    begin = time.perf_counter()
    for _ in range(steps):
        state, metrics = compiled.run(state, batch)
    jax.block_until_ready((state, metrics))
    into.seconds.append((time.perf_counter() - begin) / steps)
    into.metrics = {
        name: float(x)
        for name, x in metrics.items()
        if hasattr(x, "dtype") and jnp.ndim(x) == 0 and not jnp.iscomplexobj(x)
    }


def spread(values: Sequence[float]) -> str:
    """`"1.02 (0.99 to 1.10)"`: median, least and greatest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def describe_hardware() -> str:
    """The device that computes, as its maker calls it."""
    device = jax.devices()[0]
    cpu = f"{_cpu_model()}, {_usable_cores()} cores"
    return cpu if device.platform == "cpu" else str(device.device_kind)


def _cpu_model() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _usable_cores() -> int:
    # Within a container there may be fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
