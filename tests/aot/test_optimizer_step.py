"""The optimizer step as GPU and TPU compilers make it."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from tests.aot.conftest import Compiler

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

N = 2048
PARAMS = {"w": jax.ShapeDtypeStruct((N, N), jnp.bfloat16), "b": jax.ShapeDtypeStruct((N,), "f4")}
GRADS = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), PARAMS)


def roundings(compiled: Any) -> int:
    """How often an N x N array is rounded to 16 bits, as a cast or in place."""
    text = compiled.as_text()
    casts = re.findall(rf"= b?f16\[{N},{N}\]\S* convert\(", text)
    return len(casts) + len(re.findall(rf"= f32\[{N},{N}\]\S* reduce-precision\(", text))


def update_step(tx: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize(
    ("policy", "skip"),
    [
        *(("bfloat16", skip) for skip in ("auto", "cond", "select", "none")),
        *(("float16", skip) for skip in ("auto", "none")),
    ],
)
def test_updates_are_made_of_rounded_params(compiler: Compiler, policy: str, skip: Any) -> None:
    """One rounding makes the new param, the other belongs to `apply_updates`."""
    config = jaxmp.StaticLossScale(8.0)
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy, loss_scale=config, skip=skip)
    params = jaxmp.get_policy(policy).cast_to_param(PARAMS)
    compiled = compiler(update_step(tx), params, jax.eval_shape(tx.init, params), GRADS)
    assert roundings(compiled) >= 2


def test_the_gpu_drops_a_plain_rounding(gpu: Compiler) -> None:
    """Positive control: the same step written with a pair of casts is rounded once."""

    def step(param: Any, master: Any, grad: Any) -> Any:
        master = master - 0.1 * grad
        rounded = master.astype(jnp.bfloat16).astype(jnp.float32)
        update = rounded - param.astype(jnp.float32)
        return (param + update).astype(jnp.bfloat16), master

    master = jax.ShapeDtypeStruct((N, N), jnp.float32)
    assert roundings(gpu(step, PARAMS["w"], master, master)) == 1


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_masters_are_compared_with_rounded_params(compiler: Compiler, policy: str) -> None:
    """One rounding makes the new param, the other tells whether the old one was set."""
    config = jaxmp.StaticLossScale(8.0)
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy, loss_scale=config)
    params = jaxmp.get_policy(policy).cast_to_param(PARAMS)
    state = jax.eval_shape(tx.init, params)
    compiled = compiler(apply_gradients(tx), params, state, GRADS, donate=(0, 1))
    assert roundings(compiled) >= 2
    # Not even a mask, of one byte for each param.
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * N * N


def test_the_gpu_drops_a_comparison_in_float32(gpu: Compiler) -> None:
    """Positive control: widened for `==`, each master that is not rounded seems to be set."""

    def step(param: Any, master: Any, grad: Any) -> Any:
        wide = param.astype(jnp.float32)
        same = master.astype(jnp.bfloat16).astype(jnp.float32) == wide
        master = jnp.where(same, master, wide) - 0.1 * grad
        return master.astype(jnp.bfloat16), master

    master = jax.ShapeDtypeStruct((N, N), jnp.float32)
    assert roundings(gpu(step, PARAMS["w"], master, master)) == 1


def temporaries(compiler: Compiler, policy: str, skip: Any) -> float:
    """Bytes per param of temporaries in a donated step, beside 16 to 18 of state and gradients."""
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy, skip=skip)
    params = jaxmp.get_policy(policy).cast_to_param(PARAMS)
    state = jax.eval_shape(tx.init, params)
    compiled = compiler(apply_gradients(tx), params, state, GRADS, donate=(0, 1))
    return compiled.memory_analysis().temp_size_in_bytes / (N * N)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("skip", ["auto", "cond", "select", "none"])
def test_a_donated_step_needs_no_second_state(compiler: Compiler, policy: str, skip: Any) -> None:
    assert temporaries(compiler, policy, skip) < 0.5  # one bfloat16 copy of the params would be 2


# What one device holds: beyond a TPU's 128 MiB of vector memory, where copies would cost nothing.
ROWS, COLUMNS = 8192, 8192
PER_DEVICE = ROWS * COLUMNS
STACKS = {1: (16, 2048), 8: (32, 4096)}  # layers and width of as many params, by devices
BEFORE_0_12 = tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 12)


def on_devices(compiler: Compiler, count: int, *trees: Any, axis: int = 0) -> list[Any]:
    """Abstract trees, whose matrices are split along an axis over so many devices."""
    mesh = compiler.mesh((count,), ("data",))

    def place(x: Any) -> Any:
        spec = [None] * axis + ["data"] if x.ndim > 1 else []
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return [jax.tree.map(place, tree) for tree in trees]


def apply_gradients(tx: Any) -> Any:
    return lambda params, state, grads: tx.apply_gradients(grads, state, params)


def plain_cond(tx: Any) -> Any:
    """What one would write by hand around a step that does not skip."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        def take() -> Any:
            return tx.apply_gradients(grads, state, params)

        return jax.lax.cond(jaxmp.numbers.all_finite(grads), take, lambda: (params, state))

    return step


