"""Masters in fewer bytes: what each storage promises, bit for bit, over steps and skips."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._training.master_storages import STORAGES, half_unit
from tests.support.bits import tree_bits
from tests.support.recorded import load_arrays, load_json

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax needs it

SHAPE = (64, 128)
NARROW = [name for name in STORAGES if name != "float32"]


def normal(seed: int, scale: float = 1.0) -> Any:
    values = np.random.default_rng(seed).standard_normal(SHAPE) * scale
    return jax.device_put(values.astype(np.float32))


def trained(
    tx: Any, steps: int = 20, param: Any = None, *, compiled: bool = True
) -> jaxmp.TrainState:
    state = jaxmp.TrainState.create(params={"w": normal(0) if param is None else param}, tx=tx)
    step: Any = jaxmp.TrainState.apply_gradients
    step = jax.jit(step) if compiled else step
    for i in range(steps):
        state = step(state, {"w": normal(i + 1)})
    return state


def halves(name: str, policy: str = "bfloat16", **options: Any) -> jaxmp.MixedPrecision:
    return jaxmp.mixed_precision(optax.adamw(1e-3), policy, master=name, **options)  # type: ignore[arg-type]


def master_of(state: jaxmp.TrainState, inner: Any = None) -> Any:
    """The float32 masters, by way of another storage."""
    tx = jaxmp.mixed_precision(inner or optax.adamw(1e-3), "bfloat16")
    return jaxmp.storage.convert_state(state, tx, widen_params=True).opt_state.master["w"]


def test_remainders_train_as_float32_masters_do() -> None:
    """To the bit. One operation at a time: compilers contract sums with products as they like."""
    copies, remainders = (
        trained(halves(name), compiled=False) for name in ("float32", "remainder")
    )
    np.testing.assert_array_equal(copies.opt_state.master["w"], master_of(remainders))
    assert tree_bits(copies.opt_state.inner) == tree_bits(remainders.opt_state.inner)
    assert tree_bits(copies.params) == tree_bits(remainders.params)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("remainder", False),
        pytest.param("remainder", True, marks=pytest.mark.device),
        pytest.param("float32", True, marks=pytest.mark.device),
    ],
)
def test_masters_train_to_the_bit_through_ties(name: Any, compiled: bool) -> None:
    """Against NumPy: gradient descent whose masters are often exactly between two params.

    The rate is a power of two, so that a compiler may contract product and sum.
    """
    inner = optax.sgd(2.0**-9)
    tx = jaxmp.mixed_precision(inner, "bfloat16", master=name)
    step: Any = jaxmp.TrainState.apply_gradients
    step = jax.jit(step) if compiled else step
    grads = np.random.default_rng(0).integers(-2, 3, (30, *SHAPE)).astype(np.float32)
    state = jaxmp.TrainState.create(params={"w": jnp.ones(SHAPE)}, tx=tx)
    master, ties = np.ones(SHAPE, np.float32), 0
    for grad in grads:
        state = step(state, {"w": grad})
        master = master - np.float32(2.0**-9) * grad
        bits = master.view(np.uint32)
        ties += np.sum((bits & 0xFFFF) == 0x8000)
        to_even = master.astype(ml_dtypes.bfloat16).view(np.uint16)
        away = ((bits + 0x8000) >> 16).astype(np.uint16)
        expected = away if name == "remainder" else to_even
        np.testing.assert_array_equal(np.asarray(state.params["w"]).view(np.uint16), expected)
    assert ties > 1000
    np.testing.assert_array_equal(master_of(state, inner), master)


@pytest.mark.device
@pytest.mark.parametrize("name", ["remainder8", "kahan"])
def test_masters_of_fewer_bits_stay_near(name: str) -> None:
    exact = trained(halves("float32")).opt_state.master["w"]
    apart = np.mean(np.abs(master_of(trained(halves(name))) - exact))
    lost = trained(halves("none")).params["w"].astype(jnp.float32)
    assert apart < 2.0**-15 * np.mean(np.abs(exact)) + 1e-5  # of 20 roundings at random
    assert np.mean(np.abs(lost - exact)) > 50 * apart  # positive control


@pytest.mark.device
def test_stochastic_params_follow_in_the_mean() -> None:
    """Steps of a thousandth of a param's unit, where to nearest nothing would ever move."""
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "bfloat16", master="stochastic")
    state = jaxmp.TrainState.create(params={"w": jnp.ones(SHAPE)}, tx=tx)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads))
    grads = {"w": jnp.full(SHAPE, -(2.0**-7) / 1000)}
    for _ in range(1000):
        state = step(state, grads)
    moved = np.mean(np.asarray(state.params["w"], np.float64) - 1) / 2.0**-7
    assert abs(moved - 1) < 5 / np.sqrt(state.params["w"].size)


