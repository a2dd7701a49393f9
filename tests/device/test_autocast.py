"""Gradients under autocast and recompute: against float32, and against the same program on a CPU.

Sums in bfloat16 are wrong with the CPU compiler of jaxlib 0.11.2. So what is compared with a CPU is
float16, and what is said of bfloat16 is skipped on such a CPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.compiled import WITHOUT_TRITON
from tests.support.devices import needs_bfloat16, on_cpu
from tests.support.float8_references import error

pytestmark = [pytest.mark.device, pytest.mark.jax]

LAYERS, WIDTH, HEADS, TOKENS = 3, 64, 4, 32
# How far two devices, or two orders of the same sums, are apart; a tenth of what TF32 loses.
FLOAT32 = 5e-5


def norm(x: Any) -> Any:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def transformer(params: Any, x: Any) -> Any:
    """Pre-norm blocks in a scan: causal attention, and a layer of four times the width."""

    def block(x: Any, w: Any) -> Any:
        qkv = (norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = (qkv[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
        mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        heads = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + heads.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    x, _ = lax.scan(block, x, params["blocks"])
    return -jnp.sum(jax.nn.log_softmax(norm(x) @ params["head"])[..., 0])


def convnet(params: Any, x: Any) -> Any:
    for name in ("first", "second"):
        x = lax.conv_general_dilated(
            x, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.silu(norm(x))  # smooth: where rounding flips the sign of a kink, errors jump
    return -jnp.sum(jax.nn.log_softmax(jnp.mean(x, (1, 2)) @ params["head"])[..., 0])


@functools.cache
def arrays(name: str) -> Any:
    """Params and an input."""
    random = np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        return (random.normal(size=shape) / np.prod(shape[-4:-1]) ** 0.5).astype(np.float32)

    if name == "convnet":
        params: Any = {"first": weights(3, 3, 16, 32), "second": weights(3, 3, 32, 64)}
        params["head"] = weights(64, 32)
        return params, random.normal(size=(4, 16, 16, 16)).astype(np.float32)
    shapes = {"qkv": 3 * WIDTH, "out": WIDTH, "up": 4 * WIDTH}
    blocks = {k: np.stack([weights(WIDTH, n) for _ in range(LAYERS)]) for k, n in shapes.items()}
    blocks["down"] = np.stack([weights(4 * WIDTH, WIDTH) for _ in range(LAYERS)])
    params = {"blocks": blocks, "head": weights(WIDTH, 128)}
    return params, random.normal(size=(4, TOKENS, WIDTH)).astype(np.float32)


MODELS = {"transformer": transformer, "convnet": convnet}
each_model = pytest.mark.parametrize("name", MODELS)


@functools.cache
def gradients(
    name: str, policy: str, *, cpu: bool = False, mode: Any = "never", outside: bool = False
) -> Any:
    """Loss and gradients in NumPy, of a compiled program on one device.

    On a GPU of cuBLAS alone: to try out Triton's kernels for these 20 products takes minutes.
    """
    fun: Callable[..., Any] = MODELS[name]
    fast = (
        jaxmp.recompute(jaxmp.autocast(fun, policy), mode)
        if outside
        else jaxmp.autocast(jaxmp.recompute(fun, mode), policy)
    )
    args = on_cpu(arrays(name)) if cpu else arrays(name)
    options = {"xla_backend_optimization_level": 0} if cpu else WITHOUT_TRITON
    program = jax.jit(jax.value_and_grad(fast), compiler_options=options)
    return jax.device_get(program(*args))


def apart(got: Any, want: Any) -> float:
    """The largest relative error of an array of a tree, by norms."""
    return max(map(error, jax.tree.leaves(got), jax.tree.leaves(want)))


@each_model
def test_float32_gradients(name: str) -> None:
    """The whole model under policy float32 gives what the CPU gives; in TF32 it would not."""
    assert apart(gradients(name, "float32"), gradients(name, "float32", cpu=True)) < FLOAT32


@each_model
def test_float16_loses_no_more_than_on_a_cpu(name: str) -> None:
    """The error against float32 is that of the roundings autocast makes, and of no others.

    A device may round less, where it fuses. Three bits lost would be eight times the error.
    """
    exact = gradients(name, "float32", cpu=True)
    here = apart(gradients(name, "mixed_float16"), exact)
    there = apart(gradients(name, "mixed_float16", cpu=True), exact)
    assert 2.0**-14 < there < 2.0**-8
    assert there / 4 < here < 3 * there


@each_model
def test_bfloat16_loses_three_bits_more(name: str) -> None:
    """Eight times the error of float16, about: both errors are those of the dtype."""
    needs_bfloat16()
    exact = gradients(name, "float32", cpu=True)
    half, brain = (apart(gradients(name, f"mixed_{d}"), exact) for d in ("float16", "bfloat16"))
    assert 3 < brain / half < 20


@pytest.mark.parametrize(
    ("mode", "policy", "outside"),
    [
        ("auto", "float32", False),
        ("auto", "mixed_float16", True),
        ("always", "mixed_float16", False),
    ],
)
def test_recompute_changes_no_number(mode: Any, policy: str, outside: bool) -> None:
    """What is computed again is what was computed before, in autocast and around it.

    Compilers fuse the two programs in other ways: sums have another order, and an activation of 16
    bits may be read before it is rounded in one of them.
    """
    want = gradients("transformer", policy)
    rounding = apart(want, gradients("transformer", "float32"))
    within = FLOAT32 if policy == "float32" else 2 * rounding
    got = gradients("transformer", policy, mode=mode, outside=outside)
    assert error(got[0], want[0]) < within
    assert apart(got, want) < within
