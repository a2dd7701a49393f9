"""Delayed scaling in training: the state follows the data, once for each step, and nothing else."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from tests.support.bits import tree_bits
from tests.support.dots import count_dots

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]
POLICY = "mixed_float8"
FLOAT16 = "params=float32,compute=float16,output=float32,products=tensorwise"


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
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def params_of(loss: Callable[..., Any] = loss_fn) -> Any:
    params = {"up": draw(16, 32, seed=1) / 4, "down": draw(32, 16, seed=2) / 6}
    if getattr(loss, "func", loss) is layered:
        params = {"layers": draw(3, 16, 16, seed=1) / 4, "down": draw(16, 16, seed=2) / 4}
    return jax.device_put(params)


def batch_of(rows: int = 32, size: float = 1.0, seed: int = 3, bad: float | None = None) -> Any:
    x = draw(rows, 16, seed=seed)
    y = np.sin(x @ draw(16, 16, seed=9) / 4)
    if bad is not None:
        x[3, 5] = bad
    return jax.device_put({"x": x * np.float32(size), "y": y})


def init(loss: Callable[..., Any] = loss_fn, policy: str = POLICY, **batch: Any) -> Any:
    fast = jaxmp.autocast(loss, policy)
    return jaxmp.float8.init_state(fast, params_of(loss), batch_of(**batch), history=3)


def new_state(
    loss: Callable[..., Any] = loss_fn, policy: str = POLICY, **options: Any
) -> jaxmp.TrainState:
    tx = jaxmp.mixed_precision(optax.adamw(3e-3), policy, **options)
    return jaxmp.TrainState.create(params=params_of(loss), tx=tx, float8=init(loss, policy))


def make_step(loss: Callable[..., Any] = loss_fn, policy: str = POLICY, **options: Any) -> Any:
    """A train step as the page on float8 has it."""
    fast = jaxmp.autocast(loss, policy)

    @jax.jit
    def step(state: jaxmp.TrainState, batch: Any) -> Any:
        scale = state.loss_scale

        def scaled(params: Any, probes: Any) -> Any:
            fun = jaxmp.float8.with_state(fast, state.float8, probes, scale=scale.scale)
            return fun(params, batch)

        both = jaxmp.value_and_grad(
            scaled, (0, 1), has_aux=True, loss_scale=scale, reduce_dtype="float32", **options
        )
        (value, seen), (grads, found) = both(state.params, jaxmp.float8.probes_of(state.float8))
        new = state.apply_gradients(grads, float8=jaxmp.float8.update(state.float8, seen, found))
        return new, {"loss": value, "grads_finite": new.opt_state.grads_finite}

    return step


def current(loss: Callable[..., Any] = loss_fn, **optimizer: Any) -> tuple[Any, Any]:
    """A step with current scaling, and its state."""
    state = new_state(loss, **optimizer).replace(collections={})
    return jaxmp.make_train_step(loss, POLICY, donate=False), state


def magnitudes(state: Any) -> Any:
    """The latest magnitudes of a state, as NumPy arrays."""
    return jax.tree.map(lambda history: np.asarray(history)[..., 0], state)


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
        got = [np.asarray(history)[0] for history in found]
        np.testing.assert_allclose(got, [np.abs(x).max() for x in arrays], rtol=0.1)
    assert all(history.shape == (3,) for history in jax.tree.leaves(state))
    assert all((np.max(history, -1) > 0).all() for history in jax.tree.leaves(state))


def test_the_state_is_float32_where_float64_is_enabled() -> None:
    """A scale is made of the bits of a float32; the state is the same to the bit."""
    narrow, _ = make_step()(new_state(), batch_of())
    with jax.enable_x64(True):
        begun = new_state()
        wide, _ = make_step()(begun, batch_of())
    for state in (begun.float8, wide.float8):
        assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32"}
    assert tree_bits(wide.float8) == tree_bits(narrow.float8)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float8,products=rowwise"])
def test_a_function_without_such_products_has_no_state(policy: str) -> None:
    with pytest.raises(ValueError, match="no product in 8 bits with one scale for each array, and"):
        init(policy=policy)


@pytest.mark.parametrize("history", [0, 2.5, True])
@pytest.mark.usefixtures("unchecked")
def test_a_history_has_steps(history: Any) -> None:
    with pytest.raises(ValueError, match=f"a whole number of steps, at least 1; got {history}"):
        jaxmp.float8.init_state(loss_fn, params_of(), batch_of(), history=history)


def test_what_stays_on_current_scaling_is_named() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = jax.lax.cond(True, lambda x: x @ params["up"], lambda x: x @ params["up"], batch["x"])
        return jnp.mean((jnp.tanh(x) @ params["down"] - batch["y"]) ** 2)

    with pytest.warns(UserWarning, match="products in cond scale by current magnitudes"):
        state = init(loss)
    assert len(state.backward) == 1


def test_a_state_of_another_model_is_refused() -> None:
    other = new_state(layered).replace(float8=init())
    with pytest.raises(ValueError, match="the float8 state is that of another program"):
        make_step(layered)(other, batch_of())


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_stored_state_is_the_new_one() -> None:
    """The data grow by 8: the next state has that magnitude, and the scale follows.

    A step that writes the old state back trains, too, but clips: the control has its losses.
    """
    step, state = make_step(), new_state()
    large = batch_of(size=8.0)
    first = magnitudes(state.float8)
    state, _ = step(state, large)
    assert magnitudes(state.float8).forward[0] == 8 * first.forward[0]
    assert np.asarray(state.float8.forward[0])[1] == first.forward[0]

    def after(keep_old: bool) -> float:
        now = new_state()
        for _ in range(2):
            old = now.float8
            now, metrics = step(now, large)
            now = now.replace(float8=old) if keep_old else now
        return float(metrics["loss"])

    exact, reference = current()
    for _ in range(2):
        reference, metrics = exact(reference, large)
    wanted = float(metrics["loss"])
    assert abs(after(keep_old=False) / wanted - 1) < 0.02
    assert abs(after(keep_old=True) / wanted - 1) > 0.02


def test_a_history_forgets() -> None:
    step, state = make_step(), new_state()
    for size in (8.0, 1.0, 1.0):
        state, _ = step(state, batch_of(size=size))
        assert np.max(state.float8.forward[0]) > 16
    state, _ = step(state, batch_of())
    assert np.max(state.float8.forward[0]) < 8


@pytest.mark.jax
def test_each_use_of_a_weight_has_its_own_magnitudes() -> None:
    """Cotangents of 1 and 5 for one weight: not 6, which JAX's addition would make of them."""

    def loss(params: Any, batch: Any) -> Any:
        w, x = params["up"], batch["x"]
        return jnp.sum((x @ w)[0]) + 5 * jnp.sum((2 * x) @ w)

    state = init(loss)
    assert magnitudes(state).backward == (1, 5)
    x, w, twice, again = magnitudes(state).forward
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
    params = {"layers": np.float32(order * np.array([2, 8, 0.25])[:, None, None])}
    x = np.float32(2.0) ** (np.arange(128, dtype=np.float32).reshape(8, 16) % 3)
    batch = {"x": x, "y": np.ones((8, 16), np.float32)}
    scanned, apart = (
        jaxmp.float8.init_state(
            jaxmp.autocast(functools.partial(linear, unrolled=x), POLICY), params, batch
        )
        for x in (False, True)
    )
    xs, ws, cts = apart.forward[::2], apart.forward[1::2], apart.backward
    assert [history[0] for history in map(np.asarray, xs)] == [4, 8, 64]
    assert [history[0] for history in map(np.asarray, ws)] == [2, 8, 0.25]
    assert [history[0] for history in map(np.asarray, cts)] == [2, 0.25, 1]
    stacked = type(apart)((np.stack(xs), np.stack(ws)), (np.stack(cts),))
    assert tree_bits(scanned) == tree_bits(stacked)


