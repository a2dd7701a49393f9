"""Scales and codes against NumPy float64 and exact fractions, at edges that are never drawn too."""

import fractions
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxmp._numerics.float8_codes import (
    decode_float8,
    encode_blocks,
    encode_float8,
    largest_code,
    round_to_codes,
    scale_of,
)
from tests.support.float8_references import FORMATS, LEAST_AMAX, coded, in_blocks, rounded, scale

pytestmark = pytest.mark.jax

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
each_format = pytest.mark.parametrize("form", [E4M3, E5M2, "int8"])
each_float8 = pytest.mark.parametrize("form", [E4M3, E5M2])
each_scaling = pytest.mark.parametrize("powers", [True, False], ids=["powers of two", "any scale"])

TINY = float(np.finfo(np.float32).tiny)
HUGE = float(np.finfo(np.float32).max)
# No subnormal float32 numbers: CPUs have zero for them. They have tests of their own.
floats = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
magnitudes = st.floats(0, HUGE, width=32, allow_subnormal=False)

jitted_encode = jax.jit(encode_float8, static_argnames=("dtype", "axes", "power_of_two"))
jitted_decode = jax.jit(decode_float8, static_argnums=1)
jitted_blocks = jax.jit(encode_blocks, static_argnums=1)


def same(got: Any, want: Any) -> None:
    """The same numbers; zeros may differ in sign, NaN is NaN."""
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), np.asarray(want))


def numbers_of(form: str) -> list[fractions.Fraction]:
    """All finite numbers of a format that are not negative, from its definition, in order."""
    mantissa, least, largest = FORMATS[form]
    found = [fractions.Fraction(0)]
    while found[-1] < largest:
        exponent = max(math.floor(math.log2(found[-1])) if found[-1] else least, least)
        found.append(found[-1] + fractions.Fraction(2) ** (exponent - mantissa))
    return found


def nearest(x: float, form: str) -> float:
    """The nearest number of a format by exact fractions; of two, the one with an even code."""
    exact, numbers = abs(fractions.Fraction(x)), numbers_of(form)
    best = min(range(len(numbers)), key=lambda code: (abs(numbers[code] - exact), code % 2))
    return math.copysign(float(numbers[best]), x)


@each_format
def test_the_formats_are_those_of_the_definition(form: str) -> None:
    """The list of numbers is what the codes 0, 1, 2, ... stand for."""
    numbers = numbers_of(form)
    codes = np.arange(len(numbers), dtype=np.uint8).view(jnp.dtype(form))
    same(codes, [float(x) for x in numbers])
    assert largest_code(jnp.dtype(form)) == FORMATS[form][2] == numbers[-1]


@each_format
def test_the_reference_rounds_as_fractions_do(form: str) -> None:
    """Also in ties, in subnormal codes and out of range."""
    numbers = [float(x) for x in numbers_of(form)]
    middles = np.float32([(a + b) / 2 for a, b in itertools.pairwise(numbers)])
    points = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9)),
         np.float32([0, 1e-30, 449, 1e5, HUGE])]
    )  # fmt: skip
    points = np.concatenate([points, -points])
    same(rounded(points, form), [nearest(float(x), form) for x in points])
    for jit in (False, True):
        run = jax.jit(round_to_codes, static_argnums=2) if jit else round_to_codes
        same(run(points, np.ones((1,), np.float32), jnp.dtype(form)), rounded(points, form))


@each_format
@each_scaling
@given(st.lists(magnitudes, min_size=16, max_size=16))
@settings(max_examples=100)
def test_scales(form: str, powers: bool, amax: list[float]) -> None:
    got = scale_of(jnp.float32(amax), jnp.dtype(form), power_of_two=powers)
    same(got, scale(amax, form, powers))