# Updates of less than half of the last bit that is stored, alone: no larger noise is added to them.
# The last one is of an optimizer whose state does not move.
DECAY, RATE, COUNT = 3e-6, 2.0**-20, 20_000
STILL: dict[str, tuple[Any, float, Any]] = {
    "decay of unread rows": (
        optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(1.0)),
        0.0,
        lambda start: start * (1 - DECAY) ** COUNT,
    ),
    "warm-up": (
        optax.sgd(optax.linear_schedule(0.0, 2 * RATE, COUNT)),
        1.0,
        lambda start: start - RATE * (COUNT - 1),
    ),
    "small steps": (optax.sgd(RATE), -1.0, lambda start: start + RATE * COUNT),
}


@pytest.mark.device
@pytest.mark.parametrize(
    ("name", "policy"),
    [("kahan", "bfloat16"), ("remainder8", "bfloat16"), ("kahan", "float16"), ("none", "bfloat16")],
)
@pytest.mark.parametrize("kind", STILL)
def test_small_updates_add_up(kind: str, name: Any, policy: str) -> None:
    """Against float64, over 20,000 steps, on both sides of zero and of a power of two."""
    inner, grad, expected = STILL[kind]
    tx = jaxmp.mixed_precision(inner, policy, master=name, loss_scale=jaxmp.NoLossScale())
    start = np.linspace(0.97, 1.2, 512, dtype=np.float32) * np.float32([[1], [-1]])
    grads = {"w": jnp.full(start.shape, grad)}

    @jax.jit
    def train(state: Any) -> Any:
        return jax.lax.fori_loop(0, COUNT, lambda _, state: state.apply_gradients(grads), state)

    state = train(jaxmp.TrainState.create(params={"w": jnp.asarray(start)}, tx=tx))
    # By the param and what is stored with it, whose sum the optimizer reads.
    last = np.asarray(tx._algorithm.masters.load(state.params, state.opt_state.master)["w"])
    moved = (last - start.astype(np.float64)).mean(1)
    exact = (expected(start.astype(np.float64)) - start).mean(1)
    if name == "none":  # positive control
        np.testing.assert_array_less(np.abs(moved), 2.0**-9)
    else:
        np.testing.assert_allclose(moved, exact, rtol=0.02)


# Between two numbers of 24 bits: by powers of two from both sides, large, and small.
BETWEEN = [1.0 - 2.0**-20, 1.0 + 2.0**-17, -1.0 + 2.0**-19, -2.0 - 2.0**-15, 1.5 + 2.0**-9, 3.3,
           -0.1, 1e-30, -1e30, 3.38e38]  # fmt: skip


def masters_of_steps(name: str, values: list[float], count: int) -> Any:
    """What is read of masters that were stored in each of the first steps, as float64."""
    storage, bfloat16 = STORAGES[name], jnp.dtype(jnp.bfloat16)

    @jax.jit
    def stored(step: Any) -> Any:
        return storage.load(*storage.store(jnp.float32(values), bfloat16, None, 0, step))

    return np.asarray(jax.vmap(stored)(jnp.arange(count)), np.float64)


@pytest.mark.device
@pytest.mark.parametrize("name", ["kahan", "remainder8"])
def test_what_is_stored_is_right_in_the_mean(name: str) -> None:
    """Over 16,384 steps, to a fiftieth of the distance to which masters are rounded at most."""
    exact = np.float32(BETWEEN).astype(np.float64)
    apart = masters_of_steps(name, BETWEEN, 16_384) - exact
    unit = np.exp2(np.floor(np.log2(np.abs(exact))) - 15)
    assert np.all(np.abs(apart) < 1.001 * unit)
    assert np.all(np.abs(apart.mean(0)) < 0.02 * unit)
    # Positive control: to nearest, about half of them are off.
    nearest = STORAGES[name].load(
        *STORAGES[name].first(jnp.float32(BETWEEN), jnp.dtype(jnp.bfloat16))
    )
    assert np.mean(np.abs(np.asarray(nearest, np.float64) - exact) > 0.04 * unit) >= 0.4


@pytest.mark.parametrize("name", ["kahan", "remainder8"])
def test_what_needs_no_rounding_is_stored_as_it_is(name: str) -> None:
    """Among it what is not finite; and no finite number becomes infinite at random."""
    kept = [0.0, -0.0, 1.0, 1 + 2.0**-15, -1 + 2.0**-16, np.inf, -np.inf, np.nan]
    stored = masters_of_steps(name, kept, 100)
    np.testing.assert_array_equal(stored, np.broadcast_to(np.float64(kept), stored.shape))
    assert np.isfinite(masters_of_steps(name, [3.4028235e38, -3.4028235e38, 3.4e38], 100)).all()


