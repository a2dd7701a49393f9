"""Delayed scaling in training: the state follows the data, once for each step, and nothing else."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
import jaxmp.linen
from jaxmp._jaxpr import compat
from jaxmp._policies.recipe import get_recipe
from tests.support.bits import tree_bits
from tests.support.dots import count_dots

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]
POLICY = "mixed_bfloat16,products=delayed:history=3"
CURRENT = "mixed_bfloat16,products=tensorwise"
FLOAT16 = "params=float32,compute=float16,output=float32,products=delayed:history=3"


def loss_fn(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def layered(params: Any, batch: Any, *, remat: bool = False, unrolled: bool = False) -> Any:
    """Three layers of one shape, scanned or not, and a projection."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), None

    body = jax.checkpoint(layer) if remat else layer
    x = batch["x"]
    if unrolled:
        for i in range(3):
            x, _ = body(x, params["layers"][i])
    else:
        x, _ = jax.lax.scan(body, x, params["layers"])
    return jnp.mean((x @ params["down"] - batch["y"]) ** 2)


def draw(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def params_of(loss: Callable[..., Any] = loss_fn) -> Any:
    if getattr(loss, "func", loss) is not layered:
        return {"up": draw(16, 32, seed=1) / 4, "down": draw(32, 16, seed=2) / 6}
    return {"layers": draw(3, 16, 16, seed=1) / 4, "down": draw(16, 16, seed=2) / 4}


def batch_of(rows: int = 32, size: float = 1.0, seed: int = 3) -> Any:
    x = draw(rows, 16, seed=seed)
    return {"x": x * size, "y": jnp.sin(x @ draw(16, 16, seed=9) / 4)}


def init(loss: Callable[..., Any] = loss_fn, policy: Any = POLICY, **batch: Any) -> Any:
    return jaxmp.float8.init_state(loss, policy, params_of(loss), batch_of(**batch))


def new_state(
    loss: Callable[..., Any] = loss_fn, policy: str = POLICY, **options: Any
) -> jaxmp.TrainState:
    tx = jaxmp.mixed_precision(optax.adamw(3e-3), policy, **options)
    float8 = {} if "tensorwise" in policy else {"float8_state": init(loss, policy)}
    return jaxmp.TrainState.create(params=params_of(loss), tx=tx, **float8)


def make_step(loss: Callable[..., Any] = loss_fn, policy: str = POLICY, **options: Any) -> Any:
    return jaxmp.make_train_step(loss, policy, donate=False, **options)


def magnitudes(state: Any) -> Any:
    """The latest magnitudes of a state, as NumPy arrays."""
    return jax.tree.map(lambda history: np.asarray(history[..., 0]), state)


# --- recipes -------------------------------------------------------------------------------------


def test_the_recipe_as_text() -> None:
    recipe = get_recipe("delayed:history=32")
    assert recipe == jaxmp.float8.Recipe(scaling="delayed", history=32)
    assert str(recipe) == "delayed:history=32"
    assert str(jaxmp.float8.Recipe(scaling="delayed")) == "delayed"
    policy = jaxmp.get_policy("mixed_bfloat16,products=delayed:history=32")
    assert policy.products == recipe
    assert jaxmp.get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("rowwise:scaling=delayed", "only recipes with one scale for each tensor"),
        ("blockwise:scaling=delayed", "got granularity='block'"),
        ("delayed:weight_gradient=bfloat16", "weight gradients in float8 can be delayed"),
        ("delayed:history=0", "a whole number of steps, at least 1; got 0"),
        ("delayed:history=long", "a whole number of steps, at least 1; got 'long'"),
        ("tensorwise:scaling=slow", "must be 'current', 'delayed'; got 'slow'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_delayed(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        get_recipe(text)


# --- the first state -----------------------------------------------------------------------------


def test_the_first_state_holds_the_magnitudes_of_one_evaluation() -> None:
    """Against NumPy, up to the roundings of the model; no history is zero."""
    state = init()
    params, batch = jax.tree.map(np.asarray, (params_of(), batch_of()))
    hidden = np.tanh(batch["x"] @ params["up"])
    error = 2 * (hidden @ params["down"] - batch["y"]) / batch["y"].size
    inner = (error @ params["down"].T) * (1 - hidden**2)
    forward = [batch["x"], params["up"], hidden, params["down"]]
    for arrays, found in ((forward, state.forward), ([inner, error], state.backward)):
        got = [float(history[0]) for history in found]
        np.testing.assert_allclose(got, [np.abs(x).max() for x in arrays], rtol=0.1)
    assert all(history.shape == (3,) for history in jax.tree.leaves(state))
    assert all((history.max(-1) > 0).all() for history in jax.tree.leaves(state))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_state_is_float32_where_float64_is_enabled(microbatches: int) -> None:
    """A scale is made of the bits of a float32; the state is the same to the bit."""
    step = make_step(microbatches=microbatches)
    narrow, _ = step(new_state(), batch_of())
    with jax.enable_x64(True):
        begun = new_state()
        wide, _ = make_step(microbatches=microbatches)(begun, batch_of())
    for state in (begun.float8_state, wide.float8_state):
        assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32"}
    assert tree_bits(wide.float8_state) == tree_bits(narrow.float8_state)


def test_a_function_without_delayed_products_has_no_state() -> None:
    with pytest.raises(ValueError, match="no product under a delayed float8 recipe, and so no"):
        init(policy=CURRENT)


def test_what_stays_on_current_scaling_is_named() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = jax.lax.cond(True, lambda x: x @ params["up"], lambda x: x @ params["up"], batch["x"])
        return jnp.mean((jnp.tanh(x) @ params["down"] - batch["y"]) ** 2)

    with pytest.warns(UserWarning, match="products in cond scale by current magnitudes"):
        state = jaxmp.float8.init_state(loss, POLICY, params_of(), batch_of())
    assert len(state.backward) == 1


def test_a_step_asks_for_the_state() -> None:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), POLICY)
    state = jaxmp.TrainState.create(params=params_of(), tx=tx)
    with pytest.raises(ValueError, match=r"float8_state=jaxmp.float8.init_state\(loss_fn"):
        make_step()(state, batch_of())
    state = jaxmp.TrainState.create(params=params_of(), tx=tx, float8_state={"w": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"must be a jaxmp.float8.Float8State, got a dict"):
        make_step()(state, batch_of())


def test_a_state_of_another_model_is_refused() -> None:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), POLICY)
    other = jaxmp.TrainState.create(params=params_of(layered), tx=tx, float8_state=init())
    with pytest.raises(ValueError, match="the float8 state is that of another program"):
        make_step(layered)(other, batch_of())


