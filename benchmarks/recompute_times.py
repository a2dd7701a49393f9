"""The time cost of `recompute` on this machine: while a step runs, and before.

A CPU has neither the memory nor the units of an accelerator, so the time of a step here only shows
whether work is done twice. Tracing time does not depend on the device.
"""

import argparse
import functools
import itertools
import statistics
from typing import Any

import jax
from bench_rules import _alternating as alternating, _timed as timed
from lab.timing import (
    CompiledStep,
    Contender,
    Measurement,
    compile_step,
    spread,
    time_in_turn,
)
from measurement import Column, Report, Row
from stacked_models import GPT, Sizes

import jaxmp
from jaxmp._recompute.api import Mode

_STEP = Sizes(4, 256, 4, 128, heads=4, classes=1024)
_TRACED = Sizes(24, 64, 2, 32, heads=4, classes=256)
_QUICK = Sizes(2, 16, 2, 8, heads=2, classes=32)
_WAYS: dict[str, Mode] = {
    **{"without": "never", "without, again": "never", "auto": "auto", "always": "always"}
}
_COLUMNS = (
    Column("case", "what"),
    Column("loop", "layers"),
    Column("contender", "recompute"),
    Column("median_ms", "ms", ".1f"),
    Column("ratio", "over without"),
    Column("temp", "temporary MB", ".1f"),
)


def report(args: argparse.Namespace, command: str) -> Report:
    """Of steps and of tracing, with the arguments of the benchmark."""
    rows = [row for loop in args.loops for row in _step_rows(loop, args)]
    rows += [row for loop in args.loops for row in _tracing_rows(loop, args)]
    return Report(
        name="recompute-times",
        title="Times of a GPT under recompute",
        command=command,
        columns=_COLUMNS,
        rows=rows,
        assumptions=[
            f"{args.repeats} rounds in which every way takes one turn. Times are medians; ratios "
            "are taken within rounds: median (least to greatest).",
            f"A step: loss, gradients and plain descent in float32, of {_STEP}; {args.steps} in "
            "each turn. A CPU is no accelerator: this shows work that is done twice.",
            f"Trace and lower: CPU time of jax.jit(value_and_grad(loss)).trace(...).lower() of "
            f"autocast of a new function, in a warm process, in alternating order; {_TRACED}.",
        ],
    )


def _step_rows(loop: str, args: argparse.Namespace) -> list[Row]:
    model = GPT(_QUICK if args.quick else _STEP, scan=loop == "scan")
    batch = model.batch()
    steps = [compile_step(_contender(model, name), batch) for name in _WAYS]
    found = time_in_turn(steps, batch, rounds=args.repeats, steps=args.steps)
    rows = [_row("a step", loop, name, found) for name in _WAYS]
    for row, step in zip(rows, steps, strict=True):
        row |= {"temp": step.memory.temp / 1e6, **_loss_of(step, found)}
    return rows


def _loss_of(step: CompiledStep, found: dict[str, Measurement]) -> Row:
    return {"loss": found[step.contender.name].metrics["loss"]}


def _contender(model: GPT, name: str) -> Contender:
    evaluate = jax.value_and_grad(jaxmp.recompute(model.loss, _WAYS[name]))

    def step(params: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        loss, grads = evaluate(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    return Contender(name, model.params, step)


def _tracing_rows(loop: str, args: argparse.Namespace) -> list[Row]:
    model = GPT(_QUICK if args.quick else _TRACED, scan=loop == "scan")
    found = {name: Measurement() for name in _WAYS}
    names = list(_WAYS)
    # The first round is not counted: it fills JAX's caches.
    for turn, i in itertools.chain.from_iterable(
        ((turn, i) for i in alternating(len(names), turn)) for turn in range(args.repeats + 1)
    ):
        seconds = timed(functools.partial(_lower, model, _WAYS[names[i]]))
        if turn:
            found[names[i]].seconds.append(seconds)
    return [_row("trace and lower", loop, name, found) for name in names]


def _lower(model: GPT, mode: Mode) -> None:
    """As nobody has before: all functions are new."""
    arguments = jax.eval_shape(model.params), jax.eval_shape(model.batch)
    loss = jaxmp.recompute(jaxmp.autocast(lambda *args: model.loss(*args), "mixed_bfloat16"), mode)
    jax.jit(jax.value_and_grad(loss)).trace(*arguments).lower()


def _row(case: str, loop: str, name: str, found: dict[str, Measurement]) -> Row:
    mine, base = found[name], found["without"]
    row = {"case": case, "loop": loop, "contender": name, "seconds": mine.seconds}
    ratio = None if mine is base else spread(mine.ratios(base))
    return {**row, "median_ms": statistics.median(mine.seconds) * 1e3, "ratio": ratio}
