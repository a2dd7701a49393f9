"""Optimizer steps outside of `jit`: nothing is compiled anew, and nothing grows."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._numerics.tree import cast_floating
from tests.support.bits import tree_bits
from tests.support.compilations import Count

pytestmark = pytest.mark.usefixtures("standard_promotion")


def params() -> dict[str, Any]:
    return jax.device_put({"w": np.ones((8, 8), jnp.bfloat16), "b": np.ones(8, np.float32)})


def grads(value: float) -> dict[str, Any]:
    return jax.device_put({"w": np.full((8, 8), value, "f"), "b": np.full(8, value, "f")})


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@pytest.mark.parametrize("skip", ["auto", "cond", "select"])
@pytest.mark.slow
def test_eager_updates_compile_nothing(compilations: Count, skip: Any, policy: str) -> None:
    """A branch of `lax.cond` is another function at each call: 200 times slower than optax."""
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, skip=skip)
    now = cast_floating(params(), policy)
    state = tx.init(now)

    def steps(count: int) -> int:
        nonlocal now, state
        before = compilations()
        for i in range(count):
            updates, state = tx.update(grads(jnp.inf if i % 3 == 0 else 0.5), state, now)
            now = optax.apply_updates(now, updates)
        return compilations() - before

    steps(4)
    gc.collect()
    living = len(jax.live_arrays())
    assert steps(30) == 0
    gc.collect()
    assert len(jax.live_arrays()) <= living


def test_the_count_sees_a_branch(compilations: Count) -> None:
    """Positive control: what each step would pay for `lax.cond`."""
    for i in range(3):
        before = compilations()
        jax.lax.cond(jnp.array(True), lambda x, i=i: x + i, lambda x: x, jnp.ones(3))
        assert compilations() > before


@pytest.mark.programs(70, reason="steps without jit, which compile each operation once")
def test_eager_module_updates_compile_nothing(compilations: Count) -> None:
    model = jaxmp.nnx.apply_policy(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "bfloat16")
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "bfloat16")
    optimizer = jaxmp.nnx.Optimizer(model, tx)
    gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    for _ in range(2):
        optimizer.update(model, gradients)
    before = compilations()
    for _ in range(20):
        optimizer.update(model, gradients)
    assert compilations() == before


@pytest.mark.parametrize("skip", ["auto", "cond", "select", "none"])
def test_an_eager_step_equals_a_jitted_one(skip: Any) -> None:
    """Python's branch is `lax.cond`'s: every bit of params and state, taken and skipped."""
    tx = jaxmp.mixed_precision(optax.sgd(0.25), "bfloat16", skip=skip)
    eager = jitted = (params(), tx.init(params()))
    step = jax.jit(lambda p, s, g: tx.apply_gradients(g, s, p))
    for value in (0.5, jnp.inf if skip != "none" else 1.0, 0.25):
        eager = tx.apply_gradients(grads(value), eager[1], eager[0])
        jitted = step(*jitted, grads(value))
        assert tree_bits(eager) == tree_bits(jitted)
