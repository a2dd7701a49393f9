"""The train state and the assembled step."""

import copy
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from tests.support.bits import tree_bits

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]


def init_params() -> dict[str, Any]:
    w = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
    return jax.device_put({"w": w, "b": np.zeros(2, np.float32)})


def batch(rows: int = 8) -> dict[str, Any]:
    x = np.linspace(-1, 1, rows * 3, dtype=np.float32).reshape(rows, 3)
    return {"x": x, "y": x[:, :2] ** 2, "inject": np.ones(rows, np.float32)}


def loss_fn(params: Any, batch: Any) -> Any:
    out = batch["x"] @ params["w"] + params["b"]
    error = out.astype(jnp.float32) - batch["y"].astype(jnp.float32)
    return jnp.mean(error**2) * batch["inject"][0].astype(jnp.float32)


def make(policy: str = "mixed_float16", **options: Any) -> jaxmp.TrainState:
    options.setdefault("loss_scale", jaxmp.DynamicLossScale(init_scale=2.0**10))
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, **options)
    return jaxmp.TrainState.create(params=init_params(), tx=tx)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_follows_plain_optax(policy: str, microbatches: int) -> None:
    state = make(
        policy,
        loss_scale="auto"
        if "float16" not in policy[-7:]
        else jaxmp.DynamicLossScale(init_scale=2.0**8),
    )
    step = jaxmp.make_train_step(loss_fn, policy, microbatches=microbatches)
    tx = optax.adam(1e-2)
    params = init_params()
    plain = tx.init(params)
    gradient, update = jax.jit(jax.value_and_grad(loss_fn)), jax.jit(tx.update)
    for _ in range(10):
        state, metrics = step(state, batch())
        loss, grads = gradient(params, batch())
        updates, plain = update(grads, plain, params)
        params = optax.apply_updates(params, updates)
    # Adam normalises: an error of the gradient of eps moves the params by about lr * eps a step.
    low = state.tx.policy.compute_dtype != jnp.float32
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-2 if low else 1e-5)
    for name in params:
        got = np.asarray(state.params[name], np.float32)
        np.testing.assert_allclose(got, params[name], atol=1.5e-2 if low else 1e-5)
    assert state.params["w"].dtype == state.tx.policy.param_dtype
    assert int(state.step) == 10


def test_metrics() -> None:
    state, step = make(), jaxmp.make_train_step(loss_fn, "mixed_float16")
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(init_params(), batch())
    state, metrics = step(state, batch())
    assert set(metrics) == {
        "loss", "grad_norm", "grads_finite", "loss_scale", "skipped", "consecutive_skips",
    }  # fmt: skip
    assert all(isinstance(x, jax.Array) for x in metrics.values())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-3)
    norm = np.linalg.norm([*np.ravel(grads["w"]), *grads["b"]])
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-3)
    assert metrics["grads_finite"]
    state, metrics = step(state, batch() | {"inject": np.full(8, np.inf, np.float32)})
    assert float(metrics["loss_scale"]) == 2.0**10  # the one this step used
    assert float(state.loss_scale.scale) == 2.0**9
    assert (int(metrics["skipped"]), int(metrics["consecutive_skips"])) == (1, 1)
    assert int(state.step) == 1


def test_the_policy_decides_what_the_loss_sees() -> None:
    seen: dict[str, Any] = {}

    def spy(params: Any, batch: Any) -> Any:
        seen.update(params=params["w"].dtype, x=batch["x"].dtype, ids=batch["ids"].dtype)
        return loss_fn(params, batch | {"x": batch["x"].astype(params["w"].dtype)})

    full = batch() | {"ids": np.arange(8)}
    for policy, options, want in (
        ("mixed_bfloat16", {}, ("float32", "float32")),
        ("mixed_bfloat16", {"cast": "all"}, ("bfloat16", "bfloat16")),
        ("mixed_bfloat16", {"cast": "params"}, ("bfloat16", "float32")),
        (None, {}, ("float32", "float32")),
    ):
        step = jaxmp.make_train_step(spy, policy, **options)
        step(make("float32" if policy is None else policy), full)
        assert (seen["params"], seen["x"]) == want
        assert seen["ids"] == jnp.int32