def optimizer_step(
    compiler: Compiler, count: int, policy: str, skip: Any, write: Any = apply_gradients, **jit: Any
) -> Any:
    """A compiled step on so many devices, with a matrix of which each holds ROWS x COLUMNS."""
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy, skip=skip)
    shapes = {"w": (count * ROWS, COLUMNS), "b": (COLUMNS,)}
    grads = {name: jax.ShapeDtypeStruct(shape, "f4") for name, shape in shapes.items()}
    params = jaxmp.get_policy(policy).cast_to_param(grads)
    args = on_devices(compiler, count, params, jax.eval_shape(tx.init, params), grads)
    return compiler.lower(write(tx), *args, **({"donate_argnums": (0, 1)} | jit)).compile()


def train_step(compiler: Compiler, count: int, policy: str, skip: Any) -> Any:
    """A compiled train step whose gradients are temporaries: a scan over checkpointed layers."""
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy, skip=skip)
    layers, width = STACKS[count]
    params = {"w": jax.ShapeDtypeStruct((layers, width, width), "f4")}

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w), None

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params["w"])[0] ** 2)

    state = jax.eval_shape(lambda p: jaxmp.TrainState.create(params=p, tx=tx), params)
    [state] = on_devices(compiler, count, state, axis=1)
    [batch] = on_devices(compiler, count, jax.ShapeDtypeStruct((256, width), "f4"))
    return jaxmp.make_train_step(loss_fn, policy).lower(state, batch).compile()


def memory(compiled: Any) -> tuple[float, float]:
    """Temporaries and donated memory that is written over, in bytes per param of a device."""
    stats = compiled.memory_analysis()
    return stats.temp_size_in_bytes / PER_DEVICE, stats.alias_size_in_bytes / PER_DEVICE


def large(compiled: Any, operations: str) -> int:
    """How many of these operations yield at least half of the params of a device."""
    text = re.sub(r"/\*index=\d+\*/", "", compiled.as_text())
    results = re.findall(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) (?:{operations})\(", text, re.M)
    sizes = []
    for result in results:
        arrays = re.findall(r"\w\[([\d,]*)\]", result)
        size = max(math.prod(int(d) for d in array.split(",") if d) for array in arrays)
        sizes.append(0 if "S(1)" in result else size)  # in or out of a TPU's vector memory
    return sum(2 * size >= PER_DEVICE for size in sizes)


COPIES, GATHERS = "copy|copy-start", "all-gather|all-gather-done"


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(("policy", "state"), [("mixed_bfloat16", 12), ("bfloat16", 14)])
@pytest.mark.parametrize("make", [optimizer_step, train_step])
def test_a_donated_sharded_state_is_written_in_place(
    compiler: Compiler, make: Any, policy: str, state: int, count: int
) -> None:
    """Under `skip="cond"`: no copy, no gather, no second state, and the sharding stays."""
    compiled = make(compiler, count, policy, "cond")
    temporary, aliased = memory(compiled)
    assert aliased > 0.98 * state
    assert (large(compiled, COPIES), large(compiled, GATHERS)) == (0, 0)
    if make is optimizer_step:
        assert temporary < 0.5
    elif compiler.platform == "gpu":
        # Scaled gradients and unscaled ones. A TPU's compiler is lavish where there is room.
        assert temporary < 8.5


@pytest.mark.parametrize("count", [1, 8])
def test_without_donation_a_step_is_copied(compiler: Compiler, count: int) -> None:
    """Positive control: nothing can be written over, so that params and moments are copied."""
    compiled = optimizer_step(compiler, count, "mixed_bfloat16", "cond", donate_argnums=())
    assert large(compiled, COPIES) >= 3
    assert memory(compiled)[1] == 0


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_what_a_plain_cond_costs_on_a_gpu(gpu: Compiler, policy: str) -> None:
    """Positive control: the compiler of jax 0.10 copies the state, or gathers all of it."""
    if not BEFORE_0_12:
        pytest.skip("newer GPU compilers branch in place")
    state = 14 if policy == "bfloat16" else 12
    alone = optimizer_step(gpu, 1, policy, "none", plain_cond)
    assert memory(alone)[0] > 0.98 * state
    assert large(alone, COPIES) >= 3
    sharded = optimizer_step(gpu, 8, policy, "none", plain_cond)
    assert memory(sharded)[1] < 0.1
    assert large(sharded, GATHERS) >= 3


@pytest.mark.parametrize("count", [1, 8])
def test_what_a_choice_costs_on_a_tpu(tpu: Compiler, count: int) -> None:
    """Nothing for float32 params; with masters beside the params, 4 bytes per param."""
    assert memory(optimizer_step(tpu, count, "mixed_bfloat16", "select"))[0] < 0.5
    assert 3.5 < memory(optimizer_step(tpu, count, "bfloat16", "select"))[0] < 4.5
