"""Handwritten digits with a small residual CNN, in float32, bfloat16 and float16.

    python examples/digits_cnn.py --summary

The network is plain Flax: convolutions, BatchNorm, a dense head, and no dtype anywhere. One call
puts it under rules. All precisions start from the same params and see the same batches. The
float16 run starts with a loss scale far too high, so its first steps overflow and are skipped:
params, optimizer and batch statistics do not change, and the scale is halved. The 1797 images of
8 x 8 pixels come with scikit-learn. Arrays are named by their axes: B images of H x W pixels,
C channels.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import jaxmp

BATCH_SIZE = 64
LEARNING_RATE = 4e-3
# At the default of 2**16 nothing would overflow: the gradients of so small a network are small.
FLOAT16_SCALE = jaxmp.DynamicLossScale(init_scale=2.0**24)


class Digits(NamedTuple):
    """Images from 0 to 1, (N, H, W, 1), with their labels; a fifth is held out."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    @classmethod
    def load(cls) -> "Digits":
        """The digits in one shuffled order, whatever the seed: all runs share the test images."""
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        x = (images[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
        y = labels[order].astype(np.int32)
        split = len(y) * 4 // 5
        return cls((x[:split], y[:split]), (x[split:], y[split:]))

    def batch(self, seed: int, iteration: int) -> tuple[np.ndarray, np.ndarray]:
        """Random images and their labels, a pure function of seed and iteration."""
        images, labels = self.train
        chosen = np.random.default_rng((seed, iteration)).integers(len(labels), size=BATCH_SIZE)
        return images[chosen], labels[chosen]


class Net(nn.Module):
    """A convolution, a residual block at half the resolution, and a dense head."""

    width: int = 32

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), use_bias=False)
        # The statistics of about the last ten batches: those of the first steps are soon outdated.
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        # Not relu: jaxlib 0.12.0 for CPUs miscompiles two of them before a sum in bfloat16.
        x = nn.silu(norm()(conv(self.width // 2)(x)))  # (B, 8, 8, C / 2)
        x = nn.silu(norm()(conv(self.width, strides=2)(x)))  # (B, 4, 4, C)
        x = nn.silu(x + norm()(conv(self.width)(x)))  # (B, 4, 4, C)
        return nn.Dense(10)(x.mean(axis=(1, 2)))  # (B, 10)


class Run(NamedTuple):
    """The run in one precision.

    Attributes:
      before: the share of test images that the untrained network gets right.
      accuracy: the share that the trained network gets right.
      loss: the loss of each step, skipped ones included.
      loss_scale: the loss scale of each step.
      skipped: the number of steps that overflowed and were skipped.
      steps: the number of steps taken.
      seconds: the time of the run, compilation included.
    """

    before: float
    accuracy: float
    loss: list[float]
    loss_scale: list[float]
    skipped: int
    steps: int
    seconds: float


def precision_rules(precision: str) -> jaxmp.PolicyRules:
    """Everything under one policy, except for norms in float32."""
    policy = jaxmp.get_policy(precision)
    # The backward pass keeps the results of norms: in the compute dtype they take half the bytes.
    return jaxmp.rules.keep_norms_float32(policy, output_dtype=policy.compute_dtype)


def make_model(rules: jaxmp.PolicyRules) -> Net:
    """The network under rules."""
    return jaxmp.linen.apply_policy(Net(), rules)


def make_loss(model: Net) -> Callable[..., Any]:
    """The mean cross entropy, and the new batch statistics."""

    def loss_fn(params: Any, batch: Any, batch_stats: Any) -> Any:
        images, labels = batch
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = model.apply(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, {"batch_stats": new["batch_stats"]}

    return loss_fn


def make_optimizer(rules: jaxmp.PolicyRules, steps: int) -> jaxmp.MixedPrecision:
    """AdamW with a decaying learning rate, inside the wrapper."""
    inner = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, steps))
    tx = jaxmp.mixed_precision(inner, rules)
    if isinstance(tx.loss_scale, jaxmp.NoLossScale):  # only float16 needs one
        return tx
    return jaxmp.mixed_precision(inner, rules, loss_scale=FLOAT16_SCALE)


def make_state(model: Net, rules: jaxmp.PolicyRules, *, steps: int, seed: int) -> jaxmp.TrainState:
    """The state before the first of `steps` steps."""
    init = jax.jit(functools.partial(model.init, train=False))  # op by op it takes seconds
    variables = init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)))
    return jaxmp.TrainState.create(
        params=variables["params"],
        tx=make_optimizer(rules, steps),
        batch_stats=variables["batch_stats"],
    )


def train(precision: str, digits: Digits, *, steps: int, seed: int) -> Run:
    """Trains and tests in one precision."""
    started = time.perf_counter()
    rules = precision_rules(precision)
    model = make_model(rules)
    state = make_state(model, rules, steps=steps, seed=seed)
    step = jaxmp.make_train_step(make_loss(model), "none")  # the model casts by itself
    predict = jax.jit(functools.partial(model.apply, train=False))

    def test(state: jaxmp.TrainState) -> float:
        images, labels = digits.test
        logits = predict({"params": state.params, "batch_stats": state.batch_stats}, images)
        return float(np.mean(np.argmax(logits, axis=-1) == labels))

    before, pending = test(state), []
    for i in range(steps):
        state, metrics = step(state, digits.batch(seed, i))
        pending.append(metrics)
    jaxmp.check_progress(state, metrics["loss"])
    return Run(
        before=before,
        accuracy=test(state),
        loss=[float(metrics["loss"]) for metrics in pending],
        loss_scale=[float(metrics["loss_scale"]) for metrics in pending],
        skipped=int(state.opt_state.skipped),
        steps=int(state.step),
        seconds=time.perf_counter() - started,
    )


def make_table(runs: dict[str, Run]) -> Table:
    """The results of all runs, one in each row."""
    table = Table(
        title="Digits: the same init, the same batches", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("precision", no_wrap=True)
    for heading in ("test\naccuracy", "train\nloss", "steps", "skipped", "loss\nscale", "time"):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for precision, run in runs.items():
        first, last = (f"2^{math.log2(run.loss_scale[i]):g}" for i in (0, -1))
        table.add_row(
            precision,
            f"{run.accuracy:.2%}",
            f"{np.mean(run.loss[-20:]):.4f}",
            str(run.steps),
            str(run.skipped),
            last if first == last else f"{first} to {last}",
            f"{run.seconds:.1f} s",
        )
    return table


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    """Trains in every precision, prints a table, and returns its contents."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    precisions = ["float32", "mixed_bfloat16", "mixed_float16"]
    parser.add_argument("--precisions", nargs="+", default=precisions, help="policies, one by one")
    parser.add_argument("--steps", type=int, default=300, help="skipped ones included")
    parser.add_argument("--seed", type=int, default=0, help="seed of init and data order")
    parser.add_argument("--summary", action="store_true", help="which layer has which dtype")
    args = parser.parse_args(argv)
    digits, console = Digits.load(), Console()
    if args.summary:
        model = make_model(precision_rules(args.precisions[-1]))
        print(jaxmp.linen.summary(model, jax.random.key(0), digits.train[0][:1], train=False))
    runs = {
        precision: train(precision, digits, steps=args.steps, seed=args.seed)
        for precision in args.precisions
    }
    console.print(make_table(runs))
    return runs


if __name__ == "__main__":
    main()