def test_donation() -> None:
    """The state is donated and its buffers reused; the params it was made from stay usable."""
    params = init_params()
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=params, tx=tx)
    old = state.params["w"]
    step = jaxmp.make_train_step(loss_fn, "mixed_bfloat16")
    memory = step.lower(state, batch()).compile().memory_analysis()
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    flag = state.opt_state.grads_finite.nbytes  # the old one is not read
    assert memory.alias_size_in_bytes == state_bytes - flag
    step(state, batch())
    assert old.is_deleted()
    assert not params["w"].is_deleted()
    state = jaxmp.TrainState.create(params=params, tx=tx)
    jaxmp.make_train_step(loss_fn, "mixed_bfloat16", donate=False)(state, batch())
    assert not state.params["w"].is_deleted()


def bn_loss(params: Any, batch: Any, batch_stats: Any, rng: Any, frozen: Any) -> Any:
    mean = jnp.mean(batch["x"].astype(jnp.float32), axis=0)
    new = {"mean": 0.9 * batch_stats["mean"] + 0.1 * mean}
    rng, key = jax.random.split(rng)
    noise = jax.random.normal(key, ())
    loss = loss_fn(params, batch) + 0 * noise + 0 * jnp.sum(frozen)
    return loss, {"batch_stats": new, "rng": rng}, {"noise": noise}


def bn_state() -> jaxmp.TrainState:
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_float16")
    return jaxmp.TrainState.create(
        params=init_params(),
        tx=tx,
        batch_stats={"mean": np.zeros(3, np.float32)},
        rng=jax.random.key(0),
        frozen=np.ones(2, np.float32),
    )


def test_collections_move_and_stay_on_a_skip() -> None:
    step = jaxmp.make_train_step(bn_loss, "mixed_float16", has_aux=True, donate=False)
    state, metrics = step(bn_state(), batch())
    assert metrics["aux"]["noise"].shape == ()
    np.testing.assert_allclose(
        state.batch_stats["mean"], 0.1 * batch()["x"].mean(0), rtol=1e-5, atol=1e-8
    )
    np.testing.assert_array_equal(state.frozen, np.ones(2))
    bad = batch()
    bad["x"][3, 1] = np.inf
    skipped, metrics = step(state, bad)
    assert not metrics["grads_finite"]
    kept = ("step", "params", "collections")
    assert [tree_bits(getattr(skipped, k)) for k in kept] == [
        tree_bits(getattr(state, k)) for k in kept
    ]
    # Positive control: the loss function really returned infinite statistics.
    assert not jaxmp.numbers.all_finite(jax.jit(bn_loss)(state.params, bad, **state.collections)[1])


def test_a_loss_that_is_not_finite_skips_the_step() -> None:
    """Its gradients can be finite, and optimizers that read the loss would be destroyed by it."""
    tx = jaxmp.mixed_precision(optax.polyak_sgd(), "float32")
    ones = {"w": np.ones(2, np.float32)}
    state = jaxmp.TrainState.create(params=ones, tx=tx)
    step = jaxmp.make_train_step(lambda p, b: jnp.sum(p["w"]) + b, donate=False)
    bad, metrics = step(state, np.float32(np.inf))
    assert not metrics["grads_finite"]
    assert tree_bits(bad.params) == tree_bits(state.params)
    poisoned = jax.jit(jaxmp.TrainState.apply_gradients)(state, ones, {"value": np.float32(np.inf)})
    assert not np.all(poisoned.params["w"] == 1.0)  # positive control


