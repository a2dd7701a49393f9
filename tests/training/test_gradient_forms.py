"""Optimizers whose gradients have another form than their params, such as `optax.lookahead`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState as FlaxTrainState

import jaxmp
from tests.support.bits import tree_bits

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.jax]

SHAPE = (16, 8)
RATE = 2.0**-9  # a power of two, so that a compiler may contract product and sum


def params() -> dict[str, Any]:
    w = np.random.default_rng(0).integers(-512, 512, SHAPE) * 2.0**-8
    return jax.device_put({"w": np.float32(w), "b": np.ones(8, np.float32)})


def gradients(seed: int) -> dict[str, Any]:
    w = np.random.default_rng(seed).integers(-3, 4, SHAPE)
    return jax.device_put({"w": np.float32(w), "b": np.full(8, 1.0 + seed, np.float32)})


def loss(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y).astype(jnp.float32) ** 2)


BATCH = (
    jnp.asarray(np.random.default_rng(1).standard_normal((32, 16)), jnp.float32),
    jnp.asarray(np.random.default_rng(2).standard_normal((32, 8)), jnp.float32),
)


class Pair(NamedTuple):
    """Params of an optimizer of a user's own."""

    live: Any
    anchor: Any


def anchored(fast: Any) -> optax.GradientTransformationExtraArgs:
    """Moves live params by their gradients, and draws an anchor behind them."""

    def update(
        updates: Any, state: Any, params: Pair | None = None, **extra: Any
    ) -> tuple[Pair, Any]:
        assert params is not None
        updates, state = fast.update(updates, state, params.live)
        drawn = jax.tree.map(lambda a, p: 0.25 * (p - a), params.anchor, params.live)
        return Pair(updates, drawn), state

    return optax.GradientTransformationExtraArgs(lambda params: fast.init(params.live), update)


def lookahead(fast: Any) -> Any:
    return optax.lookahead(fast, 3, 0.5)


OPTIMIZERS: dict[str, Any] = {
    "lookahead": lookahead(optax.sgd(RATE)),
    "in a chain": optax.chain(optax.clip(2.0), lookahead(optax.sgd(RATE))),
    "under hyperparameters": optax.inject_hyperparams(lambda r: lookahead(optax.sgd(r)))(r=RATE),
    "resets": optax.lookahead(optax.sgd(RATE, momentum=0.5), 3, 0.5, reset_state=True),
    "of one's own": anchored(optax.sgd(RATE)),
}


def both(name: str, params: Any) -> Any:
    kind = Pair if name == "of one's own" else optax.LookaheadParams
    return kind(params, params)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("master", ["float32", "remainder"])
