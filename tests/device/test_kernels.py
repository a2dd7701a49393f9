"""The kernels that run are those of the compiled program that jaxmp reads: by the profiler."""

import collections
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from benchmarks.lab.kernels import Schedule
from benchmarks.lab.operations import hlo_product_flops, products_of
from jaxmp._tools.hlo.parser import Instruction, Module
from tests.support.compiled import WITHOUT_TRITON
from tests.support.devices import needs_gpu
from tests.support.profiles import Profile, profile

pytestmark = [pytest.mark.device, pytest.mark.jax]

LAYERS, WIDTH, ROWS = 3, 512, 256
# Compiler options of a GPU with which each kernel is launched by itself, so that a profile names
# its instruction. In a graph of many kernels it might not.
WITHOUT_GRAPHS = {"xla_gpu_graph_min_graph_size": 100_000}
# Names of NVIDIA's kernels that multiply float32 operands as TF32 or as bfloat16 have one of these.
ROUNDED = ("tf32", "bf16", "s1688")


def loss(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def arrays() -> Any:
    random = np.random.default_rng(0)
    layers = random.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    head, x = random.normal(size=(WIDTH, WIDTH)), random.normal(size=(ROWS, WIDTH))
    return jax.tree.map(jnp.float32, ({"layers": layers, "head": head}, x))


def program_of(fun: Callable[..., Any], args: Any, **options: Any) -> Any:
    return jax.jit(fun).lower(*args).compile(WITHOUT_GRAPHS | options)


def products_and_times(text: str) -> dict[frozenset[str], int]:
    """What multiplies: the names of an instruction, and of those fused in it, and how often."""
    module = Module(text)
    return {
        names_of(module, kernel.instruction): kernel.times
        for kernel in Schedule(module, lambda _: 0).kernels()
        if products_of(module, kernel.instruction)
    }


def names_of(module: Module, instruction: Instruction) -> frozenset[str]:
    """A profile may name a fusion, or the call of a library that is all that runs of it."""
    fused = (module.computations[name].instructions for name in instruction.called)
    return frozenset({instruction.name}.union(*fused))


def profile_of(program: Any, args: Any, folder: pathlib.Path) -> Profile:
    kernels = profile(functools.partial(program, *args), folder)
    if not kernels:
        pytest.skip("the profiler shows no instruction on this machine: it may need a permission")
    return kernels


def kernels_of(kernels: Profile, names: frozenset[str]) -> collections.Counter[str]:
    return sum((kernels[name] for name in names if name in kernels), collections.Counter())


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_products_of_the_program_are_those_that_run(policy: str, tmp_path: pathlib.Path) -> None:
    """Each product that jaxmp reads in the text runs, in each turn of its loop, and all are low."""
    args, low = arrays(), policy.removeprefix("mixed_")
    fun = jax.value_and_grad(jaxmp.autocast(loss, policy))
    program = program_of(fun, args)
    report, flops = jaxmp.audit(fun, *args), hlo_product_flops(program.as_text())
    assert report.share(low) == 1
    assert sum(flops.values()) == report.flops
    if jax.default_backend() == "gpu":  # a CPU widens what it multiplies
        assert set(flops) == {low}
    products = products_and_times(program.as_text())
    assert sum(products.values()) >= 3 * LAYERS
    kernels = profile_of(program, args, tmp_path)
    for names, times in products.items():
        assert kernels_of(kernels, names).total() >= times, sorted(names)


def test_float32_kernels_are_float32(tmp_path: pathlib.Path) -> None:
    """No product of policy float32 runs a kernel of TF32.

    Positive control: without jaxmp other kernels run, which the profile tells apart.
    """
    needs_gpu("its kernels have names", capability=8.0)
    args = arrays()

    def kernels(fun: Callable[..., Any], folder: str) -> set[str]:
        program = program_of(fun, args, **WITHOUT_TRITON)
        seen = profile_of(program, args, tmp_path / folder)
        products = products_and_times(program.as_text())
        return {name for names in products for name in kernels_of(seen, names)}

    exact = kernels(jaxmp.autocast(loss, "float32"), "exact")
    assert exact
    assert [name for name in exact if any(word in name.lower() for word in ROUNDED)] == []
    with jax.default_matmul_precision("default"):
        plain = kernels(loss, "plain")
    assert plain - exact
    assert exact - plain
