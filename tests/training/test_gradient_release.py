"""A step that updates layers in its backward pass is the step that keeps all gradients."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from jaxmp._program import compat
from tests.support.compilations import Count
from tests.support.dots import equations
from tests.support.one_by_one import one_by_one

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]

LAYERS, WIDTH, HIDDEN, TOKENS = 3, 32, 128, 16


def params(vocabulary: int = 50) -> Any:
    return params_of(sizes(vocabulary=vocabulary, width=WIDTH, hidden=HIDDEN))


def params_of(size: dict[str, int]) -> Any:
    """Params in which any axis may be as long as there are layers."""
    random = np.random.default_rng(0)
    layers, width, hidden = size["layers"], size["width"], size["hidden"]
    values = {
        "table": random.standard_normal((size["vocabulary"], width)),
        "layers": {
            "up": random.standard_normal((layers, width, hidden)) * 0.1,
            "down": random.standard_normal((layers, hidden, width)) * 0.1,
            "scale": np.ones((layers, width)),
        },
    }
    return jax.device_put(jax.tree.map(np.float32, values))


def layer(x: Any, p: Any) -> Any:
    x, rest = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * p["scale"][None], x
    return rest + jax.nn.gelu(x @ p["up"]) @ p["down"]


def loss(params: Any, tokens: Any) -> Any:
    x = params["table"][tokens]
    x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    return jnp.square(x - jnp.roll(params["table"][tokens], 1, 0)).mean()


def tokens(i: int) -> Any:
    return jax.device_put((np.arange(TOKENS, dtype=np.int32) * 7 + 3 * i) % 50)


def clip_by_layers(limit: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm`, whose norm is summed layer by layer: to the last bit."""

    def square(x: Any) -> Any:
        return jnp.square(x).sum(tuple(range(1, x.ndim))).sum()

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norm = jnp.sqrt(sum(map(square, jax.tree.leaves(updates))))
        factor = jnp.minimum(1.0, limit / norm)
        return jax.tree.map(lambda x: x * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


MATRIX = optax.contrib.MuonDimensionNumbers(1, 2)
OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.adamw(1e-3),
    "schedule": optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
    "clip": optax.chain(clip_by_layers(0.1), optax.adamw(1e-3)),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-4),
    "adafactor": optax.adafactor(1e-3, clipping_threshold=None, multiply_by_parameter_scale=False),
    "hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "groups": optax.multi_transform(
        {"a": optax.adamw(1e-3), "b": optax.sgd(1e-2)},
        {"table": "b", "layers": {"up": "a", "down": "b", "scale": "a"}},
    ),
    "masked decay": optax.adamw(
        1e-3, mask={"table": False, "layers": {"up": True, "down": True, "scale": False}}
    ),
    "clip by value": optax.chain(optax.clip(1e-3), optax.rmsprop(1e-3)),
    "several steps": optax.MultiSteps(optax.adamw(1e-3), 2),
    "muon": optax.contrib.muon(
        1e-3,
        muon_weight_dimension_numbers={
            "table": None,
            "layers": {"up": MATRIX, "down": MATRIX, "scale": None},
        },
    ),
}
# Norms of stacks, whose last bit depends on the order of the sum.
WITH_NORMS: dict[str, Any] = {
    "global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
    "lamb": optax.lamb(1e-3),
    "lamb with a clip": optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-3)),
    "adafactor": optax.adafactor(1e-3),
    "block norm": optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(1e-2)),
}
NARROW = "params=bfloat16,compute=bfloat16,output=float32"
STORAGES: dict[str, Any] = {
    "float16": ("mixed_float16", {}),
    "never skips": ("mixed_bfloat16", {"skip": "none"}),
    "select": ("mixed_bfloat16", {"skip": "select"}),
    "int8 moments": ("mixed_bfloat16", {"moments": "int8"}),
    "bfloat16 moments": ("mixed_bfloat16", {"moments": "bfloat16"}),
    "float32": (NARROW, {"master": "float32"}),
    "stochastic": (NARROW, {"master": "stochastic"}),
    "remainder": (NARROW, {"master": "remainder"}),
    "remainder8": (NARROW, {"master": "remainder8"}),
    "kahan": (NARROW, {"master": "kahan"}),
    "all narrow": (NARROW, {"master": "stochastic", "moments": "int8"}),
}


