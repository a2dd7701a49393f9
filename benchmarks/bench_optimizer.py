"""The cost of the optimizer wrapper: bytes per parameter, and time, of a whole donated train step.

The step trains a multilayer perceptron of square matrices with AdamW on a batch so small that
activations do not count. The compiler's own plan (`memory_analysis`) says how many bytes the step
needs for its arguments, outputs and temporaries; an output that reuses its argument's buffer
(alias) is counted once:

    peak = argument + output + temp - alias

Persistent state is in `argument`: 12 bytes per parameter for float32 params with Adam's two
moments, 14 for bfloat16 params with float32 masters. Gradients are in `temp`.

Before you compare rows:

* With `skip="none"` the compiler may update one matrix before the next gradient is computed. A
  check of all gradients needs all of them before the first update. The extra memory depends on the
  model: "list" keeps each matrix as an array of its own, "scan" stacks them, as large models do,
  which makes all gradients live at once in every row.
* Compilers differ in what they can do in place; measure where you train.

    python benchmarks/bench_optimizer.py --layers 32 --width 512
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import handwritten
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree
from lab.timing import (
    Contender,
    Measurement,
    Metrics,
    PlannedMemory,
    compile_step,
    spread,
    time_in_turn,
)
from measurement import Column, Report, Row, add_repeats, parse

import jaxmp

Path = Literal["apply_gradients", "update", "make_train_step"]
Skip = Literal["cond", "select", "none"]

_SKIPS: tuple[Skip, ...] = ("cond", "select", "none")
_PATHS: tuple[Path, ...] = ("apply_gradients", "update", "make_train_step")
_BASELINE = "optax, float32"

_COLUMNS = (
    Column("model", "model"),
    Column("contender", "contender"),
    Column("argument", "argument", ".2f"),
    Column("output", "output", ".2f"),
    Column("temp", "temp", ".2f"),
    Column("alias", "alias", ".2f"),
    Column("peak", "peak B/param", ".2f"),
    Column("over_none", "peak over none", "+.2f"),
    Column("time_ratio", f"time over {_BASELINE}"),
    Column("median_ms", "median ms", ".1f"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its tables."""
    args = _parse(argv)
    rows = [row for model in args.models for row in _measure(model, args)]
    title = "Memory and time of the optimizer step"
    return Report("bench_optimizer", title, _COLUMNS, _assumptions(args), rows).publish(args)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory and time of the optimizer step.")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=512, help="each layer is width x width")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--models", nargs="+", choices=["list", "scan"], default=["list", "scan"])
    parser.add_argument("--policies", nargs="+", default=["mixed_bfloat16", "bfloat16"])
    parser.add_argument("--clip-norm", type=float, help="clip by global norm before AdamW")
    add_repeats(parser, repeats=7, steps=3)
    return parse(parser, argv)


def _assumptions(args: argparse.Namespace) -> list[str]:
    clip = f"clipping to norm {args.clip_norm:g}, then AdamW" if args.clip_norm else "AdamW"
    return [
        f"{args.layers} layers of {args.width} x {args.width}, {clip}, batch {args.batch}; the "
        "whole train step is compiled and its state donated.",
        "Bytes per parameter are the compiler's plan; peak = argument + output + temp - alias.",
        "'peak over none' is the peak beyond that of the same row with skip='none'.",
        "On a CPU, temp of bfloat16 rows holds float32 copies that accelerators do not need: "
        "compare bfloat16 rows with each other.",
        f"Times: {args.repeats} rounds in which each contender takes one turn of {args.steps} "
        "steps after one that is not timed; ratios are taken within the rounds: median "
        "(least to greatest).",
        "make_train_step also computes the norm of the gradients, which the other rows do not.",
    ]


@dataclasses.dataclass(frozen=True)
class _Case:
    """One way to use jaxmp."""

    policy: str
    path: Path
    skip: Skip

    @property
    def name(self) -> str:
        return f"jaxmp {self.policy}, {self.path}, {self.skip}"

    @property
    def unchecked(self) -> "_Case":
        return dataclasses.replace(self, skip="none")