@pytest.mark.parametrize("name", ["kahan", "remainder8"])
def test_params_and_steps_have_random_words_of_their_own(name: Any) -> None:
    # So that each number is stored half a unit away from both neighbors.
    rate = {"kahan": 2.0**-10 + 2.0**-18, "remainder8": 2.0**-17}[name]
    tx = jaxmp.mixed_precision(optax.sgd(rate), "bfloat16", master=name)
    state = jaxmp.TrainState.create(params=dict.fromkeys("ab", jnp.ones(SHAPE)), tx=tx)
    step = jax.jit(lambda state: state.apply_gradients(dict.fromkeys("ab", jnp.ones(SHAPE))))
    seen = []
    for _ in range(2):
        state = step(state.replace(params=dict.fromkeys("ab", jnp.ones(SHAPE, jnp.bfloat16))))
        seen += [np.asarray(x, np.float32) for x in state.opt_state.master.values()]
        zeros = jax.tree.map(jnp.zeros_like, state.opt_state.master)
        state = state.replace(opt_state=state.opt_state._replace(master=zeros))
    agree = [np.mean(seen[i] == seen[j]) for i in range(4) for j in range(i)]
    assert np.all(np.abs(np.array(agree) - 0.5) < 0.03)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("skip", ["auto", "cond", "select"])
def test_a_skipped_step_leaves_every_bit(name: str, skip: Any) -> None:
    def bits(state: jaxmp.TrainState) -> Any:
        kept = state.opt_state
        return tree_bits((state.params, kept.master, kept.inner, kept.kind))

    state = trained(halves(name, skip=skip, moments="int8"), steps=3)
    before = bits(state)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads))
    state = step(state, {"w": normal(9).at[3, 4].set(jnp.nan)})
    assert bits(state) == before
    assert int(state.opt_state.skipped) == 1


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 7.0, 1e30, np.inf])
def test_params_that_are_set_are_followed(name: str, value: float) -> None:
    """Whatever was kept beside the old ones: with no gradient, what was set stays as it is."""
    tx = jaxmp.mixed_precision(optax.sgd(1e-3), "bfloat16", master=name)  # type: ignore[arg-type]
    state = trained(tx)
    wanted = jnp.full(SHAPE, value, jnp.bfloat16)
    state = state.replace(params={"w": wanted})
    for _ in range(3):
        state = jax.jit(lambda s: s.apply_gradients({"w": jnp.zeros(SHAPE)}))(state)
    got = np.asarray(state.params["w"], np.float64)
    np.testing.assert_array_equal(got, np.asarray(wanted, np.float64))


@pytest.mark.parametrize("name", ["remainder", "remainder8", "kahan"])
def test_the_rest_of_a_param_that_is_set_stays_within_half_a_unit(name: str) -> None:
    """No bit tells that a param was set: the master is within its rounding, and no further."""
    state = trained(halves(name))
    wanted = normal(50).astype(jnp.bfloat16)
    state = state.replace(params={"w": wanted})
    apart = np.abs(master_of(state) - wanted.astype(jnp.float32))
    assert np.all(apart <= half_unit(wanted))


@pytest.mark.parametrize(("name", "most"), [("float32", 2**-11), ("kahan", 2**-11),
                                            ("stochastic", 2**-6), ("none", 2**-6)])  # fmt: skip
def test_float16_params(name: str, most: float) -> None:
    """20 steps of 2**-12 and a half: params of float16 between 1 and 2 have units of 2**-10."""
    inner = optax.sgd(1.0)
    tx = jaxmp.mixed_precision(inner, "float16", master=name, loss_scale=jaxmp.NoLossScale())  # type: ignore[arg-type]
    start = 1.5 + jnp.abs(normal(0, 0.1))
    state = jaxmp.TrainState.create(params={"w": start}, tx=tx)
    for _ in range(20):
        state = state.apply_gradients({"w": jnp.full(SHAPE, -1.5 * 2.0**-12)})
    assert state.params["w"].dtype == jnp.float16
    error = np.abs(np.asarray(state.params["w"], np.float64) - np.asarray(start + 30 * 2.0**-12))
    assert np.max(error) <= 1.01 * most
    moved = 0.0 if name == "none" else 30 * 2.0**-12
    mean = np.mean(np.asarray(state.params["w"], np.float64) - np.asarray(start))
    assert abs(mean - moved) < 2.0**-13


@pytest.mark.parametrize("name", ["remainder", "remainder8"])
def test_remainders_complete_bfloat16_alone(name: str) -> None:
    tx = halves(name, "float16")
    with pytest.raises(TypeError, match=r"params, leaf 'w', is float16, and a remainder completes"):
        jaxmp.TrainState.create(params={"w": jnp.ones(SHAPE)}, tx=tx)


