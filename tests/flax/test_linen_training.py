"""Training linen models under rules: a float16 overflow leaves no trace, in statistics neither."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import dynamic_scale, train_state

import jaxmp
from tests.support.bits import tree_bits

pytestmark = [
    pytest.mark.jax,
    pytest.mark.annotations,
    pytest.mark.usefixtures("standard_promotion"),
]

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 8, 8, 3))


class Net(nn.Module):
    """Convolutions and batch norms, in whatever dtype they are told."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (4, 6):
            x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return nn.Dense(1, dtype=self.dtype, name="head")(x.mean((1, 2)))


def loss_of(model: nn.Module) -> Any:
    def loss_fn(params: Any, x: jax.Array, batch_stats: Any) -> Any:
        variables = {"params": params, "batch_stats": batch_stats}
        out, changed = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean((out.astype(jnp.float32) - 1.0) ** 2), dict(changed)

    return loss_fn


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "policy",
    [
        "mixed_float16",
        pytest.param("float16", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param("O2", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
@pytest.mark.slow
def test_a_skipped_step_changes_nothing(policy: str, microbatches: int) -> None:
    model = jaxmp.linen.apply_policy(Net(), policy)
    variables = jax.jit(model.init)(KEY, X)
    assert {x.dtype.name for x in jax.tree.leaves(variables["batch_stats"])} == {"float32"}
    scale = jaxmp.DynamicLossScale(init_scale=2.0**8)
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, loss_scale=scale)
    state = jaxmp.TrainState.create(tx=tx, **variables)
    # What the model made is what is trained: under O2, norms have float32 params.
    assert tree_bits(state.params) == tree_bits(variables["params"])
    step = jaxmp.make_train_step(loss_of(model), "none", microbatches=microbatches, donate=False)
    good, metrics = step(state, X)
    assert metrics["grads_finite"]
    bad, metrics = step(good, X * 1e30)
    assert not metrics["grads_finite"]
    for name in ("step", "params", "batch_stats"):
        assert tree_bits(getattr(bad, name)) == tree_bits(getattr(good, name)), name
    assert tree_bits(bad.opt_state.inner) == tree_bits(good.opt_state.inner)
    assert tree_bits(bad.opt_state.master) == tree_bits(good.opt_state.master)
    assert float(bad.loss_scale.scale) == float(good.loss_scale.scale) / 2
    again, metrics = step(bad, X)
    assert metrics["grads_finite"]
    assert int(again.step) == 2
    assert step._cache_size() == 1


def test_norms_are_float32_under_o2() -> None:
    model = jaxmp.linen.apply_policy(Net(), "O2")
    params = jax.eval_shape(model.init, KEY, X)["params"]
    dtypes = {name: {x.dtype.name for x in jax.tree.leaves(params[name])} for name in params}
    assert dtypes == {
        "BatchNorm_0": {"float32"},
        "BatchNorm_1": {"float32"},
        "Conv_0": {"float16"},
        "Conv_1": {"float16"},
        "head": {"float16"},
    }
    rows = {row.path: row for row in jaxmp.linen.summary(model, KEY, X).rows}
    assert (rows["BatchNorm_0"].compute, rows["BatchNorm_0"].output) == ("float32", "float16")
    assert rows[""].output == "float32"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_plain_flax_is_poisoned() -> None:
    """The positive control: DynamicScale guards params, but batch statistics are lost for ever."""
    model = Net(dtype=jnp.float16)
    variables = jax.jit(model.init)(KEY, X)
    scale = dynamic_scale.DynamicScale()
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2)
    )
    fn = scale.value_and_grad(
        lambda p: loss_of(model)(p, X * 1e30, variables["batch_stats"]), has_aux=True
    )
    scale, finite, (_, changed), grads = fn(state.params)
    new = state.apply_gradients(grads=grads)
    assert not finite
    assert int(new.step) == 1
    statistics = jax.tree.leaves(changed["batch_stats"])
    assert not all(np.isfinite(x).all() for x in statistics)
