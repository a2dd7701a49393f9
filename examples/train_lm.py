"""Trains a small GPT in float32, bfloat16 and float16, and shows that all three learn the same.

    python examples/train_lm.py --out runs/demo

A character-level transformer of about a million params learns the language reference that ships
with Python, once for each policy, from the same init and the same batches. The float16 run has an
impatient loss scale: it doubles every few dozen steps, so that gradients overflow for real, the
step is skipped, and the scale backs off. `--out` receives `results.json`, `loss.png` and the
checkpoints. An interrupted run, whatever interrupted it, goes on with `--resume` and ends with the
same bits as one that was left alone (on a GPU, under XLA_FLAGS=--xla_gpu_deterministic_ops=true).
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
from pydoc_data.topics import topics
from typing import Annotated, Any, get_type_hints

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

import jaxmp

# How many steps are dispatched before the host waits for their metrics.
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
    steps: Annotated[int, "iterations for each policy, skipped ones included"] = 600
    batch_size: Annotated[int, "sequences in a batch"] = 16
    context: Annotated[int, "characters in a sequence"] = 64
    layers: Annotated[int, "transformer blocks"] = 5
    width: Annotated[int, "size of the residual stream"] = 128
    heads: Annotated[int, "attention heads"] = 4
    lr: Annotated[float, "peak learning rate"] = 3e-3
    growth_interval: Annotated[int, "finite steps until a float16 loss scale doubles"] = 40
    seed: Annotated[int, "seed of init and data order"] = 0
    eval_every: Annotated[int, "iterations between validations"] = 50
    checkpoint_every: Annotated[int, "iterations between checkpoints; 0 for none"] = 100
    resume: Annotated[bool, "go on from the checkpoints in --out instead of replacing them"] = False
    plot: Annotated[bool, "draw the plot"] = True

    def due(self, iteration: int, every: int) -> bool:
        """Whether something that happens every so often (0: never), and at the end, happens now."""
        return iteration == self.steps or (every > 0 and iteration % every == 0)

    def recipe(self) -> dict[str, Any]:
        """The settings on which the trained bits depend: those a resumed run must share."""
        free = {"out", "policies", "eval_every", "checkpoint_every", "resume", "plot"}
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


# ---------------------------------------------------------------------------------------- data


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as numbers, the last tenth of it held out."""

    train: np.ndarray
    valid: np.ndarray
    vocab_size: int
    digest: str

    @classmethod
    def load(cls) -> "Corpus":
        """Python's own manual, character by character; its text depends on the Python version.

        The last tenth, mostly code and tables of methods, is easier than the rest: a validation
        loss below the train loss is no mistake.
        """
        text = "".join(topics[name] for name in sorted(topics))
        index = {char: i for i, char in enumerate(sorted(set(text)))}
        tokens = np.array([index[char] for char in text], np.int32)
        split = len(tokens) * 9 // 10
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(tokens[:split], tokens[split:], len(index), digest)

    def batch(self, settings: Settings, iteration: int) -> np.ndarray:
        """Random windows, a pure function of seed and iteration.

        Not of `state.step`, which stands still when a step is skipped: the same batch would come
        again, and a resumed run could not tell where in the data it was.
        """
        rng = np.random.default_rng((settings.seed, iteration))
        starts = rng.integers(len(self.train) - settings.context, size=settings.batch_size)
        return self.train[starts[:, None] + np.arange(settings.context + 1)]  # (B, T + 1)

    def validation(self, settings: Settings) -> np.ndarray:
        """Windows spread evenly over the held-out text, always the same."""
        last = len(self.valid) - settings.context - 1
        starts = np.linspace(0, last, VALIDATION_WINDOWS).astype(int)
        return self.valid[starts[:, None] + np.arange(settings.context + 1)]  # (N, T + 1)


# --------------------------------------------------------------------------------------- model


