"""Errors that one backward pass predicts: against errors that were made, and against NumPy."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._program.tracing import partition, trace_call
from jaxmp._tools.diagnostics.first_order import FirstOrder, Target
from jaxmp._tools.diagnostics.roundings import uncounted_in

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = jax.random.normal(jax.random.key(0), (64, 16))
KEYS = jax.random.split(jax.random.key(1), 16)
BFLOAT16, FLOAT16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)


def weights(key: Any, count: int = 3) -> Any:
    return jax.random.normal(key, (count, 16, 16)) / 4


def first_order(fun: Callable[..., Any], *args: Any, **options: Any) -> FirstOrder:
    static, arrays = partition((args, {}))
    traced = trace_call(fun, static, arrays)
    return FirstOrder(traced, lambda site: site.name, [Target(slice(None))], **options)


def deviation(fun: Callable[..., Any], *args: Any, column: int = 0, **options: Any) -> float:
    variances, results = first_order(fun, *args, **options)(jax.tree.leaves(args))
    size = np.linalg.norm(np.concatenate([np.ravel(x) for x in results]))
    return math.sqrt(variances[0, :, column].sum()) * float(size)


def layers(ws: Any, x: Any) -> Any:
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def scanned(ws: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return lax.cond(w[0, 0] > 0, lambda: x + jnp.tanh(x @ w), lambda: x - jnp.tanh(x @ w)), None

    return jnp.mean(lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)


def recurrent(ws: Any, x: Any) -> Any:
    def turn(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ ws[0] + h @ ws[1])
        return h, h @ ws[2]

    return jnp.mean(lax.scan(turn, jnp.zeros((8, 16)), x.reshape(8, 8, 16))[1] ** 2)


def attention(ws: Any, x: Any) -> Any:
    scores = (x @ ws[0]) @ (x @ ws[1]).T
    past = jnp.tril(jnp.ones(scores.shape, bool))
    return jnp.mean((jax.nn.softmax(jnp.where(past, scores, -1e9)) @ (x @ ws[2])) ** 2)


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.parametrize("loss", [layers, scanned, recurrent, attention])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "mixed_float8"])
def test_errors_are_as_large_as_their_bars(policy: str, loss: Callable[..., Any]) -> None:
    """Sixteen sets of params: of independent errors two thirds are within, none is far out."""
    low = jaxmp.autocast(loss, policy)
    run = first_order(low, weights(KEYS[0]), X)
    exact, rounded = jax.jit(loss), jax.jit(low)
    ratios = []
    for key in KEYS:
        ws = weights(key)
        variances, (value,) = run([ws, X])
        bar = math.sqrt(variances.sum()) * abs(float(value))
        ratios.append((float(rounded(ws, X)) - float(exact(ws, X))) / bar)
    assert 0.6 < math.sqrt(np.mean(np.square(ratios))) < 1.5
    assert max(map(abs, ratios)) < 4


def test_a_product_against_numpy() -> None:
    """One rounding of each operand and of the result, by hand in float64."""

    def product(x: Any, w: Any) -> Any:
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    x, w = X[:4], weights(KEYS[0])[0]
    variances, (result,) = first_order(product, x, w)([x, w])
    lows = [np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64) for y in (x, w)]
    exact = lows[0] @ lows[1]
    out = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)
    np.testing.assert_array_equal(np.asarray(result, np.float64), out)
    # The mean over all directions; one direction is near to it, as there are many numbers.
    off = [low - np.asarray(y, np.float64) for low, y in zip(lows, (x, w), strict=True)]
    casts = np.sum(off[0] ** 2 @ lows[1] ** 2) + np.sum(lows[0] ** 2 @ off[1] ** 2)
    variance = variances[0].sum() * np.sum(out**2)
    assert variance == pytest.approx(casts + np.sum((out - exact) ** 2), rel=0.2)


def test_another_dtype_has_its_own_errors() -> None:
    """Of float16 those below its normal numbers and above its largest too."""

    def cast(x: Any) -> Any:
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    x = jnp.float32([1.2345, 3e-6, -1e-5, 777.7])
    both = [deviation(cast, x, column=i, dtypes=[FLOAT16]) for i in (0, 1)]
    for error, dtype in zip(both, (BFLOAT16, FLOAT16), strict=True):
        off = np.asarray(x.astype(dtype), np.float64) - np.asarray(x, np.float64)
        assert error == pytest.approx(np.linalg.norm(off), rel=1e-5)
    assert deviation(cast, jnp.float32([1e5, 1.2]), column=1, dtypes=[FLOAT16]) == math.inf


def test_an_overflow_is_infinite_alone() -> None:
    """What follows it has finite errors; a mask of -1e9 has no derivative, and no error."""

    def masked(x: Any, w: Any) -> Any:
        h = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) / 1e5
        return jnp.sum(jnp.exp(jnp.where(x > 0, h, -1e9)).astype(jnp.float16).astype(jnp.float32))

    x, w = jnp.abs(X[:4]) + 1, jnp.full((16, 16), 1e4)
    run = first_order(masked, x, w)
    errors = dict(zip(run.keys, run([x, w])[0][0, :, 0], strict=True))
    assert errors["dot_general"] == math.inf
    assert 0 < errors["convert_element_type"] < math.inf
    sound = dict(zip(run.keys, run([x, w / 1e4])[0][0, :, 0], strict=True))
    assert sound["dot_general"] < math.inf


def test_equal_roundings_add_up() -> None:
    """A hundred times the same error is a hundred errors, and not ten."""

    def total(x: Any) -> Any:
        return jnp.sum(x.astype(jnp.bfloat16).astype(jnp.float32))

    x = jnp.full(100, 1.001)
    assert deviation(total, x) == pytest.approx(0.1, rel=1e-3)
    mixed = 1 + jax.random.uniform(KEYS[0], (100,))
    off = np.asarray(mixed.astype(jnp.bfloat16), np.float64) - np.asarray(mixed, np.float64)
    assert deviation(total, mixed) == pytest.approx(np.linalg.norm(off), rel=1e-3)


def test_a_weight_that_each_turn_casts_is_rounded_once() -> None:
    """Sixteen equal turns have the error of one; as independent ones it would be a quarter."""

    def turns(w: Any, length: int) -> Any:
        def turn(carry: Any, _: Any) -> Any:
            return carry + jnp.sum(X[0] * w.T.astype(jnp.bfloat16).astype(jnp.float32)), None

        return lax.scan(turn, 0.0, length=length)[0] / length

    w = weights(KEYS[0])[0]
    once, often = (deviation(functools.partial(turns, length=n), w) for n in (1, 16))
    assert often == pytest.approx(once, rel=1e-4)


def test_float32_roundings_are_of_the_size_of_those_made() -> None:
    """Against NumPy's float64: the bar is no more than a few times too wide, or too narrow."""
    ws = weights(KEYS[0])
    exact = np.asarray(X, np.float64)
    for w in np.asarray(ws, np.float64):
        exact = exact + np.tanh(exact @ w)

    def run(ws: Any, x: Any) -> Any:
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return x

    error = np.linalg.norm(np.asarray(run(ws, X), np.float64) - exact)
    assert 1 / 4 < error / deviation(run, ws, X, float32=True) < 2
    assert deviation(run, ws, X) == 0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_scale_of_results_does_not_matter(scale: float) -> None:
    """Squares of small or large numbers leave the range of float32."""
    ws = weights(KEYS[0])
    low = jaxmp.autocast(lambda ws, x: layers(ws, x) * scale, "mixed_bfloat16")
    plain = jaxmp.autocast(lambda ws, x: layers(ws, x), "mixed_bfloat16")
    bars = [first_order(fun, ws, X)([ws, X])[0].sum() for fun in (low, plain)]
    assert bars[0] == pytest.approx(bars[1], rel=1e-3)


