"""`split_float32`: every word of float32 comes back, and the upper part is its rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import jaxmp
from tests.support.recorded import load_arrays

split = jax.jit(jaxmp.numbers.split_float32, static_argnames="low_bits")
merge = jax.jit(jaxmp.numbers.merge_float32)
CHUNK = 2**24


def words(bits: Any) -> Any:
    """The float32 of these bits; by NumPy, as JAX may make other NaN of them."""
    return np.asarray(bits, np.uint32).view(np.float32)


def rounded(x: Any) -> Any:
    """To bfloat16 with ties away from zero, in float64 alone."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    unit = np.exp2(np.maximum(exponent - 8, -133).astype(np.float64))
    magnitude = np.floor(np.abs(mantissa) * np.exp2(exponent.astype(np.float64)) / unit + 0.5)
    return np.copysign(magnitude * unit, x)


def check_words(bits: Any) -> None:
    x = words(bits)
    high, low = split(x)
    nan = np.isnan(x)
    back = np.asarray(merge(high, low))
    np.testing.assert_array_equal(back.view(np.uint32)[~nan], bits[~nan])
    assert np.isnan(back[nan]).all()
    assert np.isnan(np.asarray(high, np.float32)[nan]).all()


@pytest.mark.device
def test_equals_transformer_engine() -> None:
    recorded = load_arrays("bf16_remainder.npz")
    bits = recorded["f32_bits"]
    number = ~np.isnan(words(bits))
    assert number.sum() > 4000
    high, low = split(words(bits))
    np.testing.assert_array_equal(
        np.asarray(high).view(np.uint16)[number], recorded["bf16_bits"][number]
    )
    np.testing.assert_array_equal(np.asarray(low)[number], recorded["remainder"][number])
    check_words(bits)


@pytest.mark.exhaustive
def test_all_words_come_back() -> None:
    for start in range(0, 2**32, CHUNK):
        check_words(np.arange(start, start + CHUNK, dtype=np.uint64).astype(np.uint32))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_words_come_back(bits: list[int]) -> None:
    padded = np.resize(np.array(bits, np.uint32), 50)
    check_words(padded)


@pytest.mark.device
def test_the_upper_part_is_rounded_to_nearest() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32)
    bits = np.concatenate([bits, (bits & 0xFFFF0000) | 0x8000])  # and ties
    x = words(bits)
    x = x[np.isfinite(x) & (np.abs(x) < 3.39e38)]
    np.testing.assert_array_equal(np.asarray(split(x).high, np.float64), rounded(x))


def test_with_8_bits_24_are_kept() -> None:
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    high, low = split(x, low_bits=8)
    assert low.dtype == jnp.int8
    back = np.asarray(merge(high, low), np.float64)
    error = np.abs(back - x) / np.exp2(np.floor(np.log2(np.abs(x))))
    assert 2.0**-16.01 < error.max() <= 2.0**-16
    np.testing.assert_array_equal(np.asarray(high, np.float64), rounded(back))


def test_what_was_split_stays() -> None:
    """A step that changes nothing may not move 24-bit masters."""
    x = merge(
        *split(np.random.default_rng(1).standard_normal(10_000).astype(np.float32), low_bits=8)
    )
    np.testing.assert_array_equal(merge(*split(x, low_bits=8)), x)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: jaxmp.numbers.split_float32(jnp.float16(1)), TypeError, "got float16"),
        (
            lambda: jaxmp.numbers.split_float32(jnp.float32(1), low_bits=4),
            ValueError,
            "16 or 8, got 4",
        ),
        (
            lambda: jaxmp.numbers.merge_float32(jnp.float16(1), jnp.int16(1)),
            TypeError,
            "float16 and int16",
        ),
    ],
)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
