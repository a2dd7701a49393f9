"""A float32 training script, and the same script in mixed float16: three lines differ.

    python examples/three_lines.py

`train_float32` is plain Flax and optax. `train_mixed` is its copy with three lines changed: the
dtype of the layers, the optimizer in a wrapper, and the gradient of a scaled loss (plus the import
of jaxmp). `main` runs both and prints the difference between their sources.
"""

import difflib
import inspect
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jaxmp


class Classifier(nn.Module):
    """Three dense layers; the hidden ones compute in `dtype`, the logits are always float32."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(2):
            x = nn.tanh(nn.Dense(64, dtype=self.dtype)(x))  # (N, 64)
        return nn.Dense(3, dtype=jnp.float32)(x)  # (N, 3)


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
    x, label = spirals()
    model = Classifier(dtype=jnp.float32)
    tx = optax.adam(1e-2)
    params = model.init(jax.random.key(0), x)
    opt_state = tx.init(params)

    def loss_fn(params: Any) -> Array:
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    return losses


def train_mixed(steps: int) -> list[float]:
    """Trains and returns the loss of each step."""
    x, label = spirals()
    model = Classifier(dtype=jnp.float16)
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_float16")
    params = model.init(jax.random.key(0), x)
    opt_state = tx.init(params)

    def loss_fn(params: Any) -> Array:
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        loss, grads = jaxmp.value_and_grad(loss_fn, loss_scale=opt_state.loss_scale)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
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
