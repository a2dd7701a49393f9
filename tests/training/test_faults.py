"""Fault injection: 2,000 steps with inf and NaN put anywhere at random; on devices 60."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from tests.support.bits import tree_bits

STEPS = 2000
BAD = (np.inf, -np.inf, np.nan)
WHERE = ("grads", "loss", "loss_factor", "x", "y")


def loss_fn(params: Any, batch: Any, stats: Any) -> Any:
    x = batch["x"].astype(params["w1"].dtype)
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    error = (hidden @ params["w2"]).astype(jnp.float32) - batch["y"]
    loss = jnp.mean(error**2) * batch["loss_factor"] + batch["loss"]
    mean = 0.9 * stats["mean"] + 0.1 * jnp.mean(batch["x"], axis=0)
    return loss, {"mean": mean, "count": stats["count"] + 1}


def make_step() -> Any:
    @jax.jit
    def step(state: jaxmp.TrainState, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return loss_fn(params, batch, state.stats)

        (value, stats), grads = jaxmp.value_and_grad(
            loss, has_aux=True, loss_scale=state.loss_scale
        )(state.params)
        grads = {name: g + batch["grads"] for name, g in grads.items()}
        return state.apply_gradients(
            grads, finite=jaxmp.numbers.all_finite((value, grads, stats)), stats=stats
        ), value

    return step


def new_state(policy: str, config: Any, skip: Any) -> jaxmp.TrainState:
    inner = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-2, STEPS)),
    )
    tx = jaxmp.mixed_precision(inner, policy, loss_scale=config, skip=skip)
    random = np.random.default_rng(1)
    shapes = {"w1": (4, 8), "b1": (8,), "w2": (8, 2)}
    params = {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    stats = {"mean": np.zeros(4, np.float32), "count": np.int32(0)}
    params, stats = jax.device_put((params, stats))
    return jaxmp.TrainState.create(params=params, tx=tx, stats=stats)


def batches(steps: int) -> Any:
    """(clean batch, the same batch with a fault or without, whether the fault must be seen)."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        clean = {
            "x": rng.normal(size=(8, 4)).astype(np.float32),
            "y": rng.normal(size=(8, 2)).astype(np.float32),
            "grads": np.float32(0),
            "loss": np.float32(0),
            "loss_factor": np.float32(1),
        }
        faulty, where = dict(clean), None
        if rng.random() < 0.3:
            where = WHERE[rng.integers(len(WHERE))]
            value = np.array(clean[where])
            value.reshape(-1)[rng.integers(value.size)] = BAD[rng.integers(len(BAD))]
            faulty[where] = value
        yield clean, faulty, where


def frozen(state: jaxmp.TrainState) -> Any:
    """Everything that a skip must keep."""
    return state.step, state.params, state.opt_state.master, state.opt_state.inner, state.stats


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("steps", [pytest.param(STEPS, marks=pytest.mark.slow),
                                   pytest.param(60, marks=pytest.mark.device)])  # fmt: skip
@pytest.mark.parametrize(
    ("policy", "config", "skip"),
    [
        # Powers of two change no bit of a bfloat16 gradient; a float16 one may underflow, so
        # there the scale must stay for the two runs to be equal.
        ("bfloat16", jaxmp.DynamicLossScale(growth_interval=5, hysteresis=2), "auto"),
        ("mixed_bfloat16", jaxmp.DynamicLossScale(growth_interval=5), "select"),
        ("float16", jaxmp.StaticLossScale(2.0**7), "cond"),
    ],
)
def test_faults_leave_no_trace(policy: str, config: Any, skip: Any, steps: int) -> None:
    step = make_step()
    state, clean_state = new_state(policy, config, skip), new_state(policy, config, skip)
    seen: dict[str | None, set[bool]] = {where: set() for where in (*WHERE, None)}
    for t, (clean, faulty, where) in enumerate(batches(steps)):
        before = tree_bits(frozen(state))
        state, _ = step(state, faulty)
        skipped = not state.opt_state.grads_finite
        seen[where].add(skipped)
        if skipped:
            assert tree_bits(frozen(state)) == before, (t, where)
        else:
            clean_state, _ = step(clean_state, clean)
            assert tree_bits(frozen(state)) == tree_bits(frozen(clean_state)), (t, where)
    assert seen == {where: {where is not None} for where in (*WHERE, None)}
    assert int(state.opt_state.skipped) == steps - int(state.step)
    assert int(clean_state.opt_state.skipped) == 0
    assert jaxmp.numbers.all_finite(frozen(state))


@pytest.mark.usefixtures("standard_promotion")
def test_faults_poison_plain_optax() -> None:
    """Positive control: the same faults without the wrapper."""
    tx = optax.apply_if_finite(optax.adamw(1e-2), 3)
    state = new_state("float32", jaxmp.NoLossScale(), "cond")
    params, stats, opt_state = state.params, state.stats, tx.init(state.params)

    @jax.jit
    def step(params: Any, stats: Any, opt_state: Any, batch: Any) -> Any:
        (_, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, stats)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state

    for _, faulty, _ in batches(300):
        params, stats, opt_state = step(params, stats, opt_state, faulty)
    assert not jaxmp.numbers.all_finite(stats)
