"""`convert_state`: from any storage to any other, with nothing lost that the new one can hold."""

import pathlib
from typing import Any

import flax.serialization
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxmp
from jaxmp._training.master_storages import STORAGES
from jaxmp.storage import convert_state
from tests.support.bits import tree_bits
from tests.support.compilations import Count
from tests.support.one_by_one import one_by_one

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax needs it

EXACT = ["float32", "remainder"]


def optimizer(master: Any = "float32", moments: Any = "float32", policy: str = "bfloat16") -> Any:
    return jaxmp.mixed_precision(optax.adamw(1e-2), policy, master=master, moments=moments)


def grads(i: int) -> Any:
    rng = np.random.default_rng(i)
    return {"w": jax.device_put(rng.standard_normal((64, 128), np.float32))}


# Fusions of programs of two storages may differ in their last bits.
apply_gradients = one_by_one(jaxmp.TrainState.apply_gradients)


def trained(tx: Any, steps: int = 5) -> jaxmp.TrainState:
    state = jaxmp.TrainState.create(params=grads(99), tx=tx)
    for i in range(steps):
        state = apply_gradients(state, grads(i))
    return state


@pytest.mark.parametrize("new", EXACT)
@pytest.mark.parametrize("old", EXACT)
def test_goes_on_to_the_bit(old: str, new: str) -> None:
    state = trained(optimizer(old))
    converted = convert_state(state, optimizer(new))
    assert int(converted.step) == 5
    for i in range(5, 8):
        state, converted = (apply_gradients(each, grads(i)) for each in (state, converted))
    back = convert_state(converted, state.tx)
    assert tree_bits(back) == tree_bits(state)


@pytest.mark.parametrize("old", ["float32", "remainder", "remainder8", "kahan"])
@pytest.mark.parametrize("new", STORAGES)
def test_between_all_storages(old: str, new: str) -> None:
    """Masters are within what the narrower of both can hold; params as that storage rounds."""
    state = trained(optimizer(old))
    tx = optimizer(new, moments="int8")
    converted = convert_state(state, tx)
    assert jax.tree.structure(converted) == jax.tree.structure(trained(tx, steps=0))
    exact = convert_state(state, optimizer()).opt_state
    again = convert_state(converted, optimizer(), widen_params=True).opt_state
    apart = np.abs(np.subtract(again.master["w"], exact.master["w"]))
    bound = 2.0**-8 if new in ("none", "stochastic") else 2.0**-15
    assert np.all(apart <= bound * np.abs(np.asarray(exact.master["w"])) + 1e-7)
    codes, wanted = (np.asarray(each.inner[0].mu["w"]) for each in (again, exact))
    assert np.max(np.abs(codes - wanted)) <= 0.033 * np.max(np.abs(wanted))


def test_masters_are_not_made_of_narrow_params_without_a_word() -> None:
    for old in ("none", "stochastic"):
        state = trained(optimizer(old))
        with pytest.raises(ValueError, match=r"params, leaf 'w', is narrow, and the state has no"):
            convert_state(state, optimizer("remainder"))
        converted = convert_state(state, optimizer("remainder"), widen_params=True)
        assert tree_bits(converted.params) == tree_bits(state.params)
        convert_state(state, optimizer("none"))  # asks for none


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "float32", "mixed_float16"])
def test_a_checkpoint_of_narrow_params_alone(policy: str) -> None:
    """Float32 params would be masters too, and are not made of narrow ones without a word."""
    tx, params = optimizer(policy=policy), {"w": np.asarray(grads(0)["w"]).astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match="widen_params=True"):
        convert_state(None, tx, params=params)
    with pytest.raises(ValueError, match="widen_params=True"):
        convert_state(trained(optimizer("none")), tx)
    live, state = convert_state(None, tx, params=params, widen_params=True)
    masters = state.master if policy == "bfloat16" else live
    np.testing.assert_array_equal(masters["w"], np.asarray(params["w"], np.float32))
    assert live["w"].dtype == jaxmp.get_policy(policy).param_dtype


def test_random_words_go_on() -> None:
    """The same words after each restart would round alike each time."""
    state = trained(optimizer("stochastic", "int8"))
    converted = convert_state(state, optimizer("stochastic", "bfloat16")).opt_state
    assert int(converted.master["w"]) == int(converted.inner.step) == 5
    # States without random words count their steps too.
    assert int(convert_state(trained(optimizer()), state.tx).opt_state.master["w"]) == 5
    kahan = convert_state(state, optimizer("kahan"), widen_params=True).opt_state
    assert [int(count) for count in kahan.kind.values()] == [5]