def test_float32_params_are_their_own_masters() -> None:
    for name in STORAGES:
        state = trained(halves(name, "mixed_bfloat16"))
        assert jax.tree.leaves(state.opt_state.master) == []
        exact = trained(halves("float32", "mixed_bfloat16"))
        assert tree_bits(state.params) == tree_bits(exact.params)


@pytest.mark.parametrize("name", NARROW)
def test_updates_lead_to_the_same_params(name: str) -> None:
    """`tx.update` and `optax.apply_updates`, as in a loop of the user's own."""
    tx = halves(name)
    params = {"w": normal(0).astype(jnp.bfloat16)}
    state = by_state = tx.init(params)
    exact = params
    for i in range(5):
        grads = {"w": normal(i + 1)}
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        exact, by_state = jax.jit(tx.apply_gradients)(grads, by_state, exact)
    apart = np.asarray(params["w"], np.float64) - np.asarray(exact["w"], np.float64)
    assert np.mean(apart != 0) < 1e-3
    assert tree_bits(state.inner) == tree_bits(by_state.inner)


@pytest.mark.slow
def test_the_same_on_any_mesh() -> None:
    """Random rounding too: the words depend on the place in the whole array."""
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    collectives = {}
    for name in STORAGES:
        alone = trained(halves(name), steps=5)
        w = jax.device_put(normal(0), jax.NamedSharding(mesh, jax.P("data")))
        sharded = trained(halves(name), steps=5, param=w)
        kept = [(x.params, x.opt_state.master) for x in (alone, sharded)]
        assert tree_bits(kept[0]) == tree_bits(kept[1]), name
        step = jax.jit(jaxmp.TrainState.apply_gradients).lower(sharded, {"w": w}).compile()
        collectives[name] = re.findall(r"(?:all-[a-z]+|reduce-scatter)\(", step.as_text())
    assert {tuple(x) for x in collectives.values()} == {("all-reduce(",)}  # of whether to skip


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_a_step_traces_once_under_strict_promotion(moments: Any) -> None:
    for name in STORAGES:
        inner, traces = optax.sgd(0.125, momentum=0.5), []

        @jax.jit
        def step(state: Any, grads: Any, traces: list[int] = traces) -> Any:
            traces.append(1)
            return state.apply_gradients(grads)

        with jax.numpy_dtype_promotion("strict"):
            tx = jaxmp.mixed_precision(inner, "bfloat16", master=name, moments=moments)  # type: ignore[arg-type]
            state = jaxmp.TrainState.create(params={"w": normal(0)}, tx=tx)
            for i in range(3):
                state = step(state, {"w": normal(i)})
        assert len(traces) == 1, name


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_kahan_is_as_near_as_torch_optimi(optimizer: str) -> None:
    """The recorded runs are all in bfloat16, moments too: ours may only be nearer to float32."""
    runs = [r for r in load_json("kahan_traces.json")["runs"] if r["optimizer"] == optimizer]
    with_sum, without = (next(r for r in runs if r["kahan"] is kahan) for kahan in (True, False))
    grads = load_arrays("kahan_grads.npz")["grads_bf16_bits"].view(ml_dtypes.bfloat16)
    grads = grads.astype(np.float32)
    options = with_sum["kwargs"]
    inner = optax.sgd(options["lr"])
    if optimizer == "AdamW":
        betas = options["betas"]
        inner = optax.adamw(options["lr"], *betas, eps=options["eps"],
                            weight_decay=options["weight_decay"])  # fmt: skip
    start = {"w": jnp.asarray(with_sum["w0"], jnp.float32)}

    def errors(master: Any) -> dict[int, float]:
        exact, params = start, jax.tree.map(lambda x: x.astype(jnp.bfloat16), start)
        tx = jaxmp.mixed_precision(inner, "bfloat16", master=master)
        exact_state, state, found = inner.init(exact), tx.init(params), {}
        update = jax.jit(inner.update)
        step = jax.jit(tx.apply_gradients)
        for t, grad in enumerate(grads):
            updates, exact_state = update({"w": grad}, exact_state, exact)
            exact = optax.apply_updates(exact, updates)
            params, state = step({"w": grad}, state, params)
            apart = params["w"].astype(jnp.float32) - exact["w"]
            found[t] = float(jnp.mean(jnp.abs(apart)))
        return found

    ours, lost = errors("kahan"), errors("none")
    for kahan, naive in zip(with_sum["trace"], without["trace"], strict=True):
        assert ours[kahan["t"]] <= 1.25 * kahan["mean_abs_err_vs_f32"]
        if kahan["t"] > 100:  # positive control, ours and theirs
            assert lost[kahan["t"]] > 4 * ours[kahan["t"]]
            assert naive["mean_abs_err_vs_f32"] > 4 * kahan["mean_abs_err_vs_f32"]
