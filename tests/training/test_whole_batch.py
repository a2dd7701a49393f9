"""Whoever gives each device the whole batch is told once; whoever places it otherwise is not."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp.sharding import FSDP, fully_sharded

pytestmark = pytest.mark.usefixtures("standard_promotion")

TOLD = r"each device computes the whole batch: the params lie on 8 devices.*PartitionSpec\('data'\)"
PARAMS = {"up": np.ones((16, 64), np.float32) / 16, "down": np.ones((64, 8), np.float32) / 64}
BATCH = np.ones((32, 16), np.float32)
KINDS = AxisType.Auto, AxisType.Explicit


def mesh_of(kind: AxisType = AxisType.Auto, *, model: int = 1, data: int | None = None) -> Any:
    shape = (data or 8 // model, model)
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2)


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def run(mesh: Any, batch: Any, specs: Any = None, loss: Any = loss_fn, **options: Any) -> None:
    specs = specs or {"up": P(), "down": P()}
    place = {name: NamedSharding(mesh, specs[name]) for name in PARAMS}
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=jax.device_put(PARAMS, place), tx=tx)
    step = jaxmp.make_train_step(loss, **options)
    state, _ = step(state, batch)
    step(state, batch)


def told(*args: Any, **kwargs: Any) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*args, **kwargs)
    return sum("whole batch" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_numpy_or_a_copy_on_each_device_is_told_once(kind: AxisType) -> None:
    for batch in (BATCH, jax.device_put(BATCH, NamedSharding(mesh_of(kind), P()))):
        with pytest.warns(UserWarning, match=TOLD):
            run(mesh_of(kind), batch)
        assert told(mesh_of(kind), batch) == 1
    assert told(mesh_of(kind), jax.device_put(BATCH, NamedSharding(mesh_of(kind), P("data")))) == 0


def test_params_that_are_split_to_save_memory() -> None:
    mesh = mesh_of()
    shardings = fully_sharded(PARAMS, mesh, axis="data", min_size=0)
    specs = {name: sharding.spec for name, sharding in shardings.items()}
    fsdp = FSDP(shardings=shardings)
    assert told(mesh, BATCH, specs, fsdp=fsdp) == 1
    split = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    assert told(mesh, split, specs, fsdp=fsdp) == 0


def test_tensor_parallelism_has_the_whole_batch_on_each_device() -> None:
    specs = {"up": P(None, "model"), "down": P("model", None)}
    assert told(mesh_of(model=8), BATCH, specs) == 0
    assert told(mesh_of(model=2), BATCH, specs) == 1  # four replicas of it
    assert told(mesh_of(model=1, data=1), BATCH) == 0  # one device


def test_a_loss_that_splits_its_batch_by_itself() -> None:
    mesh = mesh_of()

    def constrained(params: Any, x: Any) -> Any:
        return loss_fn(params, jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data"))))

    def mapped(params: Any, x: Any) -> Any:
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        losses = jax.shard_map(lambda p, x: loss_fn(p, x)[None], mesh=mesh, **specs)
        return jnp.mean(losses(params, x))

    for loss in (constrained, mapped):
        assert told(mesh, BATCH, loss=loss) == 0
    assert told(mesh, np.ones((3, 16, 5), np.float32)[:, :, 0]) == 1  # features can be split
    assert told(mesh, np.ones(3, np.float32), loss=lambda p, x: loss_fn(p, jnp.ones((3, 16)))) == 0


def test_the_look_costs_no_further_trace() -> None:
    traces = []

    def counted(params: Any, x: Any) -> Any:
        traces.append(1)
        return loss_fn(params, x)

    split = jax.device_put(BATCH, NamedSharding(mesh_of(), P("data")))
    assert told(mesh_of(), split, loss=counted) == 0
    alone = len(traces)
    assert told(mesh_of(), BATCH, loss=counted) == 1
    assert len(traces) == 2 * alone


def test_live_modules() -> None:
    mesh = mesh_of()
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16"))
    step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
    with pytest.warns(UserWarning, match=TOLD):
        step(model, optimizer, BATCH)
    step(model, optimizer, BATCH)  # not again: a warning would be an error here
    split = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))(model, optimizer, split)