def test_statistics_that_overflow_skip_the_step() -> None:
    """A float16 variance of 300s is infinite, its inverse zero, and so are all gradients."""

    def loss(params: Any, batch: Any, stats: Any) -> Any:
        var = jnp.mean(batch * batch)
        loss = jnp.sum(params["w"] * jax.lax.rsqrt(var)).astype(jnp.float32)
        return loss, {"stats": {"var": var.astype(jnp.float32), "least": stats["least"]}}

    tx = jaxmp.mixed_precision(
        optax.sgd(0.1), "mixed_float16", loss_scale=jaxmp.StaticLossScale(8.0)
    )
    stats = {"var": jnp.float32(1.0), "least": jnp.float32(jnp.inf)}  # this one may be infinite
    state = jaxmp.TrainState.create(params={"w": jnp.ones(2)}, tx=tx, stats=stats)
    step = jaxmp.make_train_step(loss, "mixed_float16", cast="all", donate=False)
    bad, metrics = step(state, jnp.full(4, 300.0))
    assert np.isfinite(metrics["grad_norm"])
    assert (int(bad.step), float(bad.stats["var"])) == (0, 1.0)
    good, _ = step(state, jnp.full(4, 30.0))
    assert (int(good.step), float(good.stats["var"])) == (1, 900.0)


def test_replace() -> None:
    state = bn_state().replace(step=jnp.int32(7), frozen=jnp.zeros(2))
    assert int(state.step) == 7
    np.testing.assert_array_equal(state.frozen, np.zeros(2))
    assert set(state.collections) == {"batch_stats", "rng", "frozen"}
    whole = state.replace(collections={"other": 1}, frozen=jnp.ones(2))
    assert set(whole.collections) == {"other", "frozen"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'froozen'"):
        state.replace(froozen=1)


def test_collections_pass_through_microbatches() -> None:
    step = jaxmp.make_train_step(bn_loss, "mixed_float16", has_aux=True, microbatches=4)
    state, metrics = step(bn_state(), batch())
    mean = np.zeros(3)
    for i in range(4):
        mean = 0.9 * mean + 0.1 * batch()["x"][i::4].mean(0)
    np.testing.assert_allclose(state.batch_stats["mean"], mean, rtol=1e-5)
    assert len(set(metrics["aux"]["noise"].tolist())) == 4


def test_collections_keep_their_dtypes() -> None:
    def loss(params: Any, batch: Any, stats: Any) -> Any:
        return loss_fn(params, batch), {"stats": stats.astype(jnp.bfloat16)}

    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=init_params(), tx=tx, stats=jnp.ones(2))
    state, _ = jaxmp.make_train_step(loss, "mixed_bfloat16")(state, batch())
    assert state.stats.dtype == jnp.float32