# --- steps ---------------------------------------------------------------------------------------


def test_the_stored_state_is_the_new_one() -> None:
    """The data grow by 8: the next state has that magnitude, and the scale follows.

    A step that writes the old state back trains, too, but clips: the control has its losses.
    """
    step, state = make_step(), new_state()
    large = batch_of(size=8.0)
    first = magnitudes(state.float8_state)
    state, _ = step(state, large)
    assert magnitudes(state.float8_state).forward[0] == 8 * first.forward[0]
    assert state.float8_state.forward[0][1] == first.forward[0]

    def after(keep_old: bool) -> float:
        now = new_state()
        for _ in range(2):
            old = now.float8_state
            now, metrics = step(now, large)
            now = now.replace(float8_state=old) if keep_old else now
        return float(metrics["loss"])

    exact = jaxmp.make_train_step(loss_fn, "mixed_bfloat16", donate=False)
    reference = new_state(policy="mixed_bfloat16,products=tensorwise")
    for _ in range(2):
        reference, metrics = exact(reference, large)
    wanted = float(metrics["loss"])
    assert abs(after(keep_old=False) / wanted - 1) < 0.02
    assert abs(after(keep_old=True) / wanted - 1) > 0.02


def test_a_history_forgets() -> None:
    step, state = make_step(), new_state()
    for size in (8.0, 1.0, 1.0):
        state, _ = step(state, batch_of(size=size))
        assert state.float8_state.forward[0].max() > 16
    state, _ = step(state, batch_of())
    assert state.float8_state.forward[0].max() < 8


