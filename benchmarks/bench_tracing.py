"""How long a program takes to trace and lower, over the same one with casts by hand.

Layers run one by one, where tracing costs most, or in a scan. Each measurement starts with empty
caches, as in a new process; contenders take turns.

    python benchmarks/bench_tracing.py    # ten minutes on two CPU cores
"""

import argparse
import functools
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax_gpt
import jax
import jax.numpy as jnp
import optax
from measurement import Column, Report, Row, add_repeats, parse
from stacked_models import MODELS, Sizes

import jaxmp

_COLUMNS = (
    Column("case", "case"),
    Column("program", "program"),
    Column("by_hand_s", "by hand, s", ".2f"),
    Column("jaxmp_s", "jaxmp, s", ".2f"),
    Column("ratio", "ratio", ".2f"),
    Column("lines", "lines of StableHLO", ",.0f"),
    Column("lines_ratio", "over by hand", ".2f"),
)
_POLICY = "mixed_bfloat16"


class _Case(NamedTuple):
    """A loss with casts by hand, the loss as it was written, and its arguments, as types."""

    by_hand: Callable[..., Any]
    loss: Callable[..., Any]
    params: Any
    batch: Any


def _stacked(name: str, layers: int, scan: bool) -> _Case:
    sizes = Sizes(layers, 64, 4, 64, heads=4, classes=256)
    by_hand, model = (MODELS[name](sizes, scan, casts, None) for casts in (True, False))
    return _Case(by_hand.loss, model.loss, *map(jax.eval_shape, (model.params, model.batch)))


def _linen_gpt() -> _Case:
    sizes = Sizes(24, 64, 4, 64, heads=4, classes=256)
    by_hand, _ = flax_gpt.linen_program(sizes, scan=False)
    loss, params = flax_gpt.linen_program(sizes, scan=False, policy=None)
    return _Case(by_hand, loss, params, jax.ShapeDtypeStruct((4, 65), jnp.int32))


def _unlike(layers: int = 24) -> _Case:
    """Layers of different widths: nothing repeats."""
    widths = [64 + 8 * i for i in range(layers + 1)]
    shapes = itertools.pairwise(widths)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def loss_of(dtype: Any) -> Callable[..., Any]:
        def loss(params: Any, x: Any) -> Any:
            for w in params:
                x = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
            return jnp.square(x.astype(jnp.float32)).mean()

        return loss

    return _Case(
        loss_of(jnp.bfloat16),
        loss_of(jnp.float32),
        params,
        jax.ShapeDtypeStruct((4, widths[0]), jnp.float32),
    )


CASES: dict[str, Callable[[], _Case]] = {
    **{f"gpt-{n}": functools.partial(_stacked, "gpt", n, False) for n in (4, 24, 96)},
    "gpt-24-in-a-scan": functools.partial(_stacked, "gpt", 24, True),
    "linen-gpt-24": _linen_gpt,
    "24-unlike-layers": _unlike,
}


def _programs(case: _Case) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Returns for each program what lowers it, by hand and under jaxmp. All functions are new."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    plain = jax.eval_shape(tx.init, case.params)
    wrapped = jaxmp.mixed_precision(tx, _POLICY)
    state = jax.eval_shape(
        lambda params: jaxmp.TrainState.create(params=params, tx=wrapped), case.params
    )

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(case.by_hand)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def gradients(loss: Callable[..., Any]) -> Any:
        new = lambda params, batch: loss(params, batch)  # noqa: E731
        return jax.jit(jax.value_and_grad(new)).trace(case.params, case.batch).lower()

    return {
        "loss and gradients": (
            lambda: gradients(case.by_hand),
            lambda: gradients(jaxmp.autocast(case.loss, _POLICY)),
        ),
        "train step": (
            lambda: jax.jit(lambda *x: step(*x)).trace(case.params, plain, case.batch).lower(),
            lambda: jaxmp.make_train_step(case.loss).trace(state, case.batch).lower(),
        ),
    }


def _rows(name: str, args: argparse.Namespace) -> list[Row]:
    rows = []
    for program, ways in _programs(CASES[name]()).items():
        seconds: list[list[float]] = [[], []]
        lines = [0, 0]
        for _ in range(args.repeats):
            for i, way in enumerate(ways):
                jax.clear_caches()
                gc.collect()
                gc.disable()  # as timeit does: a collection may fall into the turn of one alone
                start = time.perf_counter()
                lowered = way()
                seconds[i].append(time.perf_counter() - start)
                gc.enable()
                lines[i] = lowered.as_text().count("\n")
        best = list(map(min, seconds))
        row = {"case": name, "program": program, "by_hand_s": best[0], "jaxmp_s": best[1]}
        row |= {"ratio": best[1] / best[0], "seconds": seconds}
        rows.append(row | {"lines": lines[1], "lines_ratio": lines[1] / lines[0]})
    return rows


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    parser = argparse.ArgumentParser(description="Trace and lower, over casts by hand.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    add_repeats(parser, repeats=3, steps=1)
    args = parse(parser, argv)
    rows = [row for name in args.cases for row in _rows(name, args)]
    report = Report(
        "bench_tracing",
        "Trace and lower",
        _COLUMNS,
        [
            f"The least of {args.repeats} rounds, in turn, each with JAX's caches emptied before.",
            "By hand: casts of mixed bfloat16 in the model, by the `dtype` of Flax's layers, or "
            "for the linen GPT by `jaxmp.linen.apply_policy`, which traces as those do. The train "
            "step by hand is AdamW behind a clip, without masters, checks, a loss scale, or the "
            "recomputation in loops of the step of jaxmp.",
        ],
        rows,
    )
    return report.publish(args)


if __name__ == "__main__":
    main()