def test_it_warns_if_nobody_casts() -> None:
    """With "none" a plain model would silently train in float32."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
    plain = jaxmp.make_train_step(loss_fn, "none", donate=False)
    state = jaxmp.TrainState.create(params=init_params(), tx=tx)
    with pytest.warns(UserWarning, match="products behind its gradients are float32"):
        plain(state, batch())
    plain(state, batch())  # once

    def by_hand(params: Any, batch: Any) -> Any:
        return loss_fn(*jaxmp.get_policy("bfloat16").cast_to_compute((params, batch)))

    def in_integers(params: Any, batch: Any) -> Any:
        codes = batch["x"].astype(jnp.int8)
        scale = sum(map(jnp.sum, jax.tree.leaves(params)))
        return scale * jnp.mean(jnp.matmul(codes, codes.T, preferred_element_type=jnp.int32))

    # Controls: who casts, who wants float32, and who multiplies nothing.
    for casts in (by_hand, in_integers, jaxmp.autocast(loss_fn, "mixed_bfloat16")):
        jaxmp.make_train_step(casts, "none", donate=False)(state, batch())
    state = jaxmp.TrainState.create(
        params=init_params(), tx=jaxmp.mixed_precision(optax.sgd(0.1), "float32")
    )
    jaxmp.make_train_step(loss_fn, "none")(state, batch())
    state = jaxmp.TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
    jaxmp.make_train_step(lambda p, b: jnp.sum(p["w"] * b), "none")(state, jnp.ones(2))


def text_of(step: Any, state: Any) -> str:
    return re.sub(r"0x[0-9a-f]+|name=\w+", "", str(step.trace(state, batch()).jaxpr))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_the_policy_is_that_of_the_optimizer(policy: str) -> None:
    """Said once, it is the program of saying it twice, and of autocast."""
    state = jaxmp.TrainState.create(
        params=init_params(), tx=jaxmp.mixed_precision(optax.adam(1e-2), policy)
    )
    once = text_of(jaxmp.make_train_step(loss_fn), state)
    assert once == text_of(jaxmp.make_train_step(loss_fn, policy), state)
    fast = jaxmp.autocast(loss_fn, policy)
    assert once == text_of(jaxmp.make_train_step(fast, "none"), state)
    # Autocast leaves alone what is under one already, and the control sees what is under none.
    assert once == text_of(jaxmp.make_train_step(fast), state)
    if policy != "float32":
        with pytest.warns(UserWarning, match="all products behind its gradients are float32"):
            assert once != text_of(jaxmp.make_train_step(loss_fn, "none"), state)


def test_a_rule_in_float64_widens_nothing_else() -> None:
    """It widened params and batch, and all products with them."""
    rules = jaxmp.PolicyRules([("wide", "float64")], default="mixed_bfloat16")
    with jax.enable_x64(True):
        tx = jaxmp.mixed_precision(optax.sgd(0.1), rules)
        state = jaxmp.TrainState.create(params={"w": jnp.ones((8, 8), jnp.float32)}, tx=tx)

        def loss(params: Any, x: Any) -> Any:
            with jax.named_scope("wide"):
                shift = jnp.sum(params["w"])
            return jnp.mean((x @ params["w"]) ** 2) + shift

        report = jaxmp.audit(jaxmp.make_train_step(loss), state, jnp.ones((4, 8), jnp.float32))
        assert {row.operands for row in report.products} == {("bfloat16", "bfloat16")}


def test_rules_are_those_of_the_optimizer() -> None:
    """Over the scopes of the loss, as `autocast` takes them."""

    def scoped(params: Any, batch: Any) -> Any:
        with jax.named_scope("exact"):
            out = batch["x"] @ params["w"]
        return jnp.mean((out @ params["w"].T) ** 2)

    rules = jaxmp.PolicyRules([("exact", "float32")], default="mixed_bfloat16")
    tx = jaxmp.mixed_precision(optax.adam(1e-2), rules)
    state = jaxmp.TrainState.create(params=init_params(), tx=tx)
    step = jaxmp.make_train_step(scoped)
    by_hand = jaxmp.make_train_step(jaxmp.autocast(scoped, rules), "none")
    assert text_of(step, state) == text_of(by_hand, state)
    assert text_of(step, state) == text_of(jaxmp.make_train_step(scoped, rules), state)
    products = {row.operands for row in jaxmp.audit(step, state, batch()).products}
    assert {("float32", "float32"), ("bfloat16", "bfloat16")} <= products


def test_create_casts_params_and_keeps_the_masters() -> None:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "bfloat16")
    state = jaxmp.TrainState.create(params={"w": jnp.full(2, 1.001)}, tx=tx)
    assert state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.opt_state.master["w"], np.full(2, np.float32(1.001)))


def trained(batch: Any, loss: Any, policy: Any, steps: int = 200, **options: Any) -> Any:
    """The only param after some steps of gradient descent on one batch."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    state = jaxmp.TrainState.create(params={"w": np.zeros((4, 1), np.float32)}, tx=tx)
    step = jaxmp.make_train_step(loss, policy, donate=False, **options)
    for _ in range(steps):
        state, _ = step(state, batch)
    return np.asarray(state.params["w"])


def pressures() -> dict[str, Any]:
    """A regression with labels near 1000, whose differences bfloat16 rounds away."""
    x = np.random.default_rng(0).standard_normal((512, 4)).astype(np.float32)
    return {"x": x, "y": 1000 + x[:, :1]}


def offset_loss(params: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ params["w"] - (batch["y"] - 1000.0)) ** 2)


def scanned_loss(params: Any, batch: Any) -> Any:
    """The same, with labels that a scan over examples reads."""

    def add(total: Any, row: Any) -> Any:
        x, y = row
        return total + jnp.sum((x @ params["w"] - (y - 1000.0)) ** 2), None

    parts = jax.tree.map(lambda v: v.reshape(64, 8, -1), (batch["x"], batch["y"]))
    return jax.lax.scan(add, jnp.float32(0), parts)[0] / 512