def test_masters_train_as_plain_float32_does(name: str, master: Any) -> None:
    """To the bit, in a loop of one's own, with masters of all params; against plain optax."""
    inner = OPTIMIZERS[name]
    tx = jaxmp.mixed_precision(inner, "bfloat16", master=master)
    live, state = tx.init_params(both(name, params()))
    plain, plain_state = both(name, params()), inner.init(both(name, params()))
    step, plain_step = jax.jit(tx.update), jax.jit(inner.update)
    for seed in range(8):
        updates, state = step(gradients(seed), state, live)
        live = optax.apply_updates(live, updates)
        updates, plain_state = plain_step(gradients(seed), plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    masters = tx._algorithm.masters.load(live, state.master)
    assert tree_bits(masters) == tree_bits(plain)
    assert {x.dtype.name for x in jax.tree.leaves(live)} == {"bfloat16"}
    assert np.any(np.asarray(plain[0]["w"]) != np.asarray(plain[1]["w"]))  # not synced now


@pytest.mark.parametrize("master", ["kahan", "remainder8", "stochastic"])
@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_other_storages(master: Any, moments: Any) -> None:
    tx = jaxmp.mixed_precision(
        lookahead(optax.adam(0.05)), "bfloat16", master=master, moments=moments
    )
    state = jaxmp.TrainState.create(params=optax.LookaheadParams.init_synced(params()), tx=tx)
    step = jaxmp.make_train_step(lambda params, batch: loss(params.fast, batch))
    first = float(loss(state.params.slow, BATCH))
    for _ in range(30):
        state, _ = step(state, BATCH)
    assert float(loss(state.params.slow, BATCH)) < 0.5 * first


@pytest.mark.parametrize("gradients_of", ["fast", "both"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_a_train_step(policy: str, gradients_of: str) -> None:
    """With gradients of the fast params, and of a loss of both, and a skip that leaves all bits."""
    tx = jaxmp.mixed_precision(lookahead(optax.adamw(0.01)), policy)
    state = jaxmp.TrainState.create(params=optax.LookaheadParams.init_synced(params()), tx=tx)
    if gradients_of == "both":
        step: Any = jaxmp.make_train_step(
            lambda params, batch: loss(params.fast, batch), donate=False
        )
    else:

        @jax.jit
        def step(state: Any, batch: Any) -> Any:
            fast = jaxmp.autocast(loss, policy)
            grads = jaxmp.grad(fast, loss_scale=state.loss_scale)(state.params.fast, batch)
            return state.apply_gradients(grads), None

    inner = lookahead(optax.adamw(0.01))
    gradient, update = jax.jit(jax.grad(loss)), jax.jit(inner.update)
    plain = optax.LookaheadParams.init_synced(params())
    plain_state = inner.init(plain)
    for _ in range(7):
        state, _ = step(state, BATCH)
        updates, plain_state = update(gradient(plain.fast, BATCH), plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    for mine, exact in zip(jax.tree.leaves(state.params), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), exact, rtol=1e-2, atol=4e-3)
    before = tree_bits((state.params, state.opt_state.master, state.opt_state.inner))
    overflows = np.array(BATCH[0])
    overflows[0, 0] = np.inf
    state, _ = step(state, (overflows, BATCH[1]))
    assert tree_bits((state.params, state.opt_state.master, state.opt_state.inner)) == before
    assert int(state.opt_state.skipped) == 1


def test_the_train_state_of_flax() -> None:
    tx = jaxmp.mixed_precision(lookahead(optax.sgd(RATE)), "mixed_bfloat16")
    state = FlaxTrainState.create(
        apply_fn=None, params=optax.LookaheadParams.init_synced(params()), tx=tx
    )
    state = state.apply_gradients(grads=gradients(3))
    np.testing.assert_array_equal(state.params.fast["b"], 1 - RATE * 4)
    np.testing.assert_array_equal(state.params.slow["b"], 1)


def test_a_train_step_of_ones_own_pair() -> None:
    """A step has gradients of all params: which of them count, only the user can tell."""
    inner = anchored(optax.sgd(0.1))

    def loss_of_live(params: Any, batch: Any) -> Any:
        return loss(params.live, batch)

    def state_of(inner: Any) -> Any:
        tx = jaxmp.mixed_precision(inner, "bfloat16")
        return jaxmp.TrainState.create(params=Pair(params(), params()), tx=tx)

    with pytest.raises(ValueError, match="structure") as error:
        jaxmp.make_train_step(loss_of_live)(state_of(inner), BATCH)
    [note] = [x for x in error.value.__notes__ if "GradientTransformationExtraArgs" in x]
    assert "inner.update(grads.part, *args, **extra)" in note
    advised = optax.GradientTransformationExtraArgs(
        inner.init, lambda grads, *args, **extra: inner.update(grads.live, *args, **extra)
    )
    state, metrics = jaxmp.make_train_step(loss_of_live)(state_of(advised), BATCH)
    after, _ = jaxmp.make_train_step(loss_of_live, donate=False)(state, BATCH)
    assert float(loss(after.params.live, BATCH)) < float(metrics["loss"])
    assert np.any(after.params.anchor["w"] != params()["w"])


def test_gradients_of_each_example() -> None:
    """Those of private training have an axis of examples, which its updates have not."""
    inner = optax.chain(optax.contrib.differentially_private_aggregate(1.0, 0.0, 0), optax.sgd(0.1))
    tx = jaxmp.mixed_precision(inner, "mixed_bfloat16")
    grads = jax.jit(jax.vmap(jaxmp.grad(loss), (None, 0)))(params(), BATCH)
    update = jax.jit(tx.update)
    updates, state = update(grads, tx.init(params()), params())
    expected, _ = jax.jit(inner.update)(grads, inner.init(params()), params())
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
    assert bool(state.grads_finite)
    for g in (grads := jax.tree.map(np.array, grads)).values():
        g[0] = np.nan  # of one example
    _, state = update(grads, state, params())
    assert int(state.skipped) == 1


WRONG = {
    "missing": ({"w": jnp.ones(SHAPE)}, "gradients and params have different structures; mis"),
    "shape": ({"w": jnp.ones((8, 16)), "b": jnp.ones(8)}, r"gradients leaf 'w' has shape \(8, 16"),
    # Optimizers would broadcast it, to updates of the right shape.
    "smaller": ({"w": jnp.ones(8), "b": jnp.ones(8)}, r"gradients leaf 'w' has shape \(8,\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["sgd", "adamw", "lookahead"])
def test_gradients_that_no_optimizer_takes(name: str, wrong: str) -> None:
    inner = {"sgd": optax.sgd(0.1), "adamw": optax.adamw(0.1), "lookahead": lookahead(optax.sgd(1))}
    tx = jaxmp.mixed_precision(inner[name], "bfloat16")
    like = optax.LookaheadParams.init_synced(params()) if name == "lookahead" else params()
    live, state = tx.init_params(like)
    grads, text = WRONG[wrong]
    with pytest.raises(ValueError, match=text + ".*Differentiate with respect to the params"):
        jax.jit(tx.update)(grads, state, live)


def test_updates_of_another_form() -> None:
    inner = optax.stateless(lambda updates, params: list(updates.values()))
    tx = jaxmp.mixed_precision(inner, "bfloat16")
    live, state = tx.init_params(params())
    with pytest.raises(ValueError, match="the updates of the optimizer and params have different"):
        tx.update(gradients(0), state, live)


def test_what_a_lookahead_never_moves_has_no_master() -> None:
    frozen = optax.LookaheadParams(*[{"w": True, "b": False}] * 2)
    inner = optax.chain(lookahead(optax.adam(0.1)), optax.masked(optax.set_to_zero(), frozen))
    tx = jaxmp.mixed_precision(inner, "bfloat16")
    _, state = tx.init_params(optax.LookaheadParams.init_synced(params()))
    assert [len(jax.tree.leaves(part["w"])) for part in state.master] == [0, 0]
    assert [len(jax.tree.leaves(part["b"])) for part in state.master] == [1, 1]


def test_moments_of_fast_params_are_sharded_as_these() -> None:
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    w = jax.device_put(params()["w"], jax.NamedSharding(mesh, jax.P("data")))
    tx = jaxmp.mixed_precision(lookahead(optax.adam(0.1)), "bfloat16")
    live = optax.LookaheadParams.init_synced({"w": w.astype(jnp.bfloat16)})
    state = jax.eval_shape(tx.init, live)
    placed = jaxmp.sharding.state_shardings(state, live)
    assert placed.inner.fast_state[0].mu["w"].spec == jax.P("data")
    assert placed.master.slow["w"].spec == jax.P("data")
