"""Carries of a scan that are sums are float32, however their terms are added."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from tests.support.autocast_checks import BF16, BOTH, LOW, W, error, results_of, rows, weights
from tests.support.dots import count_dots, equations
from tests.support.ways import both_ways, in_16_bits, rounded

TURNS = 1000
WS = jax.device_put(np.stack([W, -W, W.T]))
ONES = np.full((16, 16), 1 / 16, np.float32)
Body = Callable[[Any, Any], tuple[Any, Any]]


def sums_of(wrap: Callable[[Body], Body], add: Callable[[Any, Any], Any]) -> Any:
    """What a scan adds up to, of ones that come from a product, and begin as one."""

    def f(x: Any, w: Any) -> Any:
        def body(total: Any, row: Any) -> Any:
            return add(total, row @ w), None

        return lax.scan(wrap(body), x[0] @ w, x[1:])[0]

    return jaxmp.autocast(f, BF16)(np.ones((TURNS, 4, 16), np.float32), ONES)


def branch(body: Body) -> Body:
    return lambda c, x: (lax.cond(x[0, 0] > 0, lambda c: body(c, x)[0], lambda c: c, c), None)


def inner_scan(body: Body) -> Body:
    return lambda c, x: lax.scan(body, c, x[None])


def inner_loop(body: Body) -> Body:
    return lambda c, x: (lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, body(s[1], x)[0]),
                                        (0, c))[1], None)  # fmt: skip


MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
ROWS = PartitionSpec("data")


def sharded(x: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(MESH, ROWS))


def over_devices(body: Body, of_x: PartitionSpec = ROWS) -> Body:
    add = jax.shard_map(lambda c, x: body(c, x)[0], mesh=MESH, in_specs=(ROWS, of_x),
                        out_specs=ROWS)  # fmt: skip
    return lambda c, x: (add(c, x), None)


def derivative_of_its_own(body: Body) -> Body:
    @jax.custom_jvp
    def call(c: Any, x: Any) -> Any:
        return body(c, x)[0]

    call.defjvp(lambda primals, dots: (call(*primals), dots[0]))
    return lambda c, x: (call(c, x), None)


WRAPPERS = {
    "as it is": lambda body: body,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "checkpoint of jit": lambda body: jax.checkpoint(jax.jit(body)),
    "cond": branch,
    "scan": inner_scan,
    "while": inner_loop,
    "shard_map": over_devices,
    "custom_jvp": derivative_of_its_own,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_sums_in_a_scan(name: str) -> None:
    out = sums_of(WRAPPERS[name], lambda total, x: total + x)
    np.testing.assert_array_equal(out, np.full((4, 16), float(TURNS)))
    low = lax.fori_loop(0, TURNS, lambda i, c: c + jnp.bfloat16(1), jnp.bfloat16(0))
    assert float(low) < TURNS  # what 16 bits would have made of it


ADDS: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda c, x: c.at[0].add(x[0]),
    "one of two": lambda c, x: c.at[jnp.array([0, 2])].add(x[1:3]),
    "less": lambda c, x: c.at[0].set(c[0] + x[0]),
    "up to a bound": lambda c, x: jnp.minimum(c + x, 1e6),
    "subtracted": lambda c, x: -(-c - x),
    "if finite": lambda c, x: jnp.where(jnp.isfinite(c + x).all(), c + x, c),
    "in a branch if finite": lambda c, x: lax.cond(
        jnp.isfinite(c).all(), lambda c, x: c + x, lambda c, x: c, c, x
    ),
    "behind a barrier": lambda c, x: lax.optimization_barrier((c, x))[0] + x,
    "named": lambda c, x: checkpoint_name(c, "total") + x,
    "sharded": lambda c, x: sharded(c + x),
    "without a gradient": lambda c, x: lax.stop_gradient(c) + x,
    "positive": lambda c, x: jnp.abs(c) + x,
    "row by row": lambda c, x: jnp.stack([row + x[i] for i, row in enumerate(jnp.unstack(c))]),
    "repeated": lambda c, x: jnp.tile(c[:1], (4, 1)) + x,
    "in order": lambda c, x: jnp.sort(c, axis=0) + x,
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint], ids=["", "checkpoint"])
@pytest.mark.parametrize("name", ADDS)
def test_other_sums(name: str, wrap: Any) -> None:
    assert sums_of(wrap, ADDS[name])[0, 0] == TURNS


@pytest.mark.parametrize("wrap", [lambda body: body, jax.checkpoint], ids=["", "checkpoint"])
def test_means_that_decay(wrap: Any) -> None:
    def f(x: Any, w: Any) -> Any:
        return lax.scan(wrap(lambda m, x: (0.99 * m + 0.01 * (x @ w), None)), x[0] @ w, x)[0]

    assert error(*both_ways(f, np.abs(rows(TURNS, 4, 16)), np.abs(W))) < 0.01


REPLICATED = {**WRAPPERS, "shard_map": functools.partial(over_devices, of_x=PartitionSpec())}


@pytest.mark.parametrize("name", WRAPPERS)
def test_streams_stay_in_16_bits(name: str) -> None:
    """The weights are others in each turn: layers, in every one of the same wrappings."""

    def f(x: Any, ws: Any) -> Any:
        body = REPLICATED[name](lambda c, w: (c + jnp.tanh(c @ w), None))
        return lax.scan(body, x @ ws[0], ws)[0]

    assert results_of("scan", f, rows(16, 16), WS) == [LOW[BF16]]


@pytest.mark.parametrize("name", WRAPPERS)
def test_recurrences_are_carried_in_float32(name: str) -> None:
    """The weights are the same in each turn: a solver, whose steps 16 bits would lose."""

    def f(x: Any, w: Any) -> Any:
        body = REPLICATED[name](lambda c, _: (c + jnp.tanh(c @ w), None))
        return lax.scan(body, x @ w, jnp.zeros((3, 16, 16)))[0]

    assert results_of("scan", f, rows(16, 16), W) == ["float32"]


SLICES: dict[str, Callable[[Any, Any], Any]] = {
    "by index": lambda ws, i: ws[i],
    "by dynamic_slice": lambda ws, i: lax.dynamic_slice_in_dim(ws, i, 1)[0],
    "by take, cast and scaled": lambda ws, i: 0.5 * jnp.take(ws, i % 3, axis=0).T,
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("bound", ["static", "dynamic"])
@pytest.mark.parametrize("name", SLICES)
def test_layers_that_a_counter_slices(name: str, bound: str) -> None:
    """Loops by `fori_loop` go as those by `scan` do: also where the number of turns is unknown."""

    def f(x: Any, ws: Any, n: Any) -> Any:
        body = lambda i, c: c + jnp.tanh(c @ SLICES[name](ws, i))  # noqa: E731
        return lax.fori_loop(0, n if bound == "dynamic" else 3, body, x @ ws[0])

    fast = jaxmp.autocast(f, BF16)
    loop = {"static": "scan", "dynamic": "while"}[bound]
    args = rows(16, 16), WS, jnp.int32(3)
    (found,) = [e for e in equations(jax.make_jaxpr(fast)(*args)) if e.primitive.name == loop]
    dtypes = {str(v.aval.dtype) for v in found.outvars if v.aval.shape}
    assert dtypes == {LOW[BF16]}
    assert error(*both_ways(f, *args)) < 0.05


def test_a_sum_beside_layers_is_float32() -> None:
    """As skip connections are added up: what begins with zeros is a sum, layers or not."""

    def f(x: Any, ws: Any) -> Any:
        def body(c: Any, w: Any) -> Any:
            h = c[0] + jnp.tanh(c[0] @ w)
            return (h, c[1] + h), None

        return lax.scan(body, (x @ ws[0], jnp.zeros_like(x)), ws)[0]

    assert results_of("scan", f, rows(16, 16), WS) == [LOW[BF16], "float32"]


def gates(ws: Any, x: Any) -> Any:
    """What is left after each of many layers, as halting and transmittance are."""

    def body(c: Any, w: Any) -> Any:
        h = jnp.tanh(c[0] @ w)
        return (h, c[1] * (1 - 0.02 * jax.nn.sigmoid(h))), None

    return lax.scan(body, (x, jnp.ones_like(x)), ws)[0][1]


def delta_rule(ws: Any, x: Any) -> Any:
    """Keys are others in each turn, and no weights: a product made them."""
    k, v = jnp.tanh(x @ ws[0]) / 4, x @ ws[1]

    def body(s: Any, kv: Any) -> Any:
        k, v = kv
        s = 0.999 * s
        return s + 0.05 * k[:, None] * (v - k @ s)[None], None

    return lax.scan(body, jnp.zeros((16, 16)), (k, v))[0]


@pytest.mark.parametrize("fun", [gates, delta_rule])
def test_what_adds_up_beside_layers_or_of_keys(fun: Any) -> None:
    args = np.asarray(rows(200, 16, 16)) / 4, rows(64, 16, seed=2)
    assert error(*both_ways(fun, *args)) < 0.03
    assert results_of("scan", fun, *args)[-1] == "float32"


def test_sharded_streams_stay_in_16_bits() -> None:
    def f(x: Any, ws: Any) -> Any:
        body = lambda c, w: (sharded(sharded(c) + jnp.tanh(sharded(c @ w))), None)  # noqa: E731
        return lax.scan(body, x @ ws[0], ws)[0]

    assert results_of("scan", f, rows(16, 16), WS) == [LOW[BF16]]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("loop", ["scan", "while", "python"])
def test_small_steps_are_not_lost(loop: str) -> None:
    """Of a differential equation: in a loop, and in Python's if the state begins with the data."""

    def f(x: Any, w: Any) -> Any:
        step = lambda h: h + 0.002 * jnp.tanh(h @ w)  # noqa: E731
        if loop == "scan":
            return lax.scan(
                lambda h, _: (step(h), None), x @ jnp.eye(16, dtype=x.dtype), None, length=200
            )[0]
        if loop == "while":
            turns = 200 + (x[0, 0] > 99).astype(jnp.int32)
            return lax.fori_loop(0, turns, lambda i, h: step(h), x @ jnp.eye(16, dtype=x.dtype))
        for _ in range(200):
            x = step(x)
        return x

    x = rounded(rows(16, 16))  # so that projecting it rounds nothing
    got, want = (np.asarray(out) - x for out in both_ways(f, x, W))
    assert error(got, want) < 0.02
    assert error(in_16_bits(f, BF16, x, W) - x, want) > 0.2  # positive control


