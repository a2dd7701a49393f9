"""What the optimizer never moves has no master, and may be integers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._training.frozen import trainable_leaves
from jaxmp._training.masters import is_masked
from tests.support.bits import tree_bits

pytestmark = pytest.mark.usefixtures("standard_promotion")

LABELS = {"base": "freeze", "lora": "train"}
REST = {"base": True, "lora": False}


def lora(inner: Any) -> Any:
    return optax.multi_transform({"train": inner, "freeze": optax.set_to_zero()}, LABELS)


FREEZING: dict[str, Callable[[], Any]] = {
    "multi_transform": lambda: lora(optax.adam(1e-2)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), lora(optax.adamw(1e-2))),
    "MultiSteps": lambda: optax.MultiSteps(lora(optax.adam(1e-2)), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(lora(optax.adam(1e-2)), 3),
    "zero at the end": lambda: optax.chain(
        optax.adam(1e-2), optax.masked(optax.set_to_zero(), REST)
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(lambda lr: lora(optax.adam(lr)))(1e-2),
}
# A warm-up that begins at zero, and decay after the freeze, move what looks frozen at step 0.
MOVING: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "warm-up": lambda: optax.sgd(optax.linear_schedule(0.0, 0.1, 2)),
    # Not zero whatever Python will make of it.
    "a rate of zero": lambda: optax.chain(optax.sgd(0.0), optax.add_decayed_weights(-0.5)),
    "zero to the power of zero": lambda: optax.stateless(
        lambda u, p: jax.tree.map(lambda x: -0.1 * jnp.zeros_like(x) ** 0, u)
    ),
    "decay after": lambda: optax.chain(
        lora(optax.adam(1e-2)), optax.add_decayed_weights(0.5), optax.scale(-1.0)
    ),
}


def params(dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    values = {"base": np.ones((64, 32), dtype), "lora": np.zeros((2, 32), jnp.bfloat16)}
    return jax.device_put(values)


def steps(inner: Any, params: Any, count: int = 4) -> Any:
    tx = jaxmp.mixed_precision(inner, "bfloat16")
    state = tx.init(params)
    grads = jax.tree.map(lambda p: np.ones(p.shape, np.float32), params)
    for _ in range(count):
        params, state = jax.jit(tx.apply_gradients)(grads, state, params)
    return params, state


@pytest.mark.parametrize("name", FREEZING)
def test_frozen_params_have_no_masters(name: str) -> None:
    """LoRA over a 16-bit base held float32 copies of the base, twice its bytes."""
    before = params()
    after, state = steps(FREEZING[name](), before)
    assert is_masked(state.master["base"])
    assert state.master["lora"].dtype == jnp.float32
    assert tree_bits(after["base"]) == tree_bits(before["base"])
    assert np.any(np.asarray(after["lora"], np.float32))


@pytest.mark.parametrize("name", MOVING)
def test_params_that_move_at_some_time_have_masters(name: str) -> None:
    after, state = steps(MOVING[name](), params())
    assert state.master["base"].dtype == jnp.float32
    assert np.any(np.asarray(after["base"], np.float32) != 1.0)


def by_an_argument(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
    return jax.tree.map(lambda u: -u * value, updates), state


def on_a_mesh(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return jax.tree.map(lambda u: -jax.lax.pmean(u, "data") * extra["value"], updates), state


def by_polyak(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
    """Zero where the loss is its bound: what is moved is read for any loss."""
    rate = (value - 1.0) / (1.0 + optax.tree.norm(updates))
    return jax.tree.map(lambda u: -rate * u, updates), state


@pytest.mark.every_case
@pytest.mark.parametrize("update", [by_an_argument, on_a_mesh, by_polyak])
def test_optimizers_that_move_all(update: Any) -> None:
    """What cannot be traced at `init` too, whatever it raises; it keeps its masters."""
    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    assert trainable_leaves(inner, params()) == {"base": True, "lora": True}


def test_a_rate_that_python_changes() -> None:
    """Without `jit`, an optimizer may read its rate from the program around it: zero at first."""
    box = {"rate": 0.0}
    tx = jaxmp.mixed_precision(optax.sgd(lambda _: box["rate"]), "bfloat16")
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state = tx.init(params)
    for i in range(100):
        box["rate"] = min(1.0, i / 10)
        params, state = tx.apply_gradients({"w": jnp.full(3, 1e-3)}, state, params)
    np.testing.assert_allclose(np.asarray(params["w"], np.float32), 1 - 94.5e-3, atol=0.004)


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit])
def test_what_begins_to_move_is_an_error(compile: Any) -> None:
    """Without a master small updates would be lost in silence."""
    phase = {"frozen": True}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        zeros = {"w": jnp.zeros_like(updates["w"])} if phase["frozen"] else {}
        return jax.tree.map(lambda u: -u, updates | zeros), state

    inner = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    tx = jaxmp.mixed_precision(inner, "bfloat16")
    params = {"v": jnp.ones(2, jnp.bfloat16), "w": jnp.ones(2, jnp.bfloat16)}
    grads = {"v": jnp.ones(2), "w": jnp.full(2, 1e-3)}
    state = tx.init(params)
    compile(lambda *args: tx.apply_gradients(*args))(grads, state, params)
    phase["frozen"] = False
    with pytest.raises(ValueError, match="the optimizer moves 'w' now, but did not when its state"):
        compile(lambda *args: tx.apply_gradients(*args))(grads, state, params)
    state = state._replace(master=tx.init(params).master)  # as the message says
    _, state = compile(lambda *args: tx.apply_gradients(*args))(grads, state, params)
    np.testing.assert_allclose(state.master["w"], 1 - 1e-3, rtol=1e-6)


@pytest.mark.parametrize("as_updates", [False, True])
def test_frozen_params_keep_their_bits(as_updates: bool) -> None:
    """Minus zero and infinities too, such as those of a mask."""
    tx = jaxmp.mixed_precision(lora(optax.adam(1e-2)), "bfloat16")
    before = params() | {"base": jnp.array([[-0.0, 0.0, -jnp.inf, jnp.inf]], jnp.bfloat16)}
    grads = jax.tree.map(lambda p: jnp.ones(p.shape), before)
    if as_updates:
        updates, _ = jax.jit(tx.update)(grads, tx.init(before), before)
        after = optax.apply_updates(before, updates)
    else:
        after, _ = jax.jit(tx.apply_gradients)(grads, tx.init(before), before)
    assert tree_bits(after["base"]) == tree_bits(before["base"])


def test_integers_under_a_clip() -> None:
    """The usual recipe: clip by the norm of all gradients, then freeze the base."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), lora(optax.adam(1e-2)))
    after, _ = steps(inner, params(jnp.int8))
    assert after["base"].dtype == jnp.int8
    assert np.any(np.asarray(after["lora"], np.float32))


