"""Loss scales against recorded traces of PyTorch, Megatron, apex, DeepSpeed and Keras."""

import collections
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

PARITY = pathlib.Path(__file__).parents[1] / "parity"
GRADSCALER = json.loads((PARITY / "gradscaler_traces.json").read_text())
OTHERS = json.loads((PARITY / "other_scalers.json").read_text())["cases"]
OPEN = {"min_scale": 2.0**-126, "max_scale": float(np.finfo(np.float32).max)}
VALUES = {"f": 1.0, "i": np.inf, "-": -np.inf, "n": np.nan}

# Factors that are powers of two, and others, which ask for double precision on the device.
ON_DEVICES = ("pow2_10", "nonpow2_1")


def torch_config(case: dict[str, Any]) -> jaxmp.DynamicLossScale:
    keys = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    return jaxmp.DynamicLossScale(**{key: case[key] for key in keys}, **OPEN)


def as_params(cases: list[Any]) -> list[Any]:
    """Cases by name; some of them are for devices too."""
    marks = dict.fromkeys(ON_DEVICES, pytest.mark.device)
    return [pytest.param(c, id=c["name"], marks=marks.get(c["name"], ())) for c in cases]


@pytest.mark.parametrize("case", GRADSCALER["cases"], ids=lambda c: c["name"])
def test_gradscaler(case: dict[str, Any]) -> None:
    """Scale, growth count and skips are torch's to the bit, for all factors, under jit and scan."""
    config = torch_config(case)
    grads = np.array([[VALUES[c] for c in step] for step in case["steps"]], np.float32)
    length = len(grads)
    set_to = np.array([case.get("set_at", {}).get(str(t), 0.0) for t in range(length)], np.float32)

    def step(state: jaxmp.LossScaleState, now: Any) -> tuple[jaxmp.LossScaleState, Any]:
        grads, new_scale = now
        finite = jnp.stack([jaxmp.numbers.all_finite({"g": g}) for g in grads])
        adjusted = config.adjust(state, jnp.all(finite))
        given = state._replace(scale=new_scale)  # update(new_scale) leaves the tracker alone
        state = jaxmp.numbers.select(new_scale > 0, given, adjusted)
        return state, (*state[:2], ~finite)

    run = jax.jit(lambda state, now: jax.lax.scan(step, state, now))
    state, outputs, start = config.init(), [], 0
    # A reload is a trip through host memory into a config of the same values.
    for stop in [*case.get("load_at", []), length]:
        state = jax.device_put(jax.tree.map(np.array, state))
        state, out = run(state, (grads[start:stop], set_to[start:stop]))
        outputs.append(out)
        start = stop
    scale, count, skipped = (np.concatenate(x) for x in zip(*outputs, strict=True))

    np.testing.assert_array_equal(scale.view(np.int32), case["scale_after_f32_bits"])
    np.testing.assert_array_equal(count, case["growth_tracker"])
    np.testing.assert_array_equal(skipped, case["skipped"])


@pytest.mark.parametrize(
    "case",
    as_params([c for c in GRADSCALER["cases"] if len(c["steps"][0]) == 1 and "set_at" not in c]),
)
def test_gradscaler_through_the_optimizer(case: dict[str, Any]) -> None:
    """The wrapper moves the scale and skips exactly when torch's scaler does."""
    tx = jaxmp.mixed_precision(
        optax.sgd(1e-3), "mixed_float16", loss_scale=torch_config(case), skip="cond"
    )
    grads = np.array([VALUES[step] for step in case["steps"]], np.float32)

    def step(carry: Any, grad: Any) -> Any:
        params, state = tx.apply_gradients(grad, carry[1], carry[0])
        return (params, state), (state.loss_scale.scale, ~state.grads_finite, params)

    start = (jnp.float32(1.0), tx.init(jnp.float32(1.0)))
    (_, state), (scale, skipped, params) = jax.jit(lambda g: jax.lax.scan(step, start, g))(grads)
    want_skipped = np.ravel(case["skipped"])
    np.testing.assert_array_equal(scale.view(np.int32), case["scale_after_f32_bits"])
    np.testing.assert_array_equal(skipped, want_skipped)
    assert int(state.skipped) == want_skipped.sum()
    np.testing.assert_array_equal(np.diff(params) == 0, want_skipped[1:])


@pytest.mark.parametrize("row", GRADSCALER["tiny_scale_poison"], ids=lambda r: r["log2_scale"])
def test_tiny_scales(row: dict[str, Any]) -> None:
    """Where 1/scale is finite the gradients are torch's; where torch destroys params, an error."""
    scale = 2.0 ** row["log2_scale"]
    if scale < 2.0**-126:
        with pytest.raises(ValueError, match="at least 2\\*\\*-126"):
            jaxmp.StaticLossScale(scale)
        return
    state = jaxmp.StaticLossScale(scale).init()
    unscaled = jax.jit(state.unscale)(np.array(row["scaled_grad"], np.float32))
    np.testing.assert_array_equal(unscaled, np.array(row["unscaled_grad"], np.float32))


def translate(case: dict[str, Any]) -> dict[str, Any]:
    """The jaxmp config of another system's config."""
    c = dict(case["config"])
    if case["system"] == "megatron":  # whose other names are ours
        return {"init_scale": c.pop("initial_scale"), **OPEN, **c}
    if case["system"] == "deepspeed":
        return OPEN | {
            "init_scale": c["init_scale"],
            "growth_factor": c["scale_factor"],
            "backoff_factor": 1 / c["scale_factor"],
            "growth_interval": c["scale_window"],
            "hysteresis": c["delayed_shift"],
            "consecutive_hysteresis": c["consecutive_hysteresis"],
            "min_scale": c["min_scale"],
        }
    if case["system"] == "apex":
        return {
            "init_scale": min(c["init_scale"], c["max_loss_scale"]),  # as apex's constructor does
            "growth_interval": c["scale_window"],
            "min_scale": c["min_loss_scale"] or OPEN["min_scale"],
            "max_scale": c["max_loss_scale"],
        }
    return {"init_scale": c["initial_scale"], "growth_interval": c["dynamic_growth_steps"], **OPEN}


@pytest.mark.parametrize(
    "case",
    OTHERS,
    ids=lambda c: c["system"],
)
def test_other_scalers(case: dict[str, Any]) -> None:
    config = jaxmp.DynamicLossScale(**translate(case))

    def step(state: jaxmp.LossScaleState, finite: Any) -> Any:
        state = config.adjust(state, finite)
        return state, state

    finite = ~np.array(case["overflow"], bool)
    _, states = jax.jit(lambda f: jax.lax.scan(step, config.init(), f))(finite)
    # DeepSpeed stops with an exception at the floor; check_progress is jaxmp's way to say so.
    trace = [row for row in case["trace"] if row[0] != "RAISES"]
    hysteresis = np.asarray(states.hysteresis)
    ours = {
        "scale": states.scale,
        "growth_tracker": states.growth_count,
        "unskipped": states.growth_count,
        "step_counter": states.growth_count,
        "hysteresis_tracker": hysteresis,
        "cur_hysteresis": np.maximum(hysteresis, 1),  # DeepSpeed's count stops at 1
    }
    for i, field in enumerate(case["fields"]):
        want = np.array([row[i] for row in trace], np.float64)
        np.testing.assert_array_equal(np.asarray(ours[field], np.float64)[: len(trace)], want)


def test_every_system_is_compared() -> None:
    """Guards the parametrisation above."""
    counts = collections.Counter(case["system"] for case in OTHERS)
    assert set(counts) == {"megatron", "deepspeed", "apex", "keras"}
    assert min(counts.values()) > 20
