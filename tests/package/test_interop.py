"""The same run through every way in: optax, Flax's TrainState, nnx.Optimizer, our own step."""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxTrainState

import jaxmp
from tests.support.bits import tree_bits

pytestmark = pytest.mark.usefixtures("standard_promotion")
STEPS = 25
# As `make_train_step` does: gradients of weights are summed over the batch in float32.
REDUCED: Any = {"reduce_dtype": jnp.float32}


class Model(nnx.Module):
    """Two layers and a norm, computing in the dtype of a policy."""

    def __init__(self, policy: jaxmp.Policy, rngs: nnx.Rngs) -> None:
        dtypes: Any = {"dtype": policy.compute_dtype, "param_dtype": policy.param_dtype}
        self.first = nnx.Linear(4, 16, rngs=rngs, **dtypes)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.second = nnx.Linear(16, 2, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.norm(nnx.tanh(self.first(x))))


def mse(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def batch(i: int) -> Any:
    x = np.random.default_rng(i).standard_normal((16, 4), np.float32)
    factor = np.inf if i in (5, 6, 13) else 1.0  # overflows on the way
    return {"x": x, "y": x[:, :2] * np.float32(factor)}


def setup(policy: str) -> Any:
    model = Model(jaxmp.get_policy(policy), nnx.Rngs(0))
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    config = jaxmp.DynamicLossScale(init_scale=2.0**8, growth_interval=4)
    return model, jaxmp.mixed_precision(inner, policy, loss_scale=config)


# Each way in has a state, and a step of it.
Way = tuple[Any, Callable[[Any, Any], tuple[Any, Any]]]


def through_optax(policy: str) -> Way:
    model, tx = setup(policy)
    graph, params = nnx.split(model)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(
            lambda p: mse(nnx.merge(graph, p), batch), loss_scale=opt_state.loss_scale, **REDUCED
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, tx.init(params)), step


def through_flax_train_state(policy: str) -> Way:
    model, tx = setup(policy)
    graph, params = nnx.split(model)
    state = FlaxTrainState.create(
        apply_fn=lambda p, batch: mse(nnx.merge(graph, p), batch),
        params=nnx.to_pure_dict(params),
        tx=tx,
    )

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        scale = state.opt_state.loss_scale
        grad_fn = jaxmp.value_and_grad(state.apply_fn, loss_scale=scale, **REDUCED)
        loss, grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return state, step


def through_nnx_optimizer(policy: str) -> Way:
    model, tx = setup(policy)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        graph, params = nnx.split(model)
        loss, grads = jaxmp.value_and_grad(
            lambda p: mse(nnx.merge(graph, p), batch),
            loss_scale=optimizer.opt_state.loss_scale,
            **REDUCED,
        )(params)
        optimizer.update(model, grads)
        return loss

    return optimizer, lambda optimizer, batch: (optimizer, step(model, optimizer, batch))


def through_make_train_step(policy: str) -> Way:
    model, tx = setup(policy)
    graph, params = nnx.split(model)
    state = jaxmp.TrainState.create(params=params, tx=tx, cast_params=False)
    step = jaxmp.make_train_step(lambda p, batch: mse(nnx.merge(graph, p), batch), "none")

    def loss_alone(state: Any, batch: Any) -> Any:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return state, loss_alone


def losses(way: Callable[[str], Way], policy: str) -> list[float]:
    (state, step), found = way(policy), []
    for i in range(STEPS):
        state, loss = step(state, batch(i))
        found.append(float(loss))
    jaxmp.check_progress(state)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "float32", "mixed_bfloat16", "bfloat16"])
def test_the_same_losses(policy: str) -> None:
    want = losses(through_optax, policy)
    clean = [loss for i, loss in enumerate(want) if i not in (5, 6, 13)]
    assert np.isinf([want[i] for i in (5, 6, 13)]).all()
    assert np.mean(clean[-5:]) < 0.9 * np.mean(clean[:5])
    for way in (through_flax_train_state, through_nnx_optimizer, through_make_train_step):
        np.testing.assert_allclose(losses(way, policy), want, rtol=1e-6, err_msg=way.__name__)


def test_linen_with_params_in_bfloat16() -> None:
    """A linen model whose params live in bfloat16, under flax's TrainState."""
    model = nn.Dense(2, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    params = jax.jit(model.init)(jax.random.key(0), batch(0)["x"])["params"]
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "bfloat16")
    state = FlaxTrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return mse(lambda x: state.apply_fn({"params": params}, x), batch)

        return state.apply_gradients(grads=jaxmp.grad(loss)(state.params))

    for i in range(4):
        state = step(state, batch(i))
    master = state.opt_state.master["kernel"]
    assert master.dtype == jnp.float32
    np.testing.assert_array_equal(state.params["kernel"], master.astype(jnp.bfloat16))


