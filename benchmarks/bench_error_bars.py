"""How often the error of a loss lies within the bars that are predicted for it.

Each program runs under each policy, with several sets of params, at the start and after training.
The error is the loss of the low program, compiled and run, less that of the same program in
float32. The bar is that of `FirstOrder`, which `sensitivity` and `compare` show. Of independent
roundings, 68 % of errors lie within one bar, and 95 % within two.

    python benchmarks/bench_error_bars.py
"""

import argparse
import collections
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import stacked_models
from measurement import RESULTS, Column, Report, Row
from small_models import SMALL_MODELS

import jaxmp
from jaxmp._program.tracing import partition, trace_call
from jaxmp._tools.diagnostics.first_order import AS_WRITTEN, FirstOrder, Target
from jaxmp._tools.diagnostics.roundings import uncounted_in
from jaxmp._tools.inspect.lines import line_of, scopes_of

_SIZES = stacked_models.Sizes(layers=2, width=32, batch=4, length=16, heads=4, classes=64)
_STACKED = ("GPT", "Gemma", "ViT", "ResNet", "LSTM", "MoE")
_POLICIES = ("mixed_bfloat16", "mixed_float16", "mixed_float8")
_COLUMNS = (
    Column("program", "program"),
    Column("policy", "policy"),
    Column("cases", "cases", "d"),
    Column("in_one", "within one bar", ".0%"),
    Column("in_two", "within two", ".0%"),
    Column("rms", "rms of error over bar", ".2f"),
    Column("mean", "mean", "+.2f"),
    Column("bar", "median bar, of the loss", ".1e"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    cases: dict[tuple[str, str], list[tuple[float, float]]] = {}
    uncounted: dict[str, None] = {}
    for name in args.programs:
        loss, params, batch = _program(name)
        for policy in args.policies:
            cases[name, policy], jumps = _cases(loss, params, batch, policy, args)
            if jumps:
                uncounted[name] = None
            print(_row(name, policy, cases[name, policy]), file=sys.stderr, flush=True)
    rows = [_row(*key, values) for key, values in cases.items()]
    groups: dict[tuple[str, str], list[tuple[float, float]]] = collections.defaultdict(list)
    for (name, policy), values in cases.items():
        kind = "all with a choice" if name in uncounted else "all without a choice"
        for each in (policy, "all policies"):
            groups[kind, each] += values
    rows += [_row(*key, values) for key, values in groups.items()]
    report = Report(
        name="error_bars",
        title="Errors of losses over the bars predicted for them",
        command=" ".join(["python benchmarks/bench_error_bars.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=[
            f"{args.seeds} sets of params for each program, each at the start and after "
            f"{args.steps} steps of Adam in float32.",
            "Compiled with `xla_allow_excess_precision=False`: roundings as written.",
            "A choice is a `top_k` of rounded numbers, as of experts: a rounding that swaps two of "
            "them moves the loss by a jump, which no derivative says. Reports name the line.",
        ],
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Coverage of error bars.")
    add = parser.add_argument
    programs = (*_STACKED, *SMALL_MODELS)
    add("--programs", nargs="+", default=programs, choices=programs)
    add("--policies", nargs="+", default=_POLICIES)
    add("--seeds", type=int, default=4, help="sets of params")
    add("--steps", type=int, default=60, help="steps of training")
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    return parser.parse_args(argv)


def _program(name: str) -> tuple[Callable[..., Any], Any, Any]:
    if name in SMALL_MODELS:
        return SMALL_MODELS[name]()
    model = getattr(stacked_models, name)(_SIZES)
    return model.loss, model.params(), model.batch()


def _cases(
    loss: Callable[..., Any], params: Any, batch: Any, policy: str, args: argparse.Namespace
) -> tuple[list[tuple[float, float]], bool]:
    """Returns the error over the bar, and the bar over the loss, for each set of params."""
    low = jaxmp.autocast(loss, policy)
    static, arrays = partition(((params, batch), {}))
    traced = trace_call(low, static, arrays)
    first_order = FirstOrder(
        traced,
        lambda site: (scopes_of(site), site.name, line_of(site)),
        [Target(slice(None))],
    )
    exact, rounded = jax.jit(loss), jax.jit(low, compiler_options=AS_WRITTEN)
    cases = []
    for seed in range(args.seeds):
        start = _drawn_again(params, seed)
        for each in (start, _trained(loss, start, batch, args.steps)):
            variances, (low_value,) = first_order(jax.tree.leaves((each, batch)))
            bar = float(np.sqrt(variances[0, :, 0].sum())) * abs(float(low_value))
            value = float(exact(each, batch))
            cases.append(((float(rounded(each, batch)) - value) / bar, bar / abs(value)))
    return cases, bool(uncounted_in(traced.closed, [True]))


def _drawn_again(params: Any, seed: int) -> Any:
    """Returns params of the same mean and spread; those that are alike stay as they are."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        jnp.mean(x) + jnp.std(x) * jax.random.normal(key, x.shape)
        for key, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


def _trained(loss: Callable[..., Any], params: Any, batch: Any, steps: int) -> Any:
    tx = optax.adam(3e-3)

    @jax.jit
    def train(params: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            params, moments = state
            updates, moments = tx.update(jax.grad(loss)(params, batch), moments, params)
            return (optax.apply_updates(params, updates), moments), None

        return jax.lax.scan(step, (params, tx.init(params)), length=steps)[0][0]

    return train(params)


def _row(program: str, policy: str, cases: list[tuple[float, float]]) -> Row:
    errors, bars = np.array(cases).T
    return {
        "program": program,
        "policy": policy,
        "cases": len(cases),
        "in_one": float(np.mean(np.abs(errors) <= 1)),
        "in_two": float(np.mean(np.abs(errors) <= 2)),
        "rms": float(np.sqrt(np.mean(errors**2))),
        "mean": float(np.mean(errors)),
        "bar": float(np.median(bars)),
        "errors": [float(x) for x in errors],
    }


if __name__ == "__main__":
    main()
