"""Checks whether a language model learns as well with masters and moments in fewer bytes.

The GPT of `examples/train_lm.py` learns Python's own manual, for several seeds, each with its own
weights and batches. A storage passes if its mean loss over the seeds is as near to float32's as the
means of two such sets of runs are by chance: within two standard errors of their difference,
2 s sqrt(2 / seeds). Here s is the standard deviation over seeds, pooled over all storages but the
control. The deviation of three float32 runs alone is too uncertain: for validation losses it is
0.001 where it should be 0.004. The positive control is bfloat16 without masters, which must fail.
The model computes in bfloat16 under every storage.

    python benchmarks/bench_storage_loss.py
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from measurement import RESULTS, Column, Report, Row

import jaxmp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import language_model as lm

_MASTERS = ("float32", "remainder", "kahan", "remainder8", "stochastic", "none")
_MOMENTS = ("float32", "bfloat16", "int8")
_BASE = ("float32", "float32")
_LAST = 100  # steps over which the train loss is averaged

_COLUMNS = (
    Column("master", "master"),
    Column("moments", "moments"),
    Column("bytes", "B/param", ".1f"),
    Column("train", "train loss", ".4f"),
    Column("train_gap", "from float32", "+.4f"),
    Column("valid", "validation", ".4f"),
    Column("valid_gap", "from float32", "+.4f"),
    Column("passes", "within chance"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    curves = {}
    recipes = [(m, s) for s in args.moments for m in args.masters]
    recipes = [recipe for recipe in recipes if recipe[0] != "none" or recipe[1] == "float32"]
    rows: list[Row] = []
    for master, moments in recipes:
        train, valid, size = trained(args, master, moments)
        curves[master, moments] = train
        losses = {"train": train[:, -_LAST:].mean(1), "valid": valid}
        rows.append({"master": master, "moments": moments, "bytes": size, "losses": losses})
        print(master, moments, losses, file=sys.stderr, flush=True)
    base = next(row["losses"] for row in rows if (row["master"], row["moments"]) == _BASE)
    spread, own = compare(rows, base, [row["losses"] for row in rows if row["master"] != "none"])
    for row in rows:
        row["curve"] = _thinned(curves[row["master"], row["moments"]])
    report = Report(
        name="storage_loss",
        title="Loss of a language model, by how its parameters and moments are stored",
        command=" ".join(["python benchmarks/bench_storage_loss.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=[
            f"{args.seeds} seeds, {args.steps} steps, AdamW with b2 = 0.99 and a cosine schedule.",
            f"Means over the seeds; train: over the last {_LAST} steps too.",
            f"Losses of a storage have standard deviations of {spread['train']:.4f} (train) and "
            f"{spread['valid']:.4f} (validation) over the seeds, float32's own {own['train']:.4f} "
            f"and {own['valid']:.4f}; by chance, means over the seeds "
            f"are within {by_chance(spread['train'], args.seeds):.4f} and "
            f"{by_chance(spread['valid'], args.seeds):.4f} of each other.",
        ],
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
        _draw(rows, by_chance(spread["train"], args.seeds), args.picture)
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Loss of a language model by storage.")
    add = parser.add_argument
    add("--masters", nargs="+", choices=_MASTERS, default=_MASTERS, help="float32 among them")
    add("--moments", nargs="+", choices=_MOMENTS, default=_MOMENTS, help="float32 among them")
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=3000)
    add("--width", type=int, default=128)
    add("--layers", type=int, default=2)
    add("--context", type=int, default=64)
    add("--batch", type=int, default=16)
    add("--lr", type=float, default=2e-3)
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    docs = pathlib.Path(__file__).parents[1] / "docs"
    add("--picture", type=pathlib.Path, default=docs / "storage.png", help="where to draw")
    return parser.parse_args(argv)


def trained(
    args: argparse.Namespace, master: Any, moments: Any, recompute: Any = "never"
) -> tuple[Any, Any, float]:
    """Train losses by seed and step, validation losses by seed, bytes per parameter."""
    corpus = _corpus()
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 10, args.steps, 1e-5)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99))
    tx = jaxmp.mixed_precision(inner, "bfloat16", master=master, moments=moments)
    size = lm.Size(vocab=corpus.vocab_size, context=args.context, layers=args.layers,
                   width=args.width, heads=4)  # fmt: skip
    train, valid = [], []
    for seed in range(args.seeds):
        model = jaxmp.nnx.apply_policy(
            lm.GPT(size, nnx.Rngs(seed)), lm.precision_rules(jaxmp.get_policy("mixed_bfloat16"))
        )
        graphdef, params = nnx.split(model, nnx.Param)
        loss_fn = lm.make_loss(graphdef)
        state = jaxmp.TrainState.create(params=params, tx=tx)
        arrays = jax.tree.leaves((state.params, state.opt_state))
        count = sum(x.size for x in jax.tree.leaves(params))
        step = jaxmp.make_train_step(loss_fn, "none", recompute=recompute)

        def several(state: Any, batches: Any, step: Any = step) -> Any:
            def one(state: Any, batch: Any) -> Any:
                state, metrics = step(state, batch)
                return state, metrics["loss"]

            return jax.lax.scan(one, state, batches)

        run, losses = jax.jit(several, donate_argnums=0), []
        for start in range(0, args.steps, _LAST):
            each = (
                corpus.batch(seed, i, size=args.batch, context=args.context)
                for i in range(start, min(start + _LAST, args.steps))
            )
            state, loss = run(state, np.stack(list(each)))
            losses.append(loss)
        train.append(np.concatenate(losses))
        windows = corpus.validation(windows=128, context=args.context)
        valid.append(float(jax.jit(loss_fn)(state.params, windows)))
        total = sum(x.nbytes for x in arrays) / count
    return np.stack(train), np.array(valid), total


@functools.cache
def _corpus() -> lm.Corpus:
    return lm.Corpus.load()


def by_chance(spread: float, seeds: int) -> float:
    """Two standard errors of the difference of two means."""
    return 2 * spread * (2 / seeds) ** 0.5


def compare(rows: list[Row], base: Any, sound: list[Any]) -> tuple[dict[str, float], ...]:
    """Adds the means, and how far they are from the base's; returns the spreads over the seeds.

    That of all sound ones, which the control is not, and that of the base alone.
    """
    spread = {
        key: float(np.mean([np.var(losses[key], ddof=1) for losses in sound]) ** 0.5)
        for key in base
    }
    own = {key: float(np.std(base[key], ddof=1)) for key in base}
    for row in rows:
        losses = row.pop("losses")
        for key in base:
            row[key] = float(losses[key].mean())
            row[f"{key}_gap"] = float((losses[key] - base[key]).mean())
            row[f"{key}_of_seeds"] = losses[key].tolist()
        within = all(
            abs(row[f"{key}_gap"]) <= by_chance(spread[key], len(base[key])) for key in base
        )
        row["passes"] = "yes" if within else "no"
    return spread, own


def _thinned(losses: Any) -> list[float]:
    """The mean over seeds and over every 50 steps."""
    mean = losses.mean(0)
    whole = len(mean) // 50 * 50
    return mean[:whole].reshape(-1, 50).mean(1).tolist() if whole else mean.tolist()


def _draw(rows: Sequence[Row], chance: float, path: pathlib.Path) -> None:
    """Each storage's train loss less float32's, over the steps, and how far chance reaches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    base = next(row for row in rows if (row["master"], row["moments"]) == _BASE)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for row in rows:
        gap = np.array(row["curve"]) - np.array(base["curve"])
        naive = row["master"] == "none"
        label = "no master" if naive else f"{row['master']}, {row['moments']}"
        style = {"color": "black", "linewidth": 2} if naive else {"linewidth": 1}
        axes.plot(50 * (1 + np.arange(len(gap))), gap, label=label, **style)
    axes.axhspan(-chance, chance, alpha=0.15, label="by chance")
    axes.set(xlabel="step", ylabel="train loss, less float32's")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
