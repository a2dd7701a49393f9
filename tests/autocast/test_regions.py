"""Parts of a function that autocast treats differently: full_precision, rules, lists."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, FP16, UNIT, W, X, check, error
from tests.support.dots import count_dots, equations
from tests.support.ways import both_ways, rounded

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]
exact = jaxmp.full_precision(lambda x, w: x @ w)


def scoped(name: str, x: Any, w: Any) -> Any:
    with jax.named_scope(name):
        return jnp.tanh(x @ w)


# --- full_precision ----------------------------------------------

EXACT = {
    "bare": lambda x, w: exact(x, w),
    "in a jit": lambda x, w: jax.jit(lambda x, w: exact(x, w))(x, w),
    "scan": lambda x, w: lax.scan(lambda c, _: (exact(c, w), None), x, None, length=1)[0],
    "while": lambda x, w: lax.fori_loop(0, jnp.int32(1), lambda i, c: exact(c, w), x),
    "cond": lambda x, w: lax.cond(x[0, 0] > -9, exact, lambda x, w: x + w[:4], x, w),
    "checkpoint": lambda x, w: jax.checkpoint(exact)(x, w),
    "vmap": lambda x, w: jax.vmap(exact, (0, None))(x, w),
    "scan of checkpoint in jit": lambda x, w: jax.jit(
        lambda x, w: lax.scan(jax.checkpoint(lambda c, w: (exact(c, w), None)), x, w[None])[0]
    )(x, w),
}


@pytest.mark.parametrize("name", EXACT)
def test_full_precision(name: str) -> None:
    fun = EXACT[name]
    fast = jaxmp.autocast(lambda x, w: fun(x, w), BF16)
    assert set(count_dots(fast, X, W)) == {"float32"}
    assert error(fast(X, W), np.matmul(X, W)) < 1e-6
    if name == "while":
        return
    # Also the backward pass, differentiated within and without.
    loss = lambda x, w: jnp.sum(fun(x, w) ** 2)  # noqa: E731
    want = jax.jit(jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), (0, 1)))(X, W)
    for grad in (
        jax.grad(jaxmp.autocast(loss, BF16), (0, 1)),
        jaxmp.autocast(jax.grad(loss, (0, 1)), BF16),
    ):
        assert set(count_dots(grad, X, W)) == {"float32"}
        assert error(jax.jit(grad)(X, W), want) < 1e-6


def test_full_precision_next_to_16_bits_in_one_loop() -> None:
    def f(x: Any, ws: Any) -> Any:
        @jax.checkpoint
        def body(c: Any, w: Any) -> Any:
            return jnp.tanh(c @ w) + 0.1 * exact(c, w), None

        return lax.scan(body, x, ws)[0]

    ws = np.stack([W] * 2)
    check(f, X, ws, dots={"low": 1, "float32": 1}, roundings=16)
    grad = jaxmp.autocast(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)), BF16)
    # One is computed again for the derivative of tanh.
    assert count_dots(grad, X, ws) == {"bfloat16": 4, "float32": 3}


def test_full_precision_gets_the_dtypes_that_it_would_have() -> None:
    seen = []

    @jaxmp.full_precision
    def f(x: Any, w: Any) -> Any:
        seen.append((x.dtype, w.dtype))
        return x * w

    out = jaxmp.autocast(lambda x, w: f(x @ w, x), BF16)(X, W)
    assert seen[0] == (jnp.float32, jnp.float32)
    assert out.dtype == jnp.float32
    assert error(f(X, W[:4]), X * W[:4]) == 0  # alone it does nothing


def test_autocast_within_autocast() -> None:
    inner = jaxmp.autocast(lambda x, w: x @ w, FP16)
    f = jaxmp.autocast(lambda x, w: jnp.tanh(inner(x @ w, w)) @ w, BF16)
    assert count_dots(f, X, W) == {"float16": 1, "bfloat16": 2}
    wide = jaxmp.autocast(lambda x, w: x @ w, "float32")
    g = jaxmp.autocast(lambda x, w: wide(x @ w, w), BF16)
    assert count_dots(g, X, W) == {"float32": 1, "bfloat16": 1}
    assert count_dots(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)), X, W) == {
        "float16": 3,
        "bfloat16": 6,
    }
    losses = jaxmp.autocast(lambda h: jax.nn.logsumexp(h, -1) - h[:, 0], "float32")
    h = jaxmp.autocast(lambda xs, w: lax.map(lambda x: losses(x @ w), xs), BF16, output="computed")
    out = h(X[None], W)  # stacked as they were computed
    assert out.dtype == jnp.float32
    assert np.any(out != rounded(out))
    within = jaxmp.autocast(lambda x, w: exact(inner(x, w), w), BF16)
    assert count_dots(within, X, W) == {"float16": 1, "float32": 1}


# --- rules -------------------------------------------------------


def test_rules_by_scope() -> None:
    rules = jaxmp.PolicyRules([("head", "float32"), ("odd", "float16")], default=BF16)

    def f(x: Any, w: Any) -> Any:
        return scoped("head", scoped("odd", scoped("body", x, w), w), w)

    counts = {"bfloat16": 1, "float16": 1, "float32": 1}
    assert count_dots(jaxmp.autocast(f, rules), X, W) == counts
    grads = count_dots(jax.grad(lambda x, w: jaxmp.autocast(f, rules)(x, w).sum(), (0, 1)), X, W)
    assert grads == dict.fromkeys(counts, 3)
    gradient = jaxmp.grad(lambda x, w: f(x, w).sum(), (0, 1), loss_scale=1.0)
    inside = count_dots(jaxmp.autocast(gradient, rules), X, W)
    assert inside == grads


def test_the_innermost_scope_decides() -> None:
    rules = jaxmp.PolicyRules([("block", "float32"), ("block/inner", BF16)], default=FP16)

    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("block"):
            return scoped("inner", x, w) @ w

    assert count_dots(jaxmp.autocast(f, rules), X, W) == {"bfloat16": 1, "float32": 1}


CONTAINERS = {
    "jit": lambda f: jax.jit(f),
    "scan": lambda f: lambda x, w: lax.scan(lambda c, w: (f(c, w), None), x, w[None])[0],
    "checkpoint": lambda f: jax.checkpoint(f),
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > -9, f, lambda x, w: x, x, w),
    "while": lambda f: lambda x, w: lax.fori_loop(0, jnp.int32(1), lambda i, c: f(c, w), x),
    "vmap": lambda f: jax.vmap(f, (0, None)),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("around", ["nothing", "a float32 scope", "what is left alone"])
def test_rules_for_what_is_inside_of_a_loop(container: str, around: str) -> None:
    """Only the part is low, whatever holds around the loop that it is in."""
    outer = [("outer", "float32")] if around == "a float32 scope" else []
    default = None if around == "what is left alone" else "float32"
    rules = jaxmp.PolicyRules([("part", BF16), *outer], default=default)

    def body(x: Any, w: Any) -> Any:
        return scoped("part", x, w) @ w

    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("outer"):
            return CONTAINERS[container](body)(x, w)

    fast = jaxmp.autocast(f, rules)
    assert count_dots(fast, X, W) == {"bfloat16": 1, "float32": 1}
    assert error(fast(X, W), jax.jit(f)(X, W)) < 8 * UNIT[BF16]


def test_one_jitted_function_in_two_scopes() -> None:
    rules = jaxmp.PolicyRules([("head", "float32")], default=BF16)
    shared = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("body"):
            x = shared(x, w)
        with jax.named_scope("head"):
            return shared(x, w)

    assert count_dots(jaxmp.autocast(f, rules), X, W) == {"bfloat16": 1, "float32": 1}
    assert count_dots(jaxmp.autocast(lambda x, w: exact(shared(x, w), w), BF16), X, W) == {
        "bfloat16": 1,
        "float32": 1,
    }


# --- lists and casts ---------------------------------------------


@pytest.mark.parametrize("name", ["scatter-add", "reduce_sum", "sort", "cumsum", "select_n"])
@pytest.mark.parametrize("option", ["lower", "float32", "promote"])
def test_lists_of_all_kinds_of_operations(option: str, name: str) -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        total = lax.fori_loop(0, jnp.int32(2), lambda i, c: c + h, x)
        return h.at[jnp.array([0, 0])].add(1.0), h.sum(), jnp.sort(h), jnp.cumsum(h, 0), total

    assert error(*both_ways(f, X, W, **{option: [name]})) < 16 * UNIT[BF16]


def test_each_weight_is_cast_once() -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w.T) @ w

    jaxpr = jax.make_jaxpr(jaxmp.autocast(f, BF16))(X, W)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    assert sum(e.invars[0].aval.shape == (16, 16) for e in casts) == 1


def test_a_rule_holds_in_the_pass_that_a_checkpoint_repeats() -> None:
    def loss(w: Any, x: Any) -> Any:
        def block(x: Any, w: Any) -> Any:
            with jax.named_scope("block"), jax.named_scope("query"):
                return jnp.tanh(x @ w)

        return jax.checkpoint(block)(x, w).sum()

    rules = jaxmp.PolicyRules({"block/query": "float32"}, default=BF16)
    report = jaxmp.audit(jaxmp.autocast(jax.grad(loss), rules), W, X)
    found = {(row.direction, row.path, row.operands) for row in report.product_lines}
    wide = ("float32", "float32")
    assert found == {(way, "block/query", wide) for way in ("forward", "recomputed", "backward")}
