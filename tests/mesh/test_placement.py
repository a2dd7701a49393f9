"""State that is made beside params lies on their devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp._mesh.placement import placed_beside
from tests.support.reduction_checks import MESH

pytestmark = pytest.mark.usefixtures("standard_promotion")
EVERYWHERE, SPLIT = (NamedSharding(MESH, spec) for spec in (P(), P("data")))
ALONE = NamedSharding(jax.sharding.Mesh(jax.devices()[:1], ("data",)), P())


def params() -> Any:
    return {"w": jax.device_put(np.ones((16, 8), np.float32), SPLIT)}


def test_what_is_on_the_default_device_is_replicated() -> None:
    key = jax.random.key(3)
    state = {"count": jnp.int32(3), "key": key, "moment": params()["w"], "none": None, "text": "a"}
    placed = placed_beside(params(), state)
    assert placed["count"].sharding == placed["key"].sharding == EVERYWHERE
    assert placed["moment"] is state["moment"]
    assert int(placed["count"]) == 3
    assert placed["key"] == key
    assert placed["text"] == "a"


def test_what_somebody_has_placed_stays() -> None:
    device = jax.device_put(jnp.ones(3), jax.devices()[3])
    assert placed_beside(params(), device) is device


@pytest.mark.parametrize("alone", [jnp.ones(3), np.ones(3), 1.0, None])
def test_without_a_mesh_nothing_moves(alone: Any) -> None:
    count = jnp.int32(0)
    assert placed_beside(alone, count) is count


def test_under_jit_nothing_moves() -> None:
    @jax.jit
    def inside(w: Any) -> Any:
        count = jnp.int32(0)
        assert placed_beside(w, count) is count
        return w

    inside(params()["w"])


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("laid", [SPLIT, ALONE], ids=["split", "mesh of one device"])
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_a_step_of_a_state_that_was_made_at_once_compiles_once(policy: str, laid: Any) -> None:
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), policy)
    params = {"w": jax.device_put(np.ones((16, 8), np.float32), laid)}
    state = jaxmp.TrainState.create(params=params, tx=tx, seen=jnp.int32(0))
    assert all(x.sharding.mesh == laid.mesh for x in jax.tree.leaves(state))
    assert state.opt_state.inner[0].mu["w"].sharding == laid

    def counting_loss(params: Any, x: Any, seen: Any) -> Any:
        return loss_fn(params, x), {"seen": seen + 1}

    step = jaxmp.make_train_step(counting_loss, policy)
    x = jax.device_put(np.ones((32, 16), np.float32), laid)
    for _ in range(3):
        state, _ = step(state, x)
    assert step._cache_size() == 1
    assert int(state.step) == 3


def test_a_step_of_an_nnx_optimizer_compiles_once() -> None:
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), EVERYWHERE))
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "mixed_bfloat16")
    optimizer = jaxmp.nnx.Optimizer(model, tx)
    assert all(len(x.devices()) == 8 for x in jax.tree.leaves(nnx.state(optimizer)))

    traced = []

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        traced.append(x)
        loss_fn = jaxmp.nnx.autocast(lambda m: jnp.mean(m(x) ** 2), "mixed_bfloat16")
        _, grads = jaxmp.nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)

    x = jax.device_put(np.ones((32, 16), np.float32), SPLIT)
    for _ in range(3):
        step(model, optimizer, x)
    assert len(traced) == 1
    assert int(optimizer.step[...]) == 3