# --- loops that floats end ----------------------------------------


def turns(w: Any, y: Any) -> Any:
    """How often a fixed point is iterated, up to 256 times."""

    def turn(carry: Any) -> Any:
        z, _, count = carry
        after = jnp.tanh(z @ w + y)
        return after, jnp.max(jnp.abs(after - z)), count + 1

    start = jnp.zeros_like(y), jnp.float32(1), 0
    return lax.while_loop(lambda c: (c[1] > 1e-4) & (c[2] < 256), turn, start)[2].astype(
        jnp.float32
    )


def turns_by_a_flag(w: Any, y: Any) -> Any:
    def turn(carry: Any) -> Any:
        z, _, count = carry
        after = jnp.tanh(z @ w + y)
        return after, jnp.max(jnp.abs(after - z)) > 1e-4, count + 1

    start = jnp.zeros_like(y), True, 0
    return lax.while_loop(lambda c: c[1] & (c[2] < 256), turn, start)[2].astype(jnp.float32)


def as_custom_jvp(w: Any, y: Any) -> Any:
    fun = jax.custom_jvp(turns)
    fun.defjvp(lambda primals, tangents: (fun(*primals), jnp.sum(tangents[1]) * 0))
    return fun(w, y)


def in_a_scan(w: Any, y: Any) -> Any:
    return lax.scan(lambda c, _: (turns(w, y), None), jnp.float32(0), None, length=2)[0]


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("fun", [turns, turns_by_a_flag, as_custom_jvp, jax.jit(turns), in_a_scan])
def test_a_loop_that_floats_end_is_float32(fun: Any, policy: str) -> None:
    """In 16 bits the error stays above its bound, and the loop does not end."""
    args = np.asarray(rows(16, 16)) / 10, weights(4, 16), rows(32, 4)
    got, want = both_ways(lambda w, u, x: fun(w, x @ u), *args, policy=policy)
    assert got == want < 50


def test_what_such_a_loop_carries_in_16_bits_stays_so() -> None:
    def f(x: Any) -> Any:
        halve = lambda c: c @ (0.5 * jnp.eye(16, dtype=c.dtype))  # noqa: E731
        return lax.while_loop(lambda c: jnp.max(c) > 1, halve, x) * 2

    x = np.full((4, 16), 3, jnp.bfloat16)
    assert jaxmp.autocast(f, "bfloat16", output="computed")(x).dtype == f(x).dtype == jnp.bfloat16


def test_a_loop_that_a_token_ends_is_16_bits() -> None:
    """A decoder: an argmax is no float. Positive control of the test above."""

    def decode(w: Any, table: Any) -> Any:
        def turn(carry: Any) -> Any:
            token, _, count = carry
            token = jnp.argmax(jnp.tanh(table[token] @ w) @ w)
            return token, token == 3, count + 1

        return lax.while_loop(lambda c: ~c[1] & (c[2] < 9), turn, (0, False, 0))[0]

    assert count_dots(jaxmp.autocast(decode, BF16), W, W) == {"bfloat16": 2}
