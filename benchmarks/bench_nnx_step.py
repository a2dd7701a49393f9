"""The time of one step of a live nnx module on the host, by ways to walk through the module.

The layers are small, so that a CPU computes next to nothing: what is left is the walk through the
modules and the dispatch. The contenders take turns in one run.

    python benchmarks/bench_nnx_step.py
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from lab.timing import CompiledStep, Contender, Metrics, PlannedMemory, spread, time_in_turn
from measurement import Column, Report, Row, add_repeats, parse

import jaxmp

_BASELINE, _PARAMS = "nnx.jit, plain", "jaxmp.make_train_step, params"
_COLUMNS = (
    Column("layers", "layers", "d"),
    Column("contender", "contender"),
    Column("over_nnx_jit", f"time over {_BASELINE}"),
    Column("over_params", f"time over {_PARAMS}"),
    Column("median_ms", "median ms", ".2f"),
)


class Net(nnx.Module):
    """A chain of linear layers."""

    def __init__(self, layers: int, width: int) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def loss_fn(model: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def by_hand(loss_fn: Any, model: Any, optimizer: Any, x: jax.Array) -> Metrics:
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return {"loss": loss}


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    parser = argparse.ArgumentParser(description="Host time of a step of a live nnx module.")
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--width", type=int, default=8, help="each layer is width x width")
    add_repeats(parser, repeats=9, steps=20)
    args = parse(parser, argv)
    rows = [row for layers in args.layers for row in _measure(layers, args)]
    assumptions = [
        f"Adam; layers of {args.width} x {args.width} and a bias, 4 examples.",
        f"{args.repeats} rounds in which each contender takes one turn of {args.steps} steps "
        "after one that is not timed; ratios are taken within the rounds: median (least to "
        "greatest).",
    ]
    return Report(
        "bench_nnx_step", "Host time of a step of a live nnx module", _COLUMNS, assumptions, rows
    ).publish(args)


def _measure(layers: int, args: argparse.Namespace) -> list[Row]:
    inner = optax.adam(1e-3)
    tx = jaxmp.mixed_precision(inner, "mixed_bfloat16")
    plain, cached, ours, own = (Net(layers, args.width) for _ in range(4))
    graphdef, params = nnx.split(plain)
    of_params = jaxmp.make_train_step(lambda p, x: loss_fn(nnx.merge(graphdef, p), x))
    state = jaxmp.TrainState.create(params=nnx.as_pure(params), tx=tx)
    optimizer = nnx.Optimizer(plain, inner, wrt=nnx.Param)
    jitted = nnx.jit(functools.partial(by_hand, loss_fn))
    bound = nnx.cached_partial(jitted, cached, nnx.Optimizer(cached, inner, wrt=nnx.Param))
    fast = jaxmp.nnx.autocast(loss_fn, "mixed_bfloat16")
    own_optimizer = jaxmp.nnx.Optimizer(own, tx)
    own_loop = nnx.jit(functools.partial(by_hand, fast))
    step, ours_optimizer = jaxmp.nnx.make_train_step(loss_fn), jaxmp.nnx.Optimizer(ours, tx)
    contenders = [
        _live(_BASELINE, lambda x: jitted(plain, optimizer, x)),
        _live("nnx.cached_partial, plain", bound),
        _live("a loop of its own, nnx.jit", lambda x: own_loop(own, own_optimizer, x)),
        _contender(_PARAMS, of_params, state),
        _live("jaxmp.nnx.make_train_step", lambda x: step(ours, ours_optimizer, x)),
    ]
    x = jnp.ones((4, args.width))
    times = time_in_turn(contenders, x, rounds=args.repeats, steps=args.steps)
    return [
        {
            "layers": layers,
            "contender": name,
            "over_nnx_jit": spread(mine.ratios(times[_BASELINE])),
            "over_params": spread(mine.ratios(times[_PARAMS])),
            "median_ms": 1e3 * statistics.median(mine.seconds),
            "seconds": mine.seconds,
        }
        for name, mine in times.items()
    ]


def _live(name: str, call: Callable[[jax.Array], Metrics]) -> CompiledStep:
    """A step that has no state but its modules."""
    return _contender(name, lambda state, x: (state, call(x)), ())


def _contender(name: str, step: Callable[[Any, Any], Any], state: Any) -> CompiledStep:
    latest = [state]

    def run(_: Any, x: jax.Array) -> tuple[Any, Metrics]:
        latest[0], metrics = step(latest[0], x)
        return None, metrics

    return CompiledStep(Contender(name, lambda: None, step), run, PlannedMemory(0, 0, 0, 0))


if __name__ == "__main__":
    main()
