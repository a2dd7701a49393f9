"""How well one backward pass ranks the parts of a model, and how long it takes.

What is predicted for each part is compared with what its roundings do alone: the low program runs
in float32, with the roundings of that part switched on. The time is compared with that of one run
for each part, as rules would have it: each set of rules is another program to compile. Rules for a
target are measured on a batch that was not used.

    python benchmarks/bench_sensitivity.py
"""

import argparse
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import stacked_models
from measurement import RESULTS, Column, Report, Row

import jaxmp
from jaxmp._policies.policy import short_name
from jaxmp.diagnostics import sensitivity

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from tests.support.switched_roundings import measured_alone, rank_correlation

_MODELS = ("GPT", "ViT", "ResNet", "LSTM")
_SIZES = stacked_models.Sizes(layers=4, width=32, batch=4, length=16, heads=4, classes=64)
_METHODS = ("norm", "attend", "mlp", "softmax", "_norm", "_convolve", "_block", "block", "_cell")
_COLUMNS = (
    Column("model", "model"),
    Column("policy", "policy"),
    Column("parts", "parts", "d"),
    Column("gradients", "rank correlation, gradients", ".2f"),
    Column("again", "measured on another batch", ".2f"),
    Column("loss", "loss", ".2f"),
    Column("predicted", "predicted, s", ".0f"),
    Column("measured", "one by one, s", ".0f"),
    Column("share", "share", ".2f"),
    Column("met", "worst error over target, other batch", ".2f"),
    Column("kept", "FLOPs kept", ".0%"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    rows = []
    for name, policy in itertools.product(args.models, args.policies):
        rows.append(_row(name, policy))
        print(rows[-1], file=sys.stderr, flush=True)
    report = Report(
        name="sensitivity",
        title="Sensitivity of parts: predicted, and measured",
        command=" ".join(["python benchmarks/bench_sensitivity.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=[
            "Rank correlation is that of Spearman, over all parts, of what is predicted with what "
            "the roundings of the part do alone. On another batch: that of two measurements.",
            "One by one: loss and gradients under rules for each part, compiled and run once; "
            "three of them are timed, and multiplied by the number of parts.",
            "Targets: a half and a quarter of the error of gradients in which everything is low.",
        ],
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predicted and measured sensitivity.")
    add = parser.add_argument
    add("--models", nargs="+", default=_MODELS, choices=(*_MODELS, "Gemma"))
    add("--policies", nargs="+", default=["mixed_bfloat16"])
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    return parser.parse_args(argv)


def _with_scopes(model: Any) -> Any:
    """Gives each layer a scope, and each of its methods one inside."""

    def named(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(name):
                return method(*args, **kwargs)

        return call

    for name in _METHODS:
        if hasattr(model, name):
            object.__setattr__(model, name, named(getattr(model, name), name.strip("_")))
    for name in ("block", "_block", "_cell"):
        if hasattr(model, name):
            object.__setattr__(model, name, _numbered(getattr(model, name), model.sizes.layers))
    return model


def _numbered(method: Callable[..., Any], layers: int) -> Callable[..., Any]:
    # A trace runs the layers in their order, each time anew.
    numbers = itertools.cycle(range(layers))

    def call(*args: Any) -> Any:
        with jax.named_scope(f"layer_{next(numbers)}"):
            return method(*args)

    return call


def _row(name: str, policy: str) -> Row:
    recurrent = name == "LSTM"  # its loop is over time
    model = _with_scopes(getattr(stacked_models, name)(_SIZES, scan=recurrent))
    params, batch = model.params(), model.batch()
    start = time.perf_counter()
    report = sensitivity(model.loss, params, batch, low=policy)
    predicted = time.perf_counter() - start
    alone = measured_alone(model.loss, params, batch, low=policy)
    again = measured_alone(model.loss, params, _other(batch), low=policy)
    errors = [(row.alone, alone[row.path]) for row in report.rows]
    targets = [report.all_low.gradients / x for x in (2, 4)]
    rules = [report.rules_for(target) for target in targets]
    off = [_error(model.loss, x, params, _other(batch)) for x in rules]
    patterns = [f"/{row.path}" for row in report.rows if not row.path.startswith("(")][:3]
    start = time.perf_counter()
    for pattern in patterns:
        _gradients(model.loss, jaxmp.PolicyRules({pattern: policy}, "float32"), params, batch)
    measured = (time.perf_counter() - start) / len(patterns) * len(report.rows)
    kept = [_share_of(report, x) for x in rules]
    return {
        "model": name,
        "policy": policy,
        "parts": len(errors),
        "gradients": rank_correlation(*zip(*((a.gradients, b[1]) for a, b in errors), strict=True)),
        "again": rank_correlation(*zip(*((alone[x][1], again[x][1]) for x in alone), strict=True)),
        "loss": rank_correlation(*zip(*((a.loss, b[0]) for a, b in errors), strict=True)),
        "predicted": predicted,
        "measured": measured,
        "share": predicted / measured,
        "met": max(error / target for error, target in zip(off, targets, strict=True)),
        "kept": kept[-1],
        "rows": [(row.path, row.alone.gradients, alone[row.path][1]) for row in report.rows],
    }


def _share_of(report: Any, rules: Any) -> float:
    """The share of the FLOPs in parts that rules keep in float32."""
    kept = (row for row in report.rows if short_name(rules.resolve(row.path)) == "float32")
    return sum(row.flops for row in kept)


def _other(batch: Any) -> Any:
    """A batch of the same kind: tokens or images in another order, and so with other targets."""
    key = jax.random.key(11)
    return jax.tree.map(lambda x: jax.random.permutation(key, x, axis=x.ndim - 1), batch)


def _gradients(loss: Callable[..., Any], rules: Any, params: Any, batch: Any) -> Any:
    fun = jax.jit(jax.grad(jaxmp.autocast(loss, rules)))
    leaves = jax.tree.leaves(fun(params, batch))
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in leaves])


def _error(loss: Callable[..., Any], rules: Any, params: Any, batch: Any) -> float:
    exact = _gradients(loss, "float32", params, batch)
    off = _gradients(loss, rules, params, batch) - exact
    return float(np.linalg.norm(off) / np.linalg.norm(exact))


if __name__ == "__main__":
    main()