@pytest.mark.jax
def test_each_use_of_a_weight_has_its_own_magnitudes() -> None:
    """Cotangents of 1 and 5 for one weight: not 6, which JAX's addition would make of them."""

    def loss(params: Any, batch: Any) -> Any:
        w, x = params["up"], batch["x"]
        return jnp.sum((x @ w)[0]) + 5 * jnp.sum((2 * x) @ w)

    state = jaxmp.float8.init_state(loss, POLICY, params_of(), batch_of())
    assert [float(history[0]) for history in state.backward] == [1, 5]
    x, w, twice, again = (float(history[0]) for history in state.forward)
    assert (twice, again) == (2 * x, w)


def test_a_batch_under_vmap_has_one_magnitude() -> None:
    """Per-example losses: the magnitudes are those of the batch at once, and no sums."""

    def vmapped(params: Any, batch: Any) -> Any:
        def one(x: Any, y: Any) -> Any:
            return loss_fn(params, {"x": x, "y": y})

        parts = jax.tree.map(lambda x: x.reshape(4, 8, 16), batch)
        return jnp.mean(jax.vmap(one)(parts["x"], parts["y"]))

    found, wanted = magnitudes(init(vmapped)), magnitudes(init())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02)
        assert a.shape == ()


@pytest.mark.parametrize("policy", [POLICY, FLOAT16])
@pytest.mark.jax
def test_microbatches_give_the_largest(policy: str) -> None:
    """The magnitudes of all parts, and not those of the last, which is the smallest here."""
    rows = np.arange(32) % 4
    size = jnp.asarray(np.array([1.0, 4.0, 2.0, 0.25], np.float32)[rows])[:, None]
    batch = batch_of()
    batch = {"x": batch["x"] * size, "y": batch["y"] * size}
    whole, parts = make_step(policy=policy), make_step(policy=policy, microbatches=4)
    state = new_state(policy=policy)
    one, several = (magnitudes(step(state, batch)[0].float8_state) for step in (whole, parts))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02)
    assert several.forward[0] == jnp.max(jnp.abs(batch["x"]))


def linear(params: Any, batch: Any, unrolled: bool = False) -> Any:
    """Layers of powers of two in which nothing is rounded, so that equal programs are equal."""
    x, layers = batch["x"], params["layers"]
    for w in layers if unrolled else ():
        x = x @ w
    if not unrolled:
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, layers)
    return jnp.sum(x * batch["y"])


@pytest.mark.jax
def test_a_scan_over_layers_has_the_histories_of_the_layers() -> None:
    random = np.random.default_rng(0)
    order = np.stack([np.eye(16)[random.permutation(16)] for _ in range(3)])
    params = {"layers": jnp.asarray(order * np.array([2, 8, 0.25])[:, None, None], jnp.float32)}
    batch = {
        "x": jnp.float32(2.0) ** (jnp.arange(128.0).reshape(8, 16) % 3),
        "y": jnp.ones((8, 16)),
    }
    scanned, apart = (
        jaxmp.float8.init_state(functools.partial(linear, unrolled=x), POLICY, params, batch)
        for x in (False, True)
    )
    xs, ws, cts = apart.forward[::2], apart.forward[1::2], apart.backward
    assert [float(history[0]) for history in xs] == [4, 8, 64]
    assert [float(history[0]) for history in ws] == [2, 8, 0.25]
    assert [float(history[0]) for history in cts] == [2, 0.25, 1]
    stacked = type(apart)((jnp.stack(xs), jnp.stack(ws)), (jnp.stack(cts),))
    assert tree_bits(scanned) == tree_bits(stacked)


def trained(loss: Any, steps: int = 3, policy: str = POLICY, **options: Any) -> Any:
    step, state, losses = make_step(loss, policy, **options), new_state(loss, policy), []
    for i in range(steps):
        state, metrics = step(state, batch_of(seed=3 + i))
        losses.append(metrics["loss"])
    return losses, state


@pytest.mark.parametrize("unrolled", [False, True])
def test_rematerialized_layers_give_the_same_bits(unrolled: bool) -> None:
    """The recomputed forward pass rounds by the same scales, and its magnitudes do not count."""
    plain = trained(functools.partial(layered, unrolled=unrolled))
    again = trained(functools.partial(layered, unrolled=unrolled, remat=True))
    assert tree_bits(again) == tree_bits(plain)


