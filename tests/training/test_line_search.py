"""Optimizers that want the loss, the gradients and a function of them: a step has all three."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.jax]

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.standard_normal((64, 8), np.float32)
BATCH = jax.device_put((INPUTS, np.sin(INPUTS[:, :1])))
PARAMS = jax.device_put(
    {
        "a": np.float32(RANDOM.normal(size=(8, 32)) / 3),
        "b": np.float32(RANDOM.normal(size=(32, 1)) / 6),
    }
)
STEPS = 8


def loss_fn(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y).astype(jnp.float32) ** 2)


def backtracking(store_grad: bool) -> optax.GradientTransformation:
    search = optax.scale_by_backtracking_linesearch(15, store_grad=store_grad)
    return optax.chain(optax.sgd(1.0), search)


OPTIMIZERS = {
    "lbfgs": optax.lbfgs(),
    "zoom": optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(10)),
    "backtracking": backtracking(False),
    "backtracking with gradients": backtracking(True),
}


def trained(tx: Any, policy: str, **options: Any) -> tuple[Any, Any]:
    state = jaxmp.TrainState.create(params=PARAMS, tx=tx)
    step = jaxmp.make_train_step(loss_fn, policy, **options)
    for _ in range(STEPS):
        state, metrics = step(state, BATCH)
    assert step._cache_size() == 1  # one trace
    assert int(metrics["skipped"]) == 0
    return state, metrics


def by_hand(tx: Any, policy: str) -> Any:
    """The loop that users write, with what optax's documentation passes."""
    low = jaxmp.autocast(loss_fn, policy)
    params, state = PARAMS, tx.init(PARAMS)
    gradient = jaxmp.value_and_grad(low, reduce_dtype="float32")

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, grads = gradient(params, BATCH)
        more = {"value": loss, "grad": grads, "value_fn": lambda p: low(p, BATCH)}
        return tx.apply_gradients(grads, state, params, **more), loss

    for _ in range(STEPS):
        (params, state), loss = step(params, state)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_by_hand(name: str) -> None:
    tx = jaxmp.mixed_precision(OPTIMIZERS[name], "mixed_bfloat16")
    _, metrics = trained(tx, "mixed_bfloat16")
    first = loss_fn(PARAMS, BATCH)
    assert float(metrics["loss"]) < 0.2 * float(first)
    assert float(metrics["loss"]) == pytest.approx(float(by_hand(tx, "mixed_bfloat16")), rel=0.1)


@pytest.mark.parametrize(
    ("policy", "microbatches"),
    [("float32", 1), ("bfloat16", 4), ("mixed_float16", 4), ("float16", 1)],
)
def test_in_every_precision(policy: str, microbatches: int) -> None:
    """In float16 the line is searched with scaled gradients, which plain ones would not find."""
    tx = jaxmp.mixed_precision(optax.lbfgs(), policy)
    _, metrics = trained(tx, policy, microbatches=microbatches)
    assert float(metrics["loss"]) < 0.03


@pytest.mark.parametrize("name", ["lbfgs", "zoom"])
def test_a_line_on_which_the_scale_overflows(name: str) -> None:
    """The scale suits the step's own gradients: at a trial point they may be much larger.

    With that scale alone the search failed, nothing moved, and no step was skipped.
    """
    tx = jaxmp.mixed_precision(OPTIMIZERS[name], "mixed_float16")
    params = {"a": np.zeros((8, 16), np.float32), "b": np.full((16, 1), 0.1, np.float32)}
    params["a"][0] = 0.1
    state = jaxmp.TrainState.create(params=params, tx=tx)
    large = lambda p, batch: loss_fn(p, (batch[0], 100 * batch[1]))  # noqa: E731
    step = jaxmp.make_train_step(large, "mixed_float16")
    losses = []
    for _ in range(40):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert int(metrics["skipped"]) > 0  # control: the scale overflows here
    assert losses[-1] < 0.3 * losses[0]