def trained(loss: Any, steps: int = 3, with_step: Any = None, **options: Any) -> Any:
    step, state = with_step or (make_step(loss, **options), new_state(loss))
    losses = []
    for i in range(steps):
        state, metrics = step(state, batch_of(seed=3 + i))
        losses.append(metrics["loss"])
    return losses, state


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True])
def test_rematerialized_layers_give_the_same_bits(unrolled: bool) -> None:
    """The recomputed forward pass rounds by the same scales, and its magnitudes do not count."""
    plain = trained(functools.partial(layered, unrolled=unrolled))
    again = trained(functools.partial(layered, unrolled=unrolled, remat=True))
    assert tree_bits(again) == tree_bits(plain)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["auto", "always"])
def test_recomputed_steps_give_the_same_bits(recompute: str) -> None:
    assert tree_bits(trained(layered, recompute=recompute)) == tree_bits(trained(layered))


@pytest.mark.parametrize("skip", ["cond", "select"])
@pytest.mark.parametrize("policy", [POLICY, FLOAT16, "mixed_int8"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.jax
def test_a_skipped_step_leaves_the_state_as_it_was(skip: str, policy: str, bad: float) -> None:
    step, state = make_step(policy=policy), new_state(policy=policy, skip=skip)
    state, _ = step(state, batch_of())
    before = tree_bits((state.float8, state.params))
    state, metrics = step(state, batch_of(bad=bad))
    assert not metrics["grads_finite"]
    assert tree_bits((state.float8, state.params)) == before
    state, metrics = step(state, batch_of(seed=4))
    assert metrics["grads_finite"]


def test_a_magnitude_that_is_not_finite_is_never_stored() -> None:
    """Also by an optimizer that takes every step: inf would freeze the scale for a history."""
    step, state = make_step(), new_state(skip="none")
    kept = tree_bits(state.float8.forward[0])
    state, _ = step(state, batch_of(bad=np.inf))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.float8))
    assert tree_bits(state.float8.forward[0]) == kept