def upcast_loss(params: Any, batch: Any) -> Any:
    out = (batch["x"].astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) + 1000.0
    return jnp.mean((out - batch["y"].astype(jnp.float32)) ** 2)


@pytest.mark.parametrize("loss", [offset_loss, upcast_loss, scanned_loss])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_labels_keep_their_bits(loss: Any, policy: str) -> None:
    """Rounded labels train another model, and the loss looks fine."""
    w = trained(pressures(), loss, policy)
    np.testing.assert_allclose(w, [[1], [0], [0], [0]], atol=0.02)


def test_casting_all_rounds_labels() -> None:
    """Positive control, and what `cast="params"` is for."""
    batch = pressures()
    rounded = trained(batch, upcast_loss, "mixed_bfloat16", cast="all")
    assert abs(rounded[0, 0] - 1) > 0.3
    kept = trained(batch, upcast_loss, "mixed_bfloat16", cast="params")
    np.testing.assert_allclose(kept, [[1], [0], [0], [0]], atol=0.02)


def test_a_batch_that_is_input_and_label_keeps_its_bits() -> None:
    """An autoencoder of large numbers: a product reads the batch rounded, the error does not."""
    x = 1000 + np.random.default_rng(0).standard_normal((256, 4)).astype(np.float32)

    def loss(params: Any, x: Any) -> Any:
        centred = x - 1000.0
        return jnp.mean((centred @ params["w"] - (x[:, :1] - 1000.0)) ** 2)

    w = trained(x, loss, "mixed_bfloat16")
    np.testing.assert_allclose(w, [[1], [0], [0], [0]], atol=0.02)


def test_class_ids_among_floats_keep_their_bits() -> None:
    """bfloat16 makes 1000 of 1001: ids that a reader made floats would name other classes."""
    seen = []

    def loss(params: Any, batch: Any) -> Any:
        ids = batch["ids"].astype(jnp.int32)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), ids)
        return jnp.mean((batch["x"] @ params["w"])[:, 0] * (ids % 2))

    batch = {"x": np.ones((2, 4), np.float32), "ids": np.array([1001.0, 777.0], np.float32)}
    trained(batch, loss, "mixed_bfloat16", steps=1)
    jax.effects_barrier()
    np.testing.assert_array_equal(seen[0], [1001, 777])


