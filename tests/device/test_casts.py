"""What rounding leaves, and what float32 division gives: compilers for GPUs have rules of own."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmp._numerics.float8_codes import scale_of
from jaxmp._numerics.rounding import widen_rounded
from tests.support.devices import needs_gpu

pytestmark = [pytest.mark.device, pytest.mark.jax]

X = np.random.default_rng(0).standard_normal((256, 128)).astype(np.float32)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_a_rounding(dtype: str) -> None:
    """Kahan's sum keeps it: to the bit that of NumPy, though compilers may delete cast pairs."""
    rest = jax.jit(lambda x: x - widen_rounded(x.astype(dtype)))(X)
    want = X - X.astype(DTYPES[dtype]).astype(np.float32)
    np.testing.assert_array_equal(rest, want)
    assert np.mean(want != 0) > 0.9


def test_a_plain_cast_pair_loses_it() -> None:
    """Positive control: what the compiler for GPUs makes of the same without `widen_rounded`."""
    needs_gpu("compilers for CPUs keep cast pairs")
    rest = jax.jit(lambda x: x - x.astype(jnp.bfloat16).astype(jnp.float32))(X)
    assert not np.asarray(rest).any()


def exact_scales(amax: Any, largest: float) -> Any:
    """Powers of two at or below the exact quotient, by exponents alone."""
    m, e = np.frexp(amax.astype(np.float64))
    m_largest, e_largest = np.frexp(largest)
    return np.exp2(e_largest - e - (m > m_largest))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_scales_of_float8(dtype: str) -> None:
    """As of an exact division, also next to powers of two. GPUs divide float32 two units off."""
    largest = float(ml_dtypes.finfo(dtype).max)
    powers = np.float32(largest) * np.exp2(np.arange(-30, 90)).astype(np.float32)
    below, above = (np.nextafter(powers, np.float32(end)) for end in (0, np.inf))
    random = np.exp2(np.random.default_rng(0).uniform(-30, 100, 10_000)).astype(np.float32)
    amax = np.concatenate([below, powers, above, random])
    scales = jax.jit(lambda x: scale_of(x, jnp.dtype(dtype)))(amax)
    np.testing.assert_array_equal(scales, exact_scales(amax, largest))
