"""Meshes with explicit axes: the recipe of docs/distributed.md, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from tests.support.reduction_checks import narrow_sums, representable

pytestmark = pytest.mark.jax

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


def loss_fn(params: Any, x: Any, reduced: bool) -> Any:
    if reduced:
        params = jax.tree.map(lambda w: jax.reshard(w, P(reduced={"data"})), params)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    h = jnp.tanh(x.astype(jnp.bfloat16) @ params["up"]) @ params["down"]
    return jnp.mean(h.astype(jnp.float32) ** 2)


def inputs() -> Any:
    random = np.random.default_rng(0)
    shapes = {"up": (16, 8), "down": (8, 4)}
    params = {name: random.normal(size=shape) for name, shape in shapes.items()}
    x = random.normal(size=(64, 16))
    place = [NamedSharding(MESH, spec) for spec in (P(), P("data"))]
    trees = [jax.tree.map(lambda x: x.astype("float32"), tree) for tree in (params, x)]
    return [jax.device_put(tree, sharding) for tree, sharding in zip(trees, place, strict=True)]


@pytest.mark.parametrize("reduced", [True, False])
def test_params_that_are_reduced_before_they_are_cast(reduced: bool) -> None:
    """The gradients of the others are summed in bfloat16, the positive control."""
    grad = jax.grad(lambda params, x: loss_fn(params, x, reduced))
    with jax.set_mesh(MESH):
        report = jaxmp.collectives(grad, *inputs())
        grads = jax.jit(grad)(*inputs())
    assert report.bytes(reducer="add") > 0
    assert (narrow_sums(report) == 0) is reduced
    for each in grads.values():
        assert (representable(each, jnp.bfloat16) < 0.5) is reduced


@pytest.mark.parametrize("loss", [lambda w, x: (x @ w).sum(), lambda w, x: (x * w[:, 0]).sum()])
def test_reduce_dtype_names_the_ways_out(loss: Any) -> None:
    """For every loss, before it is traced; also for those that would do without products."""
    params, x = inputs()
    grad = jaxmp.grad(loss, reduce_dtype="float32")
    says = r"explicit mesh axes \(data\).*AxisType\.Auto,\).*policy.*P\(reduced=\{'data'\}\)"
    with jax.set_mesh(MESH), pytest.raises(NotImplementedError, match=says):
        grad(params["up"], x)


def test_a_train_step_with_reductions_as_they_are() -> None:
    """What the error of the default policy recommends; params that are whole may stay explicit."""
    params, x = inputs()
    policy = "params=float32,compute=bfloat16,output=float32,reduce=bfloat16"

    def step(policy: str) -> Any:
        tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
        state = jaxmp.TrainState.create(params=params, tx=tx)
        train = jaxmp.make_train_step(lambda p, x: loss_fn(p, x, False), policy)
        return train(state, x)[1]["loss"]

    with jax.set_mesh(MESH):
        assert np.isfinite(step(policy))
        with pytest.raises(NotImplementedError, match="reduce=bfloat16 in the policy"):
            step("mixed_bfloat16")
