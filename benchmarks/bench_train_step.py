"""The train step of a GPT under each policy: time and memory.

Each policy runs through `jaxmp.make_train_step`, and is compared with a hand-written step: bare
optax for float32; params cast by a jmp policy inside the loss for mixed_bfloat16; the same with
`jmp.DynamicLossScale`, `jmp.all_finite` and `jmp.select_tree` for mixed_float16; float32 masters
without any check for bfloat16. All train the same model on the same batch with the same optimizer,
donate their state, and report loss and gradient norm. They take turns in one run.

    python benchmarks/bench_train_step.py    # minutes on two CPU cores; for a GPU: `make device`
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

import gpt
import handwritten
import jax
import jax.numpy as jnp
import optax
from lab.timing import (
    Contender,
    Measurement,
    PlannedMemory,
    compile_step,
    spread,
    time_in_turn,
)
from measurement import Column, Report, Row, add_repeats, parse

import jaxmp

_SIZES = {"layers": 4, "width": 256, "heads": 4, "vocab": 4096, "context": 128, "batch": 8}
_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")
_INITIAL_SCALE = 2.0**15

_COLUMNS = (
    Column("contender", "contender"),
    Column("median_ms", "median ms", ".1f"),
    Column("min_ms", "min", ".1f"),
    Column("max_ms", "max", ".1f"),
    Column("over_float32", "time over float32 by hand"),
    Column("over_by_hand", "time over by hand"),
    Column("planned_mib", "planned MiB", ",.0f"),
    Column("loss", "last loss", ".4f"),
    Column("loss_scale", "last scale", "g"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    args = _parse(argv)
    model = gpt.GPT(args.layers, args.width, args.heads, args.vocab, args.context)
    batch = jax.random.randint(jax.random.key(1), (args.batch, args.context + 1), 0, args.vocab)
    cases, init = _cases(args.policies), jax.jit(model.init)
    steps = [compile_step(_contender(case, model.loss, init), batch) for case in cases]
    times = time_in_turn(steps, batch, rounds=args.repeats, steps=args.steps)
    rows = [_row(case, times, step.memory) for case, step in zip(cases, steps, strict=True)]
    title, assumptions = "Train step of a GPT", _assumptions(model, args)
    return Report("bench_train_step", title, _COLUMNS, assumptions, rows).publish(args)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The train step of a GPT under each policy.")
    for name, size in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--policies", nargs="+", choices=_POLICIES, default=_POLICIES)
    add_repeats(parser, repeats=7, steps=2)
    return parse(parser, argv)


def _assumptions(model: gpt.GPT, args: argparse.Namespace) -> list[str]:
    parameters = gpt.count(jax.eval_shape(model.init))
    return [
        f"{model}: {parameters / 1e6:.3g} M parameters; batch of {args.batch} sequences of random "
        "tokens.",
        "Optimizer: clipping by global norm, then AdamW. Every contender donates its state and "
        "reports loss and gradient norm.",
        f"Times: {args.repeats} rounds in which each contender takes one turn of {args.steps} "
        "steps after one that is not timed; min and max are over rounds, ratios are taken within "
        "them: median (least to greatest). 'By hand' is the hand-written step of the same policy.",
        "Planned memory is argument + output + temp - alias of the compiled step.",
        f"A float16 scale below {_INITIAL_SCALE:g} at the end would tell of skipped steps.",
    ]


@dataclasses.dataclass(frozen=True)
class _Case:
    """Which of the contenders: by whom, under which policy."""

    author: Literal["by hand", "jaxmp"]
    policy: str

    @property
    def name(self) -> str:
        return f"{self.author}, {self.policy}"

    @property
    def by_hand(self) -> "_Case":
        return dataclasses.replace(self, author="by hand")


def _cases(policies: Sequence[str]) -> list[_Case]:
    cases = []
    # The first is what all others are compared with, so it is there for any policies.
    for policy in dict.fromkeys(("float32", *policies)):
        cases.append(_Case("by hand", policy))
        if policy in policies:
            cases.append(_Case("jaxmp", policy))
    return cases


def _contender(case: _Case, loss: handwritten.LossFn, init: handwritten.Init) -> Contender:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))
    start, step = (_jaxmp if case.author == "jaxmp" else _by_hand)(case.policy, loss, tx, init)
    return Contender(case.name, start, step)


def _by_hand(
    policy: str, loss: handwritten.LossFn, tx: optax.GradientTransformation, init: handwritten.Init
) -> handwritten.Steps:
    metrics = handwritten.loss_and_norm
    dtypes = "params=float32,compute={},output=float32"
    if policy == "mixed_bfloat16":
        jmp_policy = dtypes.format("bfloat16")
        return handwritten.with_jmp(loss, tx, init, policy=jmp_policy, metrics=metrics)
    if policy == "mixed_float16":
        return handwritten.with_jmp_loss_scale(
            loss,
            tx,
            init,
            policy=dtypes.format("float16"),
            initial_scale=_INITIAL_SCALE,
            metrics=metrics,
        )
    if policy == "bfloat16":
        return handwritten.with_masters(loss, tx, init, dtype=jnp.bfloat16, metrics=metrics)
    return handwritten.plain(loss, tx, init, metrics=metrics)


def _jaxmp(
    policy: str,
    loss: handwritten.LossFn,
    inner: optax.GradientTransformation,
    init: handwritten.Init,
) -> handwritten.Steps:
    dynamic = jaxmp.DynamicLossScale(init_scale=_INITIAL_SCALE)
    loss_scale = dynamic if policy == "mixed_float16" else jaxmp.NoLossScale()
    tx = jaxmp.mixed_precision(inner, policy, loss_scale=loss_scale)
    # The benchmark jits and donates every contender's step itself.
    step = jaxmp.make_train_step(loss, policy, donate=False)
    return handwritten.Steps(lambda: jaxmp.TrainState.create(params=init(), tx=tx), step)


def _row(case: _Case, times: dict[str, Measurement], memory: PlannedMemory) -> Row:
    mine = times[case.name]
    median = statistics.median(mine.seconds)
    float32 = next(iter(times.values()))
    by_hand = times[case.by_hand.name]
    return {
        "contender": case.name,
        "median_ms": 1e3 * median,
        "min_ms": 1e3 * min(mine.seconds),
        "max_ms": 1e3 * max(mine.seconds),
        "over_float32": spread(mine.ratios(float32)),
        "over_by_hand": spread(mine.ratios(by_hand)) if case.author == "jaxmp" else None,
        "planned_mib": memory.peak / 2**20,
        **{f"{part}_bytes": size for part, size in memory._asdict().items()},
        "seconds": mine.seconds,
        **mine.metrics,
    }


if __name__ == "__main__":
    main()
