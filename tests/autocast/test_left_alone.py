"""Autocast says so, once, where most of a function stays in float32, and why."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp

BF16 = "mixed_bfloat16"
X, W = (jax.device_put(np.full((8, 8), x, np.float32)) for x in (0.1, 0.2))


@jax.custom_vjp
def squared(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) @ w


squared.defvjp(lambda x, w: (squared(x, w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def said(f: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """What autocast warns of in several calls: alone, under jit, vmap and grad, again."""
    fast = jaxmp.autocast(f, options.pop("policy", BF16), **{"kernels": "traced"} | options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (fast, fast):
            call(*args)
        for call in (jax.jit(fast), jax.jit(lambda *args: fast(*args))):
            jax.eval_shape(call, *args)
        jax.vmap(fast, (0, *[None] * (len(args) - 1)))(args[0][None], *args[1:])
    assert all(entry.filename == __file__ for entry in caught)
    return [str(entry.message) for entry in caught]


def in_a_jit(x: Any, w: Any) -> Any:
    layer = jax.jit(squared)
    return functools.reduce(lambda h, _: layer(h, w), range(3), x @ w)


def in_a_scan(x: Any, w: Any) -> Any:
    """Of one product in each turn, and of five outside."""
    h = x @ w @ w @ w @ w @ w
    return lax.scan(lambda c, _: (squared(c, w), None), h, None, length=10)[0]


def in_a_branch(x: Any, w: Any) -> Any:
    return lax.cond(x[0, 0] > 0, squared, lambda x, w: x @ w, x, w)


def in_a_loop(x: Any, w: Any) -> Any:
    count = jnp.argmax(x[0])  # how often it runs, which is not known
    return lax.fori_loop(0, count, lambda i, c: squared(c, w), x) @ w


def in_a_checkpoint(x: Any, w: Any) -> Any:
    return jax.checkpoint(squared)(x, w)


@pytest.mark.parametrize(
    "f", [squared, in_a_jit, in_a_scan, in_a_branch, in_a_loop, in_a_checkpoint]
)
def test_what_is_inside_of_a_custom_vjp_is_said_once(f: Any) -> None:
    (text,) = said(f, X, W)
    share = {in_a_jit: 6 / 7, in_a_scan: 20 / 25, in_a_loop: 2 / 3}.get(f, 1.0)
    assert text.startswith(
        f"autocast leaves {100 * share:.0f} % of the FLOPs of products in float32: "
        f"{100 * share:.0f} % are inside of a jax.custom_vjp"
    )
    assert "Give jaxmp.autocast enter_custom_vjp=True;" in text
    assert said(f, X, W, enter_custom_vjp=True) == []
    assert said(jaxmp.full_precision(f), X, W) == []


def test_the_share_is_that_of_an_audit() -> None:
    """An independent count, of the program that autocast makes."""
    with pytest.warns(UserWarning, match="autocast leaves 80 % of"):
        report = jaxmp.audit(jaxmp.autocast(in_a_scan, BF16, kernels="traced"), X, W)
    assert report.share("float32") == pytest.approx(0.8)


def test_half_is_not_most() -> None:
    def f(x: Any, w: Any) -> Any:
        return squared(x @ w @ w, w)

    assert said(f, X, W) == []
    (_,) = said(lambda x, w: squared(x @ w, w), X, W)


def test_float32_that_somebody_asked_for_is_no_news() -> None:
    def layers(x: Any, w: Any) -> Any:
        with jax.named_scope("exact"):
            x = squared(x @ w, w)
        return x @ w

    rules = jaxmp.PolicyRules([("exact", "float32")], default=BF16)
    assert said(layers, X, W, policy=rules) == []
    assert len(said(layers, X, W)) == 0  # half
    assert len(said(lambda x, w: squared(layers(x, w), w), X, W, policy=rules)) == 1
    assert said(lambda x, w: x @ w, X, W, float32=["dot_general"]) == []
    assert said(lambda x, w: jaxmp.full_precision(jnp.matmul)(x, w @ w), X, W) == []

    @jax.custom_vjp
    def exact(x: Any) -> Any:
        return jaxmp.full_precision(lambda x: x @ x)(x)

    exact.defvjp(lambda x: (exact(x), x), lambda x, g: (g @ x,))
    assert said(exact, X) == []
    assert said(jnp.sin, X) == []


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (
            lambda x, w: lax.custom_linear_solve(lambda y: x @ y, w, lambda _, b: x @ b),
            "inside of custom_linear_solve, which autocast leaves alone.",
        ),
        (
            lambda x, w: x + jnp.arange(64.0).reshape(8, 8) @ jnp.ones((8, 8)),
            "products of constants or positions, or of numbers that 16 bits do not",
        ),
    ],
)
def test_other_reasons(f: Any, reason: str) -> None:
    (text,) = said(f, X, W)
    assert f"100 % are {reason}" in text


def test_precision_for_the_whole_process_is_a_reason_and_for_a_product_a_wish() -> None:
    def f(x: Any, w: Any) -> Any:
        return x @ w

    with jax.default_matmul_precision("highest"):
        (text,) = said(f, X, W)
    assert "100 % are asked for by jax.default_matmul_precision." in text
    assert said(lambda x, w: jnp.matmul(x, w, precision="highest"), X, W) == []


def test_several_reasons_come_by_their_share() -> None:
    def f(x: Any, w: Any) -> Any:
        table = jnp.arange(64.0).reshape(8, 8) @ jnp.ones((8, 8))
        return (squared(x, w) + table) @ w

    (text,) = said(f, X, W)
    assert re.match(r"autocast leaves 75 % .* 50 % are inside .* 25 % are products of", text)


def test_wrapped_anew_it_is_said_anew() -> None:
    for _ in range(2):
        assert len(said(squared, X, W)) == 1