def optimizer_of(tx: Any, storage: str = "select") -> Any:
    policy, options = STORAGES[storage]
    return jaxmp.mixed_precision(tx, policy, **options)


def steps_of(tx: Any, loss: Any = loss, params: Any = params, **options: Any) -> Any:
    """A first state, the step that keeps gradients, and the step that does not."""
    state = jaxmp.TrainState.create(params=params(), tx=tx)
    make = functools.partial(jaxmp.make_train_step, loss, donate=False, **options)
    return state, make(), make(gradients="released")


def different(a: Any, b: Any, rtol: float = 0.0) -> list[str]:
    """The leaves that differ, or differ by more than a part of their largest number."""
    names = []
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        if rtol:
            x, y = x.astype(np.float64), y.astype(np.float64)
            limit = rtol * np.max(np.abs(x), initial=1e-30)
            same = np.all((np.abs(x - y) <= limit) | (np.isnan(x) & np.isnan(y)) | (x == y))
        else:
            same = x.tobytes() == y.tobytes()
        names += [] if same else [jax.tree_util.keystr(path)]
    return names


def check_bits(tx: Any, steps: int = 3, rtol: float = 0.0) -> None:
    state, *both = steps_of(tx)
    buffered, released = map(one_by_one, both)
    states = state, state
    for i in range(steps):
        states = buffered(states[0], tokens(i))[0], released(states[1], tokens(i))[0]
    assert different(states[0].params, state.params)  # positive control: they were updated
    assert not different(*states, rtol=rtol)
    # Compiled, arrays are written over while others are read.
    (a, _), (b, _) = both[0](state, tokens(0)), both[1](state, tokens(0))
    assert not different(a.params, b.params, rtol=1e-2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_optimizers(name: str) -> None:
    check_bits(optimizer_of(OPTIMIZERS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_bits_of_storages(storage: str) -> None:
    check_bits(optimizer_of(OPTIMIZERS["clip"], storage))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_NORMS)
def test_norms(name: str) -> None:
    check_bits(optimizer_of(WITH_NORMS[name]), rtol=1e-5)


def planted(params: Any, batch: Any) -> Any:
    tokens, factor = batch
    return loss(params, tokens) * factor


def batch_of(step: int) -> Any:
    """Every 23rd batch overflows."""
    return tokens(step), jnp.float32(np.inf if step % 23 == 7 else 1)


SCHEDULE = optax.cosine_decay_schedule(1e-3, 300)


@pytest.mark.exhaustive
@pytest.mark.parametrize("storage", ["float16", "int8 moments", "remainder"])
def test_bits_of_three_hundred_steps(storage: str) -> None:
    """With planted overflows, clips that bite, and a schedule."""
    tx = optimizer_of(optax.chain(clip_by_layers(0.5), optax.adamw(SCHEDULE)), storage)
    state, *both = steps_of(tx, planted)
    buffered, released = map(one_by_one, both)
    states, skipped, clipped = (state, state), 0, 0
    for i in range(300):
        batch = batch_of(i)
        (a, metrics), (b, _) = buffered(states[0], batch), released(states[1], batch)
        states, skipped = (a, b), skipped + int(not metrics["grads_finite"])
        clipped += int(metrics["grads_finite"] and metrics["grad_norm"] > 0.5)
        assert not different(a, b), i
    assert skipped >= 13
    assert clipped > 20


def test_overflows_leave_every_bit() -> None:
    tx = optimizer_of(OPTIMIZERS["clip"], "float16")
    state, _, step = steps_of(tx, planted, count_overflows=True)
    state, _ = step(state, batch_of(0))
    new, metrics = step(state, batch_of(7))
    assert not metrics["grads_finite"]
    assert not different(state.params, new.params)
    assert not different(state.opt_state.inner, new.opt_state.inner)
    assert int(metrics["nonfinite"]["layers"]["up"]) == LAYERS * WIDTH * HIDDEN


def stacks(step: Any, state: Any, batch: Any = None) -> set[str]:
    """The float32 stacks that scans of a step return, of the shape of its matrices."""
    shapes = [x.shape for x in jax.tree.leaves(state.params["layers"]) if x.ndim == 3]
    closed = jax.make_jaxpr(step)(state, tokens(0) if batch is None else batch)
    scans = [e for e in equations(closed.jaxpr) if e.primitive.name == "scan"]
    stacked = [x.aval for e in scans for x in e.outvars[compat.scan_counts(e.params).carry :]]
    return {x.str_short() for x in stacked if x.shape in shapes and x.dtype == jnp.float32}


@pytest.mark.parametrize("name", ["adamw", "clip"])
@pytest.mark.parametrize("storage", ["select", "never skips", "all narrow"])
def test_no_gradients_are_stacked(name: str, storage: str) -> None:
    state, buffered, released = steps_of(optimizer_of(OPTIMIZERS[name], storage))
    assert not stacks(released, state)
    assert stacks(buffered, state)  # positive control


def scans(tx: Any) -> int:
    state, _, step = steps_of(tx)
    closed = jax.make_jaxpr(step)(state, tokens(0))
    return sum(equation.primitive.name == "scan" for equation in equations(closed.jaxpr))


def test_passes() -> None:
    """One pass without a clip and a skip, else two; LAMB's norms wait for each other."""
    adamw, clip = OPTIMIZERS["adamw"], WITH_NORMS["global norm"]
    forward = 1  # a scan too
    assert scans(optimizer_of(adamw, "never skips")) == forward + 1
    assert scans(optimizer_of(adamw, "select")) == forward + 2
    assert scans(optimizer_of(clip, "never skips")) == forward + 2
    # The clip, optax's two norms of an update, of which one chooses what the other is of, updates.
    assert scans(optimizer_of(WITH_NORMS["lamb with a clip"], "select")) == forward + 4


def test_the_loss_is_traced_once(compilations: Count) -> None:
    calls = []

    def counted(params: Any, tokens: Any) -> Any:
        calls.append(1)
        return loss(params, tokens)

    state, _, step = steps_of(optimizer_of(OPTIMIZERS["adamw"]), counted)
    for i in range(3):
        state, _ = step(state, tokens(i))
    assert len(calls) == 1


def plain_step(tx: Any, loss: Any = loss) -> Any:
    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def check_released(step: Any, *args: Any, run: Any = one_by_one) -> None:
    new = run(jaxmp.release_gradients(step))(*args)
    assert not different(run(step)(*args), new)


def test_a_loop_of_ones_own() -> None:
    tx = optax.chain(clip_by_layers(0.1), optax.adamw(1e-3))
    step = plain_step(tx)
    check_released(step, params(), tx.init(params()), tokens(0))
    assert step.__name__ == jaxmp.release_gradients(step).__name__


def test_encoder_and_decoder() -> None:
    """Two loops: the layers of both wait for the norm of all gradients."""

    def two_loops(params: Any, tokens: Any) -> Any:
        x = params["encoder"]["table"][tokens]
        for part in ("encoder", "decoder"):
            x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params[part]["layers"])
        return jnp.square(x - 1).mean()

    def both() -> Any:
        decoder = {"layers": params_of(sizes(layers=2, width=WIDTH, hidden=HIDDEN))["layers"]}
        return {"encoder": params(), "decoder": decoder}

    tx = optax.chain(clip_by_layers(0.1), optax.adamw(1e-3))
    check_released(plain_step(tx, two_loops), both(), tx.init(both()), tokens(0))


def test_metrics_of_gradients() -> None:
    """Several sums of one array; and a small stack that stays whole, in the first of two loops."""

    def two_loops(params: Any, tokens: Any) -> Any:
        x = params["layers"]["table"][tokens]
        x, _ = lax.scan(lambda x, p: (x * p, None), x, params["scales"])
        return loss(params["layers"], tokens) + jnp.square(x).mean()

    tx = optax.adam(1e-3)

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(two_loops)(params, batch)
        up, scales = grads["layers"]["layers"]["up"], grads["scales"]
        updates, state = tx.update(grads, state, params)
        metrics = up.max(), up.min(), up.sum(), jnp.sort(scales, axis=0)
        return optax.apply_updates(params, updates), state, metrics

    values = {"layers": params(), "scales": jnp.ones((5, WIDTH))}
    args = values, tx.init(values), tokens(0)
    want, new = one_by_one(step)(*args), one_by_one(jaxmp.release_gradients(step))(*args)
    assert not different(want[:2], new[:2])
    assert not different(want[2], new[2], rtol=1e-4)


def with_a_table(updates: Any, state: Any, params: Any = None) -> Any:
    """A rate for each layer, from a table at a number that all gradients decide."""
    row = jnp.isfinite(optax.tree.norm(updates)).astype(jnp.int32)
    rates = jnp.linspace(0.1, 1, 2 * LAYERS).reshape(2, LAYERS)[row]

    def scaled(x: Any) -> Any:
        return x * rates.reshape(-1, *[1] * (x.ndim - 1)) if x.shape[0] == LAYERS else x

    return jax.tree.map(scaled, updates), state


def many_operations(updates: Any, state: Any, params: Any = None) -> Any:
    for _ in range(1200):
        updates = jax.tree.map(jnp.sin, updates)
    return updates, state


def halved_by_a_loop(updates: Any, state: Any, params: Any = None) -> Any:
    """A loop that reads a norm reads no stack of gradients."""
    size = lax.while_loop(lambda x: x > 0.1, lambda x: x / 2, optax.tree.norm(updates))
    return jax.tree.map(lambda x: x * size, updates), state


def behind_a_barrier(updates: Any, state: Any, params: Any = None) -> Any:
    updates, params = lax.optimization_barrier((updates, params))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = lax.with_sharding_constraint(params, device)
    return jax.tree.map(lambda x, p: x + 0.1 * p, updates, params), state


def sorted_after_a_clip(updates: Any, state: Any, params: Any = None) -> Any:
    """Small gradients that are whole, scaled by a norm of all of them."""
    updates, _ = clip_by_layers(0.1).update(updates, optax.EmptyState())
    scales = jnp.sort(updates["layers"]["scale"], axis=0)
    return updates | {"layers": updates["layers"] | {"scale": scales}}, state


@pytest.mark.parametrize("update", [with_a_table, behind_a_barrier, sorted_after_a_clip])
def test_unusual_optimizers(update: Any) -> None:
    step = plain_step(optax.GradientTransformation(lambda params: (), update))
    check_released(step, params(), (), tokens(0))


@pytest.mark.slow
def test_more_operations_than_python_has_frames() -> None:
    """In one program of fusions: XLA has no frames for so many kernels, either."""
    step = plain_step(optax.GradientTransformation(lambda params: (), many_operations))
    check_released(step, params(), (), tokens(0), run=jax.jit)


def test_a_loop_on_the_norm() -> None:
    tx = optax.GradientTransformation(lambda params: (), halved_by_a_loop)
    args = params(), (), tokens(0)
    released = jax.jit(jaxmp.release_gradients(plain_step(tx)))(*args)
    assert not different(jax.jit(plain_step(tx))(*args), released, rtol=1e-5)


def test_params_that_stay_as_they_are() -> None:
    """A teacher of the same types, in front of the params; and one that follows them."""

    def distilled(params: Any, batch: Any) -> Any:
        teacher, tokens = batch
        return loss(params, tokens) + 0.1 * loss(lax.stop_gradient(teacher), tokens)

    tx = optax.sgd(0.1)

    def step(teacher: Any, params: Any, batch: Any) -> Any:
        new, _ = plain_step(tx, distilled)(params, tx.init(params), (teacher, batch))
        return new

    def following(teacher: Any, params: Any, batch: Any) -> Any:
        new = step(teacher, params, batch)
        return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, teacher, new), new

    for fun in (step, following):
        check_released(fun, params(), params(), tokens(0))


