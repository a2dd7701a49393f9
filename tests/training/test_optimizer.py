"""The optimizer wrapper: masters, skips, and everything of optax inside it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._training.masters import is_masked
from tests.support.bits import tree_bits
from tests.support.cases import OPTIMIZERS, mixed_tree
from tests.support.references import adamw

# optax mixes dtypes itself.
pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]


def constant_grads(value: float = 0.5) -> dict[str, jax.Array]:
    return jax.tree.map(lambda p: jax.device_put(np.full(p.shape, value, "f")), mixed_tree())


def extra_args() -> dict[str, Any]:
    def value_fn(params: Any) -> jax.Array:
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))

    return {"value": jnp.float32(1.0), "grad": constant_grads(), "value_fn": value_fn}


def run(tx: jaxmp.MixedPrecision, grads: list[Any], params: Any, *, exact: bool = True) -> Any:
    """Params and state after some steps, each under jit."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        if exact:
            return tx.apply_gradients(grads, state, params, **extra_args())
        updates, state = tx.update(grads, state, params, **extra_args())
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for g in grads:
        params, state = step(params, state, g)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    """Three steps, a skip and one more: one trace, float32 inside, a skip that leaves no trace."""
    tx = jaxmp.mixed_precision(OPTIMIZERS[name](), "bfloat16")
    params = mixed_tree()
    traces = []

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        traces.append(1)
        return tx.apply_gradients(grads, state, params, **extra_args())

    state = tx.init(params)
    for leaf in jax.tree.leaves(state.inner):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert leaf.dtype == jnp.float32
    for value in (0.5, -0.25, 1.0):
        params, state = step(params, state, constant_grads(value))
    before = tree_bits((params, state.inner, state.master))
    params, state = step(params, state, constant_grads(np.inf))
    assert tree_bits((params, state.inner, state.master)) == before
    assert not state.grads_finite
    params, state = step(params, state, constant_grads(0.5))
    assert len(traces) == 1
    assert state.grads_finite
    np.testing.assert_array_equal(params["low"], state.master["low"].astype(jnp.bfloat16))
    assert jaxmp.numbers.all_finite((params, state.inner))


@pytest.mark.parametrize("skip", ["auto", "cond", "select"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["low", "wide"])
def test_updates_of_a_skipped_step_are_zero(skip: Any, bad: float, where: str) -> None:
    """Exactly zero, and adding them keeps every bit, that of a negative zero too."""
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "float16", skip=skip)
    params, grads = (jax.tree.map(np.array, x) for x in (mixed_tree("float16"), constant_grads()))
    for p in params.values():
        p[0] = -0.0
    grads[where][-1] = bad
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    for leaf in jax.tree.leaves(updates):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))
    assert tree_bits(optax.apply_updates(params, updates)) == tree_bits(params)
    assert (int(state.skipped), int(state.consecutive_skips)) == (1, 1)
    assert float(state.loss_scale.scale) == 2.0**15


@pytest.mark.parametrize("skip", ["auto", "cond", "select"])
def test_what_a_skip_costs_on_a_cpu(skip: Any) -> None:
    """A branch writes over the donated state; a choice holds new and old moments at once."""
    params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)}
    grads = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "bfloat16", skip=skip)
    state = jax.eval_shape(tx.init, params)
    step = jax.jit(lambda p, s, g: tx.apply_gradients(g, s, p), donate_argnums=(0, 1))
    memory = step.lower(params, state, grads).compile().memory_analysis()
    temporaries = memory.temp_size_in_bytes / 512**2
    assert temporaries > 4 if skip == "select" else temporaries < 1.5


def test_counters() -> None:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "float32", loss_scale=jaxmp.StaticLossScale(4.0))
    good, bad = constant_grads(), constant_grads(np.nan)
    _, state = run(tx, [bad, bad, good, bad], mixed_tree())
    assert (int(state.skipped), int(state.consecutive_skips)) == (3, 1)
    assert float(state.loss_scale.scale) == 4.0
    _, state = run(tx, [bad, good], mixed_tree())
    assert (int(state.skipped), int(state.consecutive_skips)) == (1, 0)


def test_skip_none_does_not_look() -> None:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "bfloat16", skip="none")
    params, state = run(tx, [constant_grads(np.inf)], mixed_tree())
    assert not jaxmp.numbers.all_finite(params)
    assert state.grads_finite


