"""Every state goes through JAX's trees, orbax, flax.serialization, pickle and sharding trees."""

import copy
import dataclasses
import functools
import pathlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxmp
from tests.support.bits import tree_bits
from tests.support.cases import OPTIMIZERS, mixed_tree

pytestmark = pytest.mark.usefixtures("standard_promotion")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithAverage(jaxmp.TrainState):
    """A subclass, as users write it."""

    average: Any
    name: str = dataclasses.field(metadata={"static": True})


def optimizer(policy: str = "float16", **options: Any) -> jaxmp.MixedPrecision:
    inner = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    return jaxmp.mixed_precision(inner, policy, **options)


# Numbers of which no two are alike, and an array that is stored in blocks.
W = np.sin(np.arange(64 * 128.0)).reshape(64, 128)
LARGE = jax.device_put({"w": W, "b": np.cos(np.arange(4.0))})


def stepped(tx: jaxmp.MixedPrecision, **collections: Any) -> jaxmp.TrainState:
    @jax.jit
    def step(params: Any, collections: Any) -> jaxmp.TrainState:
        state = jaxmp.TrainState.create(params=params, tx=tx, **collections)
        return state.apply_gradients(jax.tree.map(lambda p: jnp.sin(9 * p), params))

    return step(LARGE, collections)


STATES: dict[str, Callable[[], Any]] = {
    "loss_scale": lambda: jaxmp.DynamicLossScale(min_scale=2.0).init(),
    "optimizer": lambda: optimizer().init(mixed_tree("float16")),
    "train": lambda: jaxmp.TrainState.create(
        params=mixed_tree("float16"), tx=optimizer(), batch_stats={"m": np.ones(2)}
    ),
    "key": lambda: stepped(optimizer(), rng=jax.random.key(7), others=[jax.random.key(8)] * 2),
    "subclass": lambda: WithAverage.create(
        params=LARGE, tx=optimizer(), average=[LARGE["b"]], name="run"
    ),
    "multi_steps": lambda: stepped(
        jaxmp.mixed_precision(optax.MultiSteps(optax.adam(1e-2), 2), "bfloat16")
    ),
    "injected": lambda: stepped(
        jaxmp.mixed_precision(optax.inject_hyperparams(optax.adam)(1e-2), "float32")
    ),
} | {
    f"{master}, {moments}": lambda m=master, n=moments: stepped(
        optimizer("bfloat16", master=m, moments=n)
    )
    for master, moments in [
        ("float32", "bfloat16"),
        ("remainder", "int8"),
        ("remainder8", "float32"),
        ("kahan", "float32"),
        ("stochastic", "int8"),
        ("none", "float32"),
    ]
}  # fmt: skip


@functools.cache
def state_of(name: str) -> Any:
    return STATES[name]()


@pytest.mark.parametrize("name", STATES)
def test_round_trips(name: str) -> None:
    state = state_of(name)
    leaves, treedef = jax.tree.flatten(state)
    assert tree_bits(jax.tree.unflatten(treedef, leaves)) == tree_bits(state)
    assert tree_bits(jax.jit(lambda s: s)(state)) == tree_bits(state)
    # Trees of anything: shardings, names, None. Classes that validate on construction fail here.
    for value in ("replicated", None, jax.sharding.PartitionSpec()):
        assert jax.tree.map(lambda _, v=value: v, state) is not None


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", STATES)
def test_copies(name: str, way: str) -> None:
    state = state_of(name)
    twin = COPIES[way](state)
    assert type(twin) is type(state)
    assert tree_bits(twin) == tree_bits(state)
    if isinstance(state, jaxmp.TrainState) and way in ("deepcopy", "copy"):
        assert twin.tx is state.tx  # the copy fits the same step


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_optimizer_goes_on_with_the_same_bits(way: str) -> None:
    """Alone, and in a state: it has its functions, its policy and its loss scale."""
    tx = optimizer("float16", master="kahan", moments="bfloat16")
    state = stepped(tx)
    grads = jax.tree.map(lambda p: np.cos(7 * np.asarray(p)), LARGE)
    expected = jax.jit(jaxmp.TrainState.apply_gradients)(state, grads)
    for copied in (COPIES[way](tx), COPIES[way](state).tx):
        assert (copied.rules, copied.loss_scale) == (tx.rules, tx.loss_scale)
        params, after = jax.jit(copied.apply_gradients)(grads, state.opt_state, state.params)
        assert tree_bits((params, after)) == tree_bits((expected.params, expected.opt_state))
        again = jax.eval_shape(copied.init, state.params)
        assert jax.tree.structure(again) == jax.tree.structure(state.opt_state)