@pytest.mark.slow
def test_the_loss_scale_is_not_in_the_state() -> None:
    """A float16 step under a large scale stores what a bfloat16 step without one stores."""
    for policy, scale in ((POLICY, None), (FLOAT16, 2.0**12)):
        options = {} if scale is None else {"loss_scale": jaxmp.StaticLossScale(scale)}
        state, _ = make_step(policy=policy)(new_state(policy=policy, **options), batch_of())
        largest = magnitudes(state.float8).backward
        np.testing.assert_allclose(largest, magnitudes(init()).backward, rtol=0.1)


def test_the_optimizer_sees_the_params_alone() -> None:
    seen: list[Any] = []

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        seen.append(jax.tree.structure(updates))
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = jaxmp.mixed_precision(optax.chain(spy, optax.sgd(0.1)), POLICY)
    state = jaxmp.TrainState.create(params=params_of(), tx=tx, float8=init())
    new, _ = make_step()(state, batch_of())
    assert set(seen) == {jax.tree.structure(params_of())}
    step, _ = current()
    wanted, _ = step(state.replace(collections={}), batch_of())
    assert tree_bits(new.params) == tree_bits(wanted.params)  # the state knows this batch


@pytest.mark.slow
def test_it_trains_like_current_scaling() -> None:
    losses, state = trained(layered, 60)
    wanted, _ = trained(layered, 60, current(layered))
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
    assert traces == 1


def test_a_layer_that_starts_at_zero() -> None:
    """Nothing is known of the cotangents before it; a scale for zero would clip them to 1e-12."""
    params = params_of() | {"down": jax.device_put(np.zeros((32, 16), np.float32))}
    float8 = jaxmp.float8.init_state(jaxmp.autocast(loss_fn, POLICY), params, batch_of())
    assert np.max(float8.backward[0]) == 0
    tx = jaxmp.mixed_precision(optax.sgd(1.0), POLICY)
    state = jaxmp.TrainState.create(params=params, tx=tx, float8=float8)
    step, (exact, _) = make_step(), current()
    wanted = state.replace(collections={})
    for _ in range(3):
        state, metrics = step(state, batch_of())
        wanted, exact_metrics = exact(wanted, batch_of())
        np.testing.assert_allclose(metrics["loss"], exact_metrics["loss"], rtol=0.02)
    assert np.max(state.float8.backward[0]) > 0
    np.testing.assert_allclose(
        *(np.linalg.norm(np.subtract(x.params["up"], params["up"])) for x in (state, wanted)),
        rtol=0.1,
    )


