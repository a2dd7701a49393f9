"""Models with a scan over layers train with released gradients as with gradients kept."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp.sharding import FSDP, fully_sharded, state_shardings
from tests.support import rule_models
from tests.support.dots import equations
from tests.support.one_by_one import one_by_one
from tests.support.rule_models import Flax
from tests.training.test_gradient_release import (
    clip_by_layers,
    different,
    layer,
    params,
    steps_of,
)

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]

LAYERS, WIDTH = 3, 16
TOKENS = jax.device_put((np.arange(32, dtype=np.int32).reshape(8, 4) * 7) % 20)
OPTIMIZER = optax.chain(clip_by_layers(0.1), optax.adamw(1e-3))


def cross_entropy(logits: Any, tokens: Any) -> Any:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


class Equinox(eqx.Module):
    table: jax.Array
    blocks: eqx.nn.MLP

    def __init__(self, key: Any) -> None:
        self.table = jax.random.normal(key, (20, WIDTH))
        make = eqx.filter_vmap(lambda key: eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, key=key))
        self.blocks = make(jax.random.split(key, LAYERS))

    def __call__(self, tokens: Any) -> Any:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def turn(x: Any, arrays: Any) -> Any:
            return x + jax.vmap(jax.vmap(eqx.combine(arrays, static)))(x), None

        x, _ = lax.scan(turn, self.table[tokens], arrays)
        return x @ self.table.T


def of_equinox(policy: str) -> Any:
    params, static = eqx.partition(Equinox(jax.random.key(0)), eqx.is_array)
    return params, lambda params, tokens: cross_entropy(eqx.combine(params, static)(tokens), tokens)


def of_flax(flax: Flax, policy: str) -> Any:
    adapter = {"linen": jaxmp.linen, "nnx": jaxmp.nnx}[flax]
    model = adapter.apply_policy(rule_models.make(flax, "gpt", "plain", stack="scan"), policy)
    f = rule_models.functions(model, "gpt")
    return f.params, lambda params, tokens: f.loss(params, (tokens, tokens))


MODELS = {
    "linen": functools.partial(of_flax, "linen"),
    "nnx": functools.partial(of_flax, "nnx"),
    "equinox": of_equinox,
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "mixed_float8"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_models(name: str, policy: str) -> None:
    params, loss = MODELS[name](policy)
    tx = jaxmp.mixed_precision(OPTIMIZER, policy)
    state, *both = steps_of(tx, loss, lambda: params)
    buffered, released = map(one_by_one, both)
    states = state, state
    for _ in range(2):
        states = buffered(states[0], TOKENS)[0], released(states[1], TOKENS)[0]
    assert not different(*states)


OPTIONS: dict[str, Any] = {
    "cast of params": {"cast": "params"},
    "no recomputation": {"recompute": "never"},
    "codes": {"recompute": functools.partial(jaxmp.recompute, mode="loops", codes="int8")},
    "counts": {"count_overflows": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_bits_of_options(option: str) -> None:
    params, loss = of_equinox("mixed_bfloat16")
    tx = jaxmp.mixed_precision(OPTIMIZER, "mixed_bfloat16")
    state, *both = steps_of(tx, loss, lambda: params, **OPTIONS[option])
    buffered, released = map(one_by_one, both)
    tokens = jnp.tile(TOKENS, (16, 1))  # arrays of fewer numbers are not kept in codes
    assert not different(buffered(state, tokens)[0], released(state, tokens)[0])


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ("Auto", "replicated"),
        ("Auto", "partitioner"),
        ("Auto", "fsdp"),
        ("Explicit", "replicated"),
        ("Explicit", "fsdp"),
    ],
)
def test_eight_devices(axes: str, layout: str) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(getattr(AxisType, axes),))
    rows = NamedSharding(mesh, P("data"))
    specs: Any = {
        "table": P("data"),
        "layers": {"up": P(None, None, "data"), "down": P(None, "data"), "scale": P()},
    }
    if layout == "replicated":
        specs = jax.tree.map(lambda spec: P(), specs, is_leaf=lambda x: isinstance(x, P))

    def loss(params: Any, tokens: Any) -> Any:
        # On explicit axes JAX takes this lookup, and no product of two arrays split over one axis.
        where = {"out_sharding": P("data")} if (axes, layout) == ("Explicit", "replicated") else {}
        x = params["table"].at[tokens].get(**where)
        x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        return jnp.square(x - 1).mean()

    with jax.set_mesh(mesh):
        tokens = jax.device_put((np.arange(32, dtype=np.int32) * 7) % 48, rows)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        values = jax.device_put(params(vocabulary=48), shardings)
        fsdp = jaxmp.sharding.FSDP(shardings=shardings, axis="data") if layout == "fsdp" else None
        tx = jaxmp.mixed_precision(optax.adamw(1e-3), "mixed_bfloat16")
        state, buffered, released = steps_of(tx, loss, lambda: values, fsdp=fsdp)
        states = buffered(state, tokens)[0], released(state, tokens)[0]
    assert not different(*states, rtol=1e-5)
    for before, after in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(states[1].params), strict=True
    ):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)


def tied(params: Any, tokens: Any) -> Any:
    """Plain JAX has no rule for its lookup on explicit axes."""
    x, _ = lax.scan(lambda x, p: (layer(x, p), None), params["table"][tokens], params["layers"])
    return cross_entropy(x @ params["table"].T, jnp.roll(tokens, -1, axis=1))


def one_hot(params: Any, tokens: Any) -> Any:
    x = jax.nn.one_hot(tokens, 48) @ params["table"]
    x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    return jnp.square(x - 1).mean()


def with_words(params: Any, tokens: Any) -> Any:
    """Names shardings in the loss, and in the loop."""

    def body(x: Any, p: Any) -> Any:
        return layer(x, jax.tree.map(lambda w: jax.reshard(w, P()), p)), None

    table = jax.reshard(params["table"], P(None, None))
    x = table.at[tokens].get(out_sharding=P("data", None, None))
    return jnp.square(lax.scan(jax.checkpoint(body), x, params["layers"])[0] - 1).mean()


def in_a_jit(params: Any, tokens: Any) -> Any:
    """A function with shardings around the scan."""
    shardings = jax.tree.map(lambda x: NamedSharding(TWO_AXES, P()), params)
    rows = NamedSharding(TWO_AXES, P("data"))
    return jax.jit(tied, in_shardings=(shardings, rows))(params, tokens)


TWO_AXES = jax.make_mesh((4, 2), ("data", "model"))
BASE: dict[str, Any] = {
    "table": P(),
    "layers": {"up": P(None, None, "model"), "down": P(None, "model"), "scale": P()},
}


@pytest.mark.parametrize(
    ("types", "loss", "options"),
    [
        ("Explicit Explicit", tied, {"base": BASE}),
        ("Explicit Explicit", one_hot, {"axis": ("data", "model")}),
        ("Explicit Explicit", with_words, {"axis": "model"}),
        ("Explicit Explicit", jax.checkpoint(tied), {"axis": "data"}),
        ("Explicit Explicit", in_a_jit, {"axis": "data"}),
        ("Explicit Auto", tied, {"base": BASE}),
        ("Auto Explicit", jax.checkpoint(one_hot), {"base": BASE}),
    ],
)
def test_steps_on_explicit_axes(types: str, loss: Any, options: dict[str, Any]) -> None:
    """Fully sharded over one axis or two, with replicas or split in two ways."""
    kinds = tuple(getattr(AxisType, kind) for kind in types.split())
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    values = params(vocabulary=48)
    shardings = fully_sharded(values, mesh, min_size=64, **options)
    fsdp = FSDP(shardings=shardings, axis=options.get("axis", "data"))
    with jax.set_mesh(mesh):
        values = jax.device_put(values, shardings)
        tokens = (np.arange(64, dtype=np.int32).reshape(16, 4) * 7) % 48
        tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        tx = jaxmp.mixed_precision(OPTIMIZER, "mixed_bfloat16")
        state = jaxmp.TrainState.create(params=values, tx=tx)
        placed = state_shardings(state, values)
        _, buffered, released = steps_of(tx, loss, lambda: values, fsdp=fsdp, shardings=placed)
        (a, metrics), (b, others) = buffered(state, tokens), released(state, tokens)
    assert different(state.params, a.params)  # positive control: they were updated
    assert not different(a, b, rtol=1e-4)
    assert not different(metrics, others, rtol=1e-4)
    for sharding, x in zip(jax.tree.leaves(placed), jax.tree.leaves(b), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_a_loop_of_ones_own_on_explicit_axes() -> None:
    """Without a train step: the new params lie as the old ones."""
    mesh = jax.make_mesh((8,), ("data",))
    values = params(vocabulary=48)
    shardings = fully_sharded(values, mesh, min_size=64)
    values = jax.device_put(values, shardings)
    gradient = jaxmp.value_and_grad(tied, fsdp=FSDP(shardings=shardings), reduce_dtype="float32")
    tx = jaxmp.mixed_precision(OPTIMIZER, "float32")

    def step(params: Any, state: Any, tokens: Any) -> Any:
        loss, grads = gradient(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    tokens = (np.arange(64, dtype=np.int32).reshape(16, 4) * 7) % 48
    args = values, tx.init(values), jax.device_put(tokens, NamedSharding(mesh, P("data")))
    want, new = jax.jit(step)(*args), jax.jit(jaxmp.release_gradients(step))(*args)
    assert not different(want, new, rtol=1e-4)
    for old, x in zip(jax.tree.leaves(values), jax.tree.leaves(new[0]), strict=True):
        assert jax.typeof(x).sharding == jax.typeof(old).sharding


def test_statistics_of_a_forward_pass_are_not_computed_again() -> None:
    """They have the shape of params, and stay whole beside small gradients that are sorted."""

    def step(params: Any, means: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            def body(x: Any, stacks: Any) -> Any:
                p, mean = stacks
                return layer(x, p), 0.9 * mean + 0.1 * x

            x, new = lax.scan(body, params["table"][tokens], (params["layers"], means))
            return jnp.square(x).mean(), new

        grads, new = jax.grad(loss, has_aux=True)(params)
        grads["layers"]["scale"] = jnp.sort(grads["layers"]["scale"], axis=0)
        values = jax.tree.map(lambda x, g: x - g, params, grads), new
        is_finite = jnp.isfinite(optax.tree.norm(grads))
        return jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), values, (params, means))

    means = np.zeros((LAYERS, 17, 32), np.float32)  # a sixteenth of the gradients
    args = params(), means, np.arange(17, dtype=np.int32)
    released = jaxmp.release_gradients(step)
    assert not different(jax.jit(step)(*args), jax.jit(released)(*args), rtol=1e-5)
    closed = jax.make_jaxpr(released)(*args)
    scans = [e for e in equations(closed.jaxpr) if e.primitive.name == "scan"]
    assert len(scans) == 3  # forward once, backward twice