def test_either_state_may_be_donated() -> None:
    for new in ("float32", "remainder"):
        state = trained(optimizer("float32"))
        before = tree_bits(state)
        converted = convert_state(state, optimizer(new))
        step = jax.jit(lambda s: s.apply_gradients(grads(0)), donate_argnums=0)
        step(converted)
        assert tree_bits(state) == before


def test_codes_are_not_rounded_again() -> None:
    state = trained(optimizer("float32", "int8"))
    converted = convert_state(state, optimizer("remainder", "int8"))
    assert tree_bits(converted.opt_state.inner) == tree_bits(state.opt_state.inner)


def test_a_converted_state_lies_on_the_mesh(compilations: Count) -> None:
    """All of it, or the second step is compiled anew."""
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    placed = jax.device_put(grads(99), jax.NamedSharding(mesh, jax.P("data")))
    state = jaxmp.TrainState.create(params=placed, tx=optimizer())
    step = jax.jit(lambda s, g: s.apply_gradients(g))
    state = convert_state(state, optimizer("stochastic", "int8"))
    counts = []
    for i in range(3):
        state = step(state, jax.device_put(grads(i), jax.NamedSharding(mesh, jax.P("data"))))
        counts.append(compilations())
    assert counts[0] > 0
    assert counts[1:] == counts[:1] * 2


def test_from_plain_optax() -> None:
    """The masters are the float32 params, and the moments those that were."""
    params, inner = grads(99), optax.adamw(1e-2)
    state = inner.init(params)
    for i in range(3):
        updates, state = jax.jit(inner.update)(grads(i), state, params)
        params = optax.apply_updates(params, updates)
    live, converted = convert_state(state, optimizer("remainder"), params=params)
    exact = convert_state(converted, optimizer(), params=live)[1]
    assert tree_bits(exact.master) == tree_bits(params)
    assert tree_bits(exact.inner) == tree_bits(state)


def test_from_the_train_state_of_flax() -> None:
    train_state: Any = flax.training.train_state.TrainState
    state = train_state.create(apply_fn=None, params=grads(99), tx=optax.adamw(1e-2))
    state = state.apply_gradients(grads=grads(0))
    tx = optimizer()
    converted = convert_state(state, tx)
    assert (int(converted.step), converted.tx) == (1, tx)
    assert converted.params["w"].dtype == jnp.bfloat16
    assert tree_bits(converted.opt_state.master) == tree_bits(state.params)
    converted.apply_gradients(grads=grads(1))


@pytest.mark.parametrize("old", ["bfloat16", "mixed_bfloat16", "float16"])
@pytest.mark.parametrize("new", ["bfloat16", "mixed_bfloat16", "float16"])
def test_between_policies(old: str, new: str) -> None:
    state = trained(optimizer(policy=old))
    converted = convert_state(state, optimizer(policy=new))
    back = convert_state(converted, state.tx)
    assert tree_bits(back.params) == tree_bits(state.params)
    assert tree_bits(back.opt_state.master) == tree_bits(state.opt_state.master)


def test_the_loss_scale_goes_on() -> None:
    state = trained(optimizer(policy="float16"))
    state = state.apply_gradients({"w": jnp.full((64, 128), jnp.inf)})
    scale = float(state.loss_scale.scale)
    assert scale == 2.0**15
    converted = convert_state(state, optimizer("kahan", policy="float16"))
    assert float(converted.loss_scale.scale) == scale
    assert int(converted.opt_state.skipped) == 1
    none = convert_state(state, optimizer())
    assert float(none.loss_scale.scale) == 1
    assert float(convert_state(none, state.tx).loss_scale.scale) == 2.0**16


def test_params_of_rules_keep_their_dtypes() -> None:
    rules = jaxmp.PolicyRules([("norm", "float32")], default="bfloat16")
    params = {"norm": jnp.ones((64, 64)), "w": jnp.ones((64, 64), jnp.bfloat16)}
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), rules)
    state = jaxmp.TrainState.create(params=params, tx=tx)
    new = jaxmp.mixed_precision(optax.adamw(1e-2), rules, master="remainder")
    converted = convert_state(state, new)
    assert jax.tree.map(lambda x: x.dtype.name, converted.params) == {
        "norm": "float32",
        "w": "bfloat16",
    }


def test_under_jit() -> None:
    tx = optimizer("remainder", "int8")
    state = trained(optimizer())
    converted = jax.jit(lambda state: convert_state(state, tx))(state)
    assert tree_bits(converted) == tree_bits(convert_state(state, tx))


