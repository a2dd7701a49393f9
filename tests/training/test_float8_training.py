"""Training in float8: steps learn, and a step that overflows leaves no trace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from tests.support.bits import tree_bits
from tests.support.dots import count_dots

pytestmark = [
    pytest.mark.annotations,
    pytest.mark.jax,
    pytest.mark.usefixtures("standard_promotion", "blocks_on_a_cpu"),
]
E4 = "float8_e4m3fn"
FLOAT16 = "params=float32,compute=float16,output=float32,products=tensorwise"
BLOCKS = "mixed_float8,products=mxfp8"
POLICIES = ["mixed_float8", "mixed_float8,products=rowwise_hp", FLOAT16, "mixed_int8", BLOCKS]
each_policy = pytest.mark.parametrize("policy", POLICIES)


def loss_fn(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    hidden = hidden + jnp.tanh(hidden @ params["mid"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def new_state(policy: str, **options: Any) -> jaxmp.TrainState:
    random = np.random.default_rng(1)
    shapes = {"up": (16, 32), "mid": (32, 32), "down": (32, 16), "bias": (32,)}
    params = jax.device_put(
        {name: np.float32(random.normal(size=s) / s[0] ** 0.5) for name, s in shapes.items()}
    )
    tx = jaxmp.mixed_precision(optax.adamw(3e-3), policy, **options)
    return jaxmp.TrainState.create(params=params, tx=tx)


def batches(count: int, rows: int = 64) -> list[Any]:
    random = np.random.default_rng(0)
    mix = random.normal(size=(16, 16)).astype(np.float32) / 4
    xs = [random.normal(size=(rows, 16)).astype(np.float32) for _ in range(count)]
    return jax.device_put([{"x": x, "y": np.sin(x @ mix)} for x in xs])


@each_policy
def test_a_step_trains(policy: str) -> None:
    step = jaxmp.make_train_step(loss_fn, policy)
    state, losses = new_state(policy), []
    for batch in batches(80):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    codes = "int8" if policy == "mixed_int8" else E4
    assert count_dots(step, state, batches(1)[0])[codes] >= 3
    assert int(state.step) == 80
    assert np.mean(losses[-5:]) < 0.4 * np.mean(losses[:5])


@each_policy
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_overflow_skips_the_step_and_changes_nothing_else(policy: str, bad: float) -> None:
    """The training with bad batches in between is, bit for bit, that without them."""
    # A loss scale that stays: backing off would change the roundings of later float16 gradients.
    options = {"loss_scale": jaxmp.StaticLossScale(2.0**8)} if policy == FLOAT16 else {}
    options["skip"] = "select"
    step = jaxmp.make_train_step(loss_fn, policy)
    state, clean = new_state(policy, **options), new_state(policy, **options)

    def frozen(state: Any) -> Any:
        return tree_bits((state.step, state.params, state.opt_state.master, state.opt_state.inner))

    for i, batch in enumerate(batches(6)):
        if i in (1, 4):
            before = frozen(state)
            x = np.array(batch["x"])
            x[3, 5] = bad
            state, _ = step(state, batch | {"x": x})
            assert not state.opt_state.grads_finite
            assert frozen(state) == before
        state, _ = step(state, batch)
        clean, _ = step(clean, batch)
        assert state.opt_state.grads_finite
        assert frozen(state) == frozen(clean)
    assert int(state.opt_state.skipped) == 2
    assert int(clean.opt_state.skipped) == 0


def test_a_loss_scale_backs_off_and_finds_its_way() -> None:
    """Sums of float16 overflow at a scale of 2**24; a scale in float8 does not hide that."""
    step = jaxmp.make_train_step(loss_fn, FLOAT16)
    config = jaxmp.DynamicLossScale(init_scale=2.0**24)
    state = new_state(FLOAT16, loss_scale=config)
    skipped = []
    for batch in batches(30):
        state, _ = step(state, batch)
        skipped.append(not state.opt_state.grads_finite)
    assert skipped[0]
    assert not skipped[-1]
    assert jaxmp.numbers.all_finite(state.params)


@pytest.mark.parametrize("policy", ["mixed_float8", "mixed_float8,products=rowwise_hp"])
def test_a_scale_of_the_loss_changes_no_bit(policy: str) -> None:
    """A power of two moves the amax and the scale alike: harmless, if pointless with bfloat16."""
    found = []
    for options in ({}, {"loss_scale": jaxmp.StaticLossScale(2.0**10)}):
        state, step = new_state(policy, **options), jaxmp.make_train_step(loss_fn, policy)
        for batch in batches(3):
            state, _ = step(state, batch)
        found.append(tree_bits(state.params))
    assert found[0] == found[1]


def test_microbatches_train_like_one_batch() -> None:
    """Each microbatch has its own scales; the float32 sum of gradients is near that of the whole.

    Nothing is carried from one to the next, so that nothing can be lost or added up.
    """
    (batch,) = batches(1)
    found = {}
    for count in (1, 4):
        step = jaxmp.make_train_step(loss_fn, "mixed_float8", microbatches=count)
        tx = jaxmp.mixed_precision(optax.sgd(1.0), "mixed_float8")
        params = new_state("mixed_float8").params
        before = jax.tree.map(np.array, params)
        after, _ = step(jaxmp.TrainState.create(params=params, tx=tx), batch)
        found[count] = jax.tree.map(lambda a, b: np.asarray(a) - b, after.params, before)
    for name, whole in found[1].items():
        difference = np.linalg.norm(found[4][name] - whole) / np.linalg.norm(whole)
        assert difference < 0.1, name


@pytest.mark.parametrize(
    ("recipe", "codes", "again"),
    # Blocks of a width of 96 are padded to 128.
    [("tensorwise", 96 * 96, 0), ("rowwise", 96 * 96, 1), ("mxfp8", 96 * 128, 1)],
)
def test_microbatches_share_the_codes_of_weights(recipe: str, codes: int, again: int) -> None:
    """Of the forward pass, where each weight is rounded once for all of them.

    By rows and blocks, the backward product of the second layer rounds its weight again.
    """

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)

    def bytes_of_codes(count: int) -> int:
        tx = jaxmp.mixed_precision(optax.sgd(1.0), policy)
        state = jaxmp.TrainState.create(params=dict.fromkeys("ab", jnp.ones((96, 96))), tx=tx)
        step = jaxmp.make_train_step(loss_fn, policy, microbatches=count)
        converts = jaxmp.audit(step, state, jnp.ones((64, 96), jnp.bfloat16)).converts
        return sum(x.bytes for x in converts if (x.source, x.target) == ("float32", E4))

    policy = f"mixed_float8,products={recipe}"
    assert bytes_of_codes(1) == (2 + again) * codes
    assert bytes_of_codes(4) == (2 + 4 * again) * codes
