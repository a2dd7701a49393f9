"""Prints and other effects of a step with released gradients come in their order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback

import jaxmp
from tests.training.test_gradient_release import (
    different,
    layer,
    loss,
    params,
    plain_step,
    tokens,
)

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]


def test_prints_are_kept_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        norm = optax.tree.norm(grads)
        lax.cond(norm < 0, lambda x: jax.debug.print("negative {}", x), lambda x: None, norm)
        jax.debug.print("norm {}", norm, ordered=True)
        jax.debug.print("loss {}", value, ordered=True)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    tx = optax.adam(1e-3)
    new = jaxmp.release_gradients(step)(params(), tx.init(params()), tokens(0))
    jax.block_until_ready(new)
    jax.effects_barrier()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["norm", "loss"]


def test_other_callbacks_in_the_backward_pass_are_refused() -> None:
    """They would be called once for each pass."""

    @jax.custom_vjp
    def called(x: Any) -> Any:
        return x

    def backward(_: None, cotangent: Any) -> Any:
        io_callback(lambda x: None, None, cotangent, ordered=True)
        return (cotangent,)

    called.defvjp(lambda x: (x, None), backward)

    def loss(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        x, _ = lax.scan(lambda x, p: (layer(called(x), p), None), x, params["layers"])
        return jnp.square(x).mean()

    tx = optax.adam(1e-3)
    step = jaxmp.release_gradients(plain_step(tx, loss))
    with pytest.raises(ValueError, match="no callbacks but prints"):
        step(params(), tx.init(params()), tokens(0))


def by_host(norm: Any) -> Any:
    """Called after a print of the norm, with which it has nothing to do."""
    jax.debug.callback(lambda norm: None, norm)
    return io_callback(lambda: np.float32(0.1), jax.ShapeDtypeStruct((), jnp.float32))


def by_ref(norm: Any) -> Any:
    ref = jax.new_ref(jnp.float32(1))
    ref[...] += norm
    return 0.1 / ref[...]


@pytest.mark.parametrize("rate_of", [by_host, by_ref])
def test_results_of_effects_come_as_late_as_these(rate_of: Any) -> None:
    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        rate = rate_of(optax.tree.norm(grads))
        return jax.tree.map(lambda x, g: x - rate * g, params, grads)

    args = params(), tokens(0)
    released = jax.jit(jaxmp.release_gradients(step))(*args)
    assert not different(jax.jit(step)(*args), released, rtol=1e-5)


def test_a_loop_that_would_wait_for_a_later_one_is_refused() -> None:
    """The second network prints in its forward pass, after a norm of a clipped gradient."""

    def printing(params: Any, tokens: Any) -> Any:
        def body(x: Any, p: Any) -> Any:
            jax.debug.callback(lambda x: None, x[0, 0])
            return layer(x, p), None

        x, _ = lax.scan(body, params["table"][tokens], params["layers"])
        return jnp.square(x).mean()

    def step(first: Any, second: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(first, batch)
        factor = jnp.minimum(1, 0.1 / optax.tree.norm(grads))
        grads = jax.tree.map(lambda g: g * factor, grads)
        jax.debug.callback(lambda norm: None, optax.tree.norm(grads))
        others = jax.grad(printing)(second, batch)
        return jax.tree.map(lambda x, g: x - g, (first, second), (grads, others))

    with pytest.raises(
        ValueError, match=r"scan at .*printing.* waits for an effect, such as a print"
    ):
        jaxmp.release_gradients(step)(params(), params(), tokens(0))