KINDS = {
    **{master: optimizer(master) for master in STORAGES},
    "bfloat16 moments": optimizer(moments="bfloat16"),
    "codes": optimizer("stochastic", moments="int8"),
    "codes, no master": optimizer("none", moments="int8"),
    "float16": optimizer(policy="float16"),
    "float16, kahan": optimizer("kahan", policy="float16"),
    "float32 params": optimizer(policy="mixed_bfloat16"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint of each kind, after five steps."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with ocp.StandardCheckpointer() as checkpointer, jax.numpy_dtype_promotion("standard"):
        for kind, tx in KINDS.items():
            checkpointer.save(folder / kind, trained(tx))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_resumes_to_the_bit(kind: str, checkpoints: pathlib.Path) -> None:
    wanted = jax.eval_shape(lambda: trained(KINDS[kind], steps=0))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(checkpoints / kind, wanted)
    for i in range(5, 8):
        state = apply_gradients(state, grads(i))
    assert tree_bits(state) == tree_bits(trained(KINDS[kind], steps=8))


@pytest.mark.parametrize("wrong", KINDS)
def test_a_checkpoint_of_another_kind_is_an_error(wrong: str, checkpoints: pathlib.Path) -> None:
    """Those who restore look for names, and cast without a word what has another dtype.

    Else float32 params would be made of bfloat16 ones, and the masters left in the file.
    """
    wanted = jax.eval_shape(lambda: trained(KINDS[wrong], steps=0))
    with ocp.StandardCheckpointer() as checkpointer:
        for kind in KINDS.keys() - {wrong}:
            with pytest.raises(ValueError, match="not found in metadata"):
                checkpointer.restore(checkpoints / kind, wanted)
    narrow = flax.serialization.to_bytes(trained(KINDS["none"], steps=1).opt_state)
    if wrong != "none":
        with pytest.raises(ValueError, match=r"do not match|does not match"):
            flax.serialization.from_bytes(trained(KINDS[wrong], steps=0).opt_state, narrow)


def test_kinds_of_params_under_rules() -> None:
    """Which of the params are narrow is part of the kind."""
    params = {"a": jnp.ones(8), "b": jnp.ones(8)}
    kinds = set()
    for high in ("a", "b", "none"):
        rules = jaxmp.PolicyRules([(high, "float32")], default="bfloat16")
        live = {name: x.astype("float32" if name == high else "bfloat16")
                for name, x in params.items()}  # fmt: skip
        state = jaxmp.mixed_precision(optax.sgd(0.1), rules, master="remainder").init(live)
        kinds.update(state.kind)
    assert len(kinds) == 3
    assert "bfloat16-remainder" in kinds


def test_a_state_of_another_storage_is_an_error() -> None:
    """As if restored into the wrong optimizer: before anything is computed."""
    state = trained(optimizer("remainder"))
    wrong = state.replace(tx=optimizer("remainder8"))
    with pytest.raises(ValueError, match=r"jaxmp\.storage\.convert_state"):
        wrong.apply_gradients(grads(0))


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_other_moments_are_an_error(moments: str) -> None:
    state = trained(optimizer(moments=moments))
    with pytest.raises((ValueError, TypeError), match=r"jaxmp\.storage\.convert_state"):
        state.replace(tx=optimizer()).apply_gradients(grads(0))


@pytest.mark.parametrize("value", [1, 1e-4, np.float32(1e-4), np.float64(1e-4), jnp.bfloat16(1e-4)])
def test_hyperparameters_may_be_set(value: Any) -> None:
    """To scalars of any kind; arrays of another dtype are named."""
    inner = optax.inject_hyperparams(optax.sgd)(1e-3, momentum=0.9)
    state = trained(jaxmp.mixed_precision(inner, "bfloat16"))
    hyperparams = state.opt_state.inner.hyperparams | {"momentum": value}
    edited = state.opt_state.inner._replace(hyperparams=hyperparams)
    state.replace(opt_state=state.opt_state._replace(inner=edited)).apply_gradients(grads(0))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, edited.inner_state)
    wrong = state.opt_state._replace(inner=edited._replace(inner_state=narrow))
    with pytest.raises(
        ValueError, match=r"trace/w bfloat16\[64, 128\]; wanted: float32\[64, 128\]"
    ):
        state.replace(opt_state=wrong).apply_gradients(grads(0))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: convert_state(trained(optimizer()), optax.adam(1.0)), TypeError,
         "tx must be jaxmp.mixed_precision"),
        (lambda: convert_state({}, optimizer()), TypeError, "a TrainState, or an optimizer"),
        (lambda: convert_state(optax.sgd(1.0).init(grads(0)), optimizer(), params=grads(0)),
         ValueError, "must be the one that made the state"),
    ],
)  # fmt: skip
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
