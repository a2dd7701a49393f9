"""Training of Equinox models: steps by hand, train steps, batch statistics, skipped steps."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp._numerics.tree import cast_floating
from tests.equinox.models import X, mean_square, net, norm_net, plain_params, with_state
from tests.support.bits import tree_bits

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]


def error(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((jax.vmap(model)(batch[0]).astype(jnp.float32) - batch[1]) ** 2)


BATCH = X, jnp.asarray(np.sin(np.asarray(X)[:, :4]))


def losses_by_hand(policy: str, steps: int = 40) -> list[float]:
    """A loop as one writes it with Equinox, with three lines changed."""
    model = jaxmp.equinox.apply_policy(net(), policy)
    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jaxmp.equinox.filter_value_and_grad(error, loss_scale=opt_state.loss_scale)(
            model, batch
        )
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(steps):
        model, opt_state, loss = step(model, opt_state, BATCH)
        losses.append(float(loss))
    return losses


def test_a_loop_by_hand_follows_float32() -> None:
    exact = losses_by_hand("float32")
    assert exact[-1] < 0.3 * exact[0]
    for policy, tolerance in {"mixed_bfloat16": 0.05, "mixed_float16": 0.01}.items():
        low = losses_by_hand(policy)
        assert low != exact
        np.testing.assert_allclose(low, exact, rtol=tolerance, atol=1e-3)


def train_state(policy: str, **options: Any) -> tuple[Any, Any]:
    """A train state of a model with batch statistics, and its step."""
    model, statistics = norm_net()
    model = jaxmp.equinox.apply_policy(model, policy)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params: Any, x: jax.Array, statistics: eqx.nn.State) -> Any:
        loss, statistics = with_state(eqx.combine(params, static), statistics, x)
        return loss, {"statistics": statistics}

    tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, **options)
    state = jaxmp.TrainState.create(params=params, tx=tx, statistics=statistics)
    return state, jaxmp.make_train_step(loss_fn, policy, donate=False)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_train_steps_keep_statistics_in_float32(policy: str) -> None:
    state, step = train_state(policy)
    exact, exact_step = train_state("float32")
    for _ in range(3):
        state, metrics = step(state, X)
        exact, exact_metrics = exact_step(exact, X)
    assert step._cache_size() == 1
    np.testing.assert_allclose(metrics["loss"], exact_metrics["loss"], rtol=0.05)
    found = jax.tree.leaves(state.statistics)
    for x, y in zip(found, jax.tree.leaves(exact.statistics), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, atol=0.02)
    assert int(state.step) == 3


def test_an_overflow_changes_nothing() -> None:
    state, step = train_state("mixed_float16")
    state, _ = step(state, X)
    large = np.float32(1e6) * np.asarray(X)  # for float16
    after, metrics = step(state, large)
    assert not bool(metrics["grads_finite"])
    for name in ("params", "statistics", "step"):
        assert tree_bits(getattr(after, name)) == tree_bits(getattr(state, name)), name
    assert tree_bits(after.opt_state.inner) == tree_bits(state.opt_state.inner)
    assert float(after.loss_scale.scale) == float(state.loss_scale.scale) / 2
    # Positive control: without a skip the statistics are infinite.
    model = jaxmp.equinox.apply_policy(norm_net()[0], "mixed_float16")
    _, statistics = eqx.filter_jit(with_state)(model, state.statistics, large)
    assert not bool(jaxmp.numbers.all_finite(statistics))


def test_rules_for_scopes_find_modules() -> None:
    rules = jaxmp.PolicyRules({"head": "float32"}, default="mixed_bfloat16")
    model = jaxmp.equinox.with_scopes(net())
    report = jaxmp.audit(jaxmp.autocast(mean_square, rules), model, X)
    found = {row.path.split("/")[0]: row.operands for row in report.product_lines}
    assert found == {"inner": ("bfloat16", "bfloat16"), "head": ("float32", "float32")}
    params, static = eqx.partition(model, eqx.is_inexact_array)
    parts = jaxmp.diagnostics.sensitivity(
        lambda params, x: mean_square(eqx.combine(params, static), x), params, X
    )
    assert {row.path.split("/")[0] for row in parts.rows} >= {"inner", "head"}


def test_a_loss_in_the_form_of_mpx() -> None:
    """Shardings, a key and a number are arguments of the loss; auxiliary data comes out."""
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("batch"))
    whole = jax.NamedSharding(mesh, jax.P())

    def loss_fn(
        model: Any, batch: Any, split: Any, whole: Any, key: jax.Array, decay: float
    ) -> tuple[jax.Array, Any]:
        model, batch = eqx.filter_shard(model, whole), eqx.filter_shard(batch, split)
        noise = jax.random.normal(key, batch[0].shape) / 100
        predicted = jax.vmap(model)(batch[0] + noise)
        norm = sum(jnp.sum(x**2) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        return jnp.mean((predicted - batch[1]) ** 2) + decay * norm, {"predicted": predicted}

    def run(model: Any, transform: Any, **options: Any) -> Any:
        gradient = eqx.filter_jit(transform(loss_fn, has_aux=True, **options))
        args = eqx.filter_shard(BATCH, split), split, whole, jax.random.key(0), 1e-4
        (loss, aux), grads = gradient(eqx.filter_shard(model, whole), *args)
        assert aux["predicted"].dtype == jnp.float32
        return loss, *plain_params(grads).values()

    exact = run(net(), eqx.filter_value_and_grad)
    for policy in ("mixed_float16", "mixed_bfloat16"):
        model = jaxmp.equinox.apply_policy(net(), policy)
        low = run(model, jaxmp.equinox.filter_value_and_grad, loss_scale=2.0**10)
        assert tree_bits(low) != tree_bits(exact)
        for got, want in zip(low, exact, strict=True):
            np.testing.assert_allclose(got, want, rtol=0.05, atol=0.02 * np.abs(want).max())


def test_sums_over_devices_are_float32() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = jaxmp.equinox.apply_policy(net(), "mixed_bfloat16")
    params, static = eqx.partition(model, eqx.is_inexact_array)
    shardings = jaxmp.sharding.fully_sharded(params, mesh, min_size=1)
    split = jax.device_put(params, shardings)
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    options = {"reduce_dtype": "float32", "fsdp": jaxmp.sharding.FSDP(shardings=shardings)}

    def grads(params: Any, x: jax.Array, **options: Any) -> Any:
        differentiated = jaxmp.equinox.filter_grad(mean_square, **options)
        return differentiated(eqx.combine(params, static), x)

    reduced = jax.jit(lambda params, x: grads(params, x, **options))
    jaxmp.assert_reduced_in(reduced, "float32", split, x, axis="data")
    exact = plain_params(jax.jit(grads)(params, X))
    for name, found in plain_params(reduced(split, x)).items():
        np.testing.assert_allclose(found, exact[name], atol=2e-3)
    # Positive control: casts of the whole model, as mpx makes them.
    rest = jaxmp.equinox.remove_policy(static)
    low = cast_floating(jaxmp.equinox.remove_policy(params), jnp.bfloat16)
    low = jax.device_put(low, jax.NamedSharding(mesh, jax.P()))

    @jax.jit
    def cast(low: Any, x: jax.Array) -> Any:
        return eqx.filter_grad(mean_square)(eqx.combine(low, rest), x.astype(jnp.bfloat16))

    with pytest.raises(jaxmp.AuditError, match="bfloat16"):
        jaxmp.assert_reduced_in(cast, "float32", low, x)
