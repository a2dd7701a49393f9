"""Trains a small GPT in float32, bfloat16 and float16, and shows that all three learn the same.

    python examples/train_lm.py --out runs/demo

A character-level transformer of half a million params learns the language reference that ships
with Python, once for each policy, from the same init and the same batches. In the float16 run the
loss scale doubles every few dozen steps, so gradients really overflow, the step is skipped, and the
scale backs off. `results.json`, `loss.png` and the checkpoints go to `--out`. `--resume` continues
an interrupted run, which ends with the same bits as an uninterrupted one (on a GPU, under
XLA_FLAGS=--xla_gpu_deterministic_ops=true).
"""

import argparse
import dataclasses
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from language_model import GPT, Corpus, Size, make_loss, precision_rules
from lm_checkpoints import Checkpoints
from lm_report import Earlier, draw, make_table, show_progress
from rich.console import Console

import jaxmp

# The number of steps dispatched before the host waits for their metrics.
FETCH_EVERY = 10
VALIDATION_WINDOWS = 128


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command line: every field is a flag, with its default."""

    out: Annotated[Path, "folder for results, plot and checkpoints"] = Path("runs/demo")
    policies: Annotated[tuple[str, ...], "policies to train with, one by one"] = (
        "float32",
        "mixed_bfloat16",
        "mixed_float16",
    )
    steps: Annotated[int, "iterations for each policy, skipped ones included"] = 350
    batch_size: Annotated[int, "sequences in a batch"] = 16
    context: Annotated[int, "characters in a sequence"] = 64
    layers: Annotated[int, "transformer blocks"] = 4
    width: Annotated[int, "size of the residual stream"] = 96
    heads: Annotated[int, "attention heads"] = 4
    lr: Annotated[float, "peak learning rate"] = 3e-3
    growth_interval: Annotated[int, "finite steps until a float16 loss scale doubles"] = 30
    seed: Annotated[int, "seed of init and data order"] = 0
    eval_every: Annotated[int, "iterations between validations"] = 50
    checkpoint_every: Annotated[int, "iterations between checkpoints; 0 for none"] = 100
    resume: Annotated[bool, "go on from the checkpoints in --out instead of replacing them"] = False
    plot: Annotated[bool, "draw the plot"] = True
    autocast: Annotated[bool, "leave the model in plain float32, and autocast the loss"] = False
    audit: Annotated[bool, "print what the train step of each policy runs in which dtype"] = False

    def due(self, iteration: int, every: int) -> bool:
        """Whether something that happens at intervals (0: never) and at the end happens now."""
        return iteration == self.steps or (every > 0 and iteration % every == 0)

    def size(self, vocab: int) -> Size:
        """The size of the model."""
        return Size(
            vocab=vocab,
            context=self.context,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
        )

    def recipe(self) -> dict[str, Any]:
        """The settings that the trained bits depend on; a resumed run must share them."""
        free = {"out", "policies", "eval_every", "checkpoint_every", "resume", "plot", "audit"}
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in free}


def parse_args(argv: Sequence[str] | None) -> Settings:
    """Settings from the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        default, (help_text,) = getattr(Settings, name), hint.__metadata__
        options: dict[str, Any] = {"default": default, "help": help_text}
        if isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, tuple):
            options["nargs"] = "+"
        else:
            options["type"] = type(default)
        parser.add_argument("--" + name.replace("_", "-"), **options)
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.resume and not settings.checkpoint_every:
        parser.error("--resume needs checkpoints: give --checkpoint-every")
    return settings


def make_optimizer(settings: Settings, policy: jaxmp.Policy) -> jaxmp.MixedPrecision:
    """AdamW with clipping, inside the wrapper: both see only unscaled float32 gradients."""
    warmup = max(1, settings.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.lr, warmup, settings.steps + 1)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99))
    if policy.compute_dtype != jnp.float16:
        return jaxmp.mixed_precision(inner, policy)
    impatient = jaxmp.DynamicLossScale(growth_interval=settings.growth_interval)
    return jaxmp.mixed_precision(inner, policy, loss_scale=impatient)


