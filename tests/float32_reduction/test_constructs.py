"""Every way in which a param can be used: its gradient is summed in float32, the loss unchanged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from tests.support.bits import tree_bits
from tests.support.reduction_checks import (
    compiled,
    narrow_sums,
    relative_error,
    representable,
    split_over,
)
from tests.support.reduction_models import (
    AT_USE,
    AUTOCAST,
    BEFORE,
    MODELS,
    Author,
    batch,
    cases,
    params_of,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

HALF = Author("at use", jnp.float16)
# Those that run with the quick tests; each of the others is like one of them.
QUICK = {
    AT_USE: {
        *("matmul", "conv grouped and dilated", "embedding", "experts by index", "ragged"),
        *("dense", "bias of rank two", "tokens by choice", "weight norm", "scan returns params"),
        *("scan", "scan remat", "cond unlike", "per example branch", "gradient penalty"),
        *("custom jvp", "custom jvp of a product", "custom vjp", "custom vjp in parts"),
        *("custom vjp of a lookup", "orthogonalized"),
    },
    AUTOCAST: {"dense", "tied embeddings", "scan remat", "lora"},
    BEFORE: {"dense", "scan carries", "rms norm"},
    HALF: {"conv", "scan remat"},
}
COMPILED = {"matmul", "conv", "embedding", "rms norm", "dense", "scan", "scan remat"}
COMPILED |= {"custom jvp", "custom jvp of a product", "custom vjp", "custom vjp in parts"}
COMPILED |= {"custom vjp of a lookup", "orthogonalized"}

# Programs whose plain form sums nothing in 16 bits, or which sum narrowly for a reason.
NO_CONTROL = {"float32 result", "in another dtype", "per example branch"}
SUMMED = {"scan returns params", "cond unlike", "lora", "weight norm", "attention"}
# What autocast computes from params in 16 bits, before it multiplies.
MADE_OF_PARAMS = {
    *("lora", "lora in float32", "lora of frozen weights", "weight norm", "weight standardisation"),
    *("scan remat", "embedding", "squared"),
}


ALL = set(MODELS)
# Autocast leaves them in float32, and says so.
LEFT_ALONE = {"custom vjp", "custom vjp in parts"}


@cases(QUICK, {AT_USE: ALL, AUTOCAST: ALL - LEFT_ALONE})
def test_loss_and_gradients(author: Author, name: str) -> None:
    model = MODELS[name]
    params, examples, loss_fn = params_of(model), batch(), author.loss(model.loss)
    ours = jaxmp.value_and_grad(loss_fn, reduce_dtype="float32", loss_scale=1.0)
    loss, grads = compiled(ours)(params, examples)

    def others(params: Any, examples: Any) -> Any:
        exact = jax.grad(lambda p: model.loss(p, examples, lambda w: w))(params)
        return jax.value_and_grad(loss_fn)(params, examples), exact

    (plain_loss, plain), exact = compiled(others)(params, examples)
    np.testing.assert_array_equal(tree_bits(loss), tree_bits(plain_loss.astype(jnp.float32)))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    room = 1.25 if author is HALF else 1.1
    assert relative_error(grads, exact) <= room * relative_error(plain, exact)
    if name not in ROUNDED:
        for key, grad in grads.items():
            if grad.size > 8 and np.any(grad):
                assert representable(grad, author.dtype) < 0.6, key


# Gradients that are rounded after they were summed: what 16-bit products of params get.
ROUNDED = {"block of params", "softplus of params"}


# The others are looked at when their params are split, in test_fsdp.py.
@cases({AT_USE: COMPILED, AUTOCAST: {"dense"}}, {AT_USE: SUMMED, AUTOCAST: MADE_OF_PARAMS})
def test_sums_over_devices(author: Author, name: str) -> None:
    model = MODELS[name]
    loss_fn = author.loss(model.loss)
    params, examples = split_over(params_of(model)), split_over(batch(), "data")
    ours = jaxmp.value_and_grad(loss_fn, reduce_dtype="float32")
    assert narrow_sums(jaxmp.sharding.collectives(ours, params, examples)) == 0
    if author in (AT_USE, HALF) and name not in NO_CONTROL:
        plain = jaxmp.sharding.collectives(jax.value_and_grad(loss_fn), params, examples)
        assert narrow_sums(plain) > 0


# Of which there are layers, so that a copy of the params is more than an activation is.
LOOPS = ["scan remat", pytest.param("scan", marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    "author", [AT_USE, pytest.param(AUTOCAST, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", LOOPS)
def test_keeps_no_copy_of_the_params(author: Author, name: str) -> None:
    model = MODELS[name]
    params, examples, loss_fn = params_of(model), batch(), author.loss(model.loss)
    plain, ours = (
        jax.jit(grad).lower(params, examples).compile().memory_analysis().temp_size_in_bytes
        for grad in (jax.grad(loss_fn), jaxmp.grad(loss_fn, reduce_dtype="float32"))
    )
    # One float32 gradient of a layer is there; not the layers, neither in 16 bits nor in 32.
    assert ours - plain < sum(2 * x.size for x in jax.tree.leaves(params))