def test_slopes_along_the_line() -> None:
    """Forward and backward mode, and second derivatives, as of the loss itself."""

    def update(grads: Any, _: Any, params: Any = None, *, value_fn: Any, **__: Any) -> Any:
        along = jax.tree.map(jnp.ones_like, params)
        slope = lambda p: jax.jvp(value_fn, (p,), (along,))[1]  # noqa: E731
        product = jax.jvp(jax.grad(value_fn), (params,), (along,))[1]
        return grads, {
            "slope": slope(params),
            "curvature": sum(jnp.sum(x) for x in jax.tree.leaves(product)),
        }

    start = {"slope": jnp.float32(0), "curvature": jnp.float32(0)}
    tx = jaxmp.mixed_precision(
        optax.GradientTransformationExtraArgs(lambda _: start, update), "float32"
    )
    state = jaxmp.TrainState.create(params=PARAMS, tx=tx)
    state, _ = jaxmp.make_train_step(loss_fn, "float32")(state, BATCH)
    along = jax.tree.map(jnp.ones_like, PARAMS)
    of_loss = lambda p: loss_fn(p, BATCH)  # noqa: E731
    want = jax.jit(lambda p: jax.jvp(of_loss, (p,), (along,))[1])(PARAMS)
    np.testing.assert_allclose(state.opt_state.inner["slope"], want, rtol=1e-4)
    twice = jax.jit(lambda p: jax.jvp(jax.grad(of_loss), (p,), (along,))[1])(PARAMS)
    want = sum(np.sum(x) for x in jax.tree.leaves(twice))
    np.testing.assert_allclose(state.opt_state.inner["curvature"], want, rtol=1e-3)


def test_what_the_optimizer_gets() -> None:
    """The loss and the gradients, float32 and unscaled; and a function with the same of both."""
    dtypes: set[str] = set()

    def update(
        grads: Any, _: Any, params: Any = None, *, value: Any, grad: Any, value_fn: Any
    ) -> Any:
        again, slopes = jax.value_and_grad(value_fn)(params)
        dtypes.update(x.dtype.name for x in jax.tree.leaves((grads, grad, slopes, value)))
        errors = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), grad, slopes)
        new = {"value": value, "again": again, "error": sum(errors.values())}
        return jax.tree.map(jnp.zeros_like, grads), new

    start = {"value": jnp.float32(0), "again": jnp.float32(0), "error": jnp.float32(1)}
    inner = optax.GradientTransformationExtraArgs(lambda _: start, update)
    tx = jaxmp.mixed_precision(inner, "mixed_float16")
    step = jaxmp.make_train_step(lambda p, b: 1e-6 * loss_fn(p, b), "mixed_float16", microbatches=2)
    state, metrics = step(jaxmp.TrainState.create(params=PARAMS, tx=tx), BATCH)
    got = state.opt_state.inner
    assert dtypes == {"float32"}
    assert float(got["value"]) == float(got["again"]) == float(metrics["loss"])
    # So small a loss has zero gradients in float16 without the scale.
    assert float(metrics["grad_norm"]) > 0
    assert float(got["error"]) == 0


def test_an_optimizer_that_takes_one_of_them() -> None:
    def update(grads: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        return jax.tree.map(lambda g: -0.1 * g, grads), value

    inner = optax.GradientTransformationExtraArgs(lambda _: jnp.float32(0), update)
    state, metrics = trained(jaxmp.mixed_precision(inner, "mixed_bfloat16"), "mixed_bfloat16")
    assert float(state.opt_state.inner) == float(metrics["loss"])


@pytest.mark.parametrize("kind", ["another grad", "jitted"])
def test_optimizers_that_take_what_is_offered_amiss(kind: str) -> None:
    """They get less: one calls its first argument `grad`, and functions cannot go through `jit`."""

    def named(grad: Any, state: Any, params: Any = None, **_: Any) -> Any:
        return jax.tree.map(lambda g: -0.1 * g, grad), state

    chain = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau())
    inner = {
        "another grad": optax.GradientTransformationExtraArgs(lambda _: None, named),
        "jitted": optax.GradientTransformationExtraArgs(chain.init, jax.jit(chain.update)),
    }[kind]
    _, metrics = trained(jaxmp.mixed_precision(inner, "mixed_bfloat16"), "mixed_bfloat16")
    assert float(metrics["loss"]) < float(loss_fn(PARAMS, BATCH))


def test_what_the_user_asks_for_has_to_be_taken() -> None:
    plain = optax.GradientTransformationExtraArgs(
        lambda _: None, lambda grads, state, params=None: (grads, state)
    )
    tx = jaxmp.mixed_precision(plain, "mixed_bfloat16")
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        trained(tx, "mixed_bfloat16", extra_args=lambda state, batch, loss: {"speed": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_on_a_mesh(policy: str) -> None:
    """Explicit axes too: the search runs on automatic ones, as the optimizer does."""
    losses = []
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        batch = jax.device_put(BATCH, jax.NamedSharding(mesh, jax.P("data")))
        params = jax.device_put(PARAMS, jax.NamedSharding(mesh, jax.P()))
        tx = jaxmp.mixed_precision(optax.lbfgs(), policy)
        with jax.set_mesh(mesh):
            state = jaxmp.TrainState.create(params=params, tx=tx)
            step = jaxmp.make_train_step(loss_fn, policy)
            for _ in range(5):
                state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, losses[0], rtol=0.05)
    assert losses[0] < 0.1 * float(loss_fn(PARAMS, BATCH))
