"""Rows of an argument are exact until they meet activations: embeddings, phases, targets."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import (
    BF16,
    LOW,
    UNIT,
    W,
    X,
    both,
    check,
    error,
    results_of,
    rows,
)
from tests.support.dots import equations
from tests.support.ways import both_ways, rounded

PHASES = np.outer(np.arange(2048), 100.0 ** (-np.arange(8) / 8)).astype(np.float32)
AT = jax.device_put(np.array([3, 700, 1501, 2047], np.int32))


def rotated(x: Any, w: Any, phases: Any) -> Any:
    a, b = jnp.split(x @ w, 2, axis=-1)
    phases = jnp.broadcast_to(phases, a.shape)
    cos, sin = jnp.cos(phases), jnp.sin(phases)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def rotated_and_scaled(x: Any, w: Any, phases: Any) -> Any:
    """A product with an activation reads them as well."""
    h = (x @ w)[:, : phases.shape[-1]]
    return jnp.concatenate([h * phases / 2048, jnp.cos(phases)], -1)


def rotated_and_added(x: Any, w: Any, phases: Any) -> Any:
    """They are added to an activation as well, and scaled before their cosine is taken."""
    h = (x @ w)[:, : phases.shape[-1]]
    return jnp.concatenate([(h + phases) / 2048, jnp.sin(1.5 * phases) * h], -1)


def added_and_reshaped(x: Any, w: Any, phases: Any) -> Any:
    h = (x @ w)[:, : phases.shape[-1]]
    angles = phases.reshape(2, 2, -1)
    return jnp.concatenate([(h + phases) / 2048, jnp.cos(angles).reshape(h.shape)], -1)


def through_scan(x: Any, w: Any, phases: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        h, phases = carry
        return (rotated(h, w, phases), phases), None

    return lax.scan(body, (x, phases), None, length=2)[0][0]


def scanned(x: Any, w: Any, phases: Any) -> Any:
    return lax.scan(lambda c, row: (c, rotated(row[0], w, row[1])), 0.0, (x, phases))[1]


def mapped(x: Any, w: Any, phases: Any) -> Any:
    return rotated(x, w, lax.map(lambda i: phases[i], jnp.arange(4)))


def one_by_one(x: Any, w: Any, phases: Any) -> Any:
    def body(carry: Any, i: Any) -> Any:
        return phases[i], rotated(x, w, carry)

    return lax.scan(body, phases[0], jnp.arange(4))[1]


WAYS = {
    "checkpoint": jax.checkpoint(rotated),
    "checkpoint, scaled": jax.checkpoint(rotated_and_scaled),
    "checkpoint, added": jax.checkpoint(rotated_and_added),
    "checkpoint, added and reshaped": jax.checkpoint(added_and_reshaped),
    "checkpoint of checkpoint": jax.checkpoint(jax.checkpoint(rotated)),
    "carry": through_scan,
    "carry of a checkpoint": jax.checkpoint(through_scan),
    "scanned": scanned,
    "results of a scan": mapped,
    "carry of rows": one_by_one,
    "jit": jax.jit(rotated),
}


@both
@pytest.mark.parametrize("name", WAYS)
def test_phases_by_position(name: str, policy: str) -> None:
    def f(x: Any, w: Any, table: Any) -> Any:
        return WAYS[name](x, w, table[AT])

    check(f, X, W, jax.device_put(PHASES), policy=policy, roundings=24, argnums=(0, 1))
    # In 16 bits the last of them is off by more than a radian.
    assert np.abs(PHASES[2047] - PHASES[2047].astype(jnp.bfloat16).astype(np.float32)).max() > 0.5


def test_targets_that_are_looked_up() -> None:
    y = 1000 + np.asarray(rows(8))

    def loss(x: Any, w: Any, y: Any, i: Any) -> Any:
        part = jax.checkpoint(lambda x, w, y: jnp.mean(((x @ w)[:, 0] + 1000.0 - y) ** 2))
        return part(x, w, y[i])

    i = np.array([5, 2, 7, 0], np.int32)
    assert error(*both_ways(loss, X, W, y, i)) < 8 * UNIT[BF16]


@both
def test_a_stream_that_begins_as_an_embedding(policy: str) -> None:
    """A scan over layers carries it in 16 bits from the start."""

    def f(table: Any, w: Any, i: Any) -> Any:
        body = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
        return lax.scan(body, table[i], w)[0]

    args = rows(32, 16), np.stack([W, W]), np.arange(4)
    assert results_of("scan", f, *args, policy=policy) == [LOW[policy]]
    check(f, *args, policy=policy, roundings=16)


@both
def test_a_checkpoint_keeps_an_embedding_as_it_is(policy: str) -> None:
    """In float32, since it may be read exactly. The layers after the first find 16 bits."""

    def f(table: Any, w: Any, i: Any) -> Any:
        x = table[i]
        for _ in range(3):
            x = jax.checkpoint(lambda h: h + jnp.tanh(h @ w))(x)
        return x

    args = rows(32, 16), W, np.arange(4)
    closed = jax.make_jaxpr(jaxmp.autocast(f, policy))(*args)
    kept = [e for e in equations(closed) if e.primitive.name in ("remat2", "checkpoint")]
    dtypes = [str(v.aval.dtype) for e in kept for v in e.invars if v.aval.shape == (4, 16)]
    assert dtypes == ["float32", LOW[policy], LOW[policy]]
    check(f, *args, policy=policy, roundings=16)


POSITIONS = 300.3 + np.arange(32)[:, None] + np.linspace(0, 1, 16)
READS = {
    "as an integer": lambda p: (p.astype(jnp.int32) % 7).astype(jnp.float32),
    "by floor": lambda p: p - jnp.floor(p),
    "by differences": lambda p: p[1:] - p[:-1],
    "from an origin": lambda p: jnp.tanh(p - 302.0),
    "by order": lambda p: jnp.diff(jnp.sort(p, axis=0), axis=0),
    "by a comparison": lambda p: jnp.where(p > 302.45, 1.0, 0.0),
    "between points": lambda p: jnp.interp(p, jnp.linspace(300, 335, 50), jnp.arange(50.0) % 7),
    "by cosine in a jit": lambda p: jax.jit(lambda p: jnp.cos(p) @ jnp.eye(16))(p),
    "by cosine in a branch": lambda p: lax.cond(p[0, 0] > 0, jnp.cos, jnp.sin, p),
}


@pytest.mark.parametrize("name", READS)
def test_positions_that_are_added_and_read_exactly(name: str) -> None:
    """As a layer does that moves points: `x + f(x)` in a checkpoint, and differences of points."""

    def f(table: Any, w: Any, i: Any) -> Any:
        def layer(p: Any) -> tuple[Any, Any]:
            read = READS[name](p)
            return p + jnp.tanh(p @ w), read

        return jax.checkpoint(layer)(table[i])[1]

    args = np.float32(POSITIONS), W / 300, np.arange(4)
    got, want = both_ways(f, *args)
    assert error(got, want) < 4 * UNIT[BF16]
    assert error(jax.jit(f)(rounded(args[0]), *args[1:]), want) > 0.1  # positive control


def test_coordinates_that_are_moved_in_a_checkpoint() -> None:
    """A grid and an offset that a network gives; what is there is looked up between two points."""

    def f(x: Any, w: Any, offset: Any, features: Any) -> Any:
        def step(at: Any, h: Any) -> tuple[Any, Any]:
            left = at.astype(jnp.int32)
            part = at - left.astype(jnp.float32)
            found = features[left] * (1 - part) + features[left + 1] * part
            return at + (h @ offset)[:, 0], found

        h = jnp.tanh(x @ w)
        return jax.checkpoint(step)((h @ offset)[:, 0] + jnp.arange(256.0), h)

    args = rows(256, 16), W, np.abs(rows(16, 1)) / 8, rows(300)
    (_, got), (_, want) = both_ways(f, *args)
    assert error(got, want) < 8 * UNIT[BF16]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "checkpoint"])
def test_phases_with_a_learned_frequency(wrap: Any) -> None:
    """Or of times that were normalized: float32 for a moment, read by a sine to its last bit."""

    def learned(x: Any, w: Any, times: Any, scale: Any) -> Any:
        return x @ w + jnp.sin(jnp.outer(times[AT % 64], jnp.exp(scale))) @ w

    def normalized(x: Any, w: Any, times: Any, scale: Any) -> Any:
        t = times[AT % 64]
        t = (t - jnp.mean(t)) / jnp.std(t)
        return x @ w + jnp.sin(jnp.outer(t, 100 * scale)) @ w

    args = X, W, np.linspace(0, 50, 64, dtype=np.float32), np.linspace(0, 4, 16, dtype=np.float32)
    for f in (learned, normalized):
        assert error(*both_ways(wrap(f), *args)) < 8 * UNIT[BF16]


def test_the_halves_of_a_row_in_a_checkpoint() -> None:
    def f(y: Any, i: Any) -> Any:
        def halves(y: Any) -> Any:
            high = y.astype(jnp.bfloat16)
            return high, (y - high.astype(jnp.float32)).astype(jnp.bfloat16)

        return jax.checkpoint(halves)(y[i])

    args = rows(8, 4), np.arange(4)
    for got, want in zip(*both_ways(f, *args), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.any(np.asarray(want) != 0)


def normed(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


TRUTH = np.arange(4)[:, None] < 3
MASK = jax.device_put(np.int32(TRUTH))
BLOCKS = {
    "masked": lambda x, w: x + jnp.where(TRUTH, jnp.tanh(normed(x) @ w), 0),
    "times a mask": lambda x, w: x + jnp.tanh(normed(x) @ w) * MASK.astype(jnp.float32),
    "masked at its end": lambda x, w: (
        (x + jnp.tanh(normed(x) @ w)) * (MASK > 0).astype(jnp.int32).astype(jnp.float32)
    ),
    "with noise": lambda x, w: (
        x + jnp.tanh(normed(x) @ w) * (1 + jax.random.uniform(jax.random.key(0), x.shape))
    ),
    "by position": lambda x, w: x + (normed(x) @ w) / (1 + jnp.arange(16.0)).reshape(1, 16),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_checkpoints_one_by_one_keep_16_bits(name: str) -> None:
    """Also where numbers of no activation scale what is added to the stream."""

    def f(table: Any, w: Any, i: Any) -> Any:
        x = table[i]
        for _ in range(3):
            x = jax.checkpoint(BLOCKS[name])(x, w)
        return x

    args = rows(32, 16), W, np.arange(4)
    closed = jax.make_jaxpr(jaxmp.autocast(f, BF16))(*args)
    kept = [e for e in equations(closed) if e.primitive.name in ("remat2", "checkpoint")]
    dtypes = [str(v.aval.dtype) for e in kept for v in e.invars if v.aval.shape == (4, 16)]
    assert dtypes == ["float32", "bfloat16", "bfloat16"]
    check(f, *args, roundings=16)


def test_carries_that_depend_on_a_stream() -> None:
    """The layer before it, which is only handed on, and two streams that change places."""

    def before(table: Any, w: Any, i: Any) -> Any:
        e = table[i]
        body = lambda c, w: ((c[0] + jnp.tanh(c[0] @ w), c[0]), None)  # noqa: E731
        return lax.scan(body, (e, e @ w[0]), w)[0]

    def swapped(table: Any, w: Any, i: Any) -> Any:
        e = table[i]
        body = lambda c, w: ((c[1], c[0] + jnp.tanh(c[1] @ w)), None)  # noqa: E731
        return lax.scan(body, (e @ w[0], e), w)[0]

    args = rows(32, 16), np.stack([W, W, W]), np.arange(4)
    for f, dtypes in ((before, ["bfloat16", "float32"]), (swapped, ["bfloat16"] * 2)):
        assert results_of("scan", f, *args) == dtypes, f.__name__
        check(f, *args, roundings=24)


def test_a_stream_that_adds_up_embeddings() -> None:
    def f(table: Any, w: Any, i: Any) -> Any:
        return lax.scan(lambda c, i: (c + table[i] @ w, None), table[0], i)[0]

    args = [np.full(shape, n, np.float32) for shape, n in (((4, 16), 1), ((16, 16), 1 / 16))]
    out = jax.jit(jaxmp.autocast(f, BF16))(*args, np.zeros(1000, np.int32))
    np.testing.assert_array_equal(out, np.full(16, 1001.0))


def test_rows_that_a_carry_goes_on_with() -> None:
    """It begins as an activation, and then holds the phases of the next token: float32, as `h`."""

    def f(x: Any, w: Any, phases: Any) -> Any:
        def body(carry: Any, i: Any) -> Any:
            h, angles = carry
            return (jnp.tanh(h @ w) * jnp.concatenate([jnp.cos(angles)] * 2, -1), phases[i]), h

        return lax.scan(body, (x @ w, (x @ w)[:, :8]), jnp.stack([AT, AT - 1, AT - 2]))[1]

    args = X, W, jax.device_put(PHASES)
    assert results_of("scan", f, *args) == ["float32"] * 3
    check(f, *args, roundings=24, argnums=(0, 1))


# --- products that add nothing up ---------------------------------

OUTER: dict[str, Any] = {
    "columns and rows": lambda t, f: t[:, None] @ f[None],
    "einsum": lambda t, f: jnp.einsum("i,j->ij", t, f),
    "axes of one element": lambda t, f: jnp.einsum("ik,kj->ij", t[:, None], f[None]),
    "dot_general": lambda t, f: lax.dot_general(t[None], f[None], (((0,), (0,)), ((), ()))),
    "elements": lambda t, f: jnp.einsum("ij,ij->ij", t[:, None] + 0 * f, 0 * t[:, None] + f),
    "batches": lambda t, f: jax.vmap(lambda t: jnp.dot(t[None, None], f[None])[0])(t),
    "jnp.outer": jnp.outer,
    "the right first": lambda t, f: jnp.einsum("j,i->ij", f, t),
    "in a function": lambda t, f: jax.jit(lambda t: jnp.sin(t[:, None] @ f[None]))(t),
}


@pytest.mark.usefixtures("standard_promotion")
@both
@pytest.mark.parametrize("name", OUTER)
def test_a_product_that_adds_nothing_up_is_a_multiplication(name: str, policy: str) -> None:
    """Time embeddings of bfloat16 times were 42 % off."""
    times, rates = np.float32([998.39, 988.49, 3.5]), np.float32(1e4 ** (-np.arange(16) / 16))

    def phases(t: Any, f: Any) -> Any:
        return jnp.sin(OUTER[name](t, f))

    args = times, rates
    np.testing.assert_allclose(*both_ways(phases, *args, policy=policy), atol=1e-3)
    grads = both_ways(phases, *args, policy=policy, of=lambda f: jax.grad(lambda *a: f(*a).sum()))
    np.testing.assert_allclose(*grads, rtol=1e-3, atol=1e-3)
    assert not jaxmp.audit(jaxmp.autocast(phases, policy), times, rates).product_lines
    assert not jaxmp.audit(phases, times, rates).product_lines


def test_scales_of_a_norm_are_no_products() -> None:
    """`einsum("...k,k->...k")`, as hosts write them, is `*`; the product beside it is counted."""

    def layer(x: Any, scale: Any, w: Any) -> Any:
        normed = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True))
        return jnp.einsum("...k,k->...k", normed, scale) @ w

    for fun in (layer, jaxmp.autocast(layer, BF16)):
        (row,) = jaxmp.audit(fun, X, W[0], W).product_lines
        assert row.flops == 2 * 4 * 16 * 16


@pytest.mark.usefixtures("standard_promotion")
def test_a_bias_by_an_outer_product_is_no_update() -> None:
    """The embedding of a time that is added to activations leaves them in 16 bits, as `*` does."""
    add = {"@": lambda t, f: t[:, None] @ f[None], "*": lambda t, f: t[:, None] * f}
    for product in add.values():
        fast = jaxmp.autocast(
            lambda x, w, p=product: x @ w + p(x[:, 0], w[0]), BF16, output="computed"
        )
        assert fast(X, W).dtype == jnp.bfloat16


# --- layers that end in a norm ------------------------------------


def rms(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def post_norm(x: Any, w: Any) -> Any:
    return x + rms(jnp.tanh(rms(x) @ w) @ w.T)


def scaled_post_norm(x: Any, w: Any) -> Any:
    return x + (1 + w[0]) * rms(jnp.tanh(x @ w) @ w.T)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("layer", [post_norm, scaled_post_norm])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_layers_that_end_in_a_norm_in_a_loop_and_in_a_scan(layer: Any, scale: float) -> None:
    """Gemma 2: the stream was float32 one by one, at twice the bytes, and 16 bits in a scan."""
    ws, tokens = np.stack([W, W.T]), jax.device_put(np.array([1, 2, 3]))

    def one_by_one(table: Any, ws: Any) -> Any:
        x = scale * table[tokens]
        for w in ws:
            x = layer(x, w)
        return x

    def scanned(table: Any, ws: Any) -> Any:
        return lax.scan(lambda x, w: (layer(x, w), None), scale * table[tokens], ws)[0]

    for f in (one_by_one, scanned):
        fast = jaxmp.autocast(f, BF16, output="computed")
        assert jax.eval_shape(fast, W, ws).dtype == jnp.bfloat16
