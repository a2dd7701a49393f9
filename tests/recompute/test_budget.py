"""`recompute(fun, 0.2)`: products run again until a function keeps a share of what JAX keeps."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmp
from tests.recompute.test_codes import STACKS, V, W, X, attention, scanned
from tests.support.autocast_checks import compiled, error, weights
from tests.support.recompute_checks import (
    dear_operations,
    gradient,
    kept,
    kept_bytes,
    norm,
    scalar,
)

pytestmark = pytest.mark.jax

SHARES = (1.0, 0.5, 0.2, 0.12)


def block(x: Any, w: Any) -> Any:
    x = x + attention(x, w["qk"], w["out"])
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def layers(scan: bool) -> Any:
    def model(x: Any, ws: Any) -> Any:
        if scan:
            return norm(lax.scan(lambda x, w: (block(x, w), None), x, ws)[0])
        for i in range(3):
            x = block(x, jax.tree.map(lambda w, i=i: w[i], ws))
        return norm(x)

    return model


WEIGHTS = {
    "qk": weights(3, 128, 256, seed=1),
    "out": weights(3, 256, 128, seed=2) / 2,
    "up": weights(3, 128, 512, seed=3),
    "down": weights(3, 512, 128, seed=4) / 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_function_keeps_at_most_its_share(scan: bool) -> None:
    """Less memory for more operations, step by step; no step changes the gradient."""
    model = layers(scan)
    jax_keeps = kept_bytes(model, X, WEIGHTS)
    want = jax.jit(gradient(model))(X, WEIGHTS)
    sizes, products = [], []
    for share in SHARES:
        lean = jaxmp.recompute(model, share)
        sizes.append(kept_bytes(lean, X, WEIGHTS))
        products.append(dear_operations(lean, X, WEIGHTS)["dot_general"])
        assert sizes[-1] <= share * jax_keeps
        assert error(jax.jit(gradient(lean))(X, WEIGHTS), want) < 1e-4
    assert sizes == sorted(sizes, reverse=True)
    assert products == sorted(products)
    assert sizes[-1] < sizes[0]
    assert products[-1] > products[0]
    # A share that costs nothing takes nothing.
    assert products[0] == dear_operations(jaxmp.recompute(model), X, WEIGHTS)["dot_general"]


def test_products_with_the_fewest_operations_for_a_byte_run_again_first() -> None:
    """Those that contract 128 numbers, not 256 or 512; of these the largest, four times wide."""
    shapes = [
        {x.shape for x in kept(jaxmp.recompute(layers(True), share), X, WEIGHTS) if x.size > 9999}
        for share in (1.0, 0.25)
    ]
    assert shapes[0] - shapes[1] == {(3, 64, 512)}


@pytest.mark.slow
def test_a_share_goes_with_codes_and_with_train_steps() -> None:
    """Codes come first: with them fewer products run again."""
    model, share = layers(True), 0.15
    counts = [
        dear_operations(jaxmp.recompute(model, share, codes=kept_as), X, WEIGHTS)["dot_general"]
        for kept_as in (None, "int8")
    ]
    assert counts[1] < counts[0]
    loss = scalar(lambda w: model(X, w))
    _, grads = jaxmp.value_and_grad(loss, recompute=share)(WEIGHTS)
    assert error(grads, jax.grad(loss)(WEIGHTS)) < 1e-4


def test_what_cannot_be_reached_is_said() -> None:
    """Of equal products none is cheaper; one that separates parts must stay."""
    with pytest.warns(UserWarning, match=r"0.01 cannot be reached: this function needs 0\.\d"):
        gradients = compiled(jax.grad(scalar(jaxmp.recompute(scanned, 0.01)), 1))(X, *STACKS)
    assert error(gradients, compiled(jax.grad(scalar(scanned), 1))(X, *STACKS)) < 1e-4


def test_parts_that_would_run_again_all_at_once_stay_kept() -> None:
    """Products in a chain save nothing at the peak if the whole chain runs again at once."""

    def chain(x: Any, w: Any, v: Any) -> Any:
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return jnp.concatenate([x, x], -1) @ v

    args = X, W[:, :128], V
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lean = jaxmp.recompute(chain, 0.1)
        assert kept_bytes(lean, *args) == kept_bytes(jaxmp.recompute(chain), *args) > 0


def test_what_cannot_be_measured_is_said() -> None:
    """A callback has no derivative by the data, which nobody asks for."""

    def loss(w: Any, x: Any) -> Any:
        x = jax.pure_callback(lambda x: x, x, x)
        return jnp.tanh(jnp.tanh(x @ w) @ V).sum()

    with pytest.warns(UserWarning, match=r"0.2 is as recompute='auto' here.*Pure callbacks"):
        gradients = jax.grad(jaxmp.recompute(loss, 0.2))(W, X)
    assert error(gradients, compiled(jax.grad(loss))(W, X)) < 1e-5


@pytest.mark.parametrize("share", [0, -0.1, 1.5, True])
def test_a_share_is_checked(share: Any) -> None:
    with pytest.raises(ValueError, match=r"recompute as a share must be in \(0, 1\], got"):
        jaxmp.recompute(scanned, share)
    with pytest.raises(ValueError, match=r"recompute as a share must be in"):
        jaxmp.make_train_step(lambda p, x: x, recompute=share)