class Block(nnx.Module):
    """Causal attention and a two-layer network, each after a norm and around a residual."""

    def __init__(self, settings: Settings, policy: jaxmp.Policy, rngs: nnx.Rngs) -> None:
        width, self.heads = settings.width, settings.heads

        def linear(size_in: int, size_out: int) -> nnx.Linear:
            return nnx.Linear(size_in, size_out, dtype=policy.compute_dtype, rngs=rngs)

        self.attention_norm = _norm(width, rngs)
        self.query_key_value = linear(width, 3 * width)
        self.attention_out = linear(width, width)
        self.mlp_norm = _norm(width, rngs)
        self.mlp_in = linear(width, 4 * width)
        self.mlp_out = linear(4 * width, width)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.attention_norm(x))  # (B, T, D)
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x))))  # (B, T, D)

    def attention(self, x: Array) -> Array:
        """Each position looks at itself and those before it."""
        b, t, d = x.shape
        size = d // self.heads
        qkv = self.query_key_value(x).reshape(b, t, 3, self.heads, size)
        q, k, v = (qkv[:, :, i] for i in range(3))  # (B, T, H, D / H) each
        # Scaled before the product, not after it: float16 scores then stay far from 65504.
        q = q * jnp.asarray(1 / math.sqrt(size), q.dtype)
        # A softmax sums exponentials over all positions: float32, as in every mixed precision.
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)  # (B, H, T, T)
        past = jnp.tril(jnp.ones((1, 1, t, t), bool))
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf)).astype(v.dtype)
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v)  # (B, T, H, D / H)
        return self.attention_out(mixed.reshape(b, t, d))


class GPT(nnx.Module):
    """A decoder-only transformer over characters.

    Params are initialised in float32 under every policy, so that all start from the same values:
    `TrainState.create` makes the live params in `policy.param_dtype` and keeps these as masters.
    """

    def __init__(self, settings: Settings, policy: jaxmp.Policy, vocab_size: int) -> None:
        rngs = nnx.Rngs(settings.seed)
        width, dtype = settings.width, policy.compute_dtype
        self.tokens = nnx.Embed(vocab_size, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(settings.context, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(settings, policy, rngs) for _ in range(settings.layers)])
        self.norm = _norm(width, rngs)
        # Logits decide the loss, and a bfloat16 logit between 16 and 32 is off by up to 0.06.
        self.head = nnx.Linear(width, vocab_size, dtype=jnp.float32, rngs=rngs)

    def __call__(self, ids: Array) -> Array:
        positions = jnp.arange(ids.shape[1])[None]  # (1, T)
        x = self.tokens(ids) + self.positions(positions)  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (B, T, V)


def _norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # A variance is a sum of squares: it overflows in float16 and loses its digits in bfloat16.
    return nnx.LayerNorm(width, dtype=jnp.float32, rngs=rngs)


def make_loss(graphdef: Any) -> Callable[[Any, Array], Array]:
    """The mean cross entropy of the next character, as a function of plain params."""

    def loss_fn(params: Any, tokens: Array) -> Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])  # (B, T, V)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