@pytest.mark.parametrize("skip", ["auto", "cond", "select", "none"])
@pytest.mark.parametrize("exact", [True, False])
def test_adamw_in_bfloat16_follows_float64(skip: Any, exact: bool) -> None:
    """The masters are AdamW to float32 accuracy; the params are the masters, rounded."""
    rng = np.random.default_rng(0)
    grads = [
        {name: rng.normal(size=p.shape).astype(np.float32) for name, p in mixed_tree().items()}
        for _ in range(30)
    ]
    options = {"learning_rate": 1e-2, "weight_decay": 0.1, "eps": 1e-6}
    tx = jaxmp.mixed_precision(optax.adamw(**options), "bfloat16", skip=skip)
    params, state = run(tx, grads, mixed_tree(), exact=exact)
    for name, start in mixed_tree().items():
        want = adamw(np.asarray(start, np.float32), [np.asarray(g[name]) for g in grads], **options)
        got = state.master[name] if name == "low" else params[name]
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)
    np.testing.assert_array_equal(params["low"], state.master["low"].astype(jnp.bfloat16))


def test_finite_gradients_whose_float16_norm_overflows_are_clipped_rightly() -> None:
    """In float16 their norm is infinite, and clipping silently makes them zero."""
    grads = {"w": np.full(1000, 300.0, np.float16)}
    params = {"w": np.zeros(1000, np.float16)}
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    exactly = jax.jit(clip.update, compiler_options={"xla_allow_excess_precision": False})
    alone, _ = exactly(grads, clip.init(params), params)
    assert not np.any(alone["w"])  # positive control
    tx = jaxmp.mixed_precision(clip, "float16")
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert state.grads_finite
    np.testing.assert_allclose(np.linalg.norm(updates["w"]), 1.0, rtol=1e-3)


def test_multi_steps_inside_across_a_scale_change() -> None:
    """The mean of unscaled micro-gradients, however the scale moves; an overflow drops one only."""
    config = jaxmp.DynamicLossScale(init_scale=8.0, growth_interval=1)
    tx = jaxmp.mixed_precision(
        optax.MultiSteps(optax.sgd(1.0), every_k_schedule=3), "float32", loss_scale=config
    )
    params = {"w": jnp.float32(0.0)}
    state = tx.init(params)
    for target in (1.0, np.inf, 2.0, 6.0):
        grads = jaxmp.grad(lambda p, t=target: p["w"] * t, loss_scale=state.loss_scale)(params)
        params, state = tx.apply_gradients(grads, state, params)
    assert float(params["w"]) == -3.0
    assert float(state.loss_scale.scale) == 32.0
    assert int(state.skipped) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_crossing_zero(dtype: str) -> None:
    """No float32 update reaches a far smaller weight; the error is bounded and does not stay."""
    start = np.array([1.0, 0.5, -3.0, 1.0], np.float32)
    target = np.array([2.0**-20, -(2.0**-18), 2.0**-22, 0.0], np.float32)
    params = {"w": jax.device_put(start.astype(jnp.dtype(dtype)))}
    tx = jaxmp.mixed_precision(optax.sgd(1.0), dtype)
    grads = {"w": start - target}
    updates, state = tx.update(grads, tx.init(params), params)
    got = np.asarray(optax.apply_updates(params, updates)["w"], np.float32)
    want = np.asarray(state.master["w"].astype(dtype), np.float32)
    assert np.all(np.abs(got - want) <= 2.0**-24 * np.abs(start))
    exact, _ = tx.apply_gradients(grads, tx.init(params), params)
    np.testing.assert_array_equal(np.asarray(exact["w"], np.float32), want)


VANISHING = 1e-10  # of a loss, whose float16 gradients are zero without a scale


def forgotten(inner: Any, loss_scale: Any = "auto") -> tuple[Any, Any, Callable[..., Any]]:
    """A loop by hand with `jax.grad` in place of `jaxmp.grad`."""
    params = {"w": jax.device_put(np.ones((8, 4), np.float32))}
    tx = jaxmp.mixed_precision(inner, "mixed_float16", loss_scale=loss_scale)
    low = jaxmp.autocast(lambda p, x: VANISHING * jnp.mean((x @ p["w"]) ** 2), "mixed_float16")
    x = jax.device_put(np.sin(np.arange(16 * 8, dtype=np.float32)).reshape(16, 8))

    def step(params: Any, state: Any, *, scaled: bool = False) -> Any:
        gradient = jaxmp.grad(low, loss_scale=state.loss_scale) if scaled else jax.grad(low)
        return tx.apply_gradients(gradient(params, x), state, params)

    return params, tx.init(params), step


