"""Checks whether models learn as well when the backward pass reads 8-bit codes.

The GPT of `examples/train_lm.py` and the CNN of `examples/digits_cnn.py` learn for several seeds
with `jaxmp.recompute`, without codes, with those of `kept=`, and with codes of 4 bits, the positive
control. Codes pass if the mean loss is as near to that without codes as the means of two sets of
seeds are by chance: see `bench_storage_loss.py`.

    python benchmarks/bench_kept_loss.py
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from bench_storage_loss import by_chance, compare, trained
from measurement import Column, Report, Row, add_common_arguments

import jaxmp
import jaxmp._recompute.codes as codes

# isort: split
import digits_cnn as digits  # beside the language model, whose folder bench_storage_loss adds

_KEPT = (None, "int8", "float8_e4m3fn", "4 bits")
_COLUMNS = (
    Column("model", "model"),
    Column("kept", "kept"),
    Column("train", "train loss", ".4f"),
    Column("train_gap", "from none", "+.4f"),
    Column("valid", "validation", ".4f"),
    Column("valid_gap", "from none", "+.4f"),
    Column("train_gap_largest", "by chance, train", ".4f"),
    Column("valid_gap_largest", "validation", ".4f"),
    Column("passes", "within chance"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    rows: list[Row] = []
    for model, losses_of in _MODELS.items():
        own: list[Row] = []
        for kept in _KEPT:
            losses = _with_codes(losses_of, args, kept)
            print(model, kept, losses, file=sys.stderr, flush=True)
            own.append({"model": model, "kept": kept or "none", "losses": losses})
        spread, _ = compare(own, own[0]["losses"], [row["losses"] for row in own[:-1]])
        for row in own:
            for key, value in spread.items():
                row[f"{key}_gap_largest"] = by_chance(value, args.seeds)
        rows += own
    report = Report(
        name="kept_loss",
        title="Losses where the backward pass reads codes",
        command=" ".join(["python benchmarks/bench_kept_loss.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=[
            f"{args.seeds} seeds; the GPT takes {args.steps} steps, the CNN a tenth of these.",
            "bfloat16 policies, float32 masters. Means over the seeds and the last 100 steps.",
            "By chance: two standard errors of the difference of two means over the seeds.",
        ],
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Losses by what the backward pass reads.")
    add_common_arguments(parser, repeats=1, steps=3000)
    add = parser.add_argument
    add("--seeds", type=int, default=3)
    add("--width", type=int, default=128)
    add("--layers", type=int, default=2)
    add("--context", type=int, default=64)
    add("--batch", type=int, default=16)
    add("--lr", type=float, default=2e-3)
    return parser.parse_args(argv)


def _with_codes(losses_of: Callable[..., Any], args: argparse.Namespace, kept: Any) -> Any:
    """The losses of all seeds; codes of 4 bits are those of int8 with 15 values."""
    largest = codes._LARGEST["int8"]
    if kept == "4 bits":
        kept, codes._LARGEST["int8"] = "int8", 7.0
    try:
        return losses_of(args, functools.partial(jaxmp.recompute, kept=kept))
    finally:
        codes._LARGEST["int8"] = largest


def _gpt_losses(args: argparse.Namespace, recompute: Any) -> dict[str, Any]:
    train, valid, _ = trained(args, "float32", "float32", recompute)
    return {"train": train[:, -100:].mean(1), "valid": valid}


def _cnn_losses(args: argparse.Namespace, recompute: Any) -> dict[str, Any]:
    images, steps = digits.Digits.load(), max(args.steps // 10, 1)
    rules = digits.precision_rules("mixed_bfloat16")
    model = digits.make_model(rules)
    loss_fn = digits.make_loss(model)
    step = jaxmp.make_train_step(loss_fn, "none", recompute=recompute)
    losses: dict[str, list[float]] = {"train": [], "valid": []}
    for seed in range(args.seeds):
        state = digits.make_state(model, rules, steps=steps, seed=seed)
        own = []
        for i in range(steps):
            state, metrics = step(state, images.batch(seed, i))
            own.append(metrics["loss"])
        losses["train"].append(float(np.mean(jax.device_get(own)[-100:])))
        loss, _ = jax.jit(loss_fn)(state.params, images.test, state.batch_stats)
        losses["valid"].append(float(loss))
    return {key: np.array(values) for key, values in losses.items()}


_MODELS = {"GPT": _gpt_losses, "CNN": _cnn_losses}

if __name__ == "__main__":
    main()
