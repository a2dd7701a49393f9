"""Times the train step of a model under several policies, on the device at hand."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from jaxmp._tools.inspect.table_report import TableReport
from jaxmp._training.optimizer import mixed_precision
from jaxmp._training.train_state import TrainState
from jaxmp._training.train_step import make_train_step

POLICIES = ("float32", "mixed_bfloat16")


@dataclasses.dataclass(frozen=True)
class PolicyTiming:
    """The times of one policy.

    Attributes:
      policy: its name.
      seconds: of one step, one number for each round.
      ratios: those over the first policy's, round by round.
      temporary_bytes: of arrays that live only within a step, as the compiler planned them.
      loss: of the last step.
    """

    policy: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    temporary_bytes: int
    loss: float

    @property
    def ratio(self) -> float:
        """The median of the ratios: below 1, the policy is faster than the first."""
        return statistics.median(self.ratios)


@dataclasses.dataclass(frozen=True)
class BenchmarkReport(TableReport):
    """Times of a train step under several policies. Prints as a table.

    Attributes:
      rows: the policies, in the order given; ratios are of the first.
      device: the device, as JAX calls it.
    """

    rows: tuple[PolicyTiming, ...]
    device: str

    def as_dict(self) -> dict[str, Any]:
        """The report as plain numbers, texts, lists and dictionaries, for JSON."""
        rows = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in self.rows]
        return {"device": self.device, "rows": rows}

    def __rich__(self) -> Any:
        from jaxmp._tools.inspect.tables import Section, bytes_text, drawn

        rows = [
            (
                row.policy,
                *(f"{1e3 * f(row.seconds):.3g}" for f in (statistics.median, min, max)),
                f"{row.ratio:.2f} ({min(row.ratios):.2f} to {max(row.ratios):.2f})",
                bytes_text(row.temporary_bytes),
                f"{row.loss:.5g}",
            )
            for row in self.rows
        ]
        columns = ["policy", ">median, ms", ">min", ">max", f"over {self.rows[0].policy}"]
        columns += [">temporaries", ">loss"]
        return drawn(Section(f"A train step on {self.device}", columns, rows, len(rows)))


def benchmark(
    loss_fn: Callable[..., Any],
    params: PyTree | None,
    batch: PyTree,
    *,
    policies: Sequence[Any] = POLICIES,
    optimizer: optax.GradientTransformation | None = None,
    rounds: int = 5,
    steps: int = 5,
    **step_options: Any,
) -> BenchmarkReport:
    """Times a train step under several policies, on the device at hand.

    The policies take turns: in every round each takes one step that is not timed and `steps` that
    are, so that a disturbance of the machine hits all of them. They are compared within the rounds.
    A CPU says nothing about an accelerator: it mostly computes 16 bits in float32, with casts.

    Args:
      loss_fn: the loss, as `jaxmp.make_train_step` takes it. For steps of your own, with `params`
        None: a function of a policy that returns `(start, step)`. `start()` makes a fresh state,
        and `step(state, batch) -> (state, metrics)` has a loss in its metrics.
      params: float32 params; a copy is trained under each policy.
      batch: one batch, for all steps.
      policies: names of policies, or policies; ratios are of the first.
      optimizer: the optax optimizer; AdamW by default.
      rounds: how often each policy takes its turn.
      steps: how many steps of a turn are timed.
      **step_options: options of `jaxmp.make_train_step`, such as `has_aux` and `microbatches`.

    Returns:
      The report, which prints as a table.

    Raises:
      TypeError: if params or batch are abstract, since steps run.
      ValueError: if there are no policies, or a number is not positive.

    >>> params, x = {"w": jax.numpy.ones((8, 8))}, jax.numpy.ones((4, 8))
    >>> loss = lambda params, x: ((x @ params["w"]) ** 2).mean()
    >>> report = benchmark(loss, params, x, optimizer=optax.sgd(0.1), rounds=2, steps=1)
    >>> [row.policy for row in report.rows], report.rows[0].ratio
    (['float32', 'mixed_bfloat16'], 1.0)
    """
    if isinstance(policies, str) or not policies:
        raise ValueError(f"give policies as a sequence of one or more, got {policies!r}")
    if rounds < 1 or steps < 1:
        raise ValueError(f"rounds and steps must be positive, got {rounds=} and {steps=}")
    for name, tree in (("params", params), ("batch", batch)):
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
            raise TypeError(f"{name} must be arrays, since steps run, and these are abstract")
    # All are compiled before the first round: a compiler would disturb it.
    starts, programs = [], []
    for policy in policies:
        if params is None:
            start, step = loss_fn(policy)
            step = jax.jit(step, donate_argnums=0)  # as make_train_step does
        else:
            tx = mixed_precision(optimizer or optax.adamw(1e-3), policy)
            start = functools.partial(TrainState.create, params=params, tx=tx)
            step = make_train_step(loss_fn, **step_options)
        starts.append(start)
        programs.append(step.lower(jax.eval_shape(start), batch).compile())
    times: list[list[float]] = [[] for _ in policies]
    losses = [0.0 for _ in policies]
    for _ in range(rounds):
        for i, (start, program) in enumerate(zip(starts, programs, strict=True)):
            # The first step touches memory that was never used.
            state, metrics = jax.block_until_ready(program(start(), batch))
            start_time = time.perf_counter()
            for _ in range(steps):
                state, metrics = program(state, batch)
            jax.block_until_ready((state, metrics))
            times[i].append((time.perf_counter() - start_time) / steps)
            # After the clock has stopped: it waits for the device.
            losses[i] = float(metrics["loss"])
    rows = [
        PolicyTiming(
            policy=str(policy),
            seconds=tuple(seconds),
            # Within a round: a machine that slows down slows both.
            ratios=tuple(a / b for a, b in zip(seconds, times[0], strict=True)),
            temporary_bytes=program.memory_analysis().temp_size_in_bytes,
            loss=loss,
        )
        for policy, seconds, program, loss in zip(policies, times, programs, losses, strict=True)
    ]
    return BenchmarkReport(tuple(rows), jax.devices()[0].device_kind)