def test_activations_are_no_gradients() -> None:
    """Stacks of other scans, larger than all gradients, neither count nor are released."""

    def loss(params: Any, tokens: Any) -> Any:
        x = jnp.tile(params["table"][tokens], (40, 1, 1))
        hidden, x = lax.scan(lambda h, x: ((h + x) / 2, jnp.tanh(h + x)), x[0], x)
        x, stack = lax.scan(lambda x, p: (layer(x, p),) * 2, x[-1], params["layers"])
        return jnp.square(x).mean() + jnp.square(hidden).mean(), stack[-1]

    tx = optax.sgd(0.1)

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads, last = jax.grad(loss, has_aux=True)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, last

    check_released(step, params(), tx.init(params()), tokens(0))


SIZES = ("tokens", "vocabulary", "width", "hidden")


def sizes(**changed: int) -> dict[str, int]:
    return {"layers": LAYERS, "tokens": 8, "vocabulary": 20, "width": 16, "hidden": 32} | changed


def rearranged(tokens: Any) -> Any:
    """Labels, by operations that take an axis."""
    first, last = np.int64(0), np.int64(-1)
    labels = jnp.roll(jnp.roll(tokens, -1, first), (1, 2), (0, 1)) + jnp.roll(tokens, 3)
    labels += jnp.flip(jnp.sort(tokens, first), first) + jnp.cumsum(tokens, first)
    labels += jnp.tile(tokens[:1], (tokens.shape[0], 1)) + jnp.moveaxis(tokens, first, last).T
    labels += jnp.pad(tokens, np.array([[1, 0], [0, 2]]))[:-1, 2:]
    return labels + jnp.roll(tokens, jnp.array([1, 2]), (first, 1))


