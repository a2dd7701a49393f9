"""What jaxmp calls float32 against NumPy float64, at sizes for which tensor cores are used."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.compiled import WITHOUT_TRITON
from tests.support.devices import needs_gpu
from tests.support.float8_references import error

pytestmark = [pytest.mark.device, pytest.mark.jax]

# Float32 sums of 1,024 products are within this. For convolutions cuDNN has algorithms of fewer
# multiplications, such as Winograd's, that are up to ten times further away. TF32 is beyond both.
FLOAT32 = {"product": 2e-6, "convolution": 2e-5}
TF32 = 1e-4


def matrices() -> Any:
    """Operands and a cotangent, and the product with both gradients in float64."""
    random = np.random.default_rng(0)
    shapes = (512, 1024), (1024, 512), (512, 512)
    x, w, ct = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    wide = [a.astype(np.float64) for a in (x, w, ct)]
    return (x, w, ct), (wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2])


def images() -> Any:
    """The same for a convolution of 3 x 3, padded so that the result has the image's size."""
    random = np.random.default_rng(0)
    shapes = (8, 16, 16, 64), (3, 3, 64, 128), (8, 16, 16, 128)
    x, w, ct = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    wide, kernel, out = (a.astype(np.float64) for a in (x, w, ct))
    padded = np.pad(wide, ((0, 0), (1, 1), (1, 1), (0, 0)))
    y, dx, dw = np.zeros(out.shape), np.zeros(padded.shape), np.zeros(kernel.shape)
    for i, j in np.ndindex(3, 3):
        part = (slice(None), slice(i, i + 16), slice(j, j + 16))
        y += padded[part] @ kernel[i, j]
        dx[part] += out @ kernel[i, j].T
        dw[i, j] = np.einsum("bhwi,bhwo->io", padded[part], out, optimize=True)
    return (x, w, ct), (y, dx[:, 1:-1, 1:-1], dw)


def product(x: Any, w: Any) -> Any:
    return x @ w


def convolution(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "product": (product, matrices),
    "convolution": (convolution, images),
}
WAYS: dict[str, Callable[..., Any]] = {
    "policy float32": lambda f: jaxmp.autocast(f, "float32"),
    "full_precision in autocast": lambda f: jaxmp.autocast(
        jaxmp.full_precision(f), "mixed_bfloat16"
    ),
}


def errors(name: str, transform: Callable[..., Any], **options: Any) -> list[float]:
    """How far result and gradients of a case are from float64, compiled with these options."""
    fun, arrays = CASES[name]
    (x, w, ct), want = arrays()

    def both(x: Any, w: Any, ct: Any) -> Any:
        y, pull = jax.vjp(transform(fun), x, w)
        return y, *pull(ct)

    got = jax.jit(both, compiler_options=options)(x, w, ct)
    return [error(a, b) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize(
    ("way", "name", "options"),
    [
        ("policy float32", "product", {}),
        ("full_precision in autocast", "product", WITHOUT_TRITON),
        ("policy float32", "convolution", {}),
    ],
)
def test_float32_is_float32(way: str, name: str, options: Any) -> None:
    """Forward and backward: neither TF32 nor sums of bfloat16 products, whichever kernels run."""
    assert max(errors(name, WAYS[way], **options)) < FLOAT32[name]


@pytest.mark.parametrize("name", CASES)
def test_what_asks_for_nothing_is_not(name: str) -> None:
    """Positive control: the same program without jaxmp multiplies TF32 roundings on this GPU."""
    needs_gpu("TF32 is a format of GPUs", capability=8.0)
    with jax.default_matmul_precision("default"):
        plain = errors(name, lambda fun: fun, **WITHOUT_TRITON)
    if name == "convolution" and max(plain) < FLOAT32[name]:
        pytest.skip("cuDNN found algorithms in float32 to be faster than those in TF32")
    assert max(plain) > TF32


def test_the_bound_sees_16_bits() -> None:
    """Positive control for any device: the product under mixed_float16."""
    assert min(errors("product", lambda fun: jaxmp.autocast(fun, "mixed_float16"))) > TF32


def test_sums_of_16_bit_products_are_float32() -> None:
    """A product of bfloat16 operands with a float32 result has the error of float32 sums.

    Autocast relies on it for gradients of weights. Sums in 16 bits would be off by 1e-3 and more.
    """
    (x, w, _), _ = matrices()
    low = [jnp.asarray(a).astype(jnp.bfloat16) for a in (x, w)]
    want = np.asarray(low[0], np.float64) @ np.asarray(low[1], np.float64)
    got = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32))(*low)
    # Tensor cores cut off what they add, and do not round it.
    assert error(got, want) < 3e-5