@pytest.mark.parametrize("recompute", ["auto", "always"])
def test_recomputed_steps_give_the_same_bits(recompute: str) -> None:
    assert tree_bits(trained(layered, recompute=recompute)) == tree_bits(trained(layered))


@pytest.mark.parametrize("skip", ["cond", "select"])
@pytest.mark.parametrize("policy", [POLICY, FLOAT16])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.jax
def test_a_skipped_step_leaves_the_state_as_it_was(skip: str, policy: str, bad: float) -> None:
    step, state = make_step(policy=policy), new_state(policy=policy, skip=skip)
    state, _ = step(state, batch_of())
    before = tree_bits((state.float8_state, state.params))
    broken = batch_of()
    broken["x"] = broken["x"].at[3, 5].set(bad)
    state, metrics = step(state, broken)
    assert not metrics["grads_finite"]
    assert tree_bits((state.float8_state, state.params)) == before
    state, metrics = step(state, batch_of(seed=4))
    assert metrics["grads_finite"]


def test_a_magnitude_that_is_not_finite_is_never_stored() -> None:
    """Also by an optimizer that takes every step: inf would freeze the scale for a history."""
    step, state = make_step(), new_state(skip="none")
    broken = batch_of()
    broken["x"] = broken["x"].at[3, 5].set(jnp.inf)
    kept = tree_bits(state.float8_state.forward[0])
    state, _ = step(state, broken)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.float8_state))
    assert tree_bits(state.float8_state.forward[0]) == kept


def test_the_loss_scale_is_not_in_the_state() -> None:
    """A float16 step under a large scale stores what a bfloat16 step without one stores."""
    for policy, scale in ((POLICY, None), (FLOAT16, 2.0**12)):
        options = {} if scale is None else {"loss_scale": jaxmp.StaticLossScale(scale)}
        state, _ = make_step(policy=policy)(new_state(policy=policy, **options), batch_of())
        largest = [float(history[0]) for history in state.float8_state.backward]
        np.testing.assert_allclose(largest, magnitudes(init()).backward, rtol=0.1)


def test_the_optimizer_sees_the_params_alone() -> None:
    seen: list[Any] = []

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        seen.append(jax.tree.structure(updates))
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = jaxmp.mixed_precision(optax.chain(spy, optax.sgd(0.1)), POLICY)
    state = jaxmp.TrainState.create(params=params_of(), tx=tx, float8_state=init())
    _, metrics = make_step()(state, batch_of())
    assert set(seen) == {jax.tree.structure(params_of())}
    tx = jaxmp.mixed_precision(optax.sgd(0.1), CURRENT)
    plain = jaxmp.TrainState.create(params=params_of(), tx=tx)
    _, wanted = make_step(policy=CURRENT)(plain, batch_of())
    assert metrics["grad_norm"] == wanted["grad_norm"]


def test_it_trains_like_current_scaling() -> None:
    losses, state = trained(layered, 60)
    wanted, _ = trained(layered, 60, CURRENT)
    assert count_dots(make_step(layered), state, batch_of())["float8_e4m3fn"] >= 2
    assert losses[0] == wanted[0]  # the first state knows the first batch
    last, same = np.mean(losses[-5:]), np.mean(wanted[-5:])
    assert abs(last / same - 1) < 0.05
    assert last < 0.7 * np.mean(losses[:5])


@pytest.mark.jax
def test_a_step_is_traced_once() -> None:
    traces = 0

    def counted(params: Any, batch: Any) -> Any:
        nonlocal traces
        traces += 1
        return loss_fn(params, batch)

    step, state = make_step(counted), new_state()
    for i in range(3):
        state, _ = step(state, batch_of(seed=i))
    assert step._cache_size() == 1
    plain, before = make_step(counted, CURRENT), traces
    plain(new_state(policy=CURRENT), batch_of())
    assert before == traces - before


