"""A low program run in float32: all roundings on is the program itself, all off is float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._tools.diagnostics.roundings import place_of, readers_of
from jaxmp._tools.inspect.equations import all_sites, walk
from tests.support.switched_roundings import switched

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (8, 16))
IMAGES = jax.random.normal(jax.random.key(2), (2, 8, 8, 16))


def scatter(w: jax.Array) -> jax.Array:
    h = X @ w
    return jnp.zeros((4, 16), h.dtype).at[jnp.arange(8) % 4].add(h).at[0].max(h[0])


def pooled(w: jax.Array) -> jax.Array:
    h = lax.conv_general_dilated(
        IMAGES, w[None, None], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def looped(w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), X @ w)


def until(w: jax.Array) -> jax.Array:
    """Not differentiable, and so of a constant."""
    fixed = lax.stop_gradient(w)
    return lax.while_loop(lambda h: jnp.sum(jnp.abs(h)) > 1, lambda h: h / 2, X @ fixed) + X @ w


def branched(w: jax.Array) -> jax.Array:
    h = X @ w
    return lax.cond(jnp.sum(h) > -1e9, lambda h: jnp.sin(h) * h, lambda h: h, h)


def ordered(w: jax.Array) -> jax.Array:
    h = X @ w
    return jnp.sort(h, 1) + jnp.cumsum(h, 1) + lax.top_k(h, 16)[0]


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def called(w: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda h: doubled(jax.jit(jnp.tanh)(h @ w)) @ w)(X @ w)


def bits(w: jax.Array) -> jax.Array:
    h = (X @ w).astype(jnp.bfloat16)
    kept = lax.bitcast_convert_type(h, jnp.uint16) & jnp.uint16(0xFFF0)
    return h + lax.stop_gradient(lax.bitcast_convert_type(kept, jnp.bfloat16))


def sharded(w: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    local = jax.shard_map(
        lambda x, w: jnp.tanh(x @ w), mesh=mesh, in_specs=jax.P(), out_specs=jax.P()
    )
    return local(X, w) @ w


def spectral(w: jax.Array) -> jax.Array:
    return jnp.abs(jnp.fft.rfft((X @ w).astype(jnp.float32)))


FIRST = [scatter, looped, called]
OTHERS = [pooled, until, branched, ordered, bits, sharded, spectral]
CASES = [("mixed_bfloat16", program) for program in FIRST] + [
    pytest.param(policy, program, marks=pytest.mark.exhaustive)
    for policy, programs in (("mixed_bfloat16", OTHERS), ("mixed_float16", FIRST + OTHERS))
    for program in programs
    if (policy, program) != ("mixed_float16", bits)  # which is about the bits of bfloat16
]


def error(made: Any, exact: Any) -> float:
    """Relative, in NumPy."""
    a, b = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in each]) for each in (made, exact)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.jax
@pytest.mark.parametrize(("policy", "program"), CASES)
def test_on_is_low_and_off_is_float32(policy: str, program: Callable[..., Any]) -> None:
    def loss(fun: Any) -> Any:
        return jaxmp.value_and_grad(lambda w: jnp.mean(fun(w) ** 2), loss_scale=1.0)

    exact = loss(program)(W)
    low = loss(jaxmp.autocast(program, policy))
    closed = jax.make_jaxpr(low)(W)

    def run(flag: bool) -> Any:
        on = jnp.array([flag])
        return jax.jit(lambda w: switched(closed, [w], on, lambda names: 0))(W)

    full = error(jax.jit(low)(W), exact)
    assert error(run(True), exact) == pytest.approx(full, rel=0.5, abs=1e-6)
    if program not in (bits, sharded):  # these run as they are in the low program
        assert error(run(False), exact) < 1e-5


@pytest.mark.parametrize("made_low", [False, True])
def test_a_low_product_rounds_what_it_reads_whoever_made_it(made_low: bool) -> None:
    """As under rules: a value between two products is rounded if either of them is low."""

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("makes"):
            h = x @ w
        with jax.named_scope("reads"):
            return h @ w

    given = [X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)]
    on = jnp.array([made_low, not made_low])
    part_of = lambda names: ("makes", "reads").index(names[-1])  # noqa: E731
    (found,) = switched(jax.make_jaxpr(fun)(*given), given, on, part_of)
    x, w = (each.astype(jnp.float32) for each in given)

    def rounded(x: Any) -> Any:
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    out = jnp.matmul(rounded(jnp.matmul(x, w)), w)
    np.testing.assert_allclose(found, out if made_low else rounded(out), rtol=1e-6)


def test_what_reads_a_cast_reads_what_was_rounded_before_it() -> None:
    """`reduce_precision` rounds, and leaves nothing to the cast that a product reads."""

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16) @ w

    closed = jax.make_jaxpr(fun)(X, W.astype(jnp.bfloat16))
    readers = readers_of(closed, lambda site: site.name)
    places = {site.name: place_of(site) for site in all_sites(walk(closed))}
    for name in ("reduce_precision", "convert_element_type"):
        assert readers[places[name]] == {"dot_general"}
    assert places["dot_general"] not in readers
