"""Haliax models, whose casts Levanter makes by `jmp.Policy`, under jaxmp's policies."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from tests.support.dots import count_dots

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("standard_promotion"),
]


@pytest.fixture
def hax() -> Any:
    """Haliax."""
    # The release 1.3 asks JAX for a private name that is gone; the repository does not.
    reason = "no Haliax that this JAX can import is installed: install it from its repository"
    return pytest.importorskip("haliax", reason=reason, exc_type=ImportError)


def setup(hax: Any) -> tuple[Any, Any, Any]:
    inside, outside, batch = hax.make_axes(In=8, Out=4, Batch=16)
    model = hax.nn.MLP.init(inside, outside, 16, 2, key=jax.random.key(0))
    x = hax.random.normal(jax.random.key(1), (batch, inside))

    def loss_fn(model: Any, x: Any) -> jax.Array:
        return hax.mean(hax.square(model(x) - 1.0)).array.astype(jnp.float32)

    return model, x, loss_fn


def test_levanters_casts_take_a_policy(hax: Any) -> None:
    """As in Levanter's trainer: `mp.cast_to_compute(model)` in the loss function."""
    model, x, loss_fn = setup(hax)
    mp = jaxmp.get_policy("p=f32,c=bf16,o=f32")
    tx = jaxmp.mixed_precision(optax.adam(1e-2), mp)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def cast_loss(model: Any, x: Any) -> jax.Array:
        return loss_fn(mp.cast_to_compute(model), mp.cast_to_compute(x))

    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    dots = count_dots(lambda arrays: cast_loss(eqx.combine(arrays, static), x), arrays)
    assert set(dots) == {"bfloat16"}
    losses = []
    for _ in range(20):
        loss, grads = jaxmp.equinox.filter_value_and_grad(cast_loss)(model, x)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_policies_on_its_modules(hax: Any) -> None:
    model, x, loss_fn = setup(hax)
    rules = jaxmp.PolicyRules({"layers/2/**": "float32"}, default="mixed_bfloat16")
    low = jaxmp.equinox.apply_policy(model, rules)
    assert count_dots(lambda: low(x).array) == {"bfloat16": 2, "float32": 1}
    loss, grads = jaxmp.equinox.filter_value_and_grad(loss_fn)(low, x)
    exact = eqx.filter_value_and_grad(loss_fn)(model, x)
    assert abs(float(loss) - float(exact[0])) < 1e-2 * float(exact[0])
    for g, e in zip(jax.tree.leaves(grads), jax.tree.leaves(exact[1]), strict=True):
        assert float(jnp.linalg.norm(g - e)) < 3e-2 * float(jnp.linalg.norm(e))
