"""Times the train step of a model under several policies, on the device at hand."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from jaxmp._planning.benchmark_report import BenchmarkReport, PolicyTiming
from jaxmp._planning.timing import (
    CompiledStep,
    Contender,
    Measurement,
    compile_step,
    describe_hardware,
    time_in_turn,
)
from jaxmp._policies.policy import get_policy
from jaxmp._training.optimizer import mixed_precision
from jaxmp._training.train_state import TrainState
from jaxmp._training.train_step import make_train_step

POLICIES = ("float32", "mixed_bfloat16")


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

    Whether a precision pays depends on the model, the batch and the device, and is soon measured.
    Each step is compiled once, with its state donated. Then the policies take turns: in every round
    each takes one step that is not timed and `steps` that are, so that what disturbs the machine
    hits all of them. They are compared within the rounds.

    Args:
      loss_fn: the loss, as `jaxmp.make_train_step` takes it. If `params` is None, a function of a
        policy that returns `(start, step)`: `start()` makes a fresh state, and
        `step(state, batch) -> (state, metrics)`.
      params: float32 params; a copy is trained under each policy.
      batch: one batch, for all steps.
      policies: names of policies, or policies; ratios are of the first.
      optimizer: what the optimizer is made of; AdamW by default.
      rounds: how often each policy takes its turn, 2 or more.
      steps: how many steps of a turn are timed.
      **step_options: options of `jaxmp.make_train_step`, such as `has_aux` and `microbatches`.

    Returns:
      The report. It prints as a table; `report.plot(path)` draws it.

    Raises:
      TypeError: if params or batch are abstract, since steps run.
      ValueError: if no policy is given, or one twice, a number is too small, or `params` is None
        and there are options for a step that is made elsewhere.

    >>> params, x = {"w": jax.numpy.ones((8, 8))}, jax.numpy.ones((4, 8))
    >>> loss = lambda params, x: ((x @ params["w"]) ** 2).mean()
    >>> report = benchmark(loss, params, x, optimizer=optax.sgd(0.1), rounds=2, steps=1)
    >>> [row.policy for row in report.rows], report.rows[0].ratio
    (['float32', 'mixed_bfloat16'], 1.0)
    """
    options = {**step_options, **({"optimizer": optimizer} if optimizer is not None else {})}
    _check_benchmark(params, batch, policies, rounds, steps, options)
    names = [_policy_name(policy) for policy in policies]
    if len(set(names)) < len(names):
        raise ValueError(f"every policy is timed once, got {', '.join(names)}")
    compiled = [
        _compiled_step(name, policy, loss_fn, params, batch, optimizer, step_options)
        for name, policy in zip(names, policies, strict=True)
    ]
    times = time_in_turn(compiled, batch, rounds=rounds, steps=steps)
    first = times[names[0]]
    return BenchmarkReport(
        rows=tuple(_timing_row(each, times[each.contender.name], first) for each in compiled),
        hardware=describe_hardware(),
        platform=jax.devices()[0].platform,
        rounds=rounds,
        steps=steps,
    )


def _check_benchmark(
    params: Any, batch: Any, policies: Sequence[Any], rounds: int, steps: int, options: Any
) -> None:
    if isinstance(policies, str) or not policies:
        raise ValueError(f"give policies as a sequence of one or more, got {policies!r}")
    if rounds < 2 or steps < 1:
        raise ValueError(
            f"the spread shows in 2 rounds or more of 1 step or more, got {rounds=} and {steps=}"
        )
    for name, tree in (("params", params), ("batch", batch)):
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
            raise TypeError(
                f"{name} must be arrays, since steps run; jaxmp.diagnostics.estimate "
                "takes abstract ones"
            )
    if "donate" in options:
        raise ValueError("donate is not an option here: every step donates its state")
    if params is None and options:
        raise ValueError(
            f"without params, the function of a policy makes the step: {', '.join(options)} would "
            "change nothing. Give what they say to the step that it returns"
        )


def _policy_name(policy: Any) -> str:
    return policy if isinstance(policy, str) else str(get_policy(policy))


def _compiled_step(
    name: str,
    policy: Any,
    loss_fn: Callable[..., Any],
    params: PyTree | None,
    batch: PyTree,
    optimizer: optax.GradientTransformation | None,
    options: dict[str, Any],
) -> CompiledStep:
    try:
        if params is None:
            start, step = loss_fn(policy)
        else:
            tx = mixed_precision(optimizer or optax.adamw(1e-3), policy)
            # The step is jitted and donated as a whole, with its own state.
            step = make_train_step(loss_fn, policy, **{**options, "donate": False})
            start = lambda: TrainState.create(params=params, tx=tx)  # noqa: E731
        return compile_step(Contender(name, start, step), batch)
    except Exception as error:
        error.add_note(f"under the policy {name!r}")
        raise


def _timing_row(compiled: CompiledStep, mine: Measurement, first: Measurement) -> PolicyTiming:
    return PolicyTiming(
        policy=compiled.contender.name,
        seconds=tuple(mine.seconds),
        ratios=tuple(mine.ratios(first)),
        trace_seconds=compiled.trace_seconds,
        compile_seconds=compiled.compile_seconds,
        peak_bytes=compiled.memory.peak,
        state_bytes=compiled.memory.alias,
        temporary_bytes=compiled.memory.temp,
        metrics=mine.metrics,
    )