@pytest.mark.parametrize("policy", ["params=bfloat16,compute=float32", "params=float16,c=bf16"])
def test_params_of_another_narrow_dtype_are_widened(policy: str) -> None:
    """A policy that computes wider than its params are says so, and is taken at its word."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    state = jaxmp.TrainState.create(params=init_params(), tx=tx)
    step = jaxmp.make_train_step(loss_fn, policy, donate=False)
    compute = jaxmp.get_policy(policy).compute_dtype.name
    products = jaxmp.audit(step, state, batch()).products
    assert {p.operands for p in products} == {(compute, compute)}


def test_an_optimizer_that_takes_no_value() -> None:
    """`optax.contrib.sam` has no further arguments, in a chain neither."""

    def make_sam() -> Any:
        ascend = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
        return optax.contrib.sam(optax.sgd(1e-2), ascend, sync_period=2)

    for inner in (make_sam(), optax.chain(optax.clip(1.0), make_sam())):
        plain_params = {"w": np.ones(3, np.float32)}
        tx = jaxmp.mixed_precision(inner, "float32")
        state = jaxmp.TrainState.create(params=plain_params, tx=tx)
        step = jaxmp.make_train_step(lambda p, b: jnp.sum((p["w"] * b) ** 2), donate=False)
        plain_state = inner.init(plain_params)
        update = jax.jit(inner.update)
        for _ in range(4):
            grads = {"w": 2 * np.asarray(plain_params["w"])}
            updates, plain_state = update(grads, plain_state, plain_params)
            plain_params = optax.apply_updates(plain_params, updates)
            state, _ = step(state, np.ones(3, np.float32))
        np.testing.assert_allclose(state.params["w"], plain_params["w"], rtol=1e-6)


def test_further_arguments_of_the_optimizer() -> None:
    """Opaque SAM asks for a function of gradients; `extra_args` gives it with the batch."""
    inner = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=True)
    tx = jaxmp.mixed_precision(inner, "float32")
    state = jaxmp.TrainState.create(params={"w": jnp.ones(3)}, tx=tx)

    def loss(params: Any, batch: Any) -> Any:
        return jnp.sum((params["w"] * batch) ** 2)

    def extra(state: Any, batch: Any, value: Any) -> Any:
        return {"grad_fn": lambda params, _: jax.grad(loss)(params, batch)}

    step = jaxmp.make_train_step(loss, extra_args=extra, donate=False)
    new, _ = step(state, jnp.ones(3))
    # By hand: one step up of 0.05, then one down with the gradient there.
    np.testing.assert_allclose(new.params["w"], 1 - 0.1 * 2 * (1 + 0.05 * 2), rtol=1e-6)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        jaxmp.make_train_step(loss, extra_args=lambda *_: {"wrong": 1})(state, jnp.ones(3))


def test_a_donated_state_used_again() -> None:
    """Or its params alone, in a new state."""
    state = make()
    step = jaxmp.make_train_step(loss_fn, "mixed_float16")
    new, _ = step(state, batch())
    for used in (state, new.replace(params=state.params)):
        with pytest.raises(
            ValueError, match=r"this state was donated to an earlier step.*donate=Fa"
        ):
            step(used, batch())


class Renamed(jaxmp.TrainState):
    """A subclass for its type alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaged(jaxmp.TrainState):
    """A subclass with a field, and one that it makes itself."""

    ema: Any = None
    seen: dict[str, int] = dataclasses.field(default_factory=dict, init=False, compare=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Registered(jaxmp.TrainState):
    """A subclass that registers itself, with a field that is no array."""

    apply_fn: Any = dataclasses.field(default=None, metadata={"static": True})


def check_a_step(state: Any, plain: jaxmp.TrainState, **more: Any) -> None:
    """A subclass that is no pytree cannot enter a step."""
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves((plain, more.get("ema"))))
    step = jaxmp.make_train_step(loss_fn, "mixed_bfloat16", donate=False)
    after, _ = step(state, batch())
    assert type(after) is type(state)
    assert int(after.step) == 1
    assert tree_bits(after.params) == tree_bits(step(plain, batch())[0].params)
    for name, value in more.items():
        np.testing.assert_array_equal(getattr(after, name), value)


def test_subclasses_are_pytrees() -> None:
    """Flax's TrainState is subclassed too."""
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "mixed_bfloat16")
    plain = jaxmp.TrainState.create(params=init_params(), tx=tx)
    check_a_step(Renamed.create(params=init_params(), tx=tx), plain)
    check_a_step(
        Averaged.create(params=init_params(), tx=tx, ema=np.ones(3)), plain, ema=np.ones(3)
    )
    check_a_step(Registered.create(params=init_params(), tx=tx, apply_fn=max), plain, apply_fn=max)

    class Made(jaxmp.TrainState):
        """Made by calling the class, as code that restores a state does, before any `create`."""

    class MadeToo(Averaged):
        """The same with fields."""

    fields = {x.name: getattr(plain, x.name) for x in dataclasses.fields(jaxmp.TrainState)}
    for kind in (Made, MadeToo):
        assert type(jax.eval_shape(lambda kind=kind: kind(**fields))) is kind
        check_a_step(kind(**fields), plain)