# ------------------------------------------------------------------------------------ training


@dataclasses.dataclass
class History:
    """The data of plot and table: lists and numbers, which JSON stores exactly."""

    loss: list[float] = dataclasses.field(default_factory=list)
    loss_scale: list[float] = dataclasses.field(default_factory=list)
    skipped_at: list[int] = dataclasses.field(default_factory=list)
    val_at: list[int] = dataclasses.field(default_factory=list)
    val_loss: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    timed_steps: int = 0

    def add(self, metrics: Sequence[dict[str, Any]], started: float | None) -> None:
        """Appends the metrics of some steps; only here the host waits for the device.

        Args:
          metrics: what the steps returned.
          started: when the first of them was dispatched; None omits timing.
        """
        fetched = jax.device_get(metrics)
        if started is not None:
            self.seconds += time.perf_counter() - started
            self.timed_steps += len(fetched)
        for one in fetched:
            self.loss.append(float(one["loss"]))
            self.loss_scale.append(float(one["loss_scale"]))
            if not one["grads_finite"]:
                self.skipped_at.append(len(self.loss))

    def describe(self) -> str:
        """One line for the progress bar."""
        val = f"  val {self.val_loss[-1]:.3f}" if self.val_loss else ""
        scale = f"  scale 2^{math.log2(self.loss_scale[-1]):g}" if self.loss_scale[-1] != 1 else ""
        skips = f"  skips {len(self.skipped_at)}" if self.skipped_at else ""
        return f"loss {self.loss[-1]:.3f}{val}{scale}{skips}"


def train(
    name: str, settings: Settings, corpus: Corpus, report: Callable[[int, str], None]
) -> tuple[jaxmp.TrainState, History]:
    """Trains with one policy, from the start or from its latest checkpoint."""
    state, loss_fn = _start(name, settings, corpus)
    history, checkpoints = History(), None
    if settings.checkpoint_every:
        folder = settings.out / "checkpoints" / name
        if not settings.resume:
            shutil.rmtree(folder, ignore_errors=True)
        checkpoints = Checkpoints(folder, settings.recipe() | {"corpus": corpus.digest})
        if checkpoints.latest is not None:
            state, saved = checkpoints.restore(state)
            history = History(**saved)
    if history.loss:
        report(len(history.loss), history.describe())
    return _iterate(state, history, loss_fn, settings, corpus, checkpoints, report)


def audit(name: str, settings: Settings, corpus: Corpus) -> Any:
    """The dtypes of a train step under one policy; nothing is computed."""
    state, loss_fn = _start(name, settings, corpus)
    batch = corpus.batch(settings.seed, 1, size=settings.batch_size, context=settings.context)
    return jaxmp.audit(jaxmp.make_train_step(loss_fn, "none"), state, batch)


def _start(
    name: str, settings: Settings, corpus: Corpus
) -> tuple[jaxmp.TrainState, Callable[[Any, Array], Array]]:
    policy = jaxmp.get_policy(name)
    model = GPT(settings.size(corpus.vocab_size), nnx.Rngs(settings.seed))
    if not settings.autocast:
        model = jaxmp.nnx.apply_policy(model, precision_rules(policy))
    graphdef, params = nnx.split(model, nnx.Param)
    loss_fn = make_loss(graphdef)
    state = jaxmp.TrainState.create(params=params, tx=make_optimizer(settings, policy))
    return state, jaxmp.autocast(loss_fn, policy) if settings.autocast else loss_fn


