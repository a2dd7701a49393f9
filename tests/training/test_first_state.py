"""A first state is one compiled program, whatever its shapes, and the same as made one by one."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from tests.support.compilations import Count

STORED = [
    ("float32", "float32"),
    ("remainder", "int8"),
    ("kahan", "bfloat16"),
    ("stochastic", "float32"),
]
storages = pytest.mark.parametrize(("master", "moments"), STORED)
AT_MOST = 5


def _params(shapes: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    values = {f"layer_{i}": rng.normal(size=(32, 128 + i)) for i in range(shapes)}
    return jax.device_put(jax.tree.map(np.float32, values))


def _optimizer(master: Any = "float32", moments: Any = "float32") -> jaxmp.MixedPrecision:
    return jaxmp.mixed_precision(optax.adamw(1e-3), "bfloat16", master=master, moments=moments)


@storages
@pytest.mark.parametrize("shapes", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 80))])
def test_any_number_of_shapes_is_one_program(
    compilations: Count, master: str, moments: str, shapes: int
) -> None:
    """438 programs, and 14 seconds, stood before the first step of a small model."""
    params, tx = _params(shapes), _optimizer(master, moments)
    makers: list[Callable[[], Any]] = [
        lambda: jaxmp.TrainState.create(params=params, tx=tx),
        lambda: tx.init(params),
        lambda: jaxmp.storage.compact_state(optax.adamw(1e-3), "int8").init(params),
        lambda: jaxmp.storage.convert_state(None, tx, params=params),
    ]
    for make in makers:
        before = compilations()
        make()
        assert compilations() - before <= AT_MOST


@pytest.mark.programs(200, reason="compares with operations that are compiled alone")
@storages
def test_one_program_makes_what_single_operations_make(master: str, moments: str) -> None:
    """Compilers may leave out roundings within a program."""
    params, tx = _params(2), _optimizer(master, moments)
    with jax.disable_jit():
        one_by_one = jaxmp.TrainState.create(params=params, tx=tx)
    chex.assert_trees_all_equal(jaxmp.TrainState.create(params=params, tx=tx), one_by_one)


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "inner", [optax.adamw(1e-3), optax.contrib.schedule_free_adamw(1e-3)], ids=["adamw", "free"]
)
def test_a_state_has_its_own_buffers(policy: str, inner: Any) -> None:
    """Also where an optimizer begins with the params: what is donated must not lie there twice."""
    params = _params(2)
    state = jaxmp.TrainState.create(params=params, tx=jaxmp.mixed_precision(inner, policy))
    step = jax.jit(lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0)
    chex.assert_tree_all_finite((step(state).params, params))


@pytest.mark.parametrize("on_mesh", [False, True])
def test_init_params_returns_the_given_arrays(on_mesh: bool) -> None:
    """Copies would be 4 bytes more for each param."""
    params = _params(1)
    if on_mesh:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        params = jax.device_put(params, NamedSharding(mesh, P("data")))

    def places(tree: Any) -> list[int]:
        (x,) = jax.tree.leaves(tree)
        return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]

    live, state = _optimizer().init_params(params)
    assert places(state.master) == places(params)
    live, _ = jaxmp.mixed_precision(optax.sgd(0.1), "float32").init_params(params)
    assert places(live) == places(params)


@pytest.mark.programs(40, reason="on several devices, a first state is made operation by operation")
@storages
@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit])
def test_states_are_sharded_like_their_params(axis: Any, master: str, moments: str) -> None:
    """The compiler would put zeros, which come from no param, whole on each device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis,))
    everywhere = NamedSharding(mesh, P())
    # Of the two, one was never placed.
    placed = NamedSharding(mesh, P("data"))
    params = {"w": jax.device_put(np.ones((64, 1024), np.float32), placed), "scale": jnp.float32(1)}
    state = jaxmp.TrainState.create(params=params, tx=_optimizer(master, moments))
    for x in jax.tree.leaves(state):
        of_param = x.shape == (64, 1024) or (x.ndim == 2 and x.size > 8)
        assert x.sharding.is_equivalent_to(placed if of_param else everywhere, x.ndim), x
    assert {x.sharding.mesh for x in jax.tree.leaves(state)} == {mesh}


def test_the_first_state_is_made_anew() -> None:
    """Values that Python computes are those of now."""
    rate = [0.1]
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda _: jnp.float32(rate[0]))
    tx, params = jaxmp.mixed_precision(inner, "bfloat16"), _params(1)
    rates = [float(tx.init(params).inner.hyperparams["learning_rate"])]
    rate[0] = 0.5
    rates.append(float(tx.init(params).inner.hyperparams["learning_rate"]))
    np.testing.assert_allclose(rates, [0.1, 0.5])


def test_what_an_optimizer_or_a_user_has_placed_stays_there() -> None:
    """Moments may be split over devices of which each has all params."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape), split), params)

    inner = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    params = jax.device_put({"w": jnp.ones((64, 64))}, everywhere)
    state = jaxmp.mixed_precision(inner, "bfloat16").init(params)
    assert state.inner["w"].sharding == split
    other = jaxmp.mixed_precision(inner, "bfloat16", master="none")
    _, converted = jaxmp.storage.convert_state(state, other, params=params)
    assert converted.inner["w"].sharding == split


READS = {
    "a number": lambda x: np.float32(float(x.max())),
    "an array": lambda x: np.asarray(x).max(),
    "some elements": lambda x: x[x > 0].max(),
    "a sharding": lambda x: jax.device_put(x, x.sharding).max(),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", READS)
def test_an_optimizer_that_cannot_be_traced_runs_as_it_is(compilations: Count, name: str) -> None:
    """One that reads numbers of the params. It is the control of the counts above, too."""
    inner = optax.adamw(1e-3)

    def init(params: Any) -> Any:
        return inner.init(params), READS[name](params["layer_0"])

    untraceable = optax.GradientTransformation(
        init, lambda grads, state, params=None: (grads, state)
    )
    jax.clear_caches()  # of operations that the case before compiled
    params, before = _params(2), compilations()
    tx = jaxmp.mixed_precision(untraceable, "bfloat16", moments="int8")
    state = tx.init(params)
    assert compilations() - before > AT_MOST
    assert float(state.inner.codes[1]) == float(params["layer_0"].max())


def test_traced_params_make_a_part_of_their_program() -> None:
    """Under `eval_shape` nothing is compiled, and under `jit` there is no call in the call."""
    params, tx = _params(2), _optimizer("remainder", "int8")
    create = functools.partial(jaxmp.TrainState.create, tx=tx)
    made = jax.jit(create)(params=params)
    chex.assert_trees_all_equal(made, jaxmp.TrainState.create(params=params, tx=tx))
    assert "pjit" not in str(jax.make_jaxpr(lambda params: create(params=params))(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(create, params=params), made)
