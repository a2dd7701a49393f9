"""The loss-scale state machine against a ten-line reference, and its arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxmp
from tests.support.references import dynamic_scale_trace

pytestmark = pytest.mark.annotations

powers = st.integers(-20, 20).map(lambda e: 2.0**e)


@st.composite
def configs(draw: st.DrawFn) -> jaxmp.DynamicLossScale:
    low, start, high = sorted(draw(st.tuples(powers, powers, powers)))
    return jaxmp.DynamicLossScale(
        init_scale=start,
        growth_factor=draw(st.sampled_from([2.0, 4.0, 1.1, 3.0])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.9, 0.3])),
        growth_interval=draw(st.integers(1, 5)),
        min_scale=low,
        max_scale=high,
        hysteresis=draw(st.integers(1, 4)),
        consecutive_hysteresis=draw(st.booleans()),
    )


@pytest.mark.programs(70, reason="each example is a program")
@settings(max_examples=60, deadline=None)
@given(configs(), st.lists(st.booleans(), min_size=1, max_size=40))
def test_against_the_reference(config: jaxmp.DynamicLossScale, overflows: list[bool]) -> None:
    def step(state: jaxmp.LossScaleState, finite: jax.Array) -> tuple[jaxmp.LossScaleState, object]:
        state = config.adjust(state, finite)
        return state, state

    padded = np.array(overflows + [False] * (40 - len(overflows)))
    _, got = jax.jit(lambda f: jax.lax.scan(step, config.init(), f))(~padded)
    want = dynamic_scale_trace(
        overflows,
        scale=config.init_scale,
        growth_factor=config.growth_factor,
        backoff_factor=config.backoff_factor,
        growth_interval=config.growth_interval,
        min_scale=config.min_scale,
        max_scale=config.max_scale,
        hysteresis=config.hysteresis,
        consecutive_hysteresis=config.consecutive_hysteresis,
    )
    for t, (scale, count, left) in enumerate(want):
        assert (float(got.scale[t]), got.growth_count[t], got.hysteresis[t]) == (scale, count, left)


@given(
    st.floats(2.0**-100, 2.0**100, width=32),
    st.floats(1.0009765625, 100.0) | st.floats(1e-6, 0.999),
)
def test_any_factor_multiplies_as_in_double_precision(scale: float, factor: float) -> None:
    name = "growth_factor" if factor > 1 else "backoff_factor"
    config = jaxmp.DynamicLossScale(
        **{name: factor}, growth_interval=1, min_scale=2.0**-126, max_scale=3e38
    )
    state = config.init()._replace(scale=jnp.float32(scale))
    got = config.adjust(state, jnp.array(factor > 1)).scale
    assert float(got) == float(np.float32(np.float64(scale) * factor))


def test_growth_past_float32_is_refused() -> None:
    largest = float(np.finfo(np.float32).max)
    config = jaxmp.DynamicLossScale(init_scale=2.0**127, growth_interval=1, max_scale=largest)
    assert float(config.adjust(config.init(), jnp.array(True)).scale) == 2.0**127


@pytest.mark.parametrize("config", [jaxmp.NoLossScale(), jaxmp.StaticLossScale(8.0)])
def test_the_others_never_move(config: jaxmp.LossScale) -> None:
    state = config.init()
    for finite in (True, False):
        assert config.adjust(state, jnp.array(finite)) == state


@pytest.mark.parametrize(
    "exponent", [-126, -20, 0, 16, 126, pytest.param(127, marks=pytest.mark.device)]
)
def test_unscaling_undoes_scaling_to_the_bit(exponent: int) -> None:
    """Also at 2**127, whose inverse is subnormal and would be flushed to zero."""
    state = jaxmp.LossScaleState(jnp.float32(2.0**exponent), jnp.int32(0), jnp.int32(0))
    true = np.array([1.0, -1.5, 0.0], np.float32)
    scaled = (true.astype(np.float64) * 2.0**exponent).astype(np.float32)
    unscale = jax.jit(lambda state, grads: state.unscale(grads))
    np.testing.assert_array_equal(unscale(state, scaled), true)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_unscale_dtypes(dtype: str) -> None:
    state = jaxmp.StaticLossScale(2.0**10).init()
    tree = jax.device_put({"g": np.full(3, 2.0**10, dtype), "i": np.arange(3)})
    out = state.unscale({**tree, "n": np.ones(2, np.float16)})
    assert out["g"].dtype == (jnp.complex64 if dtype == "complex64" else jnp.float32)
    np.testing.assert_array_equal(out["g"], np.ones(3))
    assert out["i"] is tree["i"]
    assert out["n"].dtype == jnp.float32


@pytest.mark.parametrize("scale", [3.0, 1000.0, 2.0**16])
def test_float64_gradients_keep_their_precision(scale: float) -> None:
    """A scale that is no power of two has an inverse that float32 rounds."""
    with jax.enable_x64(True):
        state = jaxmp.StaticLossScale(scale).init()
        grads = np.array([1.0, 1 / 3, 7.0])
        found = state.unscale({"w": jnp.asarray(grads * scale), "c": jnp.asarray(1j * scale)})
        assert found["w"].dtype == jnp.float64
        np.testing.assert_allclose(found["w"], grads, rtol=4e-16)
        np.testing.assert_allclose(found["c"], 1j, rtol=4e-16)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("restored", [2.0**-3, 2.0**20])
def test_a_restored_scale_comes_within_new_bounds(restored: float, finite: bool) -> None:
    """A run that goes on with other bounds would stay outside of them for ever."""
    config = jaxmp.DynamicLossScale(min_scale=1.0, init_scale=2.0**10, max_scale=2.0**16)
    state = config.init()._replace(scale=jnp.float32(restored))
    after = config.adjust(state, jnp.array(finite))
    assert config.min_scale <= float(after.scale) <= config.max_scale


def test_counts_beyond_int32_are_never() -> None:
    """`growth_interval=2**31` and more is how people say that a scale is not to grow."""
    config = jaxmp.DynamicLossScale(growth_interval=2**40, hysteresis=2**31)
    state = config.init()
    for finite in (True, False, True):
        state = config.adjust(state, jnp.array(finite))
    assert float(state.scale) == 2.0**16
