"""Gradients over eight devices, after partitioning: in which dtype they are summed and gathered."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxmp
import jaxmp.linen
from jaxmp.sharding import FSDP, fully_sharded, state_shardings
from tests.support import sharded_models as models
from tests.support.reduction_matrix import Case, cases, check, check_alike, collectives_of, landing

pytestmark = pytest.mark.usefixtures("standard_promotion")


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def verify(author: models.Author, mode: models.Mode, remat: bool) -> None:
    case = Case(author, mode, remat, make_mesh)
    check(case, collectives_of(case))


@pytest.mark.slow
@pytest.mark.parametrize(("author", "mode", "remat"), cases(0))
def test_every_mode(author: models.Author, mode: models.Mode, remat: bool) -> None:
    verify(author, mode, remat)


def explicit_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(shape))


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.parametrize(("author", "mode", "remat"), cases(1))
def test_every_mode_on_explicit_axes(author: models.Author, mode: models.Mode, remat: bool) -> None:
    """A mesh as JAX makes it has the same collectives as one of automatic axes."""
    case = Case(author, mode, remat, explicit_mesh)
    check_alike(case, Case(author, mode, remat, make_mesh), collectives_of(case))


@pytest.mark.parametrize("shift", range(3))
def test_before_a_change_lands_each_mode_and_author_has_its_turn(shift: int) -> None:
    authors, modes, remats = map(set, zip(*landing(shift), strict=True))
    assert (authors, modes) == (set(models.AUTHORS), set(models.MODES))
    assert remats == {True, False}
    assert len(landing(shift)) == 6


def test_a_sharded_step_stays_where_it_is() -> None:
    mesh = make_mesh((4, 2), ("data", "model"))
    split = {"w": NamedSharding(mesh, P(None, "model")), "b": NamedSharding(mesh, P())}
    params = {"w": jnp.ones((64, 128)) / 64, "b": jnp.zeros(128)}
    shardings = fully_sharded(params, mesh, base=split, min_size=1024)
    params = jax.device_put(params, shardings)
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "bfloat16")
    create = functools.partial(jaxmp.TrainState.create, tx=tx)
    placed = state_shardings(jax.eval_shape(create, params=params), params)
    state = jax.jit(create, out_shardings=placed)(params=params)
    x = jax.device_put(jnp.ones((16, 64), jnp.bfloat16), NamedSharding(mesh, P("data")))

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.square((x @ p["w"] + p["b"][None]).astype(jnp.float32)))

    fsdp = FSDP(shardings=shardings)
    step = jaxmp.make_train_step(loss, "bfloat16", fsdp=fsdp, shardings=placed)
    for _ in range(2):
        old = state
        state, metrics = step(state, x)
        assert jax.tree.map(lambda x: x.sharding, state) == placed
        assert old.params["w"].is_deleted()  # one copy
    assert step._cache_size() == 1
    assert bool(metrics["grads_finite"])
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert held < 1.1 * 14 * (64 * 128 / 8) + 14 * 128 + 64


@pytest.mark.slow
@pytest.mark.parametrize("default", [None, "float32"])
def test_a_step_goes_by_all_policies_of_rules(default: Any) -> None:
    mesh = make_mesh((8,), ("data",))
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def step_of(policy: str) -> Any:
        rules = jaxmp.PolicyRules([("*", policy)], default=default)
        model = jaxmp.linen.apply_policy(nn.Sequential([nn.Dense(16)]), rules)
        tx = jaxmp.mixed_precision(optax.sgd(0.1), rules)
        params = model.init(jax.random.key(0), jnp.ones((1, 32)))
        state = jaxmp.TrainState.create(params=params, tx=tx)
        step = jaxmp.make_train_step(lambda p, x: jnp.mean(model.apply(p, x) ** 2), "none")
        return step, jax.device_put(state, NamedSharding(mesh, P()))

    step, state = step_of("mixed_bfloat16")
    jaxmp.assert_reduced_in(step, "float32", state, x)
    step, state = step_of("params=float32,compute=bfloat16,output=float32,reduce=bfloat16")
    with pytest.raises(jaxmp.AuditError, match="bfloat16  all-reduce over data"):
        jaxmp.assert_reduced_in(step, "float32", state, x)


def test_a_step_goes_by_the_policy() -> None:
    mesh = make_mesh((8,), ("data",))
    batch = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(x @ p["w"]).astype(jnp.float32))

    for reduce, is_wide in (("float32", True), ("bfloat16", False)):
        policy = jaxmp.get_policy(f"params=float32,compute=bfloat16,output=float32,reduce={reduce}")
        tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
        state = jaxmp.TrainState.create(params={"w": jnp.ones((32, 16))}, tx=tx)
        state = jax.device_put(state, NamedSharding(mesh, P()))
        step = jaxmp.make_train_step(loss, policy)
        if is_wide:
            jaxmp.assert_reduced_in(step, "float32", state, batch)
        else:
            with pytest.raises(jaxmp.AuditError, match="bfloat16  all-reduce over data"):
                jaxmp.assert_reduced_in(step, "float32", state, batch)
