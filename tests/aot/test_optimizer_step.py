"""The optimizer step as GPU and TPU compilers make it."""

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
F16 = {"w": jax.ShapeDtypeStruct((N, N), jnp.float16)}
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


@pytest.mark.parametrize("skip", ["auto", "cond", "select", "none"])
def test_updates_are_made_of_rounded_params(compiler: Compiler, skip: Any) -> None:
    """One rounding makes the new param, the other belongs to `apply_updates`."""
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "bfloat16", skip=skip)
    compiled = compiler(update_step(tx), PARAMS, jax.eval_shape(tx.init, PARAMS), GRADS)
    assert roundings(compiled) >= 2


@pytest.mark.parametrize("skip", ["auto", "none"])
def test_updates_are_made_of_rounded_float16_params(compiler: Compiler, skip: Any) -> None:
    config = jaxmp.StaticLossScale(8.0)
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "float16", loss_scale=config, skip=skip)
    grads = {"w": GRADS["w"]}
    compiled = compiler(update_step(tx), F16, jax.eval_shape(tx.init, F16), grads)
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


def temporaries(compiler: Compiler, policy: str, skip: Any) -> float:
    """Bytes per param of temporaries in a donated step, beside 16 to 18 of state and gradients."""
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy, skip=skip)
    params = jaxmp.get_policy(policy).cast_to_param(PARAMS)

    def step(params: Any, state: Any, grads: Any) -> Any:
        return tx.apply_gradients(grads, state, params)

    state = jax.eval_shape(tx.init, params)
    compiled = compiler(step, params, state, GRADS, donate=(0, 1))
    return compiled.memory_analysis().temp_size_in_bytes / (N * N)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("skip", ["auto", "select", "none"])
def test_a_donated_step_needs_no_second_state(compiler: Compiler, policy: str, skip: Any) -> None:
    assert temporaries(compiler, policy, skip) < 0.5  # one bfloat16 copy of the params would be 2


def test_why_auto_does_not_branch_on_a_gpu(gpu: Compiler) -> None:
    """Positive control: before jax 0.12 the GPU compiler copies the whole state for a branch."""
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 12):
        pytest.skip("newer GPU compilers branch without copies where gradients are arguments")
    assert temporaries(gpu, "bfloat16", "cond") > 8