def classified(params: Any, tokens: Any) -> Any:
    x = params["table"][tokens]
    x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    x, labels = jnp.roll(x, 1, np.int64(0)), rearranged(tokens) % len(params["table"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, labels).mean()


def check_compiled(tx: Any, loss: Any, size: dict[str, int]) -> None:
    """The compiled steps are the same, and the released one stacks no gradients."""
    values, ids = params_of(size), np.arange(6 * size["tokens"], dtype=np.int32) * 7
    state, buffered, released = steps_of(tx, loss, lambda: values)
    ids = jax.device_put((ids % size["vocabulary"]).reshape(size["tokens"], 6))
    (a, _), (b, _) = buffered(state, ids), released(state, ids)
    assert different(a.params, values)  # positive control
    assert not different(a.params, b.params, rtol=1e-4)
    assert not stacks(released, state, ids)
    assert stacks(buffered, state, ids)  # positive control


@pytest.mark.parametrize("size", [*SIZES, "all"])
def test_axes_that_are_as_long_as_there_are_layers(size: str) -> None:
    """No axis is taken for that of the layers because it is as long."""
    changed = dict.fromkeys(SIZES if size == "all" else (size,), LAYERS)
    check_compiled(optimizer_of(WITH_NORMS["global norm"]), classified, sizes(**changed))


SMALL = {
    "one layer": sizes(layers=1),
    "few bytes": dict.fromkeys(sizes(), 4),
    "one layer of few bytes": dict.fromkeys(sizes(), 4) | {"layers": 1},
}


@pytest.mark.parametrize("model", SMALL)
def test_small_models(model: str) -> None:
    """Norms of 64 numbers take more than a sixteenth of the bytes of all gradients."""
    check_compiled(optimizer_of(WITH_NORMS["global norm"]), classified, SMALL[model])


def beside_sums(updates: Any, state: Any, params: Any = None) -> Any:
    """Sums over layers, as many as there are layers, along the axis of the layers."""

    def scaled(x: Any) -> Any:
        return x * (1 + x.sum(0)[:, None]) if x.shape == (LAYERS, LAYERS) else x

    return jax.tree.map(scaled, updates), state


def test_sums_that_are_as_many_as_layers() -> None:
    tx = optax.chain(optax.GradientTransformation(lambda params: (), beside_sums), optax.sgd(0.1))
    tx = jaxmp.mixed_precision(tx, "float32")
    check_compiled(tx, classified, sizes(width=LAYERS, hidden=LAYERS))


def of_a_part(params: Any, tokens: Any) -> Any:
    def body(x: Any, p: Any) -> Any:
        return layer(x, p), None

    def model(params: Any, tokens: Any) -> Any:
        return lax.scan(jax.checkpoint(body), params["table"][tokens], params["layers"])[0]

    return jnp.square(jax.checkpoint(model)(params, tokens) - 1).mean()


CHECKPOINTS: dict[str, Any] = {
    "whole": jax.checkpoint(classified),
    "policy": jax.checkpoint(classified, policy=jax.checkpoint_policies.dots_saveable),
    "not kept apart": jax.checkpoint(classified, prevent_cse=False),
    "jit": jax.jit(jax.checkpoint(jax.jit(classified))),
    "part": of_a_part,
    "nested": jax.checkpoint(of_a_part),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_around_the_scan(name: str) -> None:
    check_compiled(optimizer_of(OPTIMIZERS["adamw"]), CHECKPOINTS[name], sizes())


def test_checkpoints_compute_again() -> None:
    """Around the whole loss: forward twice, and what is computed again is kept apart."""
    scans, barriers = [], []
    for loss in (classified, CHECKPOINTS["whole"]):
        state, _, step = steps_of(optimizer_of(OPTIMIZERS["adamw"], "never skips"), loss)
        closed = jax.make_jaxpr(step)(state, tokens(0)[:, None])
        names = [equation.primitive.name for equation in equations(closed.jaxpr)]
        scans.append(names.count("scan"))
        barriers.append(names.count("optimization_barrier"))
    assert scans == [2, 3]
    assert barriers[1] > barriers[0]


def flat(updates: Any, state: Any, params: Any = None) -> Any:
    vector, restore = jax.flatten_util.ravel_pytree(updates)
    return restore(vector / jnp.linalg.norm(vector)), state


def by_the_first_norm(updates: Any, state: Any, params: Any = None) -> Any:
    norms = jnp.sqrt(jnp.square(updates["layers"]["up"]).sum((1, 2)))
    return jax.tree.map(lambda x: x / norms[0], updates), state


def centred(updates: Any, state: Any, params: Any = None) -> Any:
    return jax.tree.map(lambda x: x - x.sum(0, keepdims=True), updates), state


def unrolled(params: Any, tokens: Any) -> Any:
    x = params["table"][tokens]
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(operator.itemgetter(i), params["layers"]))
    return jnp.square(x).mean()


@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (
            optax.GradientTransformation(lambda params: (), flat),
            r"gradients of all layers are needed at once: reshape at .*reads them",
        ),
        (optax.adaptive_grad_clip(0.01), r"reduce_sum at .*unitwise_norm.*Change it"),
        (
            optax.GradientTransformation(lambda params: (), by_the_first_norm),
            r"(slice|squeeze|gather) at \S*test_gradient_release.*by_the_first_norm.* reads them",
        ),
        (
            optax.GradientTransformation(lambda params: (), centred),
            r"reduce_sum at .*centred.* makes the sums of all layers [\d,]+ bytes, of at most",
        ),
        (optax.contrib.prodigy(0.1), "gradients='buffered'"),
    ],
)
def test_what_couples_layers_is_refused(tx: Any, words: str) -> None:
    args = params(), tx.init(params()), tokens(0)
    with pytest.raises(ValueError, match=words):
        jaxmp.release_gradients(plain_step(tx))(*args)
    jax.jit(plain_step(tx))(*args)  # positive control


def test_steps_without_layers_are_refused() -> None:
    tx = optax.adam(1e-3)
    step = jaxmp.release_gradients(plain_step(tx, unrolled))
    with pytest.raises(ValueError, match=r"finds no scan over layers.*along their first axis"):
        step(params(), tx.init(params()), tokens(0))
    with pytest.raises(ValueError, match=r"the step returns those of the scan at .*test_gradient"):
        jaxmp.release_gradients(jax.grad(loss))(params(), tokens(0))
    with pytest.raises(TypeError, match="step must be a function, got dict"):
        jaxmp.release_gradients({})


def test_microbatches_and_histograms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of one batch.*microbatches=4.*Choose one"):
        jaxmp.make_train_step(loss, gradients="released", microbatches=4)
    with pytest.raises(ValueError, match=r"histograms_every=10.*Choose one"):
        jaxmp.make_train_step(loss, gradients="released", histograms_every=10)
    with pytest.raises(ValueError, match="gradients must be"):
        jaxmp.make_train_step(loss, gradients="kept")
