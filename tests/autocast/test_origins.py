"""Where a value comes from decides its dtype: positions, masks, ensembles, checkpointed parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.ways import both_ways

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F16 = "mixed_bfloat16", "mixed_float16"
W = jax.device_put(np.random.default_rng(0).standard_normal((16, 16)))
X = jax.device_put(np.random.default_rng(1).standard_normal((8, 16)))
EYE = np.eye(16, dtype=np.float32)


@pytest.mark.parametrize("function", [jnp.floor, jnp.ceil, jnp.round, jnp.sin])
def test_coordinates_stay_exact(function: Any) -> None:
    def f(x: Any, w: Any) -> Any:
        return function(300.25 + jnp.arange(16.0)[None] + 0.001 * (x @ w))

    def by_hand(x: Any, w: Any) -> Any:
        low = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) * 0.001
        return function((300.25 + jnp.arange(16.0)[None]).astype(jnp.bfloat16) + low)

    got, want = both_ways(f, X, W)
    np.testing.assert_allclose(got, want, atol=1e-4)
    off = np.abs(np.asarray(by_hand(X, W), np.float32) - want)
    assert off.max() > 0.2  # positive control


def test_a_function_applied_at_places() -> None:
    def f(x: Any) -> Any:
        return (x @ EYE).at[:, jnp.array([1, 2])].apply(lambda v: 10 * v)

    np.testing.assert_allclose(*both_ways(f, X), rtol=0.01)


@pytest.mark.parametrize("loop", ["scan", "python"])
def test_the_weights_of_an_ensemble_are_updated_in_float32(loop: str) -> None:
    def train(w: Any) -> Any:
        def step(ws: Any, _: Any = None) -> tuple[Any, None]:
            gradient = jnp.einsum("bi,ebj->eij", X, jnp.einsum("bi,eij->ebj", X, ws))
            return ws - 1e-5 * gradient, None

        ws = jnp.broadcast_to(w, (4, *w.shape))
        if loop == "scan":
            return lax.scan(step, ws, None, length=20)[0]
        for _ in range(20):
            ws, _ = step(ws)
        return ws

    moved = [np.abs(np.asarray(ws) - np.asarray(W)).mean() for ws in both_ways(train, W)]
    np.testing.assert_allclose(*moved, rtol=0.02)


@pytest.mark.parametrize("also_multiplied", [False, True])
def test_a_bound_below_one(also_multiplied: bool) -> None:
    x = np.linspace(-9, 9, 16, dtype=np.float32)[None]

    def f(x: Any, w: Any) -> Any:
        p = jnp.clip(jax.nn.sigmoid(20 * (x @ w)), 1e-6, 1 - 1e-6)
        return -jnp.log(1 - p).mean() + (0 * (p @ w).sum() if also_multiplied else 0)

    np.testing.assert_allclose(*both_ways(f, x, EYE), rtol=0.01)


def test_functions_named_like_those_of_jax() -> None:
    @jax.jit
    def elu(x: Any) -> Any:
        return jnp.log1p(jnp.exp(x))

    x = np.full((2, 16), 12.0, np.float32)
    np.testing.assert_allclose(jaxmp.autocast(lambda x: elu(x @ EYE), F16)(x), elu(x), rtol=1e-3)

    def computed(x: Any) -> Any:
        return jaxmp.autocast(lambda x: jax.nn.elu(x @ EYE), F16, output="computed")(x)

    assert computed(x).dtype == jnp.float16


def test_products_with_what_came_from_a_transform_are_low() -> None:
    def f(x: Any, w: Any) -> Any:
        y = jnp.fft.fft(x @ w).real
        return y @ w

    jaxmp.audit(jaxmp.autocast(f, BF16), X, W).check(products="bfloat16")