def make_optimizer(settings: Settings, policy: jaxmp.Policy) -> jaxmp.MixedPrecision:
    """AdamW with clipping, inside the wrapper: both see unscaled float32 gradients only."""
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
    """What plot and table tell of the past: lists and numbers, so that JSON holds it exactly."""

    loss: list[float] = dataclasses.field(default_factory=list)
    loss_scale: list[float] = dataclasses.field(default_factory=list)
    skipped_at: list[int] = dataclasses.field(default_factory=list)
    val_at: list[int] = dataclasses.field(default_factory=list)
    val_loss: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    timed_steps: int = 0

    def add(self, metrics: Sequence[dict[str, Any]], started: float | None) -> None:
        """Appends the metrics of some steps; the one place where the host waits for the device.

        Args:
          metrics: what the steps returned.
          started: when the first of them was dispatched, or None not to time them.
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


class Checkpoints:
    """State and history of one policy on disk, under the number of the iteration.

    Orbax writes to a temporary folder and renames it when all is there, so a process that is
    killed in the middle of a save leaves the checkpoint before it as the latest.
    """

    def __init__(self, name: str, settings: Settings, corpus: Corpus) -> None:
        self.recipe = settings.recipe() | {"corpus": corpus.digest}
        self.folder = settings.out / "checkpoints" / name
        if not settings.resume:
            shutil.rmtree(self.folder, ignore_errors=True)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(2),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
        )
        self.manager = ocp.CheckpointManager(self.folder.resolve(), options=options)

    def save(self, iteration: int, state: jaxmp.TrainState, history: History) -> None:
        """Writes everything that the iterations after this one depend on."""
        record = {"recipe": self.recipe, "history": dataclasses.asdict(history)}
        items = {"state": ocp.args.StandardSave(state), "record": ocp.args.JsonSave(record)}
        self.manager.save(iteration, args=ocp.args.Composite(**items))

    def restore(self, state: jaxmp.TrainState) -> tuple[jaxmp.TrainState, History]:
        """The latest checkpoint in the layout of `state`; `state` itself if there is none."""
        iteration = self.manager.latest_step()
        if iteration is None:
            return state, History()
        items = {"state": ocp.args.StandardRestore(state), "record": ocp.args.JsonRestore()}
        found = self.manager.restore(iteration, args=ocp.args.Composite(**items))
        then = found.record["recipe"]
        if changed := [key for key, value in self.recipe.items() if then.get(key) != value]:
            raise SystemExit(
                f"cannot resume {self.folder}: it was made with other settings: "
                + ", ".join(f"{key} {then.get(key)}, not {self.recipe[key]}" for key in changed)
            )
        return found.state, History(**found.record["history"])


def train(
    name: str, settings: Settings, corpus: Corpus, report: Callable[[int, str], None]
) -> tuple[jaxmp.TrainState, History]:
    """Trains with one policy, from the start or from where its checkpoints end."""
    policy = jaxmp.get_policy(name)
    graphdef, params = nnx.split(GPT(settings, policy, corpus.vocab_size), nnx.Param)
    loss_fn = make_loss(graphdef)
    state = jaxmp.TrainState.create(params=params, tx=make_optimizer(settings, policy))
    history, checkpoints = History(), None
    if settings.checkpoint_every:
        checkpoints = Checkpoints(name, settings, corpus)
        state, history = checkpoints.restore(state)
    if history.loss:
        report(len(history.loss), history.describe())
    return _iterate(state, history, loss_fn, settings, corpus, checkpoints, report)


def _iterate(
    state: jaxmp.TrainState,
    history: History,
    loss_fn: Callable[[Any, Array], Array],
    settings: Settings,
    corpus: Corpus,
    checkpoints: Checkpoints | None,
    report: Callable[[int, str], None],
) -> tuple[jaxmp.TrainState, History]:
    # No policy here: the layers of this model cast by themselves.
    step = jaxmp.make_train_step(loss_fn)
    evaluate = jax.jit(loss_fn)
    periods = (FETCH_EVERY, settings.eval_every, settings.checkpoint_every)
    pending: list[dict[str, Any]] = []
    started: float | None = None  # the first steps of a process compile, and are not timed
    for i in range(len(history.loss) + 1, settings.steps + 1):
        state, metrics = step(state, corpus.batch(settings, i))
        pending.append(metrics)
        if not any(settings.due(i, every) for every in periods):
            continue
        history.add(pending, started)
        pending.clear()
        if settings.due(i, settings.eval_every):
            history.val_at.append(i)
            history.val_loss.append(float(evaluate(state.params, corpus.validation(settings))))
            jaxmp.check_progress(state, history.loss[-1])
        if checkpoints and settings.due(i, settings.checkpoint_every):
            checkpoints.save(i, state, history)
        report(i, history.describe())
        started = time.perf_counter()
    return state, history


# ------------------------------------------------------------------------------------- results


def summarize(state: jaxmp.TrainState, history: History) -> dict[str, Any]:
    """What is worth knowing about a finished run, ready for JSON."""
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
    """A hash of every byte of the state: two runs are the same only if this is."""
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        hashed.update(np.asarray(leaf).tobytes())
    return hashed.hexdigest()


def make_table(results: dict[str, dict[str, Any]]) -> Table:
    """The results side by side, one policy in a row."""
    count = next(iter(results.values()))["params"]
    title = f"{count:,} params, same init, same batches"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    state_parts = "bytes per param:\nparams + masters\n+ moments = all"
    headings = ("train\nloss", "val\nloss", "steps\nper s", state_parts, "skipped", "loss\nscale")
    for heading in headings:
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for name, run in results.items():
        speed, size = run["steps_per_second"], run["bytes_per_param"]
        table.add_row(
            name,
            f"{run['train_loss']:.4f}",
            f"{run['val_loss']:.4f}",
            f"{speed:.2f}" if speed else "-",
            "{params:.3g} + {masters:.3g} + {moments:.3g} = {total:.3g}".format(**size),
            str(run["skipped"]),
            f"2^{math.log2(run['loss_scale']):g}",
        )
    return table


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws the loss curves, the loss scales with the skipped steps, and the gaps in loss."""
    colors = ["#9a9a9a", "#0072b2", "#d55e00", "#009e73", "#cc79a7"]
    first = next(iter(results))
    with matplotlib.rc_context({"font.size": 13, "axes.titlesize": 14}):
        figure = Figure(figsize=(16, 6), layout="constrained")
        axes: dict[str, Axes] = figure.subplot_mosaic([["loss", "scale"], ["loss", "gap"]])
        for i, (name, run) in enumerate(results.items()):
            color = colors[i % len(colors)]
            # The first policy is a broad line in the background, on which the others are to lie.
            _draw_loss(axes["loss"], name, run, color, width=1.8 if i else 7.0)
            _draw_scale(axes["scale"], name, run, color)
            _draw_gap(axes["gap"], run, results[first], color, width=2.0 if i else 5.0)
        _annotate(axes, first)
        figure.savefig(path, dpi=100)


