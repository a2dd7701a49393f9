"""The cost of an optimizer step outside of `jit`, compared with plain optax.

Without `jit` each operation is dispatched separately. The time depends on the number of operations,
and on whether any is compiled anew. The arrays are small, so only dispatch is measured.

    python benchmarks/bench_eager.py
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from lab.timing import (
    CompiledStep,
    Contender,
    Metrics,
    PlannedMemory,
    spread,
    time_in_turn,
)
from measurement import Column, Report, Row, add_repeats, parse

import jaxmp

_BASELINE = "optax, float32"
_POLICIES = ("float32", "bfloat16", "float16")
_COLUMNS = (
    Column("layers", "layers", "d"),
    Column("contender", "contender"),
    Column("ratio", f"time over {_BASELINE}"),
    Column("median_ms", "median ms", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    parser = argparse.ArgumentParser(description="Time of an optimizer step outside of jit.")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--width", type=int, default=32, help="each layer is width x width")
    add_repeats(parser, repeats=9, steps=20)
    args = parse(parser, argv)
    rows = [row for layers in args.layers for row in _measure(layers, args)]
    assumptions = [
        f"AdamW, `tx.update` and `optax.apply_updates`; layers of {args.width} x {args.width} "
        "and a bias.",
        f"{args.repeats} rounds in which each contender takes one turn of {args.steps} steps "
        "after one that is not timed; ratios are taken within the rounds: median (least to "
        "greatest).",
    ]
    return Report(
        "bench_eager", "Time of an optimizer step outside of jit", _COLUMNS, assumptions, rows
    ).publish(args)


def _measure(layers: int, args: argparse.Namespace) -> list[Row]:
    params = [{"w": jnp.ones((args.width,) * 2), "b": jnp.ones(args.width)} for _ in range(layers)]
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)
    inner = optax.adamw(1e-3)
    contenders = [_contender(_BASELINE, inner, params)]
    for policy in _POLICIES:
        tx = jaxmp.mixed_precision(inner, policy)
        contenders.append(_contender(f"jaxmp {policy}", tx, tx.init_params(params)[0]))
    times = time_in_turn(contenders, grads, rounds=args.repeats, steps=args.steps)
    return [
        {
            "layers": layers,
            "contender": name,
            "ratio": spread(mine.ratios(times[_BASELINE])),
            "median_ms": 1e3 * statistics.median(mine.seconds),
            "seconds": mine.seconds,
        }
        for name, mine in times.items()
    ]


def _contender(name: str, tx: optax.GradientTransformation, params: PyTree) -> CompiledStep:
    def step(state: Any, grads: PyTree) -> tuple[Any, Metrics]:
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    contender = Contender(name, lambda: (params, tx.init(params)), step)
    # As it is: nothing is compiled.
    return CompiledStep(contender, step, PlannedMemory(0, 0, 0, 0))


if __name__ == "__main__":
    main()
