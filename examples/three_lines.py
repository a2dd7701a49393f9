"""A float32 training script, and the same script in mixed float16: three lines differ.

    python examples/three_lines.py

`train_float32` is plain Flax nnx and optax. `train_mixed` is its copy with three lines changed: the
optimizer in a wrapper that knows the policy, the nnx optimizer around it, and the train step (plus
the import of jaxmp). The model says nothing about dtypes. `main` runs both and prints the
difference between their sources.
"""

import difflib
import inspect
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import jaxmp


class Classifier(nnx.Module):
    """Three dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2, 64, rngs=rngs)
        self.second = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.tanh(self.second(nnx.tanh(self.first(x))))  # (N, 64)
        return self.head(x)  # (N, 3)


def loss_fn(model: Classifier, batch: tuple[Array, Array]) -> Array:
    x, label = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), label).mean()


def float32_step(model: Classifier, optimizer: nnx.Optimizer, batch: Any) -> dict[str, Array]:
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return {"loss": loss}


def spirals(points: int = 600) -> tuple[Array, Array]:
    """Three noisy spiral arms around the origin, one class each: no line separates them."""
    rng = np.random.default_rng(0)
    label = np.arange(points) % 3
    radius = rng.uniform(0.05, 1.0, points)
    angle = 5.0 * radius + 2.0 * np.pi / 3.0 * label + 0.15 * rng.standard_normal(points)
    place = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)  # (N, 2)
    return jnp.asarray(place, jnp.float32), jnp.asarray(label, jnp.int32)


def train_float32(steps: int) -> list[float]:
    """Trains and returns the loss of each step."""
    model = Classifier(nnx.Rngs(0))
    tx = optax.adam(1e-2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(float32_step)
    losses = []
    for _ in range(steps):
        metrics = step(model, optimizer, spirals())
        losses.append(float(metrics["loss"]))
    return losses


def train_mixed(steps: int) -> list[float]:
    """Trains and returns the loss of each step."""
    model = Classifier(nnx.Rngs(0))
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_float16")
    optimizer = jaxmp.nnx.Optimizer(model, tx)
    step = jaxmp.nnx.make_train_step(loss_fn)
    losses = []
    for _ in range(steps):
        metrics = step(model, optimizer, spirals())
        losses.append(float(metrics["loss"]))
    return losses


def sources() -> tuple[list[str], list[str]]:
    """The lines of the two functions, without their `def` lines."""
    before, after = map(inspect.getsource, (train_float32, train_mixed))
    return before.splitlines()[1:], after.splitlines()[1:]


class Result(NamedTuple):
    """The results of `main`.

    Attributes:
      diff: the lines of a unified diff.
      changed: the number of lines that differ.
      float32: the loss of each step in float32.
      mixed: the loss of each step in mixed float16.
    """

    diff: list[str]
    changed: int
    float32: list[float]
    mixed: list[float]


def main(steps: int = 300) -> Result:
    """Runs both, and prints how they differ in text and in loss."""
    before, after = sources()
    changed = sum(old != new for old, new in zip(before, after, strict=True))
    diff = list(difflib.unified_diff(before, after, "float32", "mixed", n=1, lineterm=""))
    result = Result(diff, changed, train_float32(steps), train_mixed(steps))
    print(*diff, "", sep="\n")
    print(f"{'step':>5} {'float32':>8} {'mixed':>8}")
    for i in sorted({*range(0, steps, max(1, steps // 5)), steps - 1}):
        print(f"{i:5} {result.float32[i]:8.4f} {result.mixed[i]:8.4f}")
    return result


if __name__ == "__main__":
    main()