def test_pickle_without_cloudpickle_says_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed
    for what in (optimizer(), state_of("train")):
        with pytest.raises(TypeError, match="pickled by cloudpickle: pip install it"):
            pickle.dumps(what)
    assert pickle.dumps(state_of("optimizer"))  # arrays need nothing


@pytest.mark.parametrize("name", STATES)
def test_orbax(name: str, tmp_path: pathlib.Path) -> None:
    state = state_of(name)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert tree_bits(restored) == tree_bits(state)
    assert type(restored) is type(state)


@flax.struct.dataclass
class Run:
    """A class of the user's, of which a state is a part."""

    state: Any
    epoch: Any


def blank(tree: Any) -> Any:
    """A tree of the same structure and types without its numbers."""

    def other(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            bits = np.zeros_like(jax.random.key_data(x))
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
        return jax.device_put(np.zeros(x.shape, x.dtype))

    return jax.tree.map(other, tree)


@pytest.mark.every_case
@pytest.mark.parametrize("name", STATES)
def test_flax_serialization(name: str) -> None:
    """Alone and inside of other trees; into a state, and into the types of one."""
    state = state_of(name)
    whole = {"alone": state, "inside": {"runs": [Run(state, jnp.int32(3))]}}
    for tree in whole.values():
        written = flax.serialization.to_bytes(tree)
        restored = flax.serialization.from_bytes(blank(tree), written)
        assert tree_bits(restored) == tree_bits(tree)
        assert jax.tree.structure(restored) == jax.tree.structure(tree)
    words = flax.serialization.to_state_dict(state)
    if isinstance(state, jaxmp.TrainState):
        assert set(words) >= {"step", "params", "opt_state"}
        abstract = flax.serialization.from_state_dict(jax.eval_shape(lambda: state), words)
        assert tree_bits(abstract) == tree_bits(state)


def test_a_restored_state_trains_on() -> None:
    """Its arrays are NumPy's: the step compiles once for both."""
    tx = optimizer("mixed_float16")
    step = jaxmp.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), "mixed_float16")
    state = jaxmp.TrainState.create(params=LARGE, tx=tx)
    written = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(blank(state), written)
    a, b = (step(each, np.ones((4, 64), np.float32)) for each in (restored, state))
    assert tree_bits(a) == tree_bits(b)
    assert step._cache_size() <= 2


def test_python_numbers_in_a_state() -> None:
    """As somebody sets them: `state.replace(step=3)`."""
    state = stepped(optimizer("bfloat16")).replace(step=3)
    words = flax.serialization.from_bytes(None, flax.serialization.to_bytes(state))
    assert int(flax.serialization.from_state_dict(state, words).step) == 3


def other_params(state: Any) -> Any:
    return state.replace(params=jax.tree.map(lambda x: x[:2], state.params))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: stepped(optimizer("mixed_bfloat16")), "missing: opt_state/kind/float32"),
        (lambda: stepped(optimizer("bfloat16", master="kahan")), "kind/bfloat16-kahan"),
        (lambda: stepped(optimizer("bfloat16", moments="int8")), "missing: opt_state/inner/codes"),
        (lambda: stepped(optimizer("bfloat16"), rng=jax.random.key(0)), "collections/rng"),
        (lambda: other_params(stepped(optimizer("bfloat16"))), r"params/b' has shape \(4,\)"),
    ],
    ids=["policy", "storage", "moments", "collection", "shape"],
)  # fmt: skip
def test_flax_refuses_another_state(other: Any, text: str) -> None:
    """By the name of what differs: else arrays of other dtypes would be taken without a word."""
    saved = flax.serialization.to_state_dict(stepped(optimizer("bfloat16")))
    with pytest.raises(ValueError, match=text) as error:
        flax.serialization.from_state_dict(other(), saved)
    assert "jaxmp.storage.convert_state(state, tx)" in str(error.value)


def test_flax_refuses_another_dtype() -> None:
    state = stepped(optimizer("mixed_bfloat16"))
    saved = flax.serialization.to_state_dict(state)
    saved["params"]["w"] = saved["params"]["w"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="has bfloat16 at 'params/w', and this one float32"):
        flax.serialization.from_state_dict(state, saved)


@pytest.mark.parametrize("name", ["adamw", "muon", "schedule_free_adamw", "multi_steps", "clip"])
def test_a_restored_state_goes_on_with_the_same_bits(name: str, tmp_path: pathlib.Path) -> None:
    tx = jaxmp.mixed_precision(OPTIMIZERS[name](), "bfloat16")
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5, jnp.float32), mixed_tree())
    step = jax.jit(lambda s: s.apply_gradients(grads))
    state = step(jaxmp.TrainState.create(params=mixed_tree(), tx=tx))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    assert tree_bits(step(restored)) == tree_bits(step(state))
