"""Gradients of live nnx modules, and steps that are skipped without a trace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from tests.support.bits import tree_bits

pytestmark = [
    pytest.mark.jax,
    pytest.mark.annotations,
    pytest.mark.usefixtures("standard_promotion"),
]

X = jnp.asarray(np.random.default_rng(1).standard_normal((8, 4), np.float32))


class Net(nnx.Module):
    """Batch statistics, dropout keys and params."""

    def __init__(self, rate: float = 0.0) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.second = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


net = nnx.jit(Net, static_argnames="rate")


def gradients(*args: Any, **options: Any) -> Any:
    return nnx.jit(jaxmp.nnx.value_and_grad(*args, **options))


def loss_fn(model: Net, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x).astype(jnp.float32) - 1.0) ** 2)


def bits_of(*modules: Any) -> Any:
    return [tree_bits(nnx.as_pure(nnx.state(module))) for module in modules]


@pytest.mark.parametrize("function", [jaxmp.nnx.grad, jaxmp.nnx.value_and_grad])
def test_an_unknown_option_is_named(function: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        function(loss_fn, scale=2.0)


def test_loss_gradients_and_state_are_those_of_nnx() -> None:
    ours, theirs = net(), net()
    loss, grads = gradients(loss_fn, loss_scale=2.0**10)(ours, X)
    expected_loss, expected = nnx.jit(nnx.value_and_grad(loss_fn))(theirs, X)
    assert float(loss) == float(expected_loss)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    assert tree_bits(grads) == tree_bits(expected)
    assert bits_of(ours) == bits_of(theirs) != bits_of(net())


def test_narrow_params_have_float32_gradients() -> None:
    model = jaxmp.nnx.apply_policy(net(), "bfloat16")
    grads = gradients(loss_fn)(model, X)[1]
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}


def test_argnums_aux_and_keyword_arguments() -> None:
    first, second = net(), net(rate=0.5)

    def both(a: Net, x: jax.Array, *, b: Net, weight: float) -> Any:
        return loss_fn(a, x) + weight * loss_fn(b, x), {"mean": x.mean()}

    (loss, aux), grads = gradients(both, has_aux=True)(first, X, b=second, weight=2.0)
    assert set(aux) == {"mean"}
    assert set(nnx.to_pure_dict(grads)) == {"first", "norm", "second"}
    grad = nnx.jit(jaxmp.nnx.grad(both, has_aux=True))
    alone, aux_alone = grad(net(), X, b=net(rate=0.5), weight=2.0)
    assert (tree_bits(alone), tree_bits(aux_alone)) == (tree_bits(grads), tree_bits(aux))
    assert bits_of(second) != bits_of(net(rate=0.5))  # its statistics and dropout moved
    (loss_2, grads_2) = gradients(
        lambda a, b, x: loss_fn(a, x) + loss_fn(b, x), argnums=(0, nnx.DiffState(1, nnx.BatchStat))
    )(net(), net(), X)
    assert isinstance(grads_2, tuple)
    assert set(nnx.to_pure_dict(grads_2[1])) == {"norm"}
    assert np.isfinite([float(loss), float(loss_2)]).all()
    with pytest.raises(ValueError, match="argnums contains 3"):
        jaxmp.nnx.value_and_grad(loss_fn, argnums=3)(first, X)


@pytest.mark.programs(110, reason="a live module outside of a jit, too")
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_non_finite_batch_changes_no_variable(bad: float) -> None:
    model, x = net(rate=0.5), np.array(X)
    x[3] = bad
    before = bits_of(model)
    for fun in (gradients(loss_fn), jaxmp.nnx.value_and_grad(loss_fn)):  # without a jit, too
        loss, grads = fun(model, x)
        assert not np.isfinite(loss)
        assert not jaxmp.numbers.all_finite(grads)
        assert bits_of(model) == before
    # Positive control: plain nnx is poisoned for ever.
    nnx.jit(nnx.value_and_grad(loss_fn))(model, x)
    assert not np.isfinite(model.norm.mean[...]).any()


def test_statistics_alone_can_stop_a_step() -> None:
    class Statistic(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.float32(1.0))
            self.largest = nnx.BatchStat(jnp.float16(0.0))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.largest[...] = jnp.max(x).astype(jnp.float16)
            return self.weight * jnp.mean(jnp.tanh(x))

    model = Statistic()
    loss, grads = jaxmp.nnx.value_and_grad(lambda m, x: m(x))(model, X + 1e6)
    assert np.isfinite(loss)
    assert np.isnan(grads["weight"][...])
    assert model.largest[...] == 0.0
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(1.0), "float32"))
    assert not optimizer.update(model, grads)
    assert model.weight[...] == 1.0


def test_microbatches_hand_their_state_on() -> None:
    model, by_hand = net(rate=0.5), net(rate=0.5)
    rngs = nnx.Rngs(3)

    def noisy(model: Net, x: jax.Array, rngs: nnx.Rngs) -> Any:
        return loss_fn(model, x + rngs.normal(x.shape)), x.sum()

    in_parts = gradients(noisy, has_aux=True, microbatches=2, loss_scale=64.0)
    (loss, aux), grads = in_parts(model, X, rngs)
    rngs_by_hand = nnx.Rngs(3)
    whole, x = gradients(noisy, has_aux=True), np.asarray(X)
    evaluations = [whole(by_hand, part, rngs_by_hand) for part in (x[::2], x[1::2])]
    np.testing.assert_allclose(loss, np.mean([float(e[0][0]) for e in evaluations]), rtol=1e-5)
    np.testing.assert_allclose(aux, [e[0][1] for e in evaluations], rtol=1e-5)
    for a, *parts in zip(*map(jax.tree.leaves, (grads, *(e[1] for e in evaluations))), strict=True):
        np.testing.assert_allclose(a, np.mean(parts, 0), rtol=1e-4, atol=1e-6)
    both = (model, rngs), (by_hand, rngs_by_hand)
    states = (jax.tree.leaves(nnx.state(each, nnx.Not(nnx.RngKey))) for each in both)
    for a, b in zip(*states, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_new_variables() -> None:
    class Remembering(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            self.seen = nnx.Intermediate(x)
            return super().__call__(x)

    model = nnx.jit(Remembering)()
    gradients(loss_fn)(model, X)
    assert model.seen[...].shape == X.shape
    with pytest.raises(ValueError, match="adds or removes variables of a module"):
        jaxmp.nnx.value_and_grad(loss_fn, microbatches=2)(nnx.jit(Remembering)(), X)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "O2"])
def test_a_skipped_step_changes_nothing(policy: str, microbatches: int) -> None:
    model = jaxmp.nnx.apply_policy(net(rate=0.2), policy)
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.adam(1e-2), policy))
    traces = []

    @nnx.jit
    def train_step(model: Net, optimizer: Any, x: jax.Array) -> Any:
        traces.append(1)
        loss, grads = jaxmp.nnx.value_and_grad(
            loss_fn, loss_scale=optimizer.loss_scale, microbatches=microbatches
        )(model, x)
        return loss, optimizer.update(model, grads, value=loss)

    assert train_step(model, optimizer, X)[1]
    before = bits_of(model)
    inner = tree_bits(nnx.as_pure(optimizer.opt_state.inner))
    master = tree_bits(nnx.as_pure(optimizer.opt_state.master))
    assert not train_step(model, optimizer, np.asarray(X) * np.float32(1e6))[1]
    assert bits_of(model) == before
    assert tree_bits(nnx.as_pure(optimizer.opt_state.inner)) == inner
    assert tree_bits(nnx.as_pure(optimizer.opt_state.master)) == master
    assert int(optimizer.step[...]) == 1
    assert float(optimizer.loss_scale.scale) == 2.0**15
    assert train_step(model, optimizer, X)[1]
    assert bits_of(model) != before
    assert int(optimizer.step[...]) == 2
    assert len(traces) == 1
    jaxmp.check_progress(optimizer)


def test_the_model_may_be_a_state() -> None:
    """As in Flax: a split model trains as a live one does."""
    model = net()
    params = nnx.state(net(), nnx.Param)
    grads = gradients(loss_fn)(net(), X)[1]
    for each in (model, params):
        tx = jaxmp.mixed_precision(optax.sgd(0.1), "float32")
        assert jaxmp.nnx.Optimizer(each, tx).update(each, grads)
    assert tree_bits(params) == tree_bits(nnx.state(model, nnx.Param))
    assert tree_bits(params) != tree_bits(nnx.state(net(), nnx.Param))


@pytest.mark.parametrize("optimizer", [jaxmp.nnx.Optimizer, nnx.Optimizer])
@pytest.mark.parametrize(
    ("master", "moments"),
    [("remainder", "float32"), ("kahan", "bfloat16"), ("remainder8", "int8"),
     ("stochastic", "int8")],
)  # fmt: skip
@pytest.mark.slow
def test_compact_state(optimizer: Any, master: Any, moments: Any) -> None:
    """As in a functional step; Flax takes apart and puts together what is stored in each."""
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "bfloat16", master=master, moments=moments)
    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    x = jnp.ones((4, 64), jnp.bfloat16)

    def loss_fn(model: nnx.Linear) -> jax.Array:
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    params, before = nnx.as_pure(nnx.state(model)), float(loss_fn(model))
    state = tx.init(params)
    training = optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(lambda model, training, grads: training.update(model, grads))
    for _ in range(4):
        grads = jaxmp.nnx.value_and_grad(loss_fn)(model)[1]
        params, state = jax.jit(tx.apply_gradients)(nnx.as_pure(grads), state, params)
        step(model, training, grads)
    assert tree_bits(nnx.as_pure(training.opt_state.kind)) == tree_bits(state.kind)
    trained = nnx.as_pure(nnx.state(model))
    if optimizer is nnx.Optimizer:  # adds updates, which are differences
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-6), trained, params)
    else:
        assert tree_bits(trained) == tree_bits(params)
        assert tree_bits(nnx.as_pure(training.opt_state)) == tree_bits(state)
    assert float(loss_fn(model)) < before


def test_float16_modules_without_a_scale_are_warned_of() -> None:
    """Forgetting `loss_scale=` makes float16 gradients zero, and nothing else says so."""
    linear = nnx.jit(lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)))()
    model = jaxmp.nnx.apply_policy(linear, "mixed_float16")
    block = nnx.Dict(layer=model)

    def loss(block: Any, x: Any) -> Any:
        return block["layer"](x).astype(jnp.float32).sum()

    with pytest.warns(UserWarning, match="gradients of 'layer' pass through float16 without a los"):
        gradients(loss)(block, np.ones((1, 2), np.float32))
    gradients(loss, loss_scale=1.0)(block, np.ones((1, 2), np.float32))  # said to be meant