def _annotate(axes: dict[str, Axes], first: str) -> None:
    axes["loss"].set(xlabel="iteration", ylabel="cross entropy (nats per character)")
    axes["loss"].set_title("Loss: train (lines, smoothed) and validation (dots)")
    axes["loss"].legend(title="last validation loss", frameon=False)
    axes["scale"].set_title("Loss scale, where it is not 1")
    axes["scale"].set_yscale("log", base=2)
    if axes["scale"].has_data():
        axes["scale"].legend(loc="lower right", ncols=2)
    axes["gap"].set(xlabel="iteration", ylabel="%")
    axes["gap"].set_title(f"Validation loss, difference from {first}")
    axes["gap"].axhspan(-1, 1, color="#f2f2f2")
    for panel in axes.values():
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlim(left=0)


def _draw_loss(axes: Axes, name: str, run: dict[str, Any], color: str, width: float) -> None:
    history = run["history"]
    smooth = _smoothed(history["loss"])
    axes.plot(range(1, len(smooth) + 1), smooth, color=color, linewidth=width)
    label = f"{name}  {run['val_loss']:.4f}"
    axes.plot(history["val_at"], history["val_loss"], "o", color=color, ms=3 + width, label=label)


def _smoothed(values: Sequence[float], decay: float = 0.95) -> list[float]:
    """An exponential moving average that does not start from zero."""
    total, weight, out = 0.0, 0.0, []
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        out.append(total / weight)
    return out


def _draw_scale(axes: Axes, name: str, run: dict[str, Any], color: str) -> None:
    scales, skipped_at = run["history"]["loss_scale"], run["history"]["skipped_at"]
    if all(scale == 1.0 for scale in scales):
        return
    axes.step(range(1, len(scales) + 1), scales, where="post", color=color, lw=2, label=name)
    label = f"overflow: step skipped ({len(skipped_at)})"
    axes.plot(skipped_at, [scales[i - 1] for i in skipped_at], "kx", ms=8, mew=2, label=label)


def _draw_gap(
    axes: Axes, run: dict[str, Any], reference: dict[str, Any], color: str, width: float
) -> None:
    ours, theirs = (np.array(r["history"]["val_loss"]) for r in (run, reference))
    axes.plot(run["history"]["val_at"], 100 * (ours / theirs - 1), "o-", color=color, lw=width)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Trains with every policy, and returns what `results.json` then holds."""
    settings = parse_args(argv)
    corpus = Corpus.load()
    settings.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[info]}"),
    )
    results = {}
    with Progress(*columns, console=console) as progress:
        for name in settings.policies:
            task = progress.add_task(name, total=settings.steps, info="compiling")

            def report(iteration: int, info: str, task: TaskID = task) -> None:
                progress.update(task, completed=iteration, info=info)

            results[name] = summarize(*train(name, settings, corpus, report))
    console.print(make_table(results))
    (settings.out / "results.json").write_text(json.dumps(results, indent=1))
    if settings.plot:
        draw(results, settings.out / "loss.png")
    return results


if __name__ == "__main__":
    main()
