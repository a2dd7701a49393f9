"""`stochastic_round`: unbiased to the last bit of a random word, in every format."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmp
from jaxmp._numerics.stochastic import hashed_words, round_by_words, round_mantissa
from tests.support.recorded import load_arrays, load_json

FORMATS = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
by_words = jax.jit(round_by_words, static_argnums=1)


def wide(x: Any) -> Any:
    """As float64; of NaN that signal, NumPy warns."""
    with np.errstate(invalid="ignore"):
        values = np.asarray(x).astype(np.float64)
    return np.where(np.isnan(values), np.nan, values)


def values_of(dtype: Any) -> Any:
    """All finite values of a format from zero on, in order, as float64."""
    kind = np.uint16 if np.dtype(dtype).itemsize == 2 else np.uint8
    values = wide(np.arange(np.iinfo(kind).max // 2 + 1, dtype=kind).view(dtype))
    return values[np.isfinite(values)]


def sample(dtype: Any) -> Any:
    """Float32 numbers over the range of a format: normal, subnormal, below that, at its values."""
    rng = np.random.default_rng(0)
    info = ml_dtypes.finfo(dtype)
    lowest = max(np.log2(float(info.smallest_subnormal)) - 5, -126)
    spread = np.exp2(rng.uniform(lowest, np.log2(float(info.max)) - 0.01, 300))
    small = rng.uniform(1, 40, 100) * float(info.smallest_subnormal)
    values = rng.choice(values_of(dtype)[1:], 50)
    x = np.concatenate([spread, small, values]).astype(np.float32)
    # XLA flushes what is subnormal in float32 wherever it computes with it; this does not.
    return np.concatenate([x, -x])


def neighbours(x: Any, dtype: Any) -> tuple[Any, Any]:
    """The largest value of a format that is no larger in magnitude, and the one after it."""
    values = values_of(dtype)
    at = np.searchsorted(values, np.abs(x).astype(np.float64), side="right") - 1
    return values[at], values[np.minimum(at + 1, len(values) - 1)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bf16", marks=pytest.mark.device),
        "fp16",
        pytest.param("e4m3fn", marks=pytest.mark.device),
        "e5m2",
    ],
)
def test_the_mean_over_all_random_words_is_exact(name: str) -> None:
    """Rounded away from zero by exactly as many words as the fraction asks for: the largest."""
    dtype = FORMATS[name]
    x = sample(dtype)
    low, high = neighbours(x, dtype)
    counts = []
    for value, lo, hi in zip(np.abs(x), low, high, strict=True):
        share = (Fraction(float(value)) - Fraction(lo)) / (Fraction(hi) - Fraction(lo))
        assert (share * 2**32).denominator == 1  # the sample asks for no finer share
        counts.append(int(share * 2**32))
    away = np.array(counts, np.int64)
    assert ((away > 0) & (away < 2**32)).sum() > 300

    def magnitude(words: Any) -> Any:
        rounded = by_words(x, jnp.dtype(dtype), np.asarray(words, np.uint32))
        return np.abs(np.asarray(rounded).astype(np.float64))

    some = away > 0
    np.testing.assert_array_equal(magnitude(np.maximum(2**32 - away, 0) % 2**32)[some], high[some])
    np.testing.assert_array_equal(magnitude(2**32 - away - 1), low)
    for words in np.random.default_rng(1).integers(0, 2**32, (20, len(x))):
        np.testing.assert_array_equal(magnitude(words), np.where(words >= 2**32 - away, high, low))


@pytest.mark.parametrize("name", FORMATS)
def test_equals_recorded_expectations(name: str) -> None:
    rows = load_json("sr_expectations.json")["formats"][name]["rows"]
    words = np.arange(0, 2**32, 2**18, dtype=np.uint32)
    for row in rows:
        x, low, high = (np.float64(row[key]) for key in ("x", "lo", "hi"))
        got = by_words(np.full(words.shape, np.float32(x)), jnp.dtype(FORMATS[name]), words)
        got = np.asarray(got).astype(np.float64)
        assert np.isin(got, [low, high]).all(), row
        if np.isfinite(x):
            np.testing.assert_allclose(np.mean(got == high) if low != high else 0, row["p_hi"],
                                       atol=2.0**-14)  # fmt: skip


@pytest.mark.device
def test_equals_the_safe_reference_bit_for_bit() -> None:
    recorded = load_arrays("sr_bf16_bits.npz")
    x = recorded["f32_bits"].view(np.float32)
    words = recorded["rand16"].astype(np.uint32) << 16
    got = np.asarray(by_words(x, jnp.dtype(jnp.bfloat16), words)).view(np.uint16)
    nan = np.isnan(x)
    np.testing.assert_array_equal(got[~nan], recorded["bf16_safe_reference"][~nan])
    assert np.isnan(got[nan].view(ml_dtypes.bfloat16).astype(np.float32)).all()
    # Positive control: sums that are cut off make infinity of the largest, and zero of NaN.
    assert np.any(recorded["bf16_add_and_truncate"] != recorded["bf16_safe_reference"])


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("source", ["bf16", "fp16"])
def test_a_cast_is_one_of_the_two(name: str, source: str) -> None:
    """Of all 65,536 numbers: the recorded nearest value is what some random word gives."""
    table = load_arrays("fp8_conversion_tables.npz")[f"{source}_to_{name}_torch"]
    x = np.arange(2**16, dtype=np.uint16).view(FORMATS[source])
    largest = float(ml_dtypes.finfo(FORMATS[name]).max)
    exact = wide(x)
    inside = np.abs(exact) <= largest
    nearest = wide(table.view(FORMATS[name]))

    def rounded(word: int) -> Any:
        words = np.full(2**16, word, np.uint32)
        return wide(by_words(jnp.asarray(exact, jnp.float32), jnp.dtype(FORMATS[name]), words))

    down, up = rounded(0), rounded(2**32 - 1)
    assert np.all((nearest == down) | (nearest == up) | ~inside)
    beyond = np.isfinite(exact) & ~inside
    np.testing.assert_array_equal(np.abs(up[beyond]), largest)
    np.testing.assert_array_equal(np.isnan(down), np.isnan(up))
    np.testing.assert_array_equal(np.isfinite(up), np.isfinite(exact))


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_the_format_stay(name: str) -> None:
    kind = np.uint16 if np.dtype(FORMATS[name]).itemsize == 2 else np.uint8
    values = np.arange(np.iinfo(kind).max + 1, dtype=kind).view(FORMATS[name])
    values = values[~np.isnan(wide(values))]
    got = jaxmp.numbers.stochastic_round(jnp.asarray(values), FORMATS[name], jax.random.key(3))
    np.testing.assert_array_equal(np.asarray(got).view(kind), values.view(kind))


@pytest.mark.parametrize("randomness", ["counter", "threefry"])
def test_the_mean_of_many_draws(randomness: Any) -> None:
    x = jnp.full(200_000, 1.003, jnp.float32)
    rounded = jaxmp.numbers.stochastic_round(
        x, "bfloat16", jax.random.key(0), randomness=randomness
    )
    share = float(jnp.mean((rounded > 1).astype(jnp.float32)))
    exact = (float(np.float32(1.003)) - 1) * 128
    assert abs(share - exact) < 5 * np.sqrt(exact * (1 - exact) / x.size)


def test_random_words_have_no_pattern() -> None:
    """Each bit is set half of the time; neighbours, rows and steps have nothing in common."""
    first, later, other = (
        np.asarray(hashed_words((512, 512), [jnp.uint32(a), jnp.uint32(b)]))
        for a, b in ((0, 0), (0, 1), (1, 0))
    )
    sigma = 0.5 / 512
    for bit in range(32):
        ones = (first >> bit) & 1
        assert abs(ones.mean() - 0.5) < 5 * sigma
        for same in (ones == (later >> bit) & 1, ones == (other >> bit) & 1,
                     ones[:, 1:] == ones[:, :-1], ones[1:] == ones[:-1]):  # fmt: skip
            assert abs(same.mean() - 0.5) < 5 * sigma


def test_is_the_same_on_any_mesh() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)
    key = jax.random.key(7)
    alone = jaxmp.numbers.stochastic_round(x, "bfloat16", key)
    mesh = jax.make_mesh((4, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
    for spec in (jax.P("a", "b"), jax.P(None, ("a", "b")), jax.P("b")):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, spec))
        got = jax.jit(lambda x, key: jaxmp.numbers.stochastic_round(x, "bfloat16", key))(
            sharded, key
        )
        np.testing.assert_array_equal(got, alone)
        assert got.sharding.spec == spec


def test_keys_of_any_kind() -> None:
    x = jnp.full(100, 1.003, jnp.float32)
    typed = jaxmp.numbers.stochastic_round(x, "bfloat16", jax.random.key(1))
    np.testing.assert_array_equal(
        jaxmp.numbers.stochastic_round(x, "bfloat16", jax.random.PRNGKey(1)), typed
    )
    rbg = jaxmp.numbers.stochastic_round(x, "bfloat16", jax.random.key(1, impl="rbg"))
    assert np.any(rbg != typed)
    assert np.any(jaxmp.numbers.stochastic_round(x, "bfloat16", jax.random.key(2)) != typed)


@pytest.mark.parametrize(
    ("args", "options", "error", "text"),
    [
        ((np.float64(1), "bfloat16"), {}, TypeError, "at most 32 bits, got float64"),
        ((jnp.int32(1), "bfloat16"), {}, TypeError, "got int32"),
        ((jnp.float32(1), "float32"), {}, ValueError, "fewer than 32 bits, not to float32"),
        ((jnp.float32(1), "bf17"), {}, ValueError, "unknown dtype 'bf17'"),
        ((jnp.float32(1), "bfloat16"), {"randomness": "xla"}, ValueError, "'counter', 'threefry'"),
    ],
)
def test_errors(args: Any, options: Any, error: type[Exception], text: str) -> None:
    with jax.enable_x64(True), pytest.raises(error, match=text):
        jaxmp.numbers.stochastic_round(*args, jax.random.key(0), **options)


def test_one_key_at_a_time() -> None:
    with pytest.raises(TypeError, match=r"such as jax.random.key\(0\), got int"):
        jaxmp.numbers.stochastic_round(jnp.ones(2), "bfloat16", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one key, got keys of shape \(2,\)"):
        jaxmp.numbers.stochastic_round(jnp.ones(2), "bfloat16", jax.random.split(jax.random.key(0)))


@pytest.mark.parametrize("mantissa_bits", [15, 7])
def test_a_mantissa_is_rounded_by_its_share_of_words(mantissa_bits: int) -> None:
    """All words of as many bits as are dropped: how many round up is the fraction, exactly."""
    drop = 23 - mantissa_bits
    rng = np.random.default_rng(1)
    borders = np.float32([1, 2, 2.0**-126, 3.0e38]).view(np.uint32)[:, None] + np.arange(-3, 4)
    subnormal = np.arange(1, 2**drop, 2 ** (drop - 4))
    bits = np.concatenate([rng.integers(0, 0x7F000000, 20), borders.ravel(), subnormal, [0]])
    bits = np.concatenate([bits, bits + 2**31]).astype(np.uint32)
    words = (np.arange(2**drop, dtype=np.uint32) << (32 - drop))[:, None]
    rounded = jax.jit(jax.vmap(round_mantissa, (None, None, 0)), static_argnums=1)(
        bits.view(np.float32), mantissa_bits, np.broadcast_to(words, (len(words), len(bits)))
    )
    got = np.asarray(jax.lax.bitcast_convert_type(rounded, jnp.uint32)).astype(np.int64)
    below = bits.astype(np.int64) >> drop << drop
    assert set(np.unique(got - below)) == {0, 2**drop}
    np.testing.assert_array_equal((got != below).sum(0), bits & (2**drop - 1))


def test_no_mantissa_is_rounded_to_infinity() -> None:
    x = jnp.array([0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF], jnp.uint32)
    x = jax.lax.bitcast_convert_type(x, jnp.float32)
    got = np.asarray(round_mantissa(x, 15, jnp.full(5, 2**32 - 1, jnp.uint32)))
    largest = float(np.uint32(0x7F7FFF00).view(np.float32))
    np.testing.assert_array_equal(got, [largest, -largest, np.inf, -np.inf, np.nan])