def test_collections_of_the_model_stay_apart() -> None:
    def loss(params: Any, batch: Any, *, count: Any) -> Any:
        return loss_fn(params, batch), {"count": count + 1}

    float8 = jaxmp.float8.init_state(loss, POLICY, params_of(), batch_of(), count=jnp.int32(0))
    assert tree_bits(float8) == tree_bits(init())
    tx = jaxmp.mixed_precision(optax.sgd(0.1), POLICY)
    own = {"float8_state": float8, "count": jnp.int32(0)}
    state = jaxmp.TrainState.create(params=params_of(), tx=tx, **own)
    for microbatches, count in ((1, 1), (4, 4)):
        new, _ = make_step(loss, microbatches=microbatches)(state, batch_of())
        assert int(new.count) == count
        assert not np.array_equal(new.float8_state.forward[1], float8.forward[1])


@pytest.mark.jax
def test_orbax(tmp_path: pathlib.Path) -> None:
    step, state = make_step(), new_state()
    state, _ = step(state, batch_of())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert tree_bits(restored) == tree_bits(state)
    after = batch_of(seed=7)
    assert tree_bits(step(restored, after)) == tree_bits(step(state, after))


def test_microbatches_round_each_weight_once() -> None:
    """Before the loop over them, as with current scaling."""

    def roundings(jaxpr: Any, inside: bool = False) -> list[tuple[int, ...]]:
        found = []
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "float8_encode" and inside:
                found.append(equation.invars[0].aval.shape)
            for inner in compat.sub_jaxprs(equation):
                if name != "low_precision_product":
                    found += roundings(inner, inside or name == "scan")
        return found

    step = make_step(microbatches=4)
    shapes = roundings(step.trace(new_state(), batch_of()).jaxpr.jaxpr)
    assert set(shapes) == {(8, 16), (8, 32)}


def test_a_layer_that_starts_at_zero() -> None:
    """Nothing is known of the cotangents before it; a scale for zero would clip them to 1e-12."""
    params = params_of() | {"down": jnp.zeros((32, 16))}
    float8 = jaxmp.float8.init_state(loss_fn, POLICY, params, batch_of())
    assert float8.backward[0].max() == 0
    tx = jaxmp.mixed_precision(optax.sgd(1.0), POLICY)
    state = jaxmp.TrainState.create(params=params, tx=tx, float8_state=float8)
    step, norms = make_step(), []
    for _ in range(3):
        state, metrics = step(state, batch_of())
        norms.append(float(metrics["grad_norm"]))
    assert state.float8_state.backward[0].max() > 0
    wanted = jaxmp.TrainState.create(
        params=params, tx=jaxmp.mixed_precision(optax.sgd(1.0), CURRENT)
    )
    for norm in norms:
        wanted, metrics = make_step(policy=CURRENT)(wanted, batch_of())
        np.testing.assert_allclose(norm, metrics["grad_norm"], rtol=0.1)


# --- functions of one's own ----------------------------------------------------------------------


def test_an_evaluation_reads_the_state() -> None:
    """With it, the scales are those of training; without it, the current ones. Nothing changes."""
    state = init(size=0.125)  # what is larger than expected is clipped
    before = tree_bits(state)
    fast = jaxmp.autocast(loss_fn, POLICY)
    loss, seen = jaxmp.float8.with_state(fast, state)(params_of(), batch_of())
    assert tree_bits(state) == before
    assert [float(x) for x in seen[:2]] == [float(x) for x in magnitudes(init()).forward[:2]]
    current = jaxmp.autocast(loss_fn, CURRENT)(params_of(), batch_of())
    assert tree_bits(fast(params_of(), batch_of())) == tree_bits(current)
    assert loss != current


def test_layers_of_a_library() -> None:
    """A model under a policy of its own has the state of a function under autocast."""
    model = nn.Sequential([nn.Dense(32, use_bias=False), jnp.tanh, nn.Dense(16, use_bias=False)])
    model = jaxmp.linen.apply_policy(model, POLICY)
    given = params_of()
    params = {"layers_0": {"kernel": given["up"]}, "layers_2": {"kernel": given["down"]}}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    state = jaxmp.float8.init_state(loss, None, params, batch_of())
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(init()), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), POLICY)
    without = jaxmp.TrainState.create(params=params, tx=tx)
    with pytest.raises(ValueError, match="the train state does not hold them"):
        jaxmp.make_train_step(loss)(without, batch_of())
    new = jaxmp.TrainState.create(params=params, tx=tx, float8_state=state)
    new, metrics = jaxmp.make_train_step(loss)(new, batch_of(size=8.0))
    assert metrics["grads_finite"]
    assert new.float8_state.forward[0][0] == 8 * state.forward[0][0]


