"""What many read in 16 bits: the gradients that come back are added in float32, rounded after."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, BOTH, FP16, compiled, rows, weights
from tests.support.dots import equations
from tests.support.ways import both_ways

NODES, WIDTH = 4, 8
EDGES = 2048
X, W, MIX = rows(NODES, 16), weights(16, WIDTH), weights(WIDTH, WIDTH, seed=2)
# One node is the hub that nearly all edges read.
SENDERS = np.zeros(EDGES, np.int32)
SENDERS[:3] = [1, 2, 3]
WEIGHTS = (1 + 0.1 * np.random.default_rng(0).normal(size=(EDGES, WIDTH))).astype(np.float32)

Read = Callable[[Any, Any], Any]
READS: dict[str, Read] = {
    "index": lambda h, at: h[at],
    "take": lambda h, at: jnp.take(h, at, axis=0),
    "clipped": lambda h, at: jnp.take(h, at, axis=0, mode="clip"),
    "filled": lambda h, at: h.at[at].get(mode="fill", fill_value=0),
    "take_along_axis": lambda h, at: jnp.take_along_axis(h, at[:, None], axis=0),
    "vmap": lambda h, at: jax.vmap(lambda i: h[i])(at),
    "vmap of columns": lambda h, at: jax.vmap(lambda c: c[at], in_axes=1, out_axes=1)(h),
    "columns": lambda h, at: h.T[:, at].T,
    "vmap of dynamic_slice": lambda h, at: jax.vmap(
        lambda i: lax.dynamic_slice(h, (i, 0), (1, WIDTH))[0]
    )(at),
    "repeat": lambda h, at: jnp.repeat(
        h, jnp.bincount(at, length=NODES), axis=0, total_repeat_length=EDGES
    )[jnp.argsort(jnp.argsort(at))],
    "jit": jax.jit(lambda h, at: h[at]),
    "checkpoint": jax.checkpoint(lambda h, at: h[at]),
    "cond": lambda h, at: lax.cond(at[0] > 0, lambda: h[at], lambda: -h[at]),
    "twice": lambda h, at: h[at][jnp.arange(at.size)],
}
# All turns of a loop read one array: the loop adds up what comes back.
LOOPS: dict[str, Read] = {
    "map": lambda h, at: lax.map(lambda i: h[i], at),
    "dynamic_slice in a scan": lambda h, at: lax.scan(
        lambda c, i: (c, lax.dynamic_slice(h, (i, 0), (1, WIDTH))[0]), 0.0, at
    )[1],
    "checkpoint in a scan": lambda h, at: lax.scan(jax.checkpoint(lambda c, i: (c, h[i])), 0.0, at)[
        1
    ],
    "scan in a scan": lambda h, at: lax.scan(
        lambda c, some: lax.scan(lambda c, i: (c, h[i]), c, some), 0.0, at.reshape(4, -1)
    )[1].reshape(-1, WIDTH),
    "scan of a scan, backwards": lambda h, at: lax.scan(
        lambda c, i: (c, h[i]), 0.0, at, reverse=True, unroll=2
    )[1],
}


def loss(read: Read, dtype: Any = jnp.float32) -> Callable[..., Any]:
    def function(w: Any, senders: Any, weights: Any) -> Any:
        h = X.astype(dtype) @ w.astype(dtype)
        # A product reads the messages: what only float32 operations read is gathered in float32.
        messages = read(h, senders) @ MIX.astype(dtype)
        return jnp.sum(messages.astype(jnp.float32) * weights)

    return function


def of_nodes(senders: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Rows of weights added up at their nodes, in NumPy's float64."""
    added = np.zeros((NODES, WIDTH))
    np.add.at(added, senders, weights @ np.asarray(MIX, np.float64).T)
    return added