@each_format
@each_scaling
def test_scales_at_the_edges(form: str, powers: bool) -> None:
    """Zero and tiny arrays have a finite scale; infinite ones have NaN, not zero and not one."""
    least = np.float32(LEAST_AMAX)
    edges = [0.0, 1e-45, TINY, least, np.nextafter(least, np.float32(1)), 1e-7, 1, 447.99, HUGE]
    edges = [*edges, FORMATS[form][2], np.nextafter(np.float32(FORMATS[form][2]), np.float32(1e9))]
    got = np.asarray(scale_of(jnp.float32(edges), jnp.dtype(form), power_of_two=powers))
    same(got, scale(np.float32(edges), form, powers))
    assert np.isfinite(got).all()
    assert (got > 0).all()
    assert got[0] == got[1] == got[2] == got[3] > got[5]
    for bad in (np.inf, np.nan):
        assert np.isnan(scale_of(jnp.float32(bad), jnp.dtype(form), power_of_two=powers))


@each_format
def test_powers_of_two_round_down_and_bring_all_into_range(form: str) -> None:
    """From the exponent's bits, so that a scale of exactly a power stays: log2 may be below it."""
    largest = FORMATS[form][2]
    quotients = np.float32(
        [2.0**e * m for e in range(-90, 40) for m in (1, 1 + 2**-23, 2 - 2**-23)]
    )
    with np.errstate(divide="ignore"):
        amax = (largest / quotients.astype(np.float64)).astype(np.float32)
    got = np.asarray(scale_of(amax, jnp.dtype(form)), np.float64)
    assert (np.frexp(got)[0] == 0.5).all()
    assert (got * amax <= largest).all()
    assert (2 * got * amax.astype(np.float64) > largest * (1 - 2.0**-24)).all()
    exact = np.float32(largest / 2.0 ** np.arange(-90, 40))
    same(scale_of(exact, jnp.dtype(form)), 2.0 ** np.arange(-90, 40))


ARRAYS = {
    "float32": st.lists(floats, min_size=24, max_size=24),
    "near": st.lists(
        st.floats(-500, 500, width=32, allow_subnormal=False), min_size=24, max_size=24
    ),
}


eager = pytest.param(False, marks=pytest.mark.programs(40, reason="operations without `jit`"))


@each_format
@each_scaling
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("drawn", ARRAYS)
@pytest.mark.parametrize("jit", [eager, True], ids=["eager", "jit"])
def test_codes(form: str, powers: bool, dtype: str, drawn: str, jit: bool) -> None:
    """Of all finite arrays, with one scale for all, one for each row or each column.

    Compilers may widen what is between a cast and its scale, but not round in between.
    """
    encode = jitted_encode if jit else encode_float8

    @given(ARRAYS[drawn])
    @settings(max_examples=25)
    def check(values: list[float]) -> None:
        with np.errstate(over="ignore"):
            x = np.float32(values).reshape(4, 6).astype(jnp.dtype(dtype))
        x = np.where(np.isfinite(x), x, 1).astype(x.dtype)
        tiny = np.abs(x.astype(np.float32)) < TINY  # CPUs have zero for them
        x = np.where(tiny, 0, x).astype(x.dtype)
        for axes in ((0, 1), (1,), (0,)):
            got = encode(jax.device_put(x), jnp.dtype(form), axes, power_of_two=powers)
            codes, scales = coded(x.astype(np.float64), form, axes, power_of_two=powers)
            assert got.codes.dtype == form
            assert got.scale.dtype == jnp.float32
            same(got.codes, codes)
            same(np.broadcast_to(got.scale, x.shape), scales)

    check()


@each_format
def test_codes_are_rounded_once(form: str) -> None:
    """A weight has the codes of its float32 source, and not those of its rounding to bfloat16.

    Points that lie a bit off the middle of two codes become the middle in 16 bits, and then go to
    the even one, which may be the wrong side.
    """
    numbers = np.float64([float(x) for x in numbers_of(form)])
    middles = np.float32((numbers[1:] + numbers[:-1]) / 2)
    sources = np.concatenate([middles * np.float32(1 + s * 2**-12) for s in (1, -1)])
    one = np.ones((1,), np.float32)
    good = np.asarray(round_to_codes(sources, one, jnp.dtype(form))).astype(np.float64)
    same(good, [nearest(float(x), form) for x in sources])
    twice = round_to_codes(jax.device_put(sources.astype(jnp.bfloat16)), one, jnp.dtype(form))
    changed = (np.asarray(twice).astype(np.float64) != good).mean()
    assert 0.4 < changed < 0.6  # positive control: every other middle goes the wrong way


