"""What the guides say is different, where the other package is installed."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import SingleDeviceSharding

import jaxmp
from jaxmp._primitives.float8_encode import float8_encode
from tests.guides.pages import GUIDES, skip_where_absent

pytestmark = [pytest.mark.every_case, pytest.mark.usefixtures("standard_promotion")]

TRANSFORMER_ENGINE = json.loads(
    (pathlib.Path(__file__).parent / "recorded" / "transformer_engine_scales.json").read_text()
)
FORMATS = {448.0: "float8_e4m3fn", 57344.0: "float8_e5m2"}
FINITE = jnp.bool_(True)


# --- jmp ------------------------------------------------------------------------------------------


def test_jmp_loses_its_floor_in_jit() -> None:
    scale = jmp.DynamicLossScale(jnp.float32(8), min_loss_scale=jnp.float32(4))
    assert jax.jit(lambda scale: scale)(scale).min_loss_scale == 1
    config = jaxmp.DynamicLossScale(init_scale=8.0, min_scale=4.0)
    state = config.init()
    for _ in range(3):
        state = jax.jit(config.adjust)(state, ~FINITE)
    assert state.scale == 4


def test_jmp_scales_a_float16_loss_in_float16() -> None:
    assert jnp.isinf(jmp.StaticLossScale(2.0**15).scale(jnp.float16(3)))
    assert jaxmp.StaticLossScale(2.0**15).init().scale_loss(jnp.float16(3)) == 3 * 2.0**15


def test_jmp_unscales_in_float16() -> None:
    grads = {"w": jnp.float16(1), "steps": jnp.int32(3)}
    found = jmp.StaticLossScale(jnp.float16(8)).unscale(grads)
    assert found["w"].dtype == jnp.float16
    assert jnp.issubdtype(found["steps"].dtype, jnp.floating)
    found = jaxmp.StaticLossScale(8.0).init().unscale(grads)
    assert found["w"].dtype == jnp.float32
    assert found["steps"].dtype == jnp.int32


def test_jmp_refuses_a_tree_of_shardings() -> None:
    sharding = SingleDeviceSharding(jax.devices()[0])
    scale = jmp.DynamicLossScale(jnp.float32(8))
    with pytest.raises((TypeError, ValueError, AttributeError, AssertionError)):
        jax.tree.map(lambda _: sharding, scale)
    state = jaxmp.DynamicLossScale().init()
    assert jax.tree.map(lambda _: sharding, state).scale == sharding


# --- Flax -----------------------------------------------------------------------------------------


def test_flax_grows_one_step_later() -> None:
    scale, loss = DynamicScale(growth_interval=3), lambda w: w * w
    step = jax.jit(lambda scale: scale.value_and_grad(loss)(jnp.float32(1))[0])
    grown = []
    for _ in range(4):
        scale = step(scale)
        grown.append(float(scale.scale))
    assert grown == [2.0**16] * 3 + [2.0**17]
    config = jaxmp.DynamicLossScale(growth_interval=4)
    state = config.init()
    for want in grown:
        state = jax.jit(config.adjust)(state, FINITE)
        assert state.scale == want


def test_flax_returns_nan_for_a_float16_loss() -> None:
    def loss_fn(w: Any) -> Any:
        return w * jnp.float16(3)

    theirs = jax.jit(lambda scale, w: scale.value_and_grad(loss_fn)(w)[2])
    loss = theirs(DynamicScale(), jnp.float16(1))
    assert np.isnan(loss)
    loss, _ = jaxmp.value_and_grad(loss_fn, loss_scale=2.0**16)(jnp.float16(1))
    assert loss == 3


def test_flax_keeps_an_infinite_scale_and_refuses_integers() -> None:
    scale = DynamicScale(scale=jnp.float32(jnp.inf))
    scale, *_ = jax.jit(scale.value_and_grad(lambda w: w * w))(jnp.float32(1))
    assert np.isinf(scale.scale)
    params = {"w": jnp.float32(1), "steps": jnp.int32(3)}
    with pytest.raises(TypeError):
        DynamicScale().value_and_grad(lambda p: p["w"] ** 2)(params)
    _, grads = jaxmp.value_and_grad(lambda p: p["w"] ** 2)(params)
    assert grads["steps"].dtype == jax.dtypes.float0


def test_moments_of_a_checkpoint_go_into_the_state() -> None:
    """What the page about Flax says of checkpoints."""
    params = {"w": jnp.asarray(np.ones(3, np.float32))}
    old = jax.jit(optax.adam(1e-3).update)(params, optax.adam(1e-3).init(params))[1]
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "mixed_float16")
    state = tx.init(params)._replace(inner=old)
    _, state = jax.jit(tx.update)(params, state, params)
    assert optax.tree.get(state, "count") == 2


# --- mpx, where it is installed -------------------------------------------------------------------


def test_mpx_returns_half_the_gradient() -> None:
    """The block under "Differences", which asserts it."""
    skip_where_absent("mixed_precision_for_JAX")
    (guide,) = (guide for guide in GUIDES if guide.name == "mpx")
    code = guide.program("Before").partition("losses, scales")[0]
    exec(code + guide.program("Differences"), {})


# --- Transformer Engine, restated -----------------------------------------------------------------


def test_current_scales_of_transformer_engine() -> None:
    compared = 0
    for case in TRANSFORMER_ENGINE["current"]:
        amax, dtype = float(case["amax"]), np.dtype(FORMATS[case["fp8_max"]])
        x = jnp.float32([amax, -amax / 2])
        scale = float(float8_encode(x, dtype, (0,), power_of_two=case["pow2"]).scale[0])
        if np.isfinite(amax) and amax >= 1e-12:
            assert scale == case["scale"], case
            compared += 1
        elif not np.isfinite(amax):
            assert case["scale"] == 1
            assert np.isnan(scale)
        else:
            assert np.isfinite(scale)
    assert compared >= 24
