"""Masters and moments in fewer bytes, as GPU and TPU compilers make the step of them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from jaxmp._training import compact_forms
from tests.aot.conftest import Compiler

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

# Beyond a TPU's vector memory in all, where copies would cost nothing, and as many as a model has:
# of 16 equal arrays the GPU compiler merged updates into one kernel, of 4 it did not.
COUNT, N = 16, 4096
SIZE = COUNT * N * N
BYTES = {"float32": 6, "remainder": 4, "remainder8": 3, "kahan": 4, "stochastic": 2}
MOMENTS = {"float32": 8, "bfloat16": 4, "int8": 2 + 8 / 1024}


def step_of(compiler: Compiler, master: Any, moments: Any, count: int = COUNT) -> Any:
    """A donated AdamW step with bfloat16 gradients."""
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "bfloat16", master=master, moments=moments)
    params = {f"w{i}": jax.ShapeDtypeStruct((N, N), jnp.bfloat16) for i in range(count)}

    def step(params: Any, state: Any, grads: Any) -> Any:
        return tx.apply_gradients(grads, state, params)

    return compiler(step, params, jax.eval_shape(tx.init, params), params, donate=(0, 1))


# A step with int8 moments takes a TPU compiler a minute. Before each change narrow moments run with
# two kinds of masters, and others have their turns.
BEFORE_EACH_CHANGE = {("stochastic", "bfloat16"), ("remainder", "bfloat16")}
PAIRS = [
    pytest.param(
        master,
        moments,
        marks=[]
        if moments == "float32" or (master, moments) in BEFORE_EACH_CHANGE
        else pytest.mark.exhaustive,
    )
    for master in BYTES
    for moments in MOMENTS
]


@pytest.mark.parametrize(("master", "moments"), PAIRS)
def test_bytes_of_a_step(compiler: Compiler, master: str, moments: str) -> None:
    """The state is what its formula says, is written in place, and no array comes beside it."""
    stats = step_of(compiler, master, moments).memory_analysis()
    expected = BYTES[master] + MOMENTS[moments]
    assert stats.argument_size_in_bytes / SIZE == pytest.approx(expected + 2, rel=0.002)
    assert stats.alias_size_in_bytes / SIZE == pytest.approx(expected, rel=0.002)
    # On a TPU two narrow results of so long a program want a float32 array of one param. A GPU
    # holds both moments of one param in float32 before it reduces them.
    wide = 4 if compiler.platform == "tpu" else 8 * (moments == "int8")
    allowance = wide / COUNT
    assert stats.temp_size_in_bytes / SIZE < 0.3 + allowance


@pytest.mark.parametrize(
    "master", ["stochastic", pytest.param("remainder", marks=pytest.mark.exhaustive)]
)
def test_codes_are_written_after_params(tpu: Compiler, master: str) -> None:
    """Of 48 arrays the TPU's compiler made new codes first, beside the old ones: 2.2 bytes each."""
    count = 48
    stats = step_of(tpu, master, "int8", count).memory_analysis()
    assert stats.temp_size_in_bytes / (count * N * N) < 0.3


def kernels_that_reduce_and_write(compiled: Any) -> int:
    """Kernels that reduce the blocks of whole arrays and have other whole arrays as results."""
    fusions = re.findall(r"^ +(?:ROOT )?%\S+ = \((.*?)\) fusion\(", compiled.as_text(), re.M)
    blocks = f"s32[{N // 8},8,{N // 128}]"
    return sum(blocks in results and f"[{N},{N}]" in results for results in fusions)


def test_blocks_are_reduced_in_kernels_of_their_own(
    gpu: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200 a kernel that did both took 3.5 times what its bytes take."""
    assert not kernels_that_reduce_and_write(step_of(gpu, "remainder", "int8", count=1))
    # Positive control: so XLA does it by itself.
    monkeypatch.setattr(compact_forms, "_store_on_gpus", lambda x: x)
    jax.clear_caches()  # of the trace with it
    text = step_of(gpu, "remainder", "int8", count=1)
    jax.clear_caches()  # and of this one
    assert kernels_that_reduce_and_write(text)


# What is left of `x - widen(round(x))` once a compiler has deleted the rounding.
NOTHING = re.compile(r"= f32\[[^ ]* subtract\((%\S+), \1\)")


def test_kahan_survives(compiler: Compiler) -> None:
    text = step_of(compiler, "kahan", "float32", count=1).as_text()
    assert not NOTHING.search(text)
    rounded = re.findall(rf"(%\S+) = f32\[{N},{N}\]\S* reduce-precision\(", text)
    assert any(re.search(rf"subtract\(%\S+, {re.escape(name)}\)", text) for name in rounded)


def test_the_gpu_drops_a_plain_compensation(gpu: Compiler) -> None:
    """Positive control: of a rounding that is a cast there and back, nothing is left."""

    def step(param: Any, error: Any, grad: Any) -> Any:
        value = param.astype(jnp.float32) + error.astype(jnp.float32) - 0.1 * grad
        rounded = value.astype(jnp.bfloat16)
        return rounded, (value - rounded.astype(jnp.float32)).astype(jnp.bfloat16)

    param = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    text = gpu(step, param, param, jax.ShapeDtypeStruct((N, N), jnp.float32)).as_text()
    assert NOTHING.search(text)


def test_remainders_survive(compiler: Compiler) -> None:
    """The rest is a difference of words: integers, which no compiler rounds."""
    text = step_of(compiler, "remainder", "float32", count=1).as_text()
    assert re.search(rf"= s32\[{N},{N}\]\S* subtract\(", text)
    assert re.search(rf"= s16\[{N},{N}\]\S* convert\(", text)


@pytest.mark.parametrize(("master", "moments"), [("stochastic", "float32"), ("float32", "int8")])
def test_random_rounding_survives(compiler: Compiler, master: str, moments: str) -> None:
    """The factors of the hash, and the sum that carries."""
    text = step_of(compiler, master, moments, count=1).as_text()
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        assert str(factor) in text
    plain = step_of(compiler, "float32", "float32", count=1).as_text()
    assert str(0x85EBCA6B) not in plain  # positive control
