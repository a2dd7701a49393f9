"""Comparisons as steps: what a rounding does to a gradient by way of the derivative of `relu`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmp._program.program import read
from jaxmp._tools.diagnostics.smooth_comparisons import SmoothComparisons
from jaxmp.diagnostics import sensitivity

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = jax.random.normal(jax.random.key(0), (512, 64))
WS = [jax.random.normal(key, (64, 64)) / 8 for key in jax.random.split(jax.random.key(1), 3)]


def run(fun: Any, *arrays: Any, unit: float | None = 2.0**-8) -> list[Any]:
    closed = jax.make_jaxpr(fun)(*arrays)
    return SmoothComparisons(unit).run(read(closed), list(arrays))


def everywhere(x: Any) -> Any:
    """Comparisons that go through all that bools go through."""
    mask = x > 0
    inside = jnp.logical_not(mask) | ((x < 1) & mask[::-1][::-1])
    masked = jnp.where(inside, x, -x) * mask.astype(jnp.float32)

    def turn(carry: Any, mask: Any) -> Any:
        seen, total = carry
        return (seen | mask, total + jnp.where(mask, 1.0, 2.0)), mask

    (seen, total), masks = lax.scan(turn, (x[0] > 5, x[0]), mask)
    chosen = lax.cond(x[0, 0] > 0, lambda: mask, lambda: x > 1)
    return masked, seen.sum(), total, masks.astype(jnp.int32), jnp.where(chosen, x, 0.0), mask.any()


def test_numbers_are_those_of_the_program() -> None:
    ours = jax.jit(lambda x: run(everywhere, x))
    for result, plain in zip(ours(X), jax.jit(everywhere)(X), strict=True):
        np.testing.assert_allclose(result, plain, rtol=1e-6)


def test_the_derivative_is_that_of_a_step_as_wide_as_the_errors() -> None:
    """It adds up to one over the line; without a unit there is none."""
    x = np.linspace(-1, 1, 40_001, dtype=np.float32)

    def taken(x: Any) -> Any:
        return jnp.where(x > 0, 3.0, 1.0)

    def slope_of(x: Any, **unit: Any) -> Any:
        return np.asarray(jax.jit(jax.grad(lambda x: run(taken, x, **unit)[0].sum()))(x))

    slope = slope_of(x)
    assert float(slope.sum()) * 2 / 40_000 == pytest.approx(2, rel=1e-2)
    assert np.abs(x[slope > 0.01 * slope.max()]).max() < 0.05
    np.testing.assert_array_equal(slope_of(x, unit=None), 0)
    # An infinite mask has no step, and no NaN.
    assert np.isfinite(slope_of(np.array([-np.inf, 1.0, 2.0], np.float32))).all()


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("low", ["mixed_bfloat16", "mixed_float16"])
def test_gradients_of_relu_move_as_they_are_predicted_to(low: str, scan: bool) -> None:
    """Signs that change are more of their error the finer the dtype; `tanh` is the control."""

    def loss_of(activation: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            with jax.named_scope("layer"):
                return activation(h @ w), None

        def loss(ws: Any, x: Any) -> Any:
            if scan:
                h = lax.scan(layer, x, jnp.stack(ws))[0]
            else:
                h = x
                for w in ws:
                    h, _ = layer(h, w)
            return jnp.mean(h**2)

        return loss

    errors = {}
    for activation in (jax.nn.relu, jnp.tanh):
        report = sensitivity(loss_of(activation), WS, X, low=low, confirm=True)
        errors[activation] = report.measured.gradients
        ratio = report.all_low.gradients / report.measured.gradients
        assert 0.6 < ratio < 1.7
    # In three layers there are few such signs in bfloat16, beside its other errors.
    assert errors[jax.nn.relu] > (2 if low == "mixed_float16" else 1) * errors[jnp.tanh]
