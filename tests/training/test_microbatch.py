"""Gradient accumulation equals the full batch, in float32, without moving sharded data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp

pytestmark = pytest.mark.annotations


def linear(params: Any, batch: Any) -> Any:
    out = batch["x"] @ params["w"]
    return jnp.mean((out - batch["y"]) ** 2), {"seen": batch["x"][:, 0]}


def problem(rows: int) -> tuple[Any, Any]:
    x = np.random.default_rng(0).standard_normal((rows, 4), np.float32)
    w = np.arange(4, dtype=np.float32)
    return jax.device_put(({"w": w}, {"x": x, "y": x.sum(1)}))


def test_every_example_is_seen_once_and_aux_is_stacked() -> None:
    params, batch = problem(12)
    (_, aux), _ = jaxmp.value_and_grad(linear, has_aux=True, microbatches=3)(params, batch)
    assert aux["seen"].shape == (3, 4)
    # Part i holds examples i, i + 3, ...
    np.testing.assert_array_equal(np.ravel(aux["seen"], order="F"), batch["x"][:, 0])


def test_the_function_is_traced_once() -> None:
    traces = []

    def counted(params: Any, batch: Any) -> Any:
        traces.append(1)
        return linear(params, batch)[0]

    params, batch = problem(32)
    jax.jit(jaxmp.value_and_grad(counted, microbatches=8))(params, batch)
    assert len(traces) == 1


def test_accumulates_in_float32() -> None:
    """512 equal bfloat16 gradients: a bfloat16 sum stops at 256 times the first one."""
    total = jnp.bfloat16(0)
    for _ in range(512):
        total += jnp.bfloat16(1)
    assert float(total) == 256.0  # positive control

    def mean(w: Any, x: Any) -> Any:
        return jnp.mean(x) * w

    x = jnp.full((512, 1), 3.0, jnp.bfloat16)
    grad = jaxmp.grad(mean, microbatches=512)(jnp.bfloat16(1.0), x)
    assert float(grad) == 3.0


def test_small_gradients_survive_as_in_the_full_batch() -> None:
    """The weight 1/n is inside the scaled loss, so float16 gradients have full-batch size."""

    def fun(w: Any, x: Any) -> Any:
        return jnp.mean((w * x).astype(jnp.float32))

    w, x, scale = jnp.float16(1.0), np.full(64, 2.0**-6, np.float16), 2.0**21
    full = jax.jit(jaxmp.grad(fun, loss_scale=scale))
    assert float(full(w, x)) == 2.0**-6
    assert np.isinf(full(w, x[:16]))  # positive control
    assert float(jaxmp.grad(fun, loss_scale=scale, microbatches=4)(w, x)) == 2.0**-6


def test_keys_in_the_batch_are_split() -> None:
    def fun(w: Any, batch: Any) -> Any:
        noise = jax.random.normal(batch["key"])
        return jnp.mean(batch["x"]) * w, noise

    batch = {"x": jnp.ones((4, 1)), "key": jax.random.key(7)}
    (_, noise), _ = jaxmp.value_and_grad(fun, has_aux=True, microbatches=4)(jnp.float32(1), batch)
    assert len(set(noise.tolist())) == 4


def test_batch_argnums() -> None:
    def fun(w: Any, x: Any, table: Any, y: Any) -> Any:
        return jnp.mean((x * w + jnp.sum(table) - y) ** 2)

    x = np.arange(6, dtype=np.float32)
    args = (jnp.float32(0.5), x, np.ones(5, np.float32), x * 2)
    want = jax.jit(jaxmp.value_and_grad(fun))(*args)
    for split in ((1, 3), (1, -1)):
        got = jaxmp.value_and_grad(fun, microbatches=3, batch_argnums=split)(*args)
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_sharded_batch_stays_where_it_is(microbatches: int) -> None:
    """No collective but the reduction of loss and gradients. Contiguous parts would move data."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, batch = problem(64)
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    batch, params = jax.device_put(batch, spec), jax.device_put(params, replicated)

    def collectives(fun: Any) -> set[str]:
        text = jax.jit(fun).lower(params, batch).compile().as_text()
        kinds = ("all-gather", "all-to-all", "collective-permute", "all-reduce")
        return {kind for kind in kinds if f" {kind}(" in text}

    def contiguous(params: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: jnp.reshape(x, (microbatches, -1, *x.shape[1:])), batch)
        return jax.lax.map(lambda part: jax.grad(linear, has_aux=True)(params, part)[0], parts)

    ours = collectives(jaxmp.grad(lambda p, b: linear(p, b)[0], microbatches=microbatches))
    assert ours == {"all-reduce"}
    assert collectives(contiguous) - {"all-reduce"}  # positive control


def test_sharded_params_under_an_explicit_mesh() -> None:
    """The float32 sum is sharded like the params; a plain array of zeros would not be."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((8, 4)), jax.sharding.NamedSharding(mesh, spec("d")))
        x = jax.device_put(jnp.ones((16, 8)), jax.sharding.NamedSharding(mesh, spec()))

        def fun(w: Any, x: Any) -> Any:
            return jnp.mean(jnp.dot(x, w, out_sharding=spec()) ** 2)

        loss, grad = jax.jit(jaxmp.value_and_grad(fun, microbatches=2))(w, x)
        assert float(loss) == 64.0
        assert grad.sharding.is_equivalent_to(w.sharding, 2)
        np.testing.assert_array_equal(grad, np.full((8, 4), 4.0))


@pytest.mark.parametrize("sharded", ["params", "batch"])
def test_in_shard_map(sharded: str) -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    w_spec, x_spec = (spec("d"), spec()) if sharded == "params" else (spec(), spec("d"))
    w, x = jnp.ones((16, 4)), jnp.ones((16, 16))
    if sharded == "params":
        x = x[:, :2]

    def local(w: Any, x: Any) -> Any:
        return jaxmp.grad(lambda w, x: jnp.mean((x @ w) ** 2), microbatches=2)(w, x)

    run = jax.shard_map(local, mesh=mesh, in_specs=(w_spec, x_spec), out_specs=w_spec)
    grad = jax.jit(run)(w, x)
    # Gradients of replicated params are summed over the devices, in each of which x is a mean.
    want = np.full((16, 4), 1.0) if sharded == "params" else np.full((16, 4), 8 * 8.0)
    np.testing.assert_allclose(grad, want)


def test_leaves_of_one_name_are_two() -> None:
    """`"a/b"` beside `{"a": {"b": ...}}`: one hid that the other has half the examples."""
    batch = {"a/b": jnp.arange(8.0), "a": {"b": jnp.arange(4.0)}}
    with pytest.raises(ValueError, match="batch leaves '1/a/b' and '1/a/b' have 4 and 8 examples"):
        jaxmp.value_and_grad(lambda w, b: w * jnp.mean(b["a/b"]), microbatches=2)(1.0, batch)
