"""Autocast inside of jit, scan, while, cond, and checkpoint."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from tests.support.autocast_checks import (
    BF16,
    BOTH,
    LOW,
    UNIT,
    W,
    X,
    both,
    check,
    error,
    layer,
    results_of,
    rows,
)
from tests.support.dots import count_dots, equations
from tests.support.recompute_checks import shapes
from tests.support.ways import both_ways

pytestmark = pytest.mark.jax


def test_a_shared_jitted_function_stays_one() -> None:
    jitted = jax.jit(layer)
    fast = jaxmp.autocast(lambda x, w: [x := jitted(x, w) for _ in range(8)][-1], BF16)
    text = jax.jit(fast).lower(X, W).as_text()
    assert text.count("dot_general") <= 2  # once for a float32 operand, once for a 16-bit one


def test_a_jitted_function_is_one_however_its_argument_was_made() -> None:
    jitted = jax.jit(layer)

    def f(x: Any, w: Any) -> Any:
        h = x @ w
        return [jitted(each, w) for each in (h, -h, jnp.tanh(h), h + 1, h + jnp.exp(h), h * h)]

    text = jax.jit(jaxmp.autocast(f, BF16)).lower(X, W).as_text()
    assert text.count("func.func private @layer") == 1


def test_jit_with_donation_inside() -> None:
    step = jax.jit(layer, donate_argnums=0)
    check(lambda x, w: step(x @ w, w), X, W, dots={"low": 2})


def test_jit_with_shardings_inside() -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.P("d"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    step = jax.jit(layer, in_shardings=(spec, whole), out_shardings=spec)
    out = check(lambda x, w: step(x @ w, w), X, W, dots={"low": 2})
    assert out.sharding.spec == jax.P("d")


def test_jit_that_is_inlined_or_nested() -> None:
    inner = jax.jit(lambda x: jax.nn.gelu(x) * 0.5, inline=True)
    outer = jax.jit(lambda x, w: inner(jax.jit(jnp.sin)(x @ w)) @ w)
    check(outer, X, W, dots={"low": 2})


@both
def test_scan_over_layers(policy: str) -> None:
    def f(x: Any, ws: Any) -> Any:
        return lax.scan(lambda c, w: (c + layer(c, w), None), x @ ws[0], ws)[0]

    ws = np.stack([W] * 3)
    check(f, X, ws, policy=policy, dots={"low": 2}, roundings=12)
    # Activations are carried in 16 bits.
    assert results_of("scan", f, X, ws, policy=policy) == [LOW[policy]]


@both
def test_scan_adds_up_16_bit_values_in_float32(policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        def body(total: Any, row: Any) -> Any:
            return total + row @ w, None

        return lax.scan(body, jnp.zeros(16), x)[0]

    x, w = np.full((3000, 16), 1 / 16, np.float32), np.ones((16, 16), np.float32)
    out = jax.jit(jaxmp.autocast(f, policy))(x, w)
    np.testing.assert_array_equal(out, np.full(16, 3000.0))
    low = LOW[policy]
    total = lax.fori_loop(0, 3000, lambda i, c: c + jnp.ones((), low), jnp.zeros((), low))
    assert float(total) < 3000  # what 16 bits would have made of it


def test_nested_scans_with_mixed_carries() -> None:
    def f(x: Any, w: Any) -> Any:
        def outer(carry: Any, row: Any) -> Any:
            h, total, n, seen = carry

            def inner(c: Any, _: Any) -> Any:
                return layer(c, w), c.mean()

            h, means = lax.scan(inner, h, None, length=2)
            carry = (h, total + means.sum(), n + 1, seen | (h > 0.5).any())
            return carry, (h * row[0], n)

        start = (x @ w, jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros((), bool))
        return lax.scan(outer, start, x)

    check(f, X, W, dots={"low": 2}, roundings=24)


def test_scan_of_length_zero() -> None:
    def f(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, r: (c @ w, r @ w), x, jnp.zeros((0, 4, 16)))

    out = check(f, X, W)
    assert out[1].shape == (0, 4, 16)


def test_scan_that_swaps_its_carries() -> None:
    def f(x: Any, w: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            a, b, _ = c
            return (b, a @ w, a), None

        return lax.scan(body, (x @ w, jnp.zeros((4, 16)), x), None, length=5)[0]

    check(f, X, W, dots={"low": 2}, roundings=16)


@both
def test_while_and_fori(policy: str) -> None:
    def loop(x: Any, w: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1], w)), (0, x))[1]

    check(loop, X, W, policy=policy, dots={"low": 1}, argnums=(), roundings=12)
    check(
        lambda x, w: lax.fori_loop(0, 3, lambda i, c: layer(c, w), x @ w),
        X,
        W,
        policy=policy,
        dots={"low": 2},
        roundings=12,
    )


def test_while_with_products_in_its_condition() -> None:
    def f(x: Any, w: Any) -> Any:
        def more(c: Any) -> Any:
            return ((c[1] @ w).sum() < 1e3) & (c[0] < 4)

        return lax.while_loop(more, lambda c: (c[0] + 1, c[1] @ w + 1.0), (0, x))

    check(f, X, W, dots={"float32": 2}, argnums=(), roundings=16)


def test_while_inside_scan_and_cond_inside_while() -> None:
    def f(x: Any, w: Any) -> Any:
        def body(h: Any, n: Any) -> Any:
            def turn(c: Any) -> Any:
                i, h = c
                return i + 1, lax.cond(i % 2 == 0, lambda h: layer(h, w), lambda h: h * 0.5, h)

            return lax.while_loop(lambda c: c[0] < n, turn, (jnp.int32(0), h))[1], h[0, 0]

        return lax.scan(body, x @ w, jnp.array([1, 2, 3], jnp.int32))

    check(f, X, W, dots={"low": 2}, argnums=(), roundings=24)


@both
def test_cond(policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        return lax.cond(x[0, 0] > 0, lambda x: layer(x, w), lambda x: x * 2, x)

    for sign in (1, -1):
        x = np.array(X)
        x[0, 0] = sign
        check(f, x, W, policy=policy, dots={"low": 1})


@pytest.mark.parametrize("index", range(4))
def test_switch_whose_branches_differ_in_dtype(index: int) -> None:
    def f(i: Any, x: Any, w: Any) -> Any:
        h = x @ w
        branches = [
            lambda h: h @ w,
            lambda h: jnp.exp(-(h**2)),
            lambda h: jnp.zeros_like(h),
            lambda h: w[:4],
        ]
        return lax.switch(i, branches, h)

    check(f, jnp.int32(index), X, W, dots={"low": 2})


def test_cond_of_a_literal_that_16_bits_cannot_hold() -> None:
    def f(p: Any, x: Any, w: Any) -> Any:
        least = jnp.finfo(jnp.float32).min
        y = lax.cond(p, lambda h: h, lambda h: jnp.full_like(h, least), x @ w)
        return y

    for policy in BOTH:
        check(f, jnp.bool_(False), X, W, policy=policy, argnums=())


def test_platform_dependent() -> None:
    def f(x: Any, w: Any) -> Any:
        return lax.platform_dependent(x, cpu=lambda x: x @ w, default=lambda x: (x @ w) * 1.0)

    check(f, X, W, dots={"low": 2})


@pytest.mark.slow
def test_map_reduce_and_associative_scan() -> None:
    check(lambda x, w: lax.map(lambda r: layer(r, w), x), X, W, dots={"low": 1})
    check(lambda x, w: lax.map(lambda r: layer(r, w), x, batch_size=2), X, W, dots={"low": 1})
    check(lambda x, w: lax.associative_scan(jnp.add, x @ w), X, W, dots={"low": 1})

    def matmuls(ws: Any) -> Any:
        return lax.associative_scan(lambda a, b: jnp.einsum("nij,njk->nik", a, b), ws)

    check(matmuls, jnp.stack([W] * 4), roundings=16)
    assert set(count_dots(jaxmp.autocast(matmuls, BF16), jnp.stack([W] * 4))) == {"bfloat16"}

    def gated(x: Any, w: Any) -> Any:  # a linear recurrence, as in state space models
        a, b = jax.nn.sigmoid(x @ w), x @ w

        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        return lax.associative_scan(combine, (a, b))[1]

    check(gated, rows(64, 16), W, dots={"low": 2}, roundings=24)


def test_kv_cache_in_a_while_loop() -> None:
    def f(x: Any, w: Any) -> Any:
        cache = jnp.zeros((8, 16))

        def step(carry: Any) -> Any:
            i, h, cache = carry
            cache = lax.dynamic_update_slice(cache, (h @ w)[None], (i, 0))
            scores = jnp.where(jnp.arange(8) <= i, cache @ h, -jnp.inf)
            return i + 1, jax.nn.softmax(scores) @ cache, cache

        return lax.while_loop(lambda c: c[0] < 6, step, (0, x[0], cache))

    check(f, X, W, dots={"low": 3}, argnums=(), roundings=32)


def test_kv_cache_keeps_the_dtype_it_was_made_in() -> None:
    def f(cache: Any, x: Any, w: Any) -> Any:
        return lax.dynamic_update_slice(cache, (x @ w).astype(cache.dtype), (2, 0))

    for dtype in (jnp.float32, jnp.bfloat16):
        fast = jaxmp.autocast(f, BF16)
        cache = np.full((8, 16), 1.001, dtype)
        out = fast(cache, X, W)
        assert out.dtype == dtype
        np.testing.assert_array_equal(out[0], cache[0])
    assert count_dots(fast, np.zeros((8, 16), np.float32), X, W) == {"bfloat16": 1}


def test_loops_and_branches_that_take_python_bools() -> None:
    """A bool that is a literal has no dtype of its own."""

    def loop(x: Any, w: Any) -> Any:
        def turn(c: Any) -> Any:
            return c[1].sum() < -1e9, c[1] @ w

        return lax.while_loop(lambda c: c[0], turn, (True, x))[1]

    def branch(x: Any, w: Any) -> Any:
        return lax.cond(
            x.sum() > -1e9, lambda x, b: jnp.where(b, x @ w, x), lambda x, b: x, x, True
        )

    def scanned(x: Any, w: Any) -> Any:
        def body(c: Any, row: Any) -> Any:
            return (c[0] & (row.sum() > 0), c[1] + row @ w), c[0]

        return lax.scan(body, (True, jnp.zeros(16)), x)

    check(loop, X, W, dots={"float32": 1}, argnums=())
    check(branch, X, W, dots={"low": 1})
    check(scanned, X, W, dots={"low": 1}, roundings=12)


@pytest.mark.parametrize("differentiated", [False, True])
def test_with_jit_disabled(differentiated: bool) -> None:
    def f(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (jax.nn.relu(c @ w), None), x, None, length=2)[0].sum()

    def way(fun: Any) -> Any:
        return jax.grad(fun, (0, 1)) if differentiated else fun

    with jax.disable_jit():
        got = way(jaxmp.autocast(f, BF16))(X, W)
    assert error(got, jax.jit(way(jaxmp.autocast(f, BF16)))(X, W)) < UNIT[BF16]


def one_hot(i: Any) -> Any:
    return (i == jnp.arange(16)).astype(jnp.float32)[None]


CASTS_INSIDE: dict[str, Any] = {
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda: one_hot(1), lambda: one_hot(2)) @ w,
    "cond with a product": lambda x, w: (
        lax.cond(x[0, 0] > 0, lambda: x[:1] @ w, lambda: one_hot(2)) @ w
    ),
    "scan": lambda x, w: lax.scan(lambda c, j: (c, one_hot(j)), 0, jnp.arange(3))[1][:, 0] @ w,
    "checkpoint": lambda x, w: jax.checkpoint(lambda h: (h > 0).astype(jnp.float32))(x @ w) @ w,
}


@pytest.mark.parametrize("name", CASTS_INSIDE)
def test_casts_of_integers_and_flags_inside_are_floats(name: str) -> None:
    """A value that is cast to float32 inside of another program is one that products cast."""
    fast = jaxmp.autocast(CASTS_INSIDE[name], BF16)
    assert set(count_dots(fast, X, W)) == {"bfloat16"}
    assert error(*both_ways(CASTS_INSIDE[name], X, W)) < 0.02


# --- checkpoint, with all its policies -----------------------------------------------------------


@both
def test_checkpoint(policy: str) -> None:
    block = jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w) * 0.3 + 1e-3)
    check(lambda x, w: block(block(x, w), w), X, W, policy=policy, dots={"low": 2}, roundings=12)


POLICIES = jax.checkpoint_policies
NAMED = POLICIES.save_only_these_names("h")


def test_what_a_checkpoint_reads_in_float32_is_computed_in_float32() -> None:
    """The sigmoid of 9 is 1 in bfloat16, and the logarithm of nothing infinite."""
    h = np.full((2, 16), 3.0, np.float32)
    rest = lambda x, w: jnp.log(jax.checkpoint(lambda s: 1 - s)(jax.nn.sigmoid(x @ w)))  # noqa: E731
    got, want = both_ways(rest, h, 3.0 * np.eye(16, dtype=np.float32))
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize(
    "remat_policy", [None, POLICIES.dots_saveable, NAMED, POLICIES.everything_saveable]
)
def test_checkpoint_policies(remat_policy: Any) -> None:
    @functools.partial(jax.checkpoint, policy=remat_policy)
    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(checkpoint_name(jax.nn.sigmoid(x @ w) * 0.5, "h")) @ w

    fast = jaxmp.autocast(block, BF16)
    check(block, X, W, dots={"low": 2})
    # As many activations are kept as without autocast, and they are 16-bit ones.
    plain = [each for each in shapes(block, X, W) if "4,16" in each]
    low = [each for each in shapes(fast, X, W) if "bfloat16[4,16]" in each]
    if remat_policy is NAMED or remat_policy is POLICIES.dots_saveable:
        assert plain == ["float32[4,16]"] * len(plain)
        assert len(low) == len(plain) > 0
    if remat_policy is None:
        assert not plain
        assert not low


def test_checkpoint_recomputes_under_autocast_of_grad() -> None:
    block = jax.checkpoint(layer, policy=POLICIES.nothing_saveable)
    grad = jax.grad(lambda w: jnp.sum(block(block(X, w), w) ** 2))
    fast = jaxmp.autocast(grad, BF16)
    assert count_dots(fast, W) == {"bfloat16": sum(count_dots(grad, W).values())}
    assert error(*both_ways(grad, W)) < 24 * UNIT[BF16]
    names = [e.primitive.name for e in equations(jax.make_jaxpr(fast)(W))]
    assert "remat2" in names or "checkpoint" in names


@both
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_jitted_helper_that_holds_an_array(policy: str, kind: Any) -> None:
    table = kind(np.linspace(1, 2, 16, dtype=np.float32).reshape(1, 16))

    @jax.jit
    def scaled(h: Any) -> Any:
        return h * table

    block = jax.checkpoint(lambda x, w: jnp.tanh(scaled(x @ w)))
    check(lambda x, w: block(block(x, w), w), X, W, policy=policy, dots={"low": 2}, roundings=12)

    def stacked(x: Any, ws: Any) -> Any:
        return lax.scan(lambda h, w: (block(h, w), None), x, ws)[0]

    check(stacked, X, np.stack([W] * 2), policy=policy, roundings=16)
