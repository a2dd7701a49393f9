"""A step that is taken or skipped: every bit, every transformation, in place and as sharded.

"loop" is what `skip="cond"` is on a GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp._training.skipping import at_most_once, step_if
from tests.support.bits import tree_bits

pytestmark = pytest.mark.annotations

NO, YES = jnp.array(False), jnp.array(True)
SKIPS = ["auto", "cond", "select", "loop"]


def run(skip: Any, taken: Any, step: Any, before: Any) -> Any:
    if skip == "loop":
        return at_most_once(taken, step, before)
    return step_if(taken, step, before, skip)


def momentum(state: Any, grads: Any) -> Any:
    """A heavy ball that counts its steps."""
    velocity = jax.tree.map(lambda v, g: 0.5 * v + g, state["velocity"], grads)
    params = jax.tree.map(lambda p, v: p - v, state["params"], velocity)
    return state | {"params": params, "velocity": velocity, "count": state["count"] + 1}


def start(size: int = 4) -> Any:
    return {
        "params": jax.device_put(np.arange(size, dtype=np.float32)),
        "velocity": jax.device_put(np.ones(size, np.float32)),
        "count": jax.device_put(np.int32(3)),
        "key": jax.random.key(7),
        "empty": None,
    }


@pytest.mark.parametrize("skip", [*SKIPS, "none"])
def test_a_taken_step(skip: Any) -> None:
    # As an argument: where it is known, Python decides, and nothing is skipped on the device.
    step = jax.jit(lambda taken, s, g: run(skip, taken, lambda s: momentum(s, g), s))
    after = step(YES, start(), 2 * jnp.ones(4))
    np.testing.assert_array_equal(after["velocity"], np.full(4, 2.5))
    np.testing.assert_array_equal(after["params"], np.arange(4.0) - 2.5)
    assert int(after["count"]) == 4
    assert after["key"] == jax.random.key(7)


@pytest.mark.device
@pytest.mark.parametrize("skip", SKIPS)
def test_a_skipped_step_keeps_every_bit(skip: Any) -> None:
    """Also those of a negative zero, of a NaN with a payload, and of a key."""
    odd = np.array([-0.0, np.nan, np.inf, 1e-45], np.float32)
    odd.view(np.uint32)[1] |= 0x1234
    before = start() | {"params": jax.device_put(odd)}
    step = jax.jit(lambda taken, s, g: run(skip, taken, lambda s: momentum(s, g), s))
    after = step(NO, before, jnp.full(4, jnp.nan))
    assert tree_bits(after) == tree_bits(before)
    assert tree_bits(momentum(before, jnp.ones(4))) != tree_bits(before)  # positive control


@pytest.mark.parametrize("skip", SKIPS)
def test_what_a_skipped_step_computes(skip: Any) -> None:
    """On a CPU nothing, unless it is asked to choose between two results."""
    seen: list[float] = []

    @jax.jit
    def step(taken: Any, x: Any, grad: Any) -> Any:
        def descend(x: Any) -> Any:
            jax.debug.callback(lambda value: seen.append(float(value)), grad)
            return x - grad

        return run(skip, taken, descend, x)

    assert float(step(NO, 1.0, 3.0)) == 1.0
    jax.effects_barrier()
    assert seen == [3.0] * (skip == "select")
    seen.clear()
    assert float(step(YES, 1.0, 3.0)) == -2.0
    jax.effects_barrier()
    assert seen == [3.0]


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("taken", [YES, NO])
def test_derivatives(skip: Any, taken: Any) -> None:
    """In both modes and of second order, by the state and by what the step closes over."""

    def loss(x: Any, grad: Any) -> Any:
        return run(skip, taken, lambda x: jnp.sin(x) * grad - x * grad**2, x) ** 2

    def want(x: Any, grad: Any) -> Any:
        return jnp.where(taken, jnp.sin(x) * grad - x * grad**2, x) ** 2

    for derive in (jax.jacfwd, jax.hessian, jax.grad):
        got, expected = (jax.jit(derive(f, (0, 1)))(0.5, 2.0) for f in (loss, want))
        assert jax.tree.all(jax.tree.map(np.allclose, got, expected))
    without_jit = jax.grad(loss, (0, 1))(0.5, 2.0)
    assert np.allclose(without_jit, jax.jit(jax.grad(want, (0, 1)))(0.5, 2.0))


@pytest.mark.parametrize("skip", SKIPS)
def test_under_vmap_each_member_skips_alone(skip: Any) -> None:
    def step(taken: Any, x: Any, grad: Any) -> Any:
        return run(skip, taken, lambda x: x - grad, x)

    grads = jnp.array([1.0, jnp.nan, 3.0])
    x = jax.jit(jax.vmap(step))(jnp.isfinite(grads), jnp.zeros(3), grads)
    np.testing.assert_array_equal(x, [-1.0, 0.0, -3.0])
    x = jax.jit(jax.vmap(step, (None, 0, 0)))(YES, jnp.zeros(2), jnp.ones(2))
    np.testing.assert_array_equal(x, [-1.0, -1.0])


@pytest.mark.parametrize("skip", SKIPS)
def test_in_a_scan(skip: Any) -> None:
    def body(x: Any, grad: Any) -> Any:
        return run(skip, jnp.isfinite(grad), lambda x: x - grad, x), None

    grads = jnp.array([1.0, jnp.inf, 2.0])
    assert float(jax.lax.scan(body, jnp.float32(0.0), grads)[0]) == -3.0


@pytest.mark.parametrize("skip", SKIPS)
def test_in_a_shard_map_what_devices_share_stays_shared(skip: Any) -> None:
    """Gradients differ between devices, the loss and what is made of it do not."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def step(x: Any, best: Any, grads: Any) -> Any:
        loss = jax.lax.psum(jnp.sum(grads), "d")

        def descend(state: Any) -> Any:
            return {"x": state["x"] - grads, "best": jnp.minimum(state["best"], loss)}

        return run(skip, jnp.isfinite(loss), descend, {"x": x, "best": best})

    out = {"x": spec("d"), "best": spec()}
    sharded = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(spec("d"), spec(), spec("d")), out_specs=out)
    )
    after = sharded(jnp.zeros(16), jnp.float32(99.0), jnp.ones(16))
    assert float(after["best"]) == 16.0
    np.testing.assert_array_equal(after["x"], np.full(16, -1.0))
    after = sharded(jnp.zeros(16), jnp.float32(99.0), jnp.ones(16).at[3].set(jnp.nan))
    assert float(after["best"]) == 99.0
    np.testing.assert_array_equal(after["x"], np.zeros(16))


@pytest.mark.parametrize("skip", SKIPS)
def test_a_donated_sharded_step_stays_sharded_and_in_place(skip: Any) -> None:
    """`tests/aot` asks the compilers of TPUs and GPUs the same."""
    size = 1 << 16
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)

    def step(state: Any, grads: Any) -> Any:
        finite = jnp.all(jnp.isfinite(grads))
        return run(skip, finite, lambda state: momentum(state, grads), state)

    state = {"params": x, "velocity": x, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    compiled = jax.jit(step, donate_argnums=0).lower(state, x).compile()
    memory = compiled.memory_analysis()
    assert compiled.output_shardings["params"].is_equivalent_to(sharding, 1)
    assert memory.alias_size_in_bytes >= 2 * 4 * size // 8
    # A byte each for the flags of the gradients; the choice, a positive control, keeps floats.
    temporary = memory.temp_size_in_bytes / (size // 8)
    assert temporary > 2 if skip == "select" else temporary < 1.1
