"""The error of each precision against float64, with a device's roundings emulated on the CPU.

The products of bfloat16 or TF32 numbers are exact in float32, which is what both devices add in.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._numerics.precision import meaning_of, name_of_param
from tests.support.dots import precisions

SIZE = 512


def part(x: Any, mantissa_bits: int) -> Any:
    """A rounding to float32's exponents with fewer bits: 7 for bfloat16, 10 for TF32."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=mantissa_bits)


def parts(x: Any) -> list[Any]:
    """Three bfloat16 numbers whose sum is the float32 number."""
    found = []
    for _ in range(3):
        found.append(part(x, 7))
        x = x - found[-1]
    return found


# Which parts of the two operands are multiplied: the largest pairs first.
_PASSES = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)]


def emulated(device: str, a: Any, b: Any) -> Any:
    """A product as a device multiplies it, by the name that an audit gives it."""
    if device == "float32":
        return a @ b
    if device == "TF32":
        return part(a, 10) @ part(b, 10)
    left, right = parts(a), parts(b)
    passes = _PASSES[: int(device.removeprefix("bf16 x "))]
    return sum(left[i] @ right[j] for i, j in reversed(passes))


def error(device: str) -> float:
    """The largest error, relative to the product of absolute values, against NumPy's float64."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(2))
    exact, size = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b)
    found = np.asarray(emulated(device, jnp.asarray(a), jnp.asarray(b)), np.float64)
    return float(np.max(np.abs(found - exact) / size))


# The table of docs/precision.md. The last two are what sums in float32 round themselves.
ERRORS = {"bf16 x 1": 8e-4, "TF32": 9e-5, "bf16 x 3": 1.5e-6, "bf16 x 6": 3e-7, "float32": 3e-7}
FLOAT32 = 1e-6


@pytest.mark.parametrize("device", ERRORS)
def test_errors(device: str) -> None:
    """Each precision loses what the docs say, and six passes lose no more than float32 itself."""
    found, want = error(device), ERRORS[device]
    assert found < FLOAT32 if want < FLOAT32 else found == pytest.approx(want, rel=0.3)


def test_parts_lose_nothing() -> None:
    x = np.random.default_rng(0).standard_normal(1000, np.float32)
    assert (sum(reversed(parts(x))) == x).all()
    assert all((p.astype(jnp.bfloat16).astype(jnp.float32) == p).all() for p in parts(x))


@pytest.mark.parametrize(
    ("policy", "on_tpu", "on_gpu"),
    [
        ("float32", "bf16 x 6", "float32"),
        ("precision=highest", "bf16 x 6", "float32"),
        ("precision=high", "bf16 x 3", "TF32"),
        ("precision=tensorfloat32", "bf16 x 3", "TF32"),
        ("precision=default", "bf16 x 1", "TF32"),
        ("precision=BF16_BF16_F32_X3", "bf16 x 3", "bf16 x 3"),
    ],
)
def test_which_policy_gives_which(policy: str, on_tpu: str, on_gpu: str) -> None:
    """What an audit says of a policy's products, and that its error is what the docs say."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    fun = jaxmp.autocast(lambda x, w: x @ w, policy)
    (row,) = jaxmp.audit(fun, x, x).products
    assert (row.tpu, row.gpu.partition(" or ")[0]) == (on_tpu, on_gpu)
    assert precisions(fun, x, x) == [("float32", row.precision.lower())]
    assert meaning_of(name_of_param(lax.Precision.HIGHEST)).tpu == "bf16 x 6"
    exact = max(ERRORS[on_tpu], ERRORS[on_gpu]) < FLOAT32
    assert exact == (policy in ("float32", "precision=highest"))