@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adam(1e-3)], ids=["sgd", "adam"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_forgotten_scale_is_seen(inner: Any, jit: bool) -> None:
    """All gradients are zero, every step is taken, and nothing moves."""
    params, state, step = forgotten(inner)
    step, first = (jax.jit(step) if jit else step), params
    for _ in range(50):
        params, state = step(params, state)
        if int(state.zero_gradients) < 50:
            jaxmp.check_progress(state)
    assert tree_bits(params) == tree_bits(first)
    text = r"in all of 50 steps every number.*zero.*loss_scale=opt_state.loss_scale"
    with pytest.raises(jaxmp.TrainingStalled, match=text):
        jaxmp.check_progress(state)
    jaxmp.check_progress(state, limit=60)


def test_gradients_with_a_scale_move() -> None:
    params, state, step = forgotten(optax.sgd(0.1))
    step = jax.jit(step, static_argnames="scaled")
    for _ in range(3):
        params, state = step(params, state)
    assert int(state.zero_gradients) == 3
    infinite = jax.tree.map(lambda p: np.full_like(p, np.inf), params)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16")
    _, state = tx.apply_gradients(infinite, state, params)  # skipped, and so no step
    assert (int(state.zero_gradients), int(state.skipped)) == (3, 1)
    params, state = step(params, state, scaled=True)
    assert int(state.zero_gradients) == -1
    for _ in range(60):  # what has moved may come to rest, as a margin that is satisfied
        params, state = step(params, state)
    jaxmp.check_progress(state)


def test_without_a_dynamic_scale_zeros_are_no_sign() -> None:
    """In bfloat16 nobody forgets a scale, and the test would cost a pass over the gradients."""
    params, state, step = forgotten(optax.sgd(0.1), loss_scale=jaxmp.NoLossScale())
    step = jax.jit(step)
    for _ in range(3):
        params, state = step(params, state)
    assert int(state.zero_gradients) == -1


def test_a_train_state_by_hand_counts_too() -> None:
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16")
    state = jaxmp.TrainState.create(params={"w": jnp.ones(3)}, tx=tx, count=jnp.zeros(2))
    for _ in range(2):
        state = state.apply_gradients({"w": jnp.zeros(3)}, count=jnp.ones(2))
    assert int(state.opt_state.zero_gradients) == 2


@pytest.mark.exhaustive
def test_donated_trees_of_mixed_dtypes() -> None:
    """No buffer is in a train state twice, so everything can be donated, for every optimizer."""
    for name, make in OPTIMIZERS.items():
        tx = jaxmp.mixed_precision(make(), "bfloat16")
        state = jaxmp.TrainState.create(params=mixed_tree(), tx=tx)
        step = jax.jit(lambda s, g: s.apply_gradients(g, extra=extra_args()), donate_argnums=0)
        for _ in range(2):
            state = step(state, constant_grads())
        assert int(state.step) == 2, name


def test_under_vmap() -> None:
    """An ensemble: each member has its own scale and skips alone."""
    tx = jaxmp.mixed_precision(optax.sgd(0.5), "mixed_float16")
    params = jnp.arange(3.0)
    state = jax.vmap(tx.init)(params)
    new, state = jax.vmap(tx.apply_gradients)(jnp.array([1.0, jnp.inf, 1.0]), state, params)
    assert new.tolist() == [-0.5, 1.0, 1.5]
    assert state.loss_scale.scale.tolist() == [65536.0, 32768.0, 65536.0]


def test_python_and_numpy_params() -> None:
    tx = jaxmp.mixed_precision(optax.sgd(0.5), "bfloat16")
    params = {"a": 1.0, "b": np.ones(2, jnp.bfloat16)}
    state = tx.init(params)
    new, state = tx.apply_gradients({"a": 1.0, "b": np.ones(2, np.float16)}, state, params)
    assert float(new["a"]) == 0.5
    assert new["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.master["b"], np.full(2, 0.5))
    updates, _ = tx.update({"a": 1.0, "b": np.ones(2)}, state, new)
    assert float(optax.apply_updates(new, updates)["a"]) == 0.0


def test_masters_beyond_float16_leave_params_finite() -> None:
    """And the params come back, also through updates: inf + -inf would be NaN for ever."""
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "float16")
    params = {"w": jnp.float16(60000.0)}
    state = tx.init(params)
    for grad, want in ((-10000.0, 65504.0), (9000.0, 60992.0), (0.0, 60992.0)):
        updates, state = tx.update({"w": jnp.float32(grad)}, state, params)
        params = optax.apply_updates(params, updates)
        assert float(params["w"]) == want
    assert float(state.master["w"]) == 61000.0
    live, state = tx.init_params({"w": jnp.float32(7e4)})
    assert (float(live["w"]), float(state.master["w"])) == (65504.0, 70000.0)


def test_wide_gradients_of_float32_params() -> None:
    with jax.enable_x64(True):
        tx = jaxmp.mixed_precision(optax.adam(0.1), "float32")
        params = {"w": jnp.ones(2, jnp.float32)}
        new, _ = tx.apply_gradients({"w": jnp.ones(2, jnp.float64)}, tx.init(params), params)
        assert new["w"].dtype == jnp.float32


def test_one_trace_without_skips() -> None:
    """Nothing but the wrapper itself keeps the state strongly typed there."""
    traces = []
    weak = optax.GradientTransformation(
        lambda params: jnp.asarray(1.0), lambda grads, state, params: (grads, jnp.asarray(2.0))
    )
    tx = jaxmp.mixed_precision(weak, "float32", skip="none")

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        traces.append(1)
        return tx.apply_gradients(constant_grads(), state, params)

    params = mixed_tree("float32")
    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state)
    assert len(traces) == 1