def test_float16_under_a_policy_without_it_is_warned_of() -> None:
    """The optimizer has no loss scale then, and gradients vanish."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16)))

    state = make("mixed_bfloat16", loss_scale="auto")
    with (
        pytest.warns(UserWarning, match="of 'b', 'w' pass through float16 without a loss scale"),
        pytest.warns(UserWarning, match="wrapped for bfloat16, and all products .* are float16"),
    ):
        jaxmp.make_train_step(loss)(state, jnp.ones((2, 3)))


def test_a_step_is_copied_like_any_function() -> None:
    step = jaxmp.make_train_step(loss_fn, "mixed_float16")
    assert copy.copy(step)._jitted is step._jitted
    step(make(), batch())
    assert copy.copy(step)._latest() is None  # a weak reference, which pickle refuses


def with_target() -> tuple[jaxmp.TrainState, Any]:
    """A state with a second network, which the loss reads and does not change."""

    def loss(params: Any, batch: Any, target: Any) -> Any:
        out = batch["x"] @ (params["w"] + 0.1 * target["w"]) + params["b"]
        return jnp.mean((out - batch["y"]) ** 2), {}

    state = jaxmp.TrainState.create(params=init_params(), tx=make().tx, target=init_params())
    return state, jaxmp.make_train_step(loss, "mixed_float16")


def test_an_array_at_two_places_of_a_state_is_donated_once() -> None:
    """A hard update, and tied params: the second place gets a copy."""
    state, step = with_target()
    state, _ = step(state, batch())
    tied = state.replace(target=state.params)
    apart = state.replace(target=jax.tree.map(jnp.copy, state.params))
    kept = jax.tree.map(jnp.copy, apart)
    got, want = step(tied, batch())[0], step(kept, batch())[0]
    assert tree_bits(got) == tree_bits(want)
    assert step._cache_size() == 1  # the copy compiles nothing anew
    assert all(x.is_deleted() for x in jax.tree.leaves(tied.params))  # given away all the same
    # And the next step goes on.
    step(got, batch())


def test_an_array_of_the_batch_in_the_state() -> None:
    """A replay buffer, or a learned input; the batch stays as it is."""
    state, step = with_target()
    data = jax.tree.map(jnp.asarray, batch())
    beside = {**data, "old": state.params["w"]}
    step(state, beside)
    assert not any(x.is_deleted() for x in jax.tree.leaves(beside))


def test_a_sharded_array_at_two_places_keeps_its_sharding() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state, step = with_target()
    split = jax.NamedSharding(mesh, jax.P(None, "data"))
    params = jax.device_put(state.params, {"w": split, "b": jax.NamedSharding(mesh, jax.P())})
    state = jaxmp.TrainState.create(params=params, tx=state.tx, target=params)
    state, _ = step(state.replace(target=state.params), batch())
    assert state.target["w"].sharding.is_equivalent_to(split, 2)


def test_an_array_that_was_written_into_the_state_that_a_step_returned() -> None:
    """The step does not look at that state again, until JAX refuses to donate an array twice."""
    state, step = with_target()
    state, _ = step(state, batch())
    kept = jax.tree.map(jnp.copy, state).replace(target=jax.tree.map(jnp.copy, state.params))
    state.collections["target"] = state.params
    assert tree_bits(step(state, batch())[0]) == tree_bits(step(kept, batch())[0])


def test_an_array_of_a_restored_state_in_the_batch() -> None:
    state, step = with_target()
    state, _ = step(jax.tree.map(np.asarray, state), batch())
    beside = batch() | {"old": state.params["w"]}
    step(state, beside)
    assert not beside["old"].is_deleted()


def test_two_arrays_in_one_memory() -> None:
    """`jax.device_put` makes such ones. Nothing is lost, and the message says what to do."""
    state, step = with_target()
    same = jax.tree.map(lambda x: jax.device_put(x, x.sharding), state.params)
    with pytest.raises(ValueError, match=r"lie in the same memory.*jax.tree.map\(jnp.copy"):
        step(state.replace(target=same), batch())
    step(state, batch())


def test_other_errors_of_a_step_stay() -> None:
    def refuses(params: Any, batch: Any) -> Any:
        raise ValueError("please donate")

    with pytest.raises(ValueError, match="please donate"):
        jaxmp.make_train_step(refuses, "mixed_float16")(make(), batch())
    _, step = with_target()
    with pytest.raises(TypeError, match="dot_general requires"):
        step(with_target()[0], batch() | {"x": np.ones((8, 5), np.float32)})


def test_a_state_of_another_policy_is_warned_of() -> None:
    """From bfloat16 to float16 the scale came back as 1: small gradients vanish for long."""
    bfloat16, float16 = make("mixed_bfloat16", loss_scale="auto"), make(loss_scale="auto")
    restored = dataclasses.replace(bfloat16, tx=float16.tx)
    step = jaxmp.make_train_step(loss_fn, "mixed_float16", donate=False)
    with pytest.warns(UserWarning, match="the loss scale of this state is 1, but its optimizer"):
        step(restored, batch())
    with pytest.warns(UserWarning, match="Begin anew: state.replace"):
        jaxmp.check_progress(restored)
    # Controls: a scale that skips brought down, also one that is rounded, and one that is its own.
    config = jaxmp.DynamicLossScale(backoff_factor=0.9)
    state = make(loss_scale=config)
    for _ in range(20):
        state = state.apply_gradients(jax.tree.map(lambda p: np.full_like(p, np.inf), state.params))
        jaxmp.check_progress(state)
    fallen = float16.opt_state._replace(skipped=jnp.int32(16), loss_scale=restored.loss_scale)
    jaxmp.check_progress(dataclasses.replace(float16, opt_state=fallen))
    jaxmp.check_progress(float16)


def test_params_that_the_optimizer_loses_are_named() -> None:
    """Finite gradients, NaN from a schedule: the step counts as taken, and nothing mends it."""
    inner = optax.scale_by_schedule(lambda count: jnp.where(count == 1, jnp.nan, -0.1))
    tx = jaxmp.mixed_precision(inner, "mixed_float16")
    state = jaxmp.TrainState.create(params=init_params(), tx=tx)
    step = jaxmp.make_train_step(loss_fn, "mixed_float16", donate=False)
    state, _ = step(state, batch())
    jaxmp.check_progress(state)
    state, metrics = step(state, batch())
    assert metrics["grads_finite"]
    with pytest.raises(jaxmp.TrainingStalled, match="params are lost: 'b', 'w' are NaN, which"):
        jaxmp.check_progress(state)


@jax.custom_vjp
def attention(q: Any, k: Any, v: Any) -> Any:
    """Stands for a kernel whose derivative is its own, and which says what it was made for."""
    KERNEL_DTYPES.append({x.dtype.name for x in (q, k, v)})
    return jax.nn.softmax(q @ k.T) @ v


KERNEL_DTYPES: list[set[str]] = []
attention.defvjp(
    lambda q, k, v: (attention(q, k, v), (q, k, v)),
    lambda kept, cotangent: jax.vjp(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, *kept)[1](
        cotangent
    ),
)


def test_kernels_of_a_step_read_16_bits() -> None:
    """Kernels are made for the dtypes of their operands; labels near 1000 keep their bits."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        heads = [x @ params[name] for name in ("q", "k", "v")]
        out = jnp.mean(attention(*heads), axis=1, keepdims=True) + params["b"] + 1000.0
        return jnp.mean((out - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(4, 4)).astype(np.float32) for name in ("q", "k", "v")}
    batch = {"x": rng.normal(size=(8, 4)).astype(np.float32), "y": np.full((8, 1), 1001.5, "f4")}
    tx = jaxmp.mixed_precision(optax.sgd(0.0), "mixed_bfloat16")
    state = jaxmp.TrainState.create(params=params | {"b": jnp.ones(1)}, tx=tx)
    step = jaxmp.make_train_step(loss, "mixed_bfloat16", donate=False)
    KERNEL_DTYPES.clear()
    _, metrics = step(state, batch)
    assert KERNEL_DTYPES[-1] == {"bfloat16"}
    exact = float(jax.jit(loss)(state.params, batch))
    np.testing.assert_allclose(metrics["loss"], exact, rtol=0.02)
    rounded = float(jax.jit(loss)(state.params, batch | {"y": np.full((8, 1), 1000.0, "f4")}))
    assert abs(rounded - exact) > 0.2 * exact  # positive control
