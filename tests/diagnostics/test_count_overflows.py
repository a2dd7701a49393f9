"""A skipped step says which gradients overflowed, and only if it was asked to."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from jaxmp.diagnostics import underflow_report
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


def test_a_report_names_what_is_broken_first() -> None:
    grads = {
        "a": jnp.array([1.0, -3.0, 0.0]),
        "b": {"w": jnp.array([jnp.inf, jnp.nan, 2.0, -jnp.inf], jnp.float16)},
        "large": jnp.array([1e5, 1e-9]),
        "zeros": jnp.zeros(4),
        "codes": jnp.array([1.5, jnp.nan], jnp.float8_e4m3fn),
    }
    report = underflow_report(grads)
    rows = {row.name: row for row in report.rows}
    assert list(rows)[:3] == ["b/w", "codes", "large"]
    assert (rows["b/w"].infinite, rows["b/w"].nan, rows["b/w"].largest) == (2, 1, 2.0)
    assert rows["codes"].nan == 1
    assert [row.name for row in report.rows if row.overflow] == ["large"]


def test_what_a_scale_would_make_infinite() -> None:
    scale = jaxmp.DynamicLossScale(init_scale=2.0**15).init()
    grads = {"small": jnp.array([0.5]), "large": jnp.array([4.0])}
    report = underflow_report(grads, loss_scale=scale)
    assert [(row.name, row.overflow) for row in report.rows] == [("large", 1), ("small", 0)]