NEEDS_LOSS: dict[str, tuple[Callable[[], Any], Any]] = {
    "after": (
        lambda: optax.chain(lora(optax.adam(1e-2)), optax.contrib.reduce_on_plateau()),
        jnp.bfloat16,
    ),
    "inside": (lambda: lora(optax.contrib.momo(1e-2)), jnp.int8),
}


@pytest.mark.parametrize("name", NEEDS_LOSS)
def test_a_frozen_base_under_optimizers_that_need_the_loss(name: str) -> None:
    """Which a train step gives: without it nobody can tell what they move."""
    make_inner, dtype = NEEDS_LOSS[name]
    inner = make_inner()
    before = params(dtype)
    tx = jaxmp.mixed_precision(inner, "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=before, tx=tx, cast_params=False)
    assert is_masked(state.opt_state.master["base"])

    def loss(params: Any, x: Any) -> Any:
        base = params["base"].astype(jnp.float32)
        return jnp.mean((x @ base + params["lora"][0].astype(jnp.float32) - 70.0) ** 2)

    state, metrics = jaxmp.make_train_step(loss, "mixed_bfloat16")(state, jnp.ones((4, 64)))
    assert metrics["grads_finite"]
    assert tree_bits(state.params["base"]) == tree_bits(before["base"])


def _descend(moves: str) -> optax.GradientTransformationExtraArgs:
    """An optimizer that needs an argument which nobody but its user has."""

    def update(updates: Any, state: Any, params: Any = None, *, rates: Any) -> Any:
        return {**jax.tree.map(jnp.zeros_like, updates), moves: updates[moves] + rates}, state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit])
def test_integers_under_an_optimizer_that_nobody_can_read(compile: Any) -> None:
    """They are taken to rest, and each step looks whether they do."""
    grads = {"base": jnp.zeros((64, 32)), "lora": jnp.ones((2, 32))}
    tx = jaxmp.mixed_precision(_descend("lora"), "bfloat16")
    before = params(jnp.int8)
    after, _ = compile(tx.apply_gradients)(grads, tx.init(before), before, rates=1.0)
    np.testing.assert_array_equal(after["base"], before["base"])
    np.testing.assert_array_equal(np.asarray(after["lora"], np.float32), 2.0)
    tx = jaxmp.mixed_precision(_descend("base"), "bfloat16")
    with pytest.raises(ValueError, match=r"the optimizer moves 'base' now, .* holds integers"):
        compile(tx.apply_gradients)(grads, tx.init(before), before, rates=1.0)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int4])
def test_frozen_integers(dtype: Any, microbatches: int) -> None:
    """A quantized base trains its LoRA, and keeps its dtype and every bit."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((x @ params["base"].astype(x.dtype)[:, :32] + params["lora"][0] - 70) ** 2)

    tx = jaxmp.mixed_precision(lora(optax.adam(1e-1)), "mixed_bfloat16")
    before = params(dtype)
    state = jaxmp.TrainState.create(params=before, tx=tx)
    step = jaxmp.make_train_step(loss, "mixed_bfloat16", microbatches=microbatches)
    losses = []
    for _ in range(5):
        state, metrics = step(state, jnp.ones((4, 64)))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert state.params["base"].dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(state.params["base"].astype(jnp.int32)), np.ones((64, 32))
    )


def test_gradients_of_integers_are_float0() -> None:
    """As `jax.grad` gives them with `allow_int`; `tx.update` takes them."""
    tree = {"base": jnp.arange(3), "w": jnp.ones(3)}
    _, grads = jaxmp.value_and_grad(lambda p: jnp.sum(p["w"] * p["base"]))(tree)
    want = jax.grad(lambda p: jnp.sum(p["w"] * p["base"]), allow_int=True)(tree)
    assert grads["base"].dtype == want["base"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(grads["w"], want["w"])
    inner = optax.multi_transform(
        {"a": optax.sgd(0.1), "b": optax.set_to_zero()}, {"base": "b", "w": "a"}
    )
    tx = jaxmp.mixed_precision(inner, "float32")
    updates, _ = tx.update(grads, tx.init(tree), tree)
    new = optax.apply_updates(tree, updates)
    assert tree_bits(new["base"]) == tree_bits(tree["base"])
    np.testing.assert_allclose(new["w"], 1 - 0.1 * np.arange(3), rtol=1e-6)