def _measure(model: str, args: argparse.Namespace) -> list[Row]:
    batch = jnp.ones((args.batch, args.width))
    network = _Network(args.layers, args.width, stacked=model == "scan")
    cases = [
        _Case(policy, path, skip) for policy in args.policies for path in _PATHS for skip in _SKIPS
    ]
    contenders = _contenders(network, cases, args.clip_norm)
    compiled = [compile_step(contender, batch) for contender in contenders]
    times = time_in_turn(compiled, batch, rounds=args.repeats, steps=args.steps)
    parameters = args.layers * args.width**2
    rows = {
        step.contender.name: {"model": model, "parameters": parameters}
        | _bytes_per_parameter(step.memory, parameters)
        | _times(step.contender.name, times)
        for step in compiled
    }
    for case in cases:
        if case.skip != "none":
            over = rows[case.name]["peak"] - rows[case.unchecked.name]["peak"]
            rows[case.name]["over_none"] = over
    return list(rows.values())


def _bytes_per_parameter(memory: PlannedMemory, parameters: int) -> Row:
    parts = memory._asdict() | {"peak": memory.peak}
    return {part: size / parameters for part, size in parts.items()}


def _times(name: str, times: dict[str, Measurement]) -> Row:
    mine = times[name]
    return {
        "contender": name,
        "median_ms": 1e3 * statistics.median(mine.seconds),
        "time_ratio": spread(mine.ratios(times[_BASELINE])),
        "seconds": mine.seconds,
        "loss": mine.metrics["loss"],
    }


def _contenders(
    network: "_Network", cases: Sequence[_Case], clip_norm: float | None
) -> list[Contender]:
    clip = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    tx = optax.chain(*clip, optax.adamw(1e-3))
    what = network.loss, tx, network.init
    mixed = "params=float32,compute=bfloat16,output=float32"
    steps = {
        _BASELINE: handwritten.plain(*what),
        "optax, all bfloat16": handwritten.plain(*what, dtype=jnp.bfloat16),
        "jmp, cast in the loss": handwritten.with_jmp(*what, policy=mixed),
        "masters by hand": handwritten.with_masters(*what, dtype=jnp.bfloat16),
    } | {case.name: _with_jaxmp(case, network, tx) for case in cases}
    return [Contender(name, start, step) for name, (start, step) in steps.items()]


class _Network:
    """Matrix products with tanh between them: the params are all that takes memory."""

    def __init__(self, layers: int, width: int, *, stacked: bool) -> None:
        shape = (layers, width, width)

        @jax.jit
        def init() -> PyTree:
            weights = jax.random.normal(jax.random.key(0), shape) * width**-0.5
            return weights if stacked else list(weights)

        self.init = init
        self._stacked = stacked

    def loss(self, params: PyTree, batch: Array) -> Array:
        """The mean square of what comes out."""

        def layer(x: Array, weight: Array) -> tuple[Array, None]:
            return jnp.tanh(x @ weight), None

        x = batch.astype(jax.tree.leaves(params)[0].dtype)
        if self._stacked:
            x, _ = jax.lax.scan(layer, x, params)
        else:
            for weight in params:
                x, _ = layer(x, weight)
        return jnp.mean(x.astype(jnp.float32) ** 2)


def _with_jaxmp(
    case: _Case, network: _Network, inner: optax.GradientTransformation
) -> handwritten.Steps:
    tx = jaxmp.mixed_precision(inner, case.policy, skip=case.skip)
    if case.path == "make_train_step":
        return handwritten.Steps(
            lambda: jaxmp.TrainState.create(params=network.init(), tx=tx),
            jaxmp.make_train_step(network.loss, case.policy, donate=False),
        )

    def loss_fn(params: PyTree, batch: Array) -> Array:
        return network.loss(tx.policy.cast_to_compute(params), batch)

    def train_step(state: Any, batch: Array) -> tuple[Any, Metrics]:
        params, opt_state = state
        value_and_grad = jaxmp.value_and_grad(loss_fn, loss_scale=opt_state.loss_scale)
        loss, grads = value_and_grad(params, batch)
        if case.path == "apply_gradients":
            params, opt_state = tx.apply_gradients(grads, opt_state, params)
        else:
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return (params, opt_state), {"loss": loss}

    return handwritten.Steps(lambda: tx.init_params(network.init()), train_step)


if __name__ == "__main__":
    main()
