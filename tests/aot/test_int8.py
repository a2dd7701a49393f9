"""What a compiler for TPUs makes of int8 products: cycles of layers, memory, gathered bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from benchmarks.gpt import GPT
from jaxmp._tools.planning.absent_devices import compile_for
from jaxmp._tools.planning.devices import find_device
from tests.aot.conftest import Compiler
from tests.support.compiled import cycles

pytestmark = pytest.mark.usefixtures("standard_promotion")


def layer(policy: str) -> Any:
    """A product with a weight, forward and backward."""
    product = jaxmp.autocast(lambda x, w: x @ w, policy)

    def both_passes(x: Any, w: Any, g: Any) -> Any:
        y, pull = jax.vjp(product, x, w)
        return y, pull(g.astype(y.dtype))

    return jax.jit(both_passes)


def cycles_of_layer(device: str, sizes: tuple[int, int, int], policy: str) -> int:
    m, k, n = sizes
    shapes = ((m, k), jnp.bfloat16), ((k, n), jnp.float32), ((m, n), jnp.bfloat16)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return cycles(compile_for(find_device(device), layer(policy), args).as_text())


# Cycles of bfloat16 over those of int8, and of int8 with such gradients of weights; in
# docs/float8.md.
SPEEDUPS = {
    ("v5e", (8192, 4096, 4096)): (1.10, 1.09),
    ("v5e", (8192, 8192, 8192)): (1.37, 1.34),
    ("v5e", (16384, 4096, 14336)): (1.35, 1.34),
    ("v6e", (8192, 4096, 4096)): (0.78, 0.94),
    ("v6e", (8192, 8192, 8192)): (1.06, 1.15),
    ("v6e", (16384, 4096, 14336)): (1.01, 1.11),
}


@pytest.mark.slow
@pytest.mark.parametrize(("device", "sizes"), SPEEDUPS)
def test_cycles_of_a_layer(tpu: Compiler, device: str, sizes: tuple[int, int, int]) -> None:
    """By the compiler's estimates; float8 takes more there (control)."""
    usual, float8, *int8 = (
        cycles_of_layer(device, sizes, policy)
        for policy in (
            *("mixed_bfloat16", "mixed_float8", "mixed_int8"),
            "mixed_int8,products=int8:weight_gradient=int8",
        )
    )
    speedups = [usual / count for count in int8]
    assert speedups == pytest.approx(SPEEDUPS[device, sizes], abs=0.02)
    assert min(int8) < float8


@pytest.mark.slow
def test_products_of_a_scanned_checkpointed_model(tpu: Compiler) -> None:
    """A block has four products forward, three of them again, and four backward.

    Gradients of weights are products in bfloat16. Temporaries are at most 1.05 of bfloat16's.
    """
    model = GPT(layers=4, width=512, heads=4, vocab=512, context=256, remat=True)
    tokens = jax.ShapeDtypeStruct((16, model.context + 1), jnp.int32)

    def program(policy: str) -> Any:
        gradient = jaxmp.value_and_grad(jaxmp.autocast(model.loss, policy), reduce_dtype="float32")
        return tpu(gradient, jax.eval_shape(model.init), tokens)

    int8, usual = program("mixed_int8"), program("mixed_bfloat16")
    rows = jaxmp.sharding.collectives(int8).float8_products
    assert {(row.operands, row.result, row.ran) for row in rows} == {
        (("int8", "int8"), "int32", "int8 operands")
    }
    assert sum(row.count for row in rows) == 4 + 3 + 4
    assert not jaxmp.sharding.collectives(usual).float8_products
    sizes = [each.memory_analysis().temp_size_in_bytes for each in (int8, usual)]
    assert sizes[0] <= 1.05 * sizes[1]