def own_step(params: Any, state: Any, batch: Any) -> Any:
    fast = jaxmp.autocast(loss_fn, POLICY)

    def loss(params: Any, probes: Any) -> Any:
        return jaxmp.float8.with_state(fast, state, probes)(params, batch)

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, seen), (grads, largest) = gradient(params, jaxmp.float8.probes_of(state))
    return value, grads, jaxmp.float8.update(state, seen, largest)


def test_a_step_of_ones_own() -> None:
    params, state, batch = params_of(), init(), batch_of(size=2.0)
    value, grads, new = jax.jit(own_step)(params, state, batch)
    stepped, metrics = make_step()(new_state(), batch)
    assert value == metrics["loss"]
    assert tree_bits(new) == tree_bits(stepped.float8_state)
    assert jax.tree.structure(grads) == jax.tree.structure(params)


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.jax
def test_a_shard_map_has_the_magnitudes_of_the_whole_batch(devices: int) -> None:
    """The largest over the devices; a psum would give several times as much."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    fast = jaxmp.autocast(loss_fn, POLICY)

    def local(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any, probes: Any) -> Any:
            value, seen = jaxmp.float8.with_state(fast, state, probes)(params, batch)
            return jax.lax.pmean(value, "data"), seen

        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (_, largest), seen = gradient(params, jaxmp.float8.probes_of(state))
        return jaxmp.float8.update(state, seen, largest)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    found = jax.jit(mapped)(params_of(), init(), batch_of(64))
    _, _, wanted = jax.jit(own_step)(params_of(), init(), batch_of(64))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02)
    assert tree_bits(found.forward[:2]) == tree_bits(wanted.forward[:2])


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.jax
def test_eight_devices_have_the_state_of_one(kind: Any, microbatches: int) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    sharded = NamedSharding(mesh, P("data"))
    step = make_step(layered, microbatches=microbatches)
    alone = new_state(layered)
    state = jax.device_put(alone, NamedSharding(mesh, P()))
    for i in range(2):
        batch = batch_of(64, seed=i)
        alone, _ = step(alone, batch)
        state, _ = step(state, jax.device_put(batch, sharded))
        if i == 0:  # after it, params differ by the order of the sums over the batch
            assert tree_bits(state.float8_state) == tree_bits(alone.float8_state)
    both = map(jax.tree.leaves, (state.float8_state, alone.float8_state))
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.15)  # codes move by one
        assert a.sharding.is_fully_replicated


def test_a_step_of_ones_own_on_explicit_axes() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params, state, batch = params_of(), init(), batch_of(64)
    _, _, wanted = jax.jit(own_step)(params, state, batch)
    given = *jax.device_put((params, state), whole), jax.device_put(batch, split)
    with jax.set_mesh(mesh):
        _, _, found = jax.jit(own_step)(*given)
    assert tree_bits(found) == tree_bits(wanted)


def test_fsdp_has_the_state_of_one_device() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    alone = new_state(layered)
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, P(*[None] * (x.ndim - 1), "data")), alone.params
    )
    tx = alone.tx
    params = jax.device_put(params_of(layered), shardings)
    state = jaxmp.TrainState.create(params=params, tx=tx, float8_state=init(layered))
    fsdp = jaxmp.sharding.FSDP(shardings=shardings, axis="data")
    placed = jaxmp.sharding.state_shardings(state, params)
    step = make_step(layered, fsdp=fsdp, shardings=placed)
    batch = batch_of(64)
    state, metrics = step(state, jax.device_put(batch, NamedSharding(mesh, P("data"))))
    alone, wanted = make_step(layered)(alone, batch)
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-3)
    for a, b in zip(
        jax.tree.leaves(state.float8_state), jax.tree.leaves(alone.float8_state), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0.02)
        assert a.sharding.is_fully_replicated
    assert tree_bits(state.float8_state.forward[1]) == tree_bits(alone.float8_state.forward[1])
