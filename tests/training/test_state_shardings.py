"""The state of an optimizer lies where its params lie, before and after a step."""

import dataclasses
import functools
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._numerics.tree import cast_floating
from jaxmp.sharding import state_shardings
from tests.support.reduction_checks import GRID, MESH

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]

P = jax.P
SPECS = {"a": {"w": P("data", "model"), "b": P("model")}, "b": [P(None, "data"), P()]}
SHAPES = {"a": {"w": (64, 16), "b": (16,)}, "b": [(16, 32), (32,)]}


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def shardings(mesh: Any = GRID) -> Any:
    return jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), SPECS)


def sharded_params() -> Any:
    def make(shape: Any, sharding: Any) -> Any:
        values = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        return jax.device_put(values, sharding)

    return jax.tree.map(make, SHAPES, shardings(), is_leaf=is_shape)


def specs(tree: Any) -> dict[str, Any]:
    """The specs of a tree of shardings by path, replicated leaves left out."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    assert all(x.mesh == GRID for _, x in paths)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.spec
        for path, x in paths
        if any(entry is not None for entry in x.spec)
    }


def under(*prefixes: str) -> dict[str, Any]:
    """What is expected: the specs of the params under each of these names."""
    own = {"a/w": SPECS["a"]["w"], "a/b": SPECS["a"]["b"], "b/0": SPECS["b"][0]}
    return {f"{prefix}/{name}": spec for prefix in prefixes for name, spec in own.items()}


def kept(names: dict[str, Any], *ends: str) -> dict[str, Any]:
    return {name: spec for name, spec in names.items() if name.endswith(ends)}


LABELS = {"a": {"w": "adam", "b": "sgd"}, "b": ["sgd", "sgd"]}
MASK = {"a": {"w": True, "b": False}, "b": [True, False]}
ADAM = optax.adam(1e-3)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (optax.sgd(0.1), {}),
    "momentum": (optax.sgd(0.1, momentum=0.9), under("0/trace")),
    "adamw": (optax.adamw(1e-3), under("0/mu", "0/nu")),
    "chain": (
        optax.chain(optax.clip_by_global_norm(1.0), ADAM, optax.ema(0.9)),
        under("1/0/mu", "1/0/nu", "2/ema"),
    ),
    "several steps": (
        optax.MultiSteps(ADAM, 2),
        under("inner_opt_state/0/mu", "inner_opt_state/0/nu", "acc_grads"),
    ),
    "hyperparams": (
        optax.inject_hyperparams(optax.adamw)(1e-3),
        under("inner_state/0/mu", "inner_state/0/nu"),
    ),
    "partition": (
        optax.partition({"adam": ADAM, "sgd": optax.sgd(0.1, momentum=0.9)}, LABELS),
        kept(under("inner_states/adam/inner_state/0/mu", "inner_states/adam/inner_state/0/nu"), "w")
        | kept(under("inner_states/sgd/inner_state/0/trace"), "b", "0"),
    ),
    "mask": (
        optax.masked(ADAM, MASK),
        kept(under("inner_state/0/mu", "inner_state/0/nu"), "w", "0"),
    ),
    "history": (
        optax.scale_by_lbfgs(3),
        under("params", "updates")
        | {
            f"{kind}/{name}": P(None, *spec)
            for kind in ("diff_params_memory", "diff_updates_memory")
            for name, spec in (
                ("a/w", P("data", "model")), ("a/b", P("model")), ("b/0", P(None, "data"))
            )
        },
    ),
    "factored": (
        optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9),
        kept(under("0/v"), "a/b") | under("4/trace", "4/ema"),
    ),
    "schedule free": (
        optax.contrib.schedule_free_adamw(1e-3),
        under("z", "base_optimizer_state/1/0/nu", "base_optimizer_state/0/nu"),
    ),
    "wrapped, float32": (
        jaxmp.mixed_precision(ADAM, "mixed_bfloat16"), under("inner/0/mu", "inner/0/nu")
    ),
    "wrapped, bfloat16": (
        jaxmp.mixed_precision(optax.MultiSteps(ADAM, 2), "bfloat16"),
        under("inner/inner_opt_state/0/mu", "inner/inner_opt_state/0/nu", "inner/acc_grads"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    tx, want = OPTIMIZERS[name]
    placed = state_shardings(tx, sharded_params())
    abstract = jax.eval_shape(tx.init, sharded_params())
    assert jax.tree.structure(placed) == jax.tree.structure(abstract)
    got = specs(placed)
    if name in ("factored", "schedule free"):  # what else they hold differs between versions
        assert got.items() <= want.items()
        assert len(got) >= 4
    else:
        assert got == want
    state = jax.jit(tx.init, out_shardings=placed)(sharded_params())
    jax.tree.map(lambda x, s: assert_placed(x, s), state, placed)


def assert_placed(x: Any, sharding: Any) -> None:
    assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.shape, x.sharding, sharding)


def test_masters() -> None:
    tx = jaxmp.mixed_precision(ADAM, "bfloat16")
    low = cast_floating(sharded_params(), jnp.bfloat16)
    assert specs(state_shardings(tx, low)) == under("inner/0/mu", "inner/0/nu", "master")
    both = jax.eval_shape(tx.init_params, sharded_params())
    assert specs(state_shardings(both, sharded_params())) == under(
        "0", "1/inner/0/mu", "1/inner/0/nu", "1/master"
    )


def test_abstract_params() -> None:
    """Shapes with shardings, or shapes and shardings beside them, before any array exists."""
    structs = jax.tree.map(
        lambda shape, s: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s),
        SHAPES, shardings(), is_leaf=is_shape,
    )  # fmt: skip
    want = under("0/mu", "0/nu")
    assert specs(state_shardings(ADAM, structs)) == want
    bare = jax.eval_shape(lambda tree: tree, sharded_params())
    assert specs(state_shardings(ADAM, bare, shardings())) == want
    rows = jax.sharding.NamedSharding(MESH, P("data"))
    prefix = {"a": rows, "b": [jax.sharding.NamedSharding(MESH, P(None, "data")), rows]}
    placed = state_shardings(ADAM, bare, prefix)
    assert placed[0].mu["a"]["b"].spec == P("data")
    assert placed[0].mu["b"][0].spec == P(None, "data")
    traced = []

    @jax.jit
    def inside(params: Any) -> Any:
        traced.append(state_shardings(ADAM, params, shardings()))
        return params

    inside(sharded_params())
    assert specs(traced[0]) == want


def test_names_that_end_alike() -> None:
    """The longest path that fits is the param's; another shape is no param's at all."""
    rows = {"w": P("data"), "x": {"w": P(None, "data")}, "count": P("data")}
    params = {
        "w": jnp.ones((8, 8)), "x": {"w": jnp.ones((8, 8))}, "count": jnp.ones(8)
    }  # fmt: skip
    params = jax.tree.map(
        lambda x, s: jax.device_put(x, jax.sharding.NamedSharding(MESH, s)), params, rows
    )
    mu = state_shardings(ADAM, params)[0].mu
    assert (mu["w"].spec, mu["x"]["w"].spec) == (P("data"), P(None, "data"))
    assert state_shardings(ADAM, params)[0].count.spec == P()
    one = state_shardings(ADAM, params["x"]["w"])
    assert (one[0].mu.spec, one[0].count.spec) == (P(None, "data"), P())


def test_nnx_params() -> None:
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    rows = jax.sharding.NamedSharding(MESH, P("data"))
    params = jax.tree.map(lambda x: jax.device_put(x, rows), params)
    placed = state_shardings(jaxmp.mixed_precision(ADAM, "mixed_bfloat16"), params)
    sharded = [x.spec for x in jax.tree.leaves(placed) if x.spec != P()]
    assert sharded == [P("data")] * 4


# --- a train state and a step ------------------------------------------------------------------


def bytes_on_one_device(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def loss_fn(params: Any, batch: Any) -> Any:
    h = jnp.tanh(batch @ params["a"]["w"] + params["a"]["b"])
    return jnp.mean((h @ params["b"][0] + params["b"][1]).astype(jnp.float32) ** 2)


def make_state(policy: str, inner: Any = ADAM) -> tuple[Any, Any]:
    tx = jaxmp.mixed_precision(inner, policy)
    create = functools.partial(
        jaxmp.TrainState.create, tx=tx, ema=sharded_params(), rng=jax.random.key(0)
    )
    placed = state_shardings(jax.eval_shape(create, params=sharded_params()), sharded_params())
    return jax.jit(create, out_shardings=placed)(params=sharded_params()), placed


def with_average(params: Any, batch: Any, *, ema: Any, rng: Any) -> Any:
    del rng
    ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p.astype(e.dtype), ema, params)
    return loss_fn(params, batch), {"ema": ema}


def batch() -> jax.Array:
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    return jax.device_put(x, jax.sharding.NamedSharding(GRID, P("data")))


def test_a_step_says_which_shardings_it_needs() -> None:
    params, tx = sharded_params(), jaxmp.mixed_precision(ADAM, "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=params, tx=tx)
    placed = state_shardings(state, params)
    replicated = jax.sharding.NamedSharding(GRID, P())

    def take(shardings: Any) -> Any:
        step = jaxmp.make_train_step(loss_fn, donate=False, shardings=shardings)
        return jax.eval_shape(step, state, batch())

    for good in (placed, dataclasses.replace(placed, params=None), replicated):
        take(good)
    with pytest.raises(ValueError, match=r"the whole state, .* got a dict \(those of the params"):
        take(placed.params)
    with pytest.raises(ValueError, match=r"got a TrainState .*: pytree structure error"):
        take(dataclasses.replace(placed, params={"a": replicated}))
    other = jaxmp.TrainState.create(params=params, tx=jaxmp.mixed_precision(ADAM, "mixed_bfloat16"))
    with pytest.raises(ValueError, match=r"a state with another optimizer: make both .* same tx"):
        take(state_shardings(other, params))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "mixed_float16"])
def test_a_step_keeps_everything_in_its_place(policy: str) -> None:
    state, placed = make_state(policy)
    jax.tree.map(assert_placed, state, placed)
    assert placed.ema["a"]["w"].spec == SPECS["a"]["w"]
    assert placed.rng.spec == P()
    count = sum(x.size for x in jax.tree.leaves(sharded_params()))
    own = bytes_on_one_device(sharded_params())  # float32
    assert own < count  # of four bytes each, on less than a quarter of the devices' worth
    masters = policy == "bfloat16"
    assert bytes_on_one_device(state.opt_state.inner) == 2 * own + 4  # and a count
    assert bytes_on_one_device(state.opt_state.master) == own * masters
    assert bytes_on_one_device(state.params) == own // (2 if masters else 1)

    step = jaxmp.make_train_step(with_average, policy)
    placed_step = jax.jit(step, out_shardings=(placed, None), donate_argnums=0)
    before = [x for x in jax.tree.leaves(state) if x.size > 1]
    after, _ = placed_step(state, batch())
    jax.tree.map(assert_placed, after, placed)
    assert all(x.is_deleted() for x in before)  # one copy of everything
    after, _ = placed_step(after, batch())
    jax.tree.map(assert_placed, after, placed)
    assert int(after.step) + int(after.opt_state.skipped) == 2
    assert placed_step._cache_size() == 1


def test_what_happens_without() -> None:
    """Positive control: jit places zeros whole, on one device or on all; eager code shards them."""
    params = sharded_params()
    tx = jaxmp.mixed_precision(ADAM, "bfloat16")
    low = cast_floating(params, jnp.bfloat16)
    whole = sum(4 * x.size for x in jax.tree.leaves(params))
    jitted = jax.jit(tx.init)(low)
    assert bytes_on_one_device(jitted.inner[0].mu) == whole
    own = bytes_on_one_device(params)
    assert own < whole / 4
    assert bytes_on_one_device(jitted.master) == own  # casts of what is sharded
    created = jaxmp.TrainState.create(params=params, tx=tx)
    assert bytes_on_one_device(created.opt_state.inner[0].mu) == own
    assert bytes_on_one_device(created.opt_state.master) == own
    assert bytes_on_one_device(created.params) == own // 2


# --- what is refused ---------------------------------------------------------------------------


def test_params_without_a_mesh() -> None:
    with pytest.raises(
        ValueError, match=r"params leaf 'w' has no NamedSharding, but Single.*Place"
    ):
        state_shardings(ADAM, {"w": jnp.ones(3)})
    with pytest.raises(
        ValueError, match=r"'w' has no NamedSharding, but None.*give state_shardings"
    ):
        state_shardings(ADAM, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
    with pytest.raises(ValueError, match="inside of jit"):
        jax.jit(lambda params: state_shardings(ADAM, params))(sharded_params())
    with pytest.raises(ValueError, match="params has no leaves"):
        state_shardings(ADAM, {})
    with pytest.raises(ValueError, match="shardings must be a tree like the params"):
        state_shardings(ADAM, sharded_params(), {"a": shardings()["a"]})
    with pytest.raises(ValueError, match="has 1 dimensions, too few for its"):
        state_shardings(ADAM, sharded_params(), shardings()["a"]["w"])
    two = {
        "v": jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(MESH, P())),
        "w": jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(GRID, P())),
    }
    with pytest.raises(ValueError, match="params lie on different meshes"):
        state_shardings(ADAM, two)


def test_a_large_array_that_is_no_params() -> None:
    with pytest.warns(UserWarning, match=r"0/mu \(1584,\), 0/nu \(1584,\). Every device"):
        state_shardings(optax.flatten(ADAM), sharded_params())