# --- functions of one's own ----------------------------------------------------------------------


def test_an_evaluation_reads_the_state() -> None:
    """What is larger than expected is clipped, and nothing changes."""
    state = init(size=0.125)
    before = tree_bits(state)
    fast = jaxmp.autocast(loss_fn, POLICY)
    loss, seen = jax.jit(jaxmp.float8.with_state(fast, state))(params_of(), batch_of())
    assert tree_bits(state) == before
    assert [float(x) for x in seen[:2]] == [float(x) for x in magnitudes(init()).forward[:2]]
    assert loss != jax.jit(fast)(params_of(), batch_of())


def test_layers_of_a_library() -> None:
    """A model under a policy of its own has the state of a function under autocast."""
    model = nn.Sequential([nn.Dense(32, use_bias=False), jnp.tanh, nn.Dense(16, use_bias=False)])
    model = jaxmp.linen.apply_policy(model, POLICY)
    given = params_of()
    params = {"layers_0": {"kernel": given["up"]}, "layers_2": {"kernel": given["down"]}}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    state = jaxmp.float8.init_state(loss, params, batch_of(), history=3)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(init()), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05)
    value, seen = jax.jit(jaxmp.float8.with_state(loss, state))(params, batch_of(size=8.0))
    assert np.isfinite(value)
    assert seen[0] == 8 * magnitudes(state).forward[0]


def own_step(params: Any, state: Any, batch: Any) -> Any:
    fast = jaxmp.autocast(loss_fn, POLICY)

    def loss(params: Any, probes: Any) -> Any:
        return jaxmp.float8.with_state(fast, state, probes)(params, batch)

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, seen), (grads, largest) = gradient(params, jaxmp.float8.probes_of(state))
    return value, grads, jaxmp.float8.update(state, seen, largest)


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
@pytest.mark.jax
def test_eight_devices_have_the_state_of_one(kind: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params, state, batch = params_of(), init(), batch_of(64)
    _, _, wanted = jax.jit(own_step)(params, state, batch)
    given = *jax.device_put((params, state), whole), jax.device_put(batch, split)
    with jax.set_mesh(mesh):
        _, _, found = jax.jit(own_step)(*given)
    assert tree_bits(found) == tree_bits(wanted)


def test_fsdp_has_the_state_of_one_device() -> None:
    """Codes of the params are gathered, and no array of float32."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    alone = new_state(layered)
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, P(*[None] * (x.ndim - 1), "data")), alone.params
    )
    whole = NamedSharding(mesh, P())
    params = jax.device_put(params_of(layered), shardings)
    state = jaxmp.TrainState.create(params=params, tx=alone.tx, float8=init(layered))
    probes = jax.tree.map(lambda _: whole, jaxmp.float8.probes_of(state.float8))
    fsdp = jaxmp.sharding.FSDP(shardings=(shardings, probes), axis="data")
    step, batch = make_step(layered, fsdp=fsdp), batch_of(64)
    placed = jax.device_put(batch, NamedSharding(mesh, P("data")))
    rows = jaxmp.sharding.collectives(step, state, placed)
    assert {row.dtype for row in rows if row.kind == "all-gather"} == {"float8_e4m3fn"}
    state, metrics = step(state, placed)
    alone, wanted = make_step(layered)(alone, batch)
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-3)
    for a, b in zip(jax.tree.leaves(state.float8), jax.tree.leaves(alone.float8), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02)
        assert a.sharding.is_fully_replicated
    assert tree_bits(state.float8.forward[1]) == tree_bits(alone.float8.forward[1])
