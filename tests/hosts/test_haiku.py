"""Haiku's modules under rules: Haiku names its scopes, which is all that autocast asks for."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from tests.support.bits import tree_bits
from tests.support.dots import count_dots

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("standard_promotion"),
]

X = jax.random.normal(jax.random.key(1), (32, 8))
BATCH = {"x": X, "y": jnp.sin(X[:, :4])}


class Block(hk.Module):
    """A residual block, whose layers are made in its constructor."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.norm = hk.LayerNorm(-1, create_scale=True, create_offset=True, name="norm")
        self.mlp = hk.Linear(16, name="mlp")

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(jax.nn.gelu(self.norm(x)))


def forward(x: jax.Array) -> jax.Array:
    x = Block("block")(hk.Linear(16, name="embed")(x))
    x = hk.BatchNorm(True, True, 0.9, name="batch_norm")(x, is_training=True)
    return hk.Linear(4, name="head")(x)


NET = hk.without_apply_rng(hk.transform_with_state(forward))
with jax.numpy_dtype_promotion("standard"):
    PARAMS, STATE = jax.jit(NET.init)(jax.random.key(0), X)


def loss_fn(params: Any, batch: Any, statistics: Any) -> Any:
    y, statistics = NET.apply(params, statistics, batch["x"])
    return jnp.mean((y - batch["y"]) ** 2), {"statistics": statistics}


@pytest.mark.parametrize("pattern", ["head", "block/mlp", "re:.*mlp"])
def test_rules_find_modules(pattern: str) -> None:
    rules = jaxmp.PolicyRules({pattern: "float32"}, default="mixed_bfloat16")
    fast = jaxmp.autocast(loss_fn, rules)
    assert count_dots(fast, PARAMS, BATCH, STATE) == {"bfloat16": 2, "float32": 1}
    (wide,) = (
        row
        for row in jaxmp.audit(fast, PARAMS, BATCH, STATE).product_lines
        if row.operands[0] == "float32"
    )
    assert wide.path == ("head" if pattern == "head" else "block/mlp")


def test_a_misspelt_rule_is_told() -> None:
    rules = jaxmp.PolicyRules({"block/~/mlp": "float32"}, default="mixed_bfloat16")
    with pytest.warns(UserWarning, match=r"match nothing.*'block/~/mlp'.*'block/mlp'"):
        jaxmp.autocast(loss_fn, rules)(PARAMS, BATCH, STATE)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_it_trains_and_skips(policy: str) -> None:
    def run(policy: str) -> tuple[Any, Any, list[float]]:
        tx = jaxmp.mixed_precision(optax.adam(1e-2), policy)
        state = jaxmp.TrainState.create(params=PARAMS, tx=tx, statistics=STATE)
        step = jaxmp.make_train_step(loss_fn, policy, donate=False)
        losses = []
        for _ in range(20):
            state, metrics = step(state, BATCH)
            losses.append(float(metrics["loss"]))
        return state, step, losses

    state, step, losses = run(policy)
    np.testing.assert_allclose(losses, run("float32")[2], rtol=0.05)
    floats = [x for x in jax.tree.leaves(state.statistics) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype.name for x in floats} == {"float32"}
    after, metrics = step(state, {"x": jnp.full_like(X, jnp.inf), "y": BATCH["y"]})
    assert not bool(metrics["grads_finite"])
    assert tree_bits((after.params, after.statistics)) == tree_bits(
        (state.params, state.statistics)
    )


def test_haikus_own_policies_take_ours() -> None:
    hk.mixed_precision.set_policy(hk.Linear, jaxmp.get_policy("mixed_bfloat16"))
    try:
        dots = count_dots(lambda params: NET.apply(params, STATE, X)[0], PARAMS)
    finally:
        hk.mixed_precision.clear_policy(hk.Linear)
    assert dots == {"bfloat16": 3}
    assert count_dots(lambda params: NET.apply(params, STATE, X)[0], PARAMS) == {"float32": 3}
