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

TOLD = r"each of 8 devices computes the whole batch.*PartitionSpec\('data'\)"
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
    step(state.replace(), batch)  # to the step a state from elsewhere


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


def test_tied_and_stacked_params_that_are_split_to_save_memory() -> None:
    """What jaxmp gathers by itself does not count as a loss that splits its batch."""
    params = {"table": np.ones((16, 16), np.float32), "layers": np.ones((2, 3, 16, 16), np.float32)}

    def loss(params: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w), None

        def pair(h: Any, ws: Any) -> Any:
            return jax.lax.scan(layer, h, ws)[0], None

        h, _ = jax.lax.scan(pair, x @ params["table"], params["layers"])
        return jnp.mean((h @ params["table"].T) ** 2)

    mesh = mesh_of()
    shardings = {
        "table": NamedSharding(mesh, P("data")),
        "layers": NamedSharding(mesh, P(None, None, "data")),
    }
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=jax.device_put(params, shardings), tx=tx)
    step = jaxmp.make_train_step(loss, fsdp=FSDP(shardings=shardings))
    with pytest.warns(UserWarning, match=TOLD):
        step(state, BATCH)


def test_whoever_splits_anything_else_has_another_plan() -> None:
    mesh, both = mesh_of(), mesh_of(model=2)
    assert told(mesh_of(model=8), BATCH, {"up": P(None, "model"), "down": P("model", None)}) == 0
    zero = {"up": P("data"), "down": P("data")}
    assert told(both, jax.device_put(BATCH, NamedSharding(both, P("data"))), zero) == 0
    assert told(mesh_of(data=1), BATCH) == 0  # one device
    other = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    assert told(mesh, jax.device_put(BATCH, NamedSharding(other, P("batch")))) == 0
    # A frozen base that a loss of adapters closes over.
    base = jax.device_put(np.ones((16, 16), np.float32), NamedSharding(mesh, P("data")))
    assert told(mesh, BATCH, loss=lambda params, x: loss_fn(params, x @ base)) == 0
    inside = jax.jit(lambda x: x @ base)
    assert told(mesh, BATCH, loss=lambda params, x: loss_fn(params, inside(x))) == 0


def test_a_frozen_base_among_the_collections() -> None:
    mesh = mesh_of(model=8)
    base = jax.device_put(np.ones((16, 16), np.float32), NamedSharding(mesh, P(None, "model")))
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=params, tx=tx, base=base)
    step = jaxmp.make_train_step(lambda params, x, base: (loss_fn(params, x @ base), {}))
    step(state, BATCH)  # a warning would be an error here


def test_params_on_several_meshes() -> None:
    mesh, other = mesh_of(), jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))
    shardings = {"up": NamedSharding(mesh, P(None, "data")), "down": NamedSharding(mesh, P())}
    params = {
        "down": jax.device_put(PARAMS["down"], NamedSharding(other, P())),
        "up": jax.device_put(PARAMS["up"], shardings["up"]),
    }
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=params, tx=tx)
    step = jaxmp.make_train_step(loss_fn, fsdp=FSDP(shardings=shardings))
    with pytest.warns(UserWarning, match=TOLD):
        step(state, BATCH)


def test_a_mesh_of_two_axes_without_a_use_for_the_second() -> None:
    with pytest.warns(UserWarning, match=r"PartitionSpec\(\('data', 'model'\)\)"):
        run(mesh_of(model=2), BATCH)


def test_batches_that_are_not_to_be_split() -> None:
    vector = np.ones(8, np.float32)  # keys and weights of parts are such

    def weighted(params: Any, weights: Any) -> Any:
        return loss_fn(params, jnp.ones((8, 16)) * weights[:, None])

    assert told(mesh_of(), vector, loss=weighted) == 0
    assert told(mesh_of(), None, loss=lambda params, _: weighted(params, vector)) == 0
    one = {"x": np.ones((1, 16), np.float32), "mask": np.ones((64, 64), np.float32)}
    assert told(mesh_of(), one, loss=lambda params, batch: loss_fn(params, batch["x"])) == 0
    assert told(mesh_of(), np.ones((1, 16), np.float32)) == 0  # one sequence
    assert told(mesh_of(), np.ones((12, 16), np.float32)) == 0  # no multiple of eight


def test_a_loss_that_splits_its_batch_by_itself() -> None:
    mesh = mesh_of()
    split = NamedSharding(mesh, P("data"))

    def constrained(params: Any, x: Any) -> Any:
        return loss_fn(params, jax.lax.with_sharding_constraint(x, split))

    def put(params: Any, x: Any) -> Any:
        return loss_fn(params, jax.device_put(x, split))

    def mapped(params: Any, x: Any) -> Any:
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        losses = jax.shard_map(lambda p, x: loss_fn(p, x)[None], mesh=mesh, **specs)
        return jnp.mean(losses(params, x))

    jitted = jax.jit(loss_fn, in_shardings=(None, split))
    for loss in (constrained, put, mapped, jitted):
        assert told(mesh, BATCH, loss=loss) == 0
    whole = NamedSharding(mesh, P())
    assert told(mesh, BATCH, loss=jax.jit(loss_fn, in_shardings=(whole, whole))) == 1


def test_a_loss_that_splits_a_result_on_explicit_axes() -> None:
    mesh = mesh_of(AxisType.Explicit)

    def loss(params: Any, x: Any) -> Any:
        hidden = jnp.einsum(
            "bi,ij->bj", x, params["up"], out_sharding=NamedSharding(mesh, P("data"))
        )
        return jnp.mean((jnp.tanh(hidden) @ params["down"]) ** 2)

    assert told(mesh, jax.device_put(BATCH, NamedSharding(mesh, P())), loss=loss) == 0


def test_a_right_program_is_not_traced_for_it() -> None:
    traces = []

    def counted(params: Any, x: Any) -> Any:
        traces.append(1)
        return loss_fn(params, x)

    split = jax.device_put(BATCH, NamedSharding(mesh_of(), P("data")))
    assert told(mesh_of(), split, loss=counted) == 0
    alone = len(traces)
    assert told(mesh_of(), BATCH, loss=counted) == 1
    assert len(traces) == 2 * alone + 1


def test_live_modules() -> None:
    mesh = mesh_of()
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16"))
    step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
    jaxmp.audit(step, model, optimizer, BATCH)  # runs nothing
    step.lower(model, optimizer, jax.ShapeDtypeStruct(BATCH.shape, jnp.float32))
    with pytest.warns(UserWarning, match=TOLD):
        step(model, optimizer, BATCH)
    step(model, optimizer, BATCH)  # not again: a warning would be an error here
    split = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))(model, optimizer, split)