def _iterate(
    state: jaxmp.TrainState,
    history: History,
    loss_fn: Callable[[Any, Array], Array],
    settings: Settings,
    corpus: Corpus,
    checkpoints: Checkpoints | None,
    report: Callable[[int, str], None],
) -> tuple[jaxmp.TrainState, History]:
    # Either the layers of this model cast by themselves, or autocast casts.
    step = jaxmp.make_train_step(loss_fn, "none")
    evaluate = jax.jit(loss_fn)
    held_out = corpus.validation(windows=VALIDATION_WINDOWS, context=settings.context)
    periods = (FETCH_EVERY, settings.eval_every, settings.checkpoint_every)
    pending: list[dict[str, Any]] = []
    started: float | None = None  # the first steps of a process compile, and are not timed
    for i in range(len(history.loss) + 1, settings.steps + 1):
        batch = corpus.batch(settings.seed, i, size=settings.batch_size, context=settings.context)
        state, metrics = step(state, batch)
        pending.append(metrics)
        if not any(settings.due(i, every) for every in periods):
            continue
        history.add(pending, started)
        pending.clear()
        if settings.due(i, settings.eval_every):
            history.val_at.append(i)
            history.val_loss.append(float(evaluate(state.params, held_out)))
            jaxmp.check_progress(state, history.loss[-1])
        if checkpoints and settings.due(i, settings.checkpoint_every):
            checkpoints.save(i, state, dataclasses.asdict(history))
        report(i, history.describe())
        started = time.perf_counter()
    return state, history


# ------------------------------------------------------------------------------------- results


def summarize(state: jaxmp.TrainState, history: History) -> dict[str, Any]:
    """The summary of a finished run, ready for JSON."""
    return {
        "train_loss": float(np.mean(history.loss[-50:])),
        "val_loss": history.val_loss[-1],
        "params": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "steps_per_second": history.timed_steps / history.seconds if history.seconds else None,
        "bytes_per_param": bytes_per_param(state),
        "skipped": int(state.opt_state.skipped),
        "loss_scale": float(state.loss_scale.scale),
        "sha256": digest(state),
        "history": dataclasses.asdict(history),
    }


def bytes_per_param(state: jaxmp.TrainState) -> dict[str, float]:
    """The size of each part of the state, divided by the number of params."""
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    parts = {
        "params": state.params,
        "masters": state.opt_state.master,
        "moments": state.opt_state.inner,
        "total": state,
    }
    return {k: sum(x.nbytes for x in jax.tree.leaves(part)) / count for k, part in parts.items()}


def digest(state: jaxmp.TrainState) -> str:
    """A hash of every byte of the state, to compare two runs."""
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        hashed.update(np.asarray(leaf).tobytes())
    return hashed.hexdigest()


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Trains with every policy, and returns the contents of `results.json`."""
    settings = parse_args(argv)
    corpus = Corpus.load()
    settings.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    earlier = Earlier.find(settings.out)
    if earlier:
        line = earlier.describe(resume=settings.resume)
        console.print(line, soft_wrap=True, highlight=False)
    results = {}
    with show_progress(console, settings.steps, settings.eval_every) as add_run:
        for name in settings.policies:
            report = add_run(name)
            if settings.audit:
                console.print(f"Audit of a train step with {name}:", style="bold")
                console.print(audit(name, settings, corpus))
            results[name] = summarize(*train(name, settings, corpus, report))
    (settings.out / "results.json").write_text(json.dumps(results, indent=1))
    conclude(results, earlier, settings, console)
    return results


def conclude(
    results: dict[str, dict[str, Any]],
    earlier: Earlier | None,
    settings: Settings,
    console: Console,
) -> None:
    """Prints the results, earlier results, and where they are."""
    console.print(make_table(results))
    lines = [earlier.losses()] if earlier else []
    lines += ["Losses and skips vary a little between machines and versions, speeds between runs."]
    lines += [f"Numbers: {settings.out / 'results.json'}"]
    if settings.plot:
        draw(results, settings.out / "loss.png")
        lines += [f"Picture: {settings.out / 'loss.png'}"]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
