"""Tools that look at numbers say so where there are none, and what a loss scale may be."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp.diagnostics import (
    compare,
    find_overflow,
    log_prob_gap,
    plot_histograms,
    scalar_log,
    scalars,
    sensitivity,
    underflow_report,
)

X = jnp.ones((4, 4))


def loss_fn(w: Any, x: Any) -> Any:
    with jax.named_scope("layer"):
        return jnp.mean(x @ w)


TOOLS: dict[str, Callable[[Any], Any]] = {
    "compare": lambda x: compare(loss_fn, loss_fn, X, x),
    "find_overflow": lambda x: find_overflow(loss_fn, X, x),
    "log_prob_gap": lambda x: log_prob_gap(-X, x),
    "plot_histograms": lambda x: plot_histograms({"x": x}),
    "scalars": lambda x: scalars({"x": x[0, 0] if isinstance(x, jax.Array) else x}),
    "sensitivity": lambda x: sensitivity(loss_fn, X, x),
    "underflow_report": lambda x: underflow_report({"x": x}),
}
SCALED: dict[str, Callable[[Any], Any]] = {
    "plot_histograms": lambda scale: plot_histograms(X, loss_scale=scale),
    "sensitivity": lambda scale: sensitivity(loss_fn, X, X, loss_scale=scale),
    "underflow_report": lambda scale: underflow_report(X, loss_scale=scale),
}


@pytest.mark.parametrize("name", TOOLS)
def test_where_there_are_no_numbers(name: str) -> None:
    shape = jax.ShapeDtypeStruct(() if name == "scalars" else (4, 4), jnp.float32)
    with pytest.raises(TypeError, match=rf"{name} looks at numbers, and ShapeDtypeStruct\(.* none"):
        TOOLS[name](shape)
    with pytest.raises(TypeError, match=f"{name} looks at numbers, and under jit there are none"):
        jax.jit(TOOLS[name])(X)
    gone = jnp.ones((4, 4)) + 1
    gone.delete()
    if name != "scalars":  # which is given a number of it
        with pytest.raises(ValueError, match="these arrays were donated to a step"):
            TOOLS[name](gone)


def test_a_log_is_given_numbers() -> None:
    with (
        scalar_log(print) as log,
        pytest.raises(TypeError, match="scalars looks at numbers, and under jit"),
    ):
        jax.jit(lambda x: log(0, {"x": x}))(1.0)


@pytest.mark.parametrize("name", SCALED)
def test_a_loss_scale_is_a_number_or_a_state(name: str) -> None:
    for wrong in ("a", {"scale": 1.0}, jaxmp.DynamicLossScale):
        with pytest.raises(TypeError, match="must be a number, or the state of a loss scale"):
            SCALED[name](wrong)
    for wrong in (0, -1.0, jnp.inf, jnp.nan):
        with pytest.raises(ValueError, match="loss_scale must be positive and finite, got"):
            SCALED[name](wrong)
    assert SCALED[name](jaxmp.StaticLossScale(8.0).init()) is not None