@pytest.mark.parametrize("fill", [-1e9, -jnp.inf, float(jnp.finfo(jnp.float32).min)])
def test_masks_do_not_count(fill: float) -> None:
    """One number of a mask is larger than all errors; without it the bar is the same."""

    def masked(q: Any, k: Any, fill: float | None) -> Any:
        scores = q @ k.T / 4
        past = jnp.tril(jnp.ones(scores.shape, bool))
        weights = jax.nn.softmax(scores if fill is None else jnp.where(past, scores, fill))
        return weights @ k

    plain, other = (
        deviation(functools.partial(masked, fill=x), X[:16], X[16:32], float32=True)
        for x in (None, fill)
    )
    assert 0.3 < other / plain < 3


def test_float32_errors_of_turns_are_their_own() -> None:
    """A scan is what the unrolled loop is."""

    def scanned_sum(x: Any) -> Any:
        return lax.scan(lambda h, y: (h + y, None), jnp.zeros(16), x)[0]

    def unrolled_sum(x: Any) -> Any:
        h = jnp.zeros(16)
        for y in x:
            h = h + y
        return h

    one, two = (deviation(fun, X, float32=True) for fun in (scanned_sum, unrolled_sum))
    assert one == pytest.approx(two, rel=0.5)


def test_a_derivative_that_is_no_number_hides_any_error() -> None:
    def steep(x: Any) -> Any:
        return jnp.sum(jnp.sqrt(x.astype(jnp.bfloat16).astype(jnp.float32)))

    assert deviation(jax.grad(steep), jnp.float32([0.0, 1.1])) == math.inf


def test_what_no_derivative_says_is_told() -> None:
    """Only what the results depend on, and no order of numbers that were not rounded."""

    def chosen(x: Any) -> Any:
        low = x.astype(jnp.bfloat16)
        best, exact = jnp.argmax(low, -1), jnp.argmax(x, -1)
        values, _ = lax.top_k(low, 2)
        halved = lax.while_loop(lambda y: jnp.sum(y) > 1, lambda y: y / 2, x)
        whole = jnp.floor(low) + low.astype(jnp.int32)
        sums = jnp.sum(best * values[:, 0]), jnp.sum(halved), jnp.argmin(low), jnp.sum(exact)
        return (*sums, jnp.sum(whole))

    closed = jax.make_jaxpr(chosen)(X)
    flags = np.eye(5, dtype=bool)
    names = [[x.split(": ")[1] for x in uncounted_in(closed, flag)] for flag in flags]
    assert names[:4] == [["argmax"], ["while"], ["argmin"], []]
    assert sorted(names[4]) == ["convert_element_type", "floor"]
    assert uncounted_in(closed, flags[0])[0].startswith("test_first_order.py:")
