"""A step compiles once, whatever happens to the scale."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]


@pytest.mark.parametrize("skip", ["auto", "cond", "select"])
@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_one_trace_over_finite_overflowing_growing_and_floor_steps(skip: Any, policy: str) -> None:
    traces = []

    def loss_fn(params: Any, batch: Any) -> Any:
        traces.append(1)
        return jnp.mean(params["w"].astype(jnp.float32) * batch)

    config = jaxmp.DynamicLossScale(
        init_scale=4.0, growth_interval=2, min_scale=2.0, max_scale=16.0, hysteresis=2
    )
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy, loss_scale=config, skip=skip)
    state = jaxmp.TrainState.create(params={"w": np.ones(3, np.float32)}, tx=tx)
    step = jaxmp.make_train_step(loss_fn)
    scales = []
    for value in [1, 1, 1, 1, 1, 1, np.inf, np.inf, np.inf, np.inf, np.inf, 1, np.nan, 1]:
        state, metrics = step(state, np.float32(value))
        jaxmp.check_progress(state, metrics["loss"])
        scales.append(float(state.loss_scale.scale))
    assert scales == [4, 8, 8, 16, 16, 16, 16, 8, 4, 2, 2, 2, 2, 2]
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_the_count_sees_a_weakly_typed_state() -> None:
    """Positive control: Python scalars in a state, as flax's DynamicScale has, trace twice."""
    traces = []

    @jax.jit
    def step(scale: Any) -> Any:
        traces.append(1)
        return jnp.where(scale > 1, scale * 2.0, jnp.float32(1.0))

    step(step(65536.0))
    assert len(traces) == 2
