"""Every state goes through JAX's trees, orbax, flax.serialization, pickle and sharding trees."""

import pathlib
import pickle
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxmp
from tests.support.bits import tree_bits
from tests.support.cases import OPTIMIZERS, mixed_tree

pytestmark = pytest.mark.usefixtures("standard_promotion")


def states() -> dict[str, Any]:
    tx = jaxmp.mixed_precision(optax.chain(optax.clip(1.0), optax.adamw(1e-3)), "float16")
    params = mixed_tree("float16")
    return {
        "loss_scale": jaxmp.DynamicLossScale(min_scale=2.0).init(),
        "optimizer": tx.init(params),
        "train": jaxmp.TrainState.create(params=params, tx=tx, batch_stats={"m": jnp.ones(2)}),
    }


@pytest.mark.parametrize("name", states())
def test_round_trips(name: str) -> None:
    state = states()[name]
    leaves, treedef = jax.tree.flatten(state)
    assert tree_bits(jax.tree.unflatten(treedef, leaves)) == tree_bits(state)
    assert tree_bits(jax.jit(lambda s: s)(state)) == tree_bits(state)
    # Trees of anything: shardings, names, None. Classes that validate on construction fail here.
    for value in ("replicated", None, jax.sharding.PartitionSpec()):
        assert jax.tree.map(lambda _, v=value: v, state) is not None


@pytest.mark.parametrize("name", ["loss_scale", "optimizer"])
def test_pickle(name: str) -> None:
    state = states()[name]
    assert tree_bits(pickle.loads(pickle.dumps(state))) == tree_bits(state)


@pytest.mark.parametrize("name", states())
def test_orbax(name: str, tmp_path: pathlib.Path) -> None:
    state = states()[name]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert tree_bits(restored) == tree_bits(state)
    assert type(restored) is type(state)


@pytest.mark.parametrize("name", ["loss_scale", "optimizer"])
def test_flax_serialization(name: str) -> None:
    state = states()[name]
    blank = jax.tree.map(jnp.zeros_like, state)
    restored = flax.serialization.from_bytes(blank, flax.serialization.to_bytes(state))
    assert tree_bits(restored) == tree_bits(state)


@pytest.mark.parametrize("name", ["adamw", "muon", "schedule_free_adamw", "multi_steps", "clip"])
def test_a_restored_state_goes_on_with_the_same_bits(name: str, tmp_path: pathlib.Path) -> None:
    tx = jaxmp.mixed_precision(OPTIMIZERS[name](), "bfloat16")
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5, jnp.float32), mixed_tree())
    step = jax.jit(lambda s: s.apply_gradients(grads))
    state = step(jaxmp.TrainState.create(params=mixed_tree(), tx=tx))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    assert tree_bits(step(restored)) == tree_bits(step(state))


def test_sharded_state_keeps_its_shardings() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = {"w": jax.device_put(jnp.ones((16, 4), jnp.bfloat16), spec)}
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "bfloat16")
    state = jaxmp.TrainState.create(params=params, tx=tx)
    grads = {"w": jax.device_put(jnp.ones((16, 4)), spec)}
    stepped = jax.jit(lambda s, g: s.apply_gradients(g), donate_argnums=0)(state, grads)
    for s in (state, stepped):
        for leaf in (s.params["w"], s.opt_state.master["w"], s.opt_state.inner[0].mu["w"]):
            assert leaf.sharding.is_equivalent_to(spec, 2), leaf.sharding
    np.testing.assert_allclose(np.asarray(stepped.params["w"], np.float32), 0.99, atol=4e-3)


def test_one_bad_shard_skips_on_all_devices() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = {"w": jax.device_put(jnp.ones((16, 4)), spec)}
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_float16")
    state = jaxmp.TrainState.create(params=params, tx=tx)
    grads = {"w": jax.device_put(jnp.ones((16, 4)).at[5, 2].set(jnp.nan), spec)}
    stepped = jax.jit(lambda s, g: s.apply_gradients(g))(state, grads)
    assert tree_bits(stepped.params) == tree_bits(state.params)
    assert int(stepped.step) == 0