def off(grads: Any, senders: np.ndarray = SENDERS, weights: np.ndarray = WEIGHTS) -> float:
    want = np.asarray(X, np.float64).T @ of_nodes(senders, weights)
    return float(np.linalg.norm(np.asarray(grads, np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("name", [*READS, *LOOPS])
def test_gradients_of_a_hub(name: str) -> None:
    """At a graph's hub 88 % of the gradient was lost with 4,096 edges."""
    read = (READS | LOOPS)[name]
    grads = compiled(jax.grad(jaxmp.autocast(loss(read), BF16)))(W, SENDERS, WEIGHTS)
    assert off(grads) < 0.01


@pytest.mark.parametrize("name", READS)
def test_gradients_of_a_hub_by_hand(name: str) -> None:
    """With `reduce_dtype`, a function that casts by itself has them too."""
    by_hand = loss(READS[name], jnp.bfloat16)
    grads = compiled(jaxmp.grad(by_hand, reduce_dtype="float32"))(W, SENDERS, WEIGHTS)
    assert off(grads) < 0.01
    assert off(compiled(jax.grad(by_hand))(W, SENDERS, WEIGHTS)) > 0.5  # control


@pytest.mark.parametrize("policy", BOTH)
def test_gradients_of_65536_edges(policy: str) -> None:
    senders = np.zeros(65536, np.int32)
    weights = np.resize(WEIGHTS, (65536, WIDTH)) / 64  # float16 ends at 65,504
    fast = jaxmp.autocast(loss(READS["index"]), policy)
    for grad in (jax.grad(fast), jaxmp.grad(fast, reduce_dtype="float32", loss_scale=1.0)):
        assert off(compiled(grad)(W, senders, weights), senders, weights) < 0.01
    by_hand = jax.grad(loss(READS["index"], jnp.bfloat16))
    assert off(compiled(by_hand)(W, senders, weights), senders, weights) > 0.9  # control


def test_messages_that_are_summed_at_their_receivers() -> None:
    """The sum of a graph network is float32, and its transpose a gather, which is exact."""

    def passed(h: Any, at: Any) -> Any:
        return jax.ops.segment_sum(h[at], at, NODES)[at] / EDGES

    def sums(w: Any) -> Any:
        return jax.ops.segment_sum(jnp.take(X @ w, SENDERS, axis=0), SENDERS, NODES)

    got = compiled(jaxmp.autocast(sums, BF16))(W)
    counts = np.bincount(SENDERS, minlength=NODES)[:, None]
    want = counts * (np.asarray(X, np.float64) @ np.asarray(W, np.float64))
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
    grads = compiled(jax.grad(jaxmp.autocast(loss(passed), BF16)))(W, SENDERS, WEIGHTS)
    exact = np.asarray(X, np.float64).T @ (of_nodes(SENDERS, WEIGHTS) * counts / EDGES)
    assert np.linalg.norm(grads - exact) < 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["index", "repeat", "map"])
@pytest.mark.slow
def test_all_other_derivatives(name: str) -> None:
    """Forward mode, second derivatives, vmap, and all of it without jit."""
    read, at = (READS | LOOPS)[name], jax.device_put(np.arange(EDGES, dtype=np.int32) % NODES)

    def function(w: Any) -> Any:
        return jnp.mean(jnp.square(read(X @ w, at)))

    fast = jaxmp.autocast(function, BF16)
    tangent = weights(16, WIDTH, seed=3)
    _, got = compiled(lambda: jax.jvp(fast, (W,), (tangent,)))()
    _, want = compiled(lambda: jax.jvp(function, (W,), (tangent,)))()
    np.testing.assert_allclose(got, want, rtol=0.02)
    got, want = (
        compiled(lambda f=f: jax.jvp(jax.grad(f), (W,), (tangent,))[1])() for f in (fast, function)
    )
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
    got, want = (compiled(jax.vmap(jax.grad(f)))(jnp.stack([W, 2 * W])) for f in (fast, function))
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
    assert np.linalg.norm(jax.grad(fast)(W) - want[0]) < 0.02 * np.linalg.norm(want[0])


def test_values_are_gathered_in_16_bits() -> None:
    """Neither the value nor what is kept for the backward pass is a float32 copy."""
    fast = jaxmp.autocast(lambda w: (X @ w)[SENDERS], BF16, output="computed")
    gathers = [e for e in equations(jax.make_jaxpr(fast)(W)) if e.primitive.name == "gather"]
    assert [str(e.outvars[0].aval.dtype) for e in gathers] == ["bfloat16"]
    _, pull = jax.vjp(fast, W)
    kept = [x for x in jax.tree.leaves(pull) if hasattr(x, "dtype")]
    assert not any(
        x.dtype == jnp.float32 and x.shape in [(NODES, WIDTH), (EDGES, WIDTH)] for x in kept
    )
    assert not any(x.dtype == jnp.bfloat16 and EDGES in x.shape for x in kept)


def test_float16_sums_that_would_overflow() -> None:
    """Under a loss scale a hub's sum may pass 65,504 on the way to a gradient that does not."""
    senders = np.zeros(EDGES, np.int32)
    weights = np.where(np.arange(EDGES)[:, None] < EDGES // 2, 128.0, -128.0) * np.ones((1, WIDTH))
    weights[0] += 64
    fast = jax.grad(jaxmp.autocast(loss(READS["index"]), FP16))
    assert off(compiled(fast)(W, senders, weights.astype(np.float32)), senders, weights) < 0.01


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_forward_mode_of_rows_that_are_not_there(mode: str) -> None:
    """What `jnp.take` fills in is a constant: its tangent is zero, not NaN."""

    def read(h: Any) -> Any:
        filled = {"fill_value": 5.0} if mode == "fill" else {}
        return jnp.take((h[None] @ jnp.eye(4))[0], jnp.array([0, 7]), mode=mode, **filled)

    for derivative in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(*both_ways(read, np.ones(4, np.float32), of=derivative))


def test_a_number_that_is_looked_up() -> None:
    """A gather of an array without dimensions, as `vmap` of a lookup may make."""
    numbers = jax.lax.GatherDimensionNumbers((), (), ())
    indices = np.zeros((0,), np.int32)

    def f(x: Any, w: Any) -> Any:
        return jnp.exp(jax.lax.gather((x @ w).sum(), indices, numbers, ()))

    got, want = both_ways(f, *[np.ones((2, 2), np.float32)] * 2)
    assert got == want
