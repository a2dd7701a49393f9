"""A whole train step: donated, compiled as users compile it, with an overflow in the middle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from tests.support.bits import tree_bits
from tests.support.references import dynamic_scale_trace

pytestmark = [pytest.mark.device, pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]

CONFIG = jaxmp.DynamicLossScale(init_scale=2.0**12, growth_interval=2)
# Activations of 1e5 are beyond float16, and within float32.
FACTORS = [1.0, 1.0, 1e5, 1.0]
OVERFLOWS = [False, False, True, False]


def loss_fn(params: Any, batch: Any, stats: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["w1"]) * batch["factor"]
    error = (hidden @ params["w2"]).astype(jnp.float32) - batch["y"]
    return jnp.mean(error**2), {"stats": 0.9 * stats + 0.1 * jnp.mean(hidden)}


def batches() -> Any:
    random = np.random.default_rng(0)
    for factor in FACTORS:
        x, y = (random.normal(size=(32, size)).astype(np.float32) for size in (64, 16))
        yield {"x": x, "y": y, "factor": np.float32(factor)}


def run(policy: str, **options: Any) -> Any:
    """The metrics of each step, the scale after it, and whether it changed any bit."""
    random = np.random.default_rng(1)
    shapes = {"w1": (64, 64), "w2": (64, 16)}
    params = {k: random.normal(size=s).astype(np.float32) / 8 for k, s in shapes.items()}
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), policy, loss_scale=CONFIG, **options)
    state = jaxmp.TrainState.create(params=params, tx=tx, stats=jnp.float32(0))
    step = jaxmp.make_train_step(loss_fn, policy)
    rows = []
    for batch in batches():
        old = state
        before = tree_bits((old.step, old.params, old.opt_state.inner, old.stats))
        state, metrics = step(state, batch)
        after = tree_bits((state.step, state.params, state.opt_state.inner, state.stats))
        assert old.params["w1"].is_deleted()
        rows.append((jax.device_get(metrics), float(state.loss_scale.scale), before != after))
    return rows, state


@pytest.mark.parametrize("skip", ["auto", "cond"])
def test_an_overflow_in_a_donated_step(skip: Any) -> None:
    """The step with the overflow leaves every bit, in buffers that the next state takes over.

    The scale moves as the reference says, and the steps around it are taken. Each skip is another
    program on a GPU: a choice, or a loop of at most one iteration.
    """
    rows, state = run("mixed_float16", skip=skip)
    options = {key: getattr(CONFIG, key) for key in (
        "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale",
        "hysteresis", "consecutive_hysteresis",
    )}  # fmt: skip
    want = dynamic_scale_trace(OVERFLOWS, scale=CONFIG.init_scale, **options)
    assert [scale for _, scale, _ in rows] == [scale for scale, _, _ in want]
    assert [changed for _, _, changed in rows] == [not x for x in OVERFLOWS]
    assert [not metrics["grads_finite"] for metrics, _, _ in rows] == OVERFLOWS
    assert int(state.opt_state.skipped) == 1
    assert int(state.step) == 3
    assert jaxmp.numbers.all_finite((state.params, state.opt_state.inner, state.stats))


def test_the_same_step_in_float32_has_no_overflow() -> None:
    """Positive control: it was float16 that overflowed, on this device too."""
    rows, state = run("float32")
    assert [changed for _, _, changed in rows] == [True] * 4
    assert int(state.opt_state.skipped) == 0