def test_jmp_policies_are_accepted_everywhere() -> None:
    policy = jmp.get_policy("p=f32,c=f16,o=f32")
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    assert tx.policy == jaxmp.get_policy("mixed_float16")
    state = jaxmp.TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
    step = jaxmp.make_train_step(lambda p, x: jnp.mean((p["w"] * x).astype(jnp.float32)), policy)
    state, _ = step(state, jnp.ones(2))
    assert int(state.step) == 1


@jax.tree_util.register_pytree_node_class
class Labelled:
    """A container that looks at its arrays whenever it is built, as those of xarray do."""

    def __init__(self, values: Any) -> None:
        self.values = values
        if values.shape[0] != 2:
            raise ValueError("conflicting sizes")

    def tree_flatten(self) -> Any:
        return (self.values,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Labelled":
        return cls(*children)


@pytest.mark.programs(60, reason="find_overflow runs one operation after the other")
def test_containers_that_look_at_shapes() -> None:
    """GraphCast's batches are such: steps and `find_overflow` put other leaves into them."""
    params = {"w": jnp.asarray(np.full((4, 4), 1e4, np.float32))}
    batch = Labelled(jnp.asarray(np.full((2, 4), 1e3, np.float32)))

    def loss(params: Any, batch: Any) -> Any:
        h = batch.values @ params["w"]
        return jnp.mean((h @ params["w"]).astype(jnp.float32)) * 1e-12

    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=params, tx=tx)
    _, metrics = jaxmp.make_train_step(loss, "mixed_bfloat16")(state, batch)
    np.testing.assert_allclose(metrics["loss"], 1.6, rtol=1e-2)
    found = jaxmp.diagnostics.find_overflow(loss, params, batch, policy="mixed_float16")
    assert found.operation == "dot_general"


# Every function of ours that returns a transformation, as optax calls it.
TRANSFORMATIONS: dict[str, Callable[[Any], Any]] = {
    "mixed_precision": lambda inner: jaxmp.mixed_precision(inner, "bfloat16"),
    "compact_state": lambda inner: jaxmp.storage.compact_state(inner, "bfloat16", min_size=1),
}


def positional(function: Any) -> list[tuple[str, Any]]:
    """The names and defaults of what may be given by position."""
    params = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [(x.name, x.default) for x in params if x.kind in kinds and x.name != "self"]


def test_all_transformations_are_listed() -> None:
    modules = [jaxmp, jaxmp.nnx, jaxmp.linen, jaxmp.float8, jaxmp.sharding, jaxmp.storage]
    functions = [f for m in modules for f in map(m.__dict__.get, dir(m)) if inspect.isfunction(f)]
    found = {
        f.__name__
        for f in functions
        if any(x in str(f.__annotations__.get("return")) for x in ("Transformation", "MixedPrec"))
    }
    assert found == set(TRANSFORMATIONS)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize(
    "inner", [optax.adam(0.1), optax.MultiSteps(optax.adam(0.1), 2)], ids=["adam", "MultiSteps"]
)
def test_transformations_are_called_as_those_of_optax(name: str, inner: Any) -> None:
    """By position and by name, with the names of optax."""
    tx = TRANSFORMATIONS[name](inner)
    assert positional(tx.init) == positional(optax.TransformInitFn.__call__)
    protocol = optax.TransformUpdateExtraArgsFn.__call__
    assert positional(tx.update) == positional(protocol)
    kinds = [x.kind for x in inspect.signature(tx.update).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds
    params = {"w": jnp.full((8, 128), 2.0)}
    grads = jax.tree.map(jnp.ones_like, params)
    by_place = tx.update(grads, tx.init(params), params)
    by_name = tx.update(updates=grads, state=tx.init(params=params), params=params)
    assert tree_bits(by_place) == tree_bits(by_name)


def test_states_and_optimizers_are_called_as_those_of_flax() -> None:
    names = {name for name, _ in positional(jaxmp.TrainState.apply_gradients)}
    flax_params = inspect.signature(FlaxTrainState.apply_gradients).parameters.values()
    assert {
        x.name for x in flax_params if x.name != "self" and x.kind is not x.VAR_KEYWORD
    } <= names
    theirs = [name for name, _ in positional(nnx.Optimizer.update)]
    assert [name for name, _ in positional(jaxmp.nnx.Optimizer.update)] == theirs