@each_format
def test_out_of_range_is_the_largest_number(form: str) -> None:
    """`astype` alone gives NaN, infinity or -128."""
    largest = FORMATS[form][2]
    x = jnp.float32([largest, largest * 1.06, 1e9, HUGE, -1e9])
    got = round_to_codes(x, np.ones((1,), np.float32), jnp.dtype(form))
    same(got, largest * np.float64([1, 1, 1, 1, -1]))
    cast = np.asarray(x.astype(form)).astype(np.float32)
    assert cast[-1] != -largest  # positive control: NaN, -inf, -128


@each_format
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_bad_number_makes_all_that_shares_its_scale_nan(form: str, bad: float) -> None:
    """In float8 all codes, so that products see it; int8 has no NaN, and shows it once decoded."""
    x = np.ones((3, 4), np.float32)
    x[1, 2] = bad
    for axes, lost in (((0, 1), [True] * 3), ((1,), [False, True, False])):
        got = jitted_encode(x, jnp.dtype(form), axes)
        numbers = jitted_decode(got, jnp.float32) if form == "int8" else got.codes
        isnan = np.isnan(np.asarray(numbers).astype(np.float32))
        assert isnan.all(axis=1).tolist() == isnan.any(axis=1).tolist() == lost


@each_float8
def test_nan_passes_a_finite_scale(form: str) -> None:
    got = round_to_codes(jnp.float32([np.nan, 1]), np.ones((1,), np.float32), jnp.dtype(form))
    same(got, [np.nan, 1])


@each_format
@each_scaling
def test_zeros_and_subnormal_numbers_have_codes_zero(form: str, powers: bool) -> None:
    x = jnp.float32([[0, 0, -0.0], [1e-45, -1e-40, 0]])
    got = jitted_encode(x, jnp.dtype(form), (0, 1), power_of_two=powers)
    same(got.codes, np.zeros((2, 3)))
    assert np.isfinite(np.asarray(got.scale)).all()
    same(jitted_decode(got, jnp.float32), np.zeros((2, 3)))


@given(st.lists(st.floats(-1e4, 1e4, width=32, allow_subnormal=False), min_size=8, max_size=8))
@settings(max_examples=50)
def test_powers_of_two_are_decoded_exactly_in_bfloat16(values: list[float]) -> None:
    for form in (E4M3, E5M2):
        got = jitted_encode(np.float32(values), jnp.dtype(form), (0,))
        want = np.asarray(got.codes).astype(np.float64) / np.asarray(got.scale, np.float64)
        same(jitted_decode(got, jnp.bfloat16), want)


def decoded_blocks(x: Any, form: str) -> np.ndarray:
    codes, scales = jitted_blocks(x, jnp.dtype(form))
    assert (codes.dtype, scales.dtype) == (form, jnp.float8_e8m0fnu)
    assert scales.shape == (*x.shape[:-1], x.shape[-1] // 32)
    return np.asarray(codes, np.float64) * np.repeat(np.asarray(scales, np.float64), 32, axis=-1)


@each_float8
@given(st.lists(floats, min_size=64, max_size=64))
@settings(max_examples=100)
def test_blocks(form: str, values: list[float]) -> None:
    """Two blocks of any finite numbers stand for what the definition says, to the bit."""
    x = np.float32(values)[None]
    same(decoded_blocks(x, form), in_blocks(x, form, (1,)))


@each_float8
def test_a_block_with_an_infinity_or_nan_is_nan(form: str) -> None:
    """Its scale is, so that all of its product is; the block beside it is as it was."""
    x = np.ones((1, 64), np.float32)
    for bad in (np.inf, -np.inf, np.nan):
        x[0, 3] = bad
        numbers = decoded_blocks(x, form)
        assert np.isnan(numbers[0, :32]).all()
        assert (numbers[0, 32:] == 1).all()