def test_complex_params() -> None:
    tx = jaxmp.mixed_precision(optax.sgd(1.0), "mixed_bfloat16")
    params = {"c": jnp.ones(2, jnp.complex64)}
    new, _ = tx.apply_gradients({"c": jnp.full(2, 1j, jnp.complex64)}, tx.init(params), params)
    np.testing.assert_array_equal(new["c"], np.full(2, 1 - 1j))


def test_an_optimizer_that_changes_its_state_is_refused() -> None:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return grads, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)

    drifting = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    tx = jaxmp.mixed_precision(drifting, "float32")
    params = mixed_tree()
    with pytest.raises(TypeError, match="changed the dtype of its state 'low' from float32 to"):
        tx.update(constant_grads(), tx.init(params), params)


def test_tree_map_params_works() -> None:
    """optax's own tool finds the param-like parts of the state, masters among them."""
    tx = jaxmp.mixed_precision(optax.adam(1e-3), "bfloat16")
    state = tx.init(mixed_tree())
    marked = optax.tree.map_params(
        tx, lambda _: "P", state, transform_non_params=lambda _: "-", is_leaf=is_masked
    )
    assert marked.inner[0].mu == {"low": "P", "wide": "P"}
    assert marked.master["low"] == "P"
    assert marked.skipped == "-"


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ("float32", jaxmp.NoLossScale),
        ("mixed_bfloat16", jaxmp.NoLossScale),
        ("bfloat16", jaxmp.NoLossScale),
        ("mixed_float16", jaxmp.DynamicLossScale),
        ("p=f16,c=f32", jaxmp.DynamicLossScale),
        ("O3", jaxmp.DynamicLossScale),
    ],
)
def test_auto_loss_scale(policy: str, config: type) -> None:
    assert jaxmp.mixed_precision(optax.sgd(0.1), policy).loss_scale == config()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16", "float16"])
def test_float64_params_have_float32_masters(policy: str) -> None:
    """NumPy's default dtype, with x64 on: the first step refused masters in float64."""
    with jax.enable_x64(True):
        tx = jaxmp.mixed_precision(optax.sgd(0.125), policy)
        state = jaxmp.TrainState.create(params={"w": np.ones(3)}, tx=tx)
        state = state.apply_gradients({"w": jnp.ones(3)})
        assert {m.dtype for m in jax.tree.leaves(state.opt_state.master)} <= {jnp.dtype("float32")}
        assert state.params["w"].dtype == jaxmp.get_policy(policy).param_dtype
        np.testing.assert_array_equal(state.params["w"].astype(jnp.float32), np.full(3, 0.875))


@pytest.mark.parametrize("skip", ["auto", "select"])
def test_a_skipped_update_keeps_the_bits_of_complex_params(skip: Any) -> None:
    """Minus zero has a sign in the imaginary part too."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "float32", skip=skip)
    params = {"w": jnp.array([complex(1, -0.0), complex(-0.0, -0.0)], jnp.complex64)}
    grads = {"w": jnp.full(2, jnp.inf, jnp.complex64)}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert tree_bits(optax.apply_updates(params, updates)) == tree_bits(params)


def test_a_copy_of_the_transformation_is_one_of_ours() -> None:
    """`_replace` with its own functions keeps the policy that a train state asks for."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16")
    same = tx._replace(update=tx.update)
    assert (same.policy, same.loss_scale, same.rules) == (tx.policy, tx.loss_scale, tx.rules)
    jaxmp.TrainState.create(params={"w": jnp.ones(2)}, tx=same)


def test_a_loss_scale_of_ones_own() -> None:
    """Any class with `init` and `adjust`, hashable or not."""

    @dataclasses.dataclass
    class Halving:
        factor: float = 0.5

        def init(self) -> Any:
            return jaxmp.StaticLossScale(8.0).init()

        def adjust(self, state: Any, grads_finite: Any) -> Any:
            return state._replace(scale=state.scale * self.factor)

    tx = jaxmp.mixed_precision(optax.sgd(0.1), "float16", loss_scale=Halving())
    for compile in (lambda f: f, jax.jit):
        params = {"w": jnp.ones(2, jnp.float16)}
        _, state = compile(tx.apply_gradients)({"w": jnp.ones(2)}, tx.init(params), params)
        assert float(state.loss_scale.scale) == 4.0
