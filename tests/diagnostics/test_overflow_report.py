"""A skipped step says which gradients overflowed, and only if it was asked to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp.diagnostics import overflow_report
from tests.support.compilations import Count

pytestmark = [
    pytest.mark.annotations,
    pytest.mark.jax,
    pytest.mark.usefixtures("standard_promotion"),
]
F16 = "mixed_float16"
N = 8
PARAMS = {"first": jnp.full((N, N), 0.1), "second": jnp.full((N, 2), 0.1)}
GOOD, BAD = jnp.ones((N, N)), jnp.ones((N, N)).at[0, 3].set(jnp.inf)


def loss_fn(params: Any, x: Any) -> Any:
    """Where one example is infinite, so is one row of the gradient of `first`."""
    return jnp.mean(x @ params["first"]) + jnp.mean(params["second"])


def step_and_state(**options: Any) -> Any:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), F16)
    state = jaxmp.TrainState.create(params=jax.tree.map(jnp.copy, PARAMS), tx=tx)
    return jaxmp.make_train_step(loss_fn, F16, **options), state


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_skipped_step_counts_by_gradient(microbatches: int) -> None:
    step, state = step_and_state(count_overflows=True, microbatches=microbatches)
    state, metrics = step(state, GOOD)
    assert jax.tree.map(int, metrics["nonfinite"]) == {"first": 0, "second": 0}
    state, metrics = step(state, BAD)
    assert jax.tree.map(int, metrics["nonfinite"]) == {"first": N, "second": 0}
    assert int(metrics["skipped"]) == 1
    with pytest.raises(jaxmp.TrainingStalled, match=r"in gradients: 'first' \(8\)\. "):
        jaxmp.check_progress(state, nonfinite=metrics["nonfinite"], limit=1)
    with pytest.raises(TypeError, match=r'nonfinite takes the counts in metrics\["nonfinite"\]'):
        jaxmp.check_progress(state, nonfinite=metrics)  # also where nothing is wrong


def test_the_step_compiles_once(compilations: Count) -> None:
    step, state = step_and_state(count_overflows=True)
    counts = []
    for x in (GOOD, BAD, GOOD):
        state, _ = step(state, x)
        counts.append(compilations())
    assert counts[0] > 0
    assert counts[1:] == counts[:1] * 2


def test_a_report_of_gradients() -> None:
    grads = {
        "a": jnp.array([1.0, -3.0, 0.0]),
        "b": {"w": jnp.array([jnp.inf, jnp.nan, 2.0, -jnp.inf], jnp.float16)},
        "zeros": jnp.zeros(4),
        "step": jnp.int32(3),
        "codes": jnp.array([1.5, jnp.nan], jnp.float8_e4m3fn),
    }
    report = overflow_report(grads)
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["codes", "b/w", "a", "zeros"]
    assert (rows["b/w"].infinite, rows["b/w"].nan, rows["b/w"].largest) == (2, 1, 2.0)
    assert rows["codes"].nan == 1
    assert [row.name for row in report.overflowing] == ["codes", "b/w"]
    assert "b[bold]" in str(overflow_report({"b[bold]": jnp.ones(2)}))
    assert rows["a"].headroom == pytest.approx(np.log2(np.finfo(np.float32).max / 3))
    assert rows["zeros"].headroom == np.inf


def test_headroom_in_another_format_and_under_a_scale() -> None:
    scale = jaxmp.DynamicLossScale(init_scale=2.0**15).init()
    grads = {"small": jnp.array([0.5]), "large": jnp.array([4.0])}
    report = overflow_report(grads, dtype="float16", loss_scale=scale)
    assert [row.name for row in report.rows] == ["large", "small"]
    assert [row.headroom for row in report.rows] == pytest.approx(
        [np.log2(65504 / 4) - 15, np.log2(65504 / 0.5) - 15]
    )
    assert [row.name for row in report.overflowing] == ["large"]
    text = str(report)
    assert "headroom in float16 after multiplication by 32768, powers of two" in text
    assert "large" in text
    with pytest.raises(ValueError, match="unknown dtype 'flaot16'"):
        overflow_report(grads, dtype="flaot16")
