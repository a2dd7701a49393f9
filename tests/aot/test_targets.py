"""What the targets let a compiler do with float8: without them no other test of it would mean much.

A GPU's products are compiled to calls of cuBLAS here, since those name the dtype they multiply in.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmp._tools.planning.absent_devices import gpu_target
from tests.aot.conftest import Compiler, compiler_for_gpus
from tests.support.compiled import WITHOUT_TRITON, cycles, float8_calls

pytestmark = pytest.mark.jax

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def operands(left: Any = E4M3, right: Any = E4M3) -> list[jax.ShapeDtypeStruct]:
    shapes = {(512, 1024): left, (2048, 1024): right}
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes.items()]


def product(x: Any, w: Any) -> Any:
    """Contracts the last axes, to bfloat16."""
    contracted = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, w, contracted, preferred_element_type=jnp.bfloat16)


def compiled(compiler: Compiler, fun: Any, *args: Any) -> str:
    return compiler(fun, *args, options=WITHOUT_TRITON).as_text()


def converts(text: str) -> int:
    return text.count(" convert(")


@pytest.mark.parametrize("target", ["gpu", "b200"])
def test_a_float8_product_is_one_call(target: str, request: pytest.FixtureRequest) -> None:
    text = compiled(request.getfixturevalue(target), product, *operands())
    assert (len(float8_calls(text)), converts(text)) == (1, 0)


@pytest.mark.parametrize("name", ["h100", "b200"])
def test_without_a_cuda_version_it_is_none(name: str) -> None:
    """The control: both operands are copied to 16 bits, and nothing warns."""
    lines = gpu_target(name).splitlines()
    unnamed = "\n".join(line for line in lines if "_version:" not in line)
    assert len(lines) - len(unnamed.splitlines()) == 3
    text = compiled(compiler_for_gpus(unnamed), product, *operands())
    assert (len(float8_calls(text)), converts(text)) == (0, 2)


def test_a_tpu_7x_multiplies_float8_faster(tpu7x: Compiler, tpu: Compiler) -> None:
    """By its compiler's estimate, twice as fast as bfloat16; a v5e gains nothing.

    The programs themselves do not tell: both have one convolution of float8 operands, and what it
    does with them is below what they show.
    """

    def estimated(compiler: Compiler, dtype: Any) -> int:
        text = compiler(product, *[jax.ShapeDtypeStruct((8192, 8192), dtype)] * 2).as_text()
        assert len(re.findall(r" convolution\(", text)) == 1
        assert converts(text) == 0
        return cycles(text)

    gains = [estimated(each, jnp.bfloat16) / estimated(each, E4M3) for each in (tpu7x, tpu)]
    assert gains[0] == pytest.approx(2.2, rel=0.1)
    assert gains[1] == pytest.approx(1.1, rel=0.1)
