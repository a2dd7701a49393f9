"""Gradients of functions of Equinox modules: what is differentiated, and in which precision."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.equinox import filter_grad, filter_value_and_grad
from tests.equinox.models import Net, X, mean_square, net, norm_net, plain_params, with_state
from tests.support.bits import tree_bits

pytestmark = [pytest.mark.jax, pytest.mark.annotations]


def jitted(function: Any, *args: Any, **options: Any) -> Any:
    return eqx.filter_jit(function(*args, **options))


def test_in_float32_they_are_those_of_equinox() -> None:
    model, state = norm_net()
    options = {"has_aux": True, "loss_scale": 2.0**10}
    ours = jitted(filter_value_and_grad, with_state, **options)(model, state, X)
    theirs = jitted(eqx.filter_value_and_grad, with_state, has_aux=True)(model, state, X)
    assert tree_bits(ours) == tree_bits(theirs)
    assert jax.tree.structure(ours[1]) == jax.tree.structure(theirs[1])
    grads, new = jitted(filter_grad, with_state, has_aux=True)(model, state, X)
    assert tree_bits((new, grads)) == tree_bits((theirs[0][1], theirs[1]))


def test_arguments_may_have_any_name() -> None:
    layer = eqx.nn.Linear(8, 1, key=jax.random.key(0))
    grads = filter_grad(lambda model, params: jnp.sum(model(params)))(layer, params=X[0])
    np.testing.assert_array_equal(grads.weight, X[:1])


def test_narrow_params_have_float32_gradients() -> None:
    model = jaxmp.equinox.apply_policy(net(), "bfloat16")
    loss, grads = jitted(filter_value_and_grad, mean_square)(model, X)
    assert {x.dtype.name for x in jax.tree.leaves((loss, grads))} == {"float32"}


def test_integers_keys_and_functions_are_passed_on() -> None:
    class Model(eqx.Module):
        weight: jax.Array
        table: jax.Array
        mask: tuple[bool, bool]
        key: jax.Array
        rate: float
        activation: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            noise = jax.random.normal(self.key, self.table.shape)
            return self.activation(self.weight[self.table] * noise * self.rate * x)

    mask = (True, False)
    model = Model(jnp.ones(3), jnp.array([2, 0]), mask, jax.random.key(3), 0.5, jnp.tanh)
    grads = filter_grad(lambda model: jnp.sum(model(1.0)))(model)
    expected = eqx.filter_grad(lambda model: jnp.sum(model(1.0)))(model)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    np.testing.assert_array_equal(grads.weight, expected.weight)
    assert grads.weight[2] != 0


def test_frozen_parts_are_arguments_of_their_own() -> None:
    trained = eqx.tree_at(lambda m: m.head, jax.tree.map(lambda _: False, net()), replace=True)
    head, rest = eqx.partition(net(), eqx.tree_at(lambda m: m.head, trained, replace=True))

    def loss_fn(head: Net, rest: Net, x: jax.Array) -> jax.Array:
        return mean_square(eqx.combine(head, rest), x)

    grads = jitted(filter_grad, loss_fn, loss_scale=8.0)(head, rest, X)
    assert len(jax.tree.leaves(grads)) == 2
    whole = jitted(filter_grad, mean_square)(net(), X)
    np.testing.assert_array_equal(grads.head.weight, whole.head.weight)


def test_microbatches_and_a_module_beside_the_batch() -> None:
    def loss_fn(model: Net, teacher: Net, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x) - 2 * jax.vmap(teacher)(x)) ** 2)

    teacher = net()
    whole = jitted(filter_value_and_grad, loss_fn)(net(), teacher, X)
    options = {"microbatches": 4, "batch_argnums": 2}
    parts = jitted(filter_value_and_grad, loss_fn, **options)(net(), teacher, X)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_sums_in_float32_and_recomputing(policy: str) -> None:
    model = jaxmp.equinox.apply_policy(net(), policy)
    gradient = functools.partial(jitted, filter_grad, mean_square, loss_scale=2.0**10)
    gradients = gradient(), gradient(reduce_dtype="float32"), gradient(recompute="auto")
    plain, *others = (jax.device_get(plain_params(each(model, X))) for each in gradients)
    for found in others:
        for name, expected in plain.items():
            atol = 2e-2 * np.abs(expected).max()
            np.testing.assert_allclose(found[name], expected, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("loss_fn", "args", "text"),
    [
        (mean_square, (eqx.filter(net(), eqx.is_inexact_array, inverse=True), X), "activation"),
        (mean_square, (None, X), "holds no floating array to differentiate, but no leaf"),
        (lambda model, x: jax.vmap(model)(x), (net(), X), r"float32\[16, 4\]. Take a mean or a"),
        (lambda model, x: (mean_square(model, x), 1), (net(), X), "give has_aux=True"),
    ],
    ids=["the static part first", "nothing", "no scalar", "aux"],
)
def test_errors(loss_fn: Any, args: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        jitted(filter_value_and_grad, loss_fn)(*args)


def test_float16_without_a_scale_warns() -> None:
    model = jaxmp.equinox.apply_policy(net(), "mixed_float16")
    with pytest.warns(UserWarning, match="pass through float16 without a loss scale"):
        jitted(filter_grad, mean_square)(model, X)


@pytest.mark.parametrize("function", [filter_grad, filter_value_and_grad])
def test_unknown_options_are_named_before_the_first_call(function: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        function(mean_square, scale=2.0)
    with pytest.raises(TypeError, match="multiple values for argument 'argnums'"):
        function(mean_square, argnums=1)
    with pytest.raises(ValueError, match="microbatches"):
        function(mean_square, microbatches=0)
