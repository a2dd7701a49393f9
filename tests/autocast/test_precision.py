"""Float32 products ask for the policy's precision: forward, both backward products, everywhere."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from tests.support.autocast_checks import BF16, W, X
from tests.support.dots import precisions

pytestmark = [
    pytest.mark.annotations,
    pytest.mark.jax,
    pytest.mark.usefixtures("standard_promotion"),
]
EXACT, PLAIN = ("float32", "highest"), ("float32", "none")
MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def dot(x: Any, w: Any) -> Any:
    return x @ w


@jax.custom_jvp
def own_rule(x: Any, w: Any) -> Any:
    return x @ w


@own_rule.defjvp
def _rule(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w + x @ dw


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "bare": dot,
    "jit": jax.jit(dot),
    "scan": lambda x, w: lax.scan(lambda c, w: (c @ w, None), x, w[None])[0],
    "checkpoint": jax.checkpoint(dot),
    "cond": lambda x, w: lax.cond(x[0, 0] > -9, dot, lambda x, w: x, x, w),
    "vmap": jax.vmap(dot, (0, None)),
    "shard_map": jax.shard_map(dot, mesh=MESH, in_specs=(P("data"), P()), out_specs=P("data")),
    "scan of checkpoints in jit": jax.jit(
        lambda x, w: lax.scan(jax.checkpoint(lambda c, w: (c @ w, None)), x, w[None])[0]
    ),
    "convolution": lambda x, w: lax.conv(x[:, :, None], w[:, :, None], (1,), "SAME")[..., 0],
    "ragged_dot": lambda x, w: lax.ragged_dot(x, w[None], jnp.array([4])),
}
WAYS: dict[str, Callable[..., Any]] = {
    "full_precision": jaxmp.full_precision,
    "in autocast": lambda f: jaxmp.autocast(jaxmp.full_precision(f), BF16),
    "float32": lambda f: jaxmp.autocast(f, "float32"),
    "a default": lambda f: jaxmp.autocast(f, jaxmp.PolicyRules(default="float32")),
    "a rule": lambda f: jaxmp.autocast(
        jax.named_scope("head")(f), jaxmp.PolicyRules({"head": "float32"}, default=BF16)
    ),
    "in its own autocast": lambda f: jaxmp.autocast(jaxmp.autocast(f, "float32"), BF16),
}


def gradient(fun: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda x, w: jnp.sum(fun(x, w) ** 2), (0, 1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_both_backward_products_are_exact(way: str, name: str) -> None:
    fun = FUNCTIONS[name]
    plain, ours = precisions(gradient(fun), X, W), precisions(gradient(WAYS[way](fun)), X, W)
    assert set(plain) == {PLAIN}  # control: JAX alone asks for nothing
    assert len(plain) >= 3
    assert ours == [EXACT] * len(plain)


@pytest.mark.parametrize("way", ["full_precision", "float32", "a rule"])
def test_loops_of_unknown_length(way: str) -> None:
    """A `while` has no gradient of its own; its products ask all the same."""
    fun = WAYS[way](lambda x, w: lax.fori_loop(0, jnp.int32(2), lambda i, c: c @ w, x))
    assert precisions(fun, X, W) == [EXACT]


REWRITTEN = [way for way in WAYS if way not in ("full_precision", "in autocast")]


@pytest.mark.parametrize("way", WAYS)
def test_rules_of_a_custom_jvp(way: str) -> None:
    """Autocast rewrites a rule. `full_precision` reaches one that JAX traces with the function."""
    fun = WAYS[way](own_rule)
    reached = {EXACT if way in REWRITTEN else PLAIN}
    assert set(precisions(gradient(fun), X, W)) == ({EXACT} if way == "full_precision" else reached)
    assert set(precisions(gradient(jax.jit(fun)), X, W)) == reached


@pytest.mark.parametrize("way", WAYS)
def test_passes_of_a_custom_vjp(way: str) -> None:
    """The same; in float32 parts, autocast enters it for the precision alone."""
    fun = jax.custom_vjp(dot)
    fun.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    found = precisions(gradient(WAYS[way](fun)), X, W)
    assert found[1:] == [EXACT if way in REWRITTEN else PLAIN] * 2
    assert found[0] == (PLAIN if way == "in autocast" else EXACT)
    ours, plain = gradient(WAYS[way](fun))(X, W), gradient(fun)(X, W)
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def test_kernels_are_left_alone() -> None:
    """What a kernel multiplies is its author's, and autocast in float32 hands it no option."""
    from jax.experimental import pallas as pl

    def kernel(x: Any, w: Any, out: Any) -> None:
        out[...] = jnp.dot(x[...], w[...])

    shape = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    fun = lambda x, w: pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, w)  # noqa: E731
    assert precisions(jaxmp.autocast(fun, "float32"), X, W) == [PLAIN]


def mixed(x: Any, w: Any) -> Any:
    positions = jnp.arange(4.0)
    phases = jnp.einsum("i,j->ij", positions, 1.0 + positions)  # adds nothing up: float32
    asked = jnp.matmul(x, w, precision="high")
    default = jnp.matmul(x, w, precision="default")
    return jnp.sum(phases) + jnp.sum(x @ w) + jnp.sum(asked) + jnp.sum(default)


def test_what_autocast_keeps_in_float32_and_what_it_does_not() -> None:
    """Outer products and lists ask too; own precisions stay; 16-bit products stay as they were."""
    found = precisions(jaxmp.autocast(mixed, BF16), X, W)
    high, low = ("float32", "high"), ("bfloat16", "none")
    assert sorted(found) == sorted([EXACT, high, ("bfloat16", "default"), low])
    kept = precisions(jaxmp.autocast(jax.jit(dot), BF16, float32=["dot"]), X, W)
    assert kept == [EXACT]
    exact = precisions(jaxmp.full_precision(mixed), X, W)
    assert sorted(exact) == sorted([EXACT, high, ("float32", "default"), EXACT])


@pytest.mark.parametrize("precision", ["default", "high", "tensorfloat32", "BF16_BF16_F32_X3"])
@pytest.mark.parametrize("way", ["policy", "rule", "train step", "cast all"])
def test_the_policy_says_which(precision: str, way: str) -> None:
    policy = jaxmp.get_policy(f"precision={precision}")
    asked = ("float32", {"tensorfloat32": "high"}.get(precision, precision.lower()))
    if way in ("policy", "rule"):
        given = policy if way == "policy" else jaxmp.PolicyRules(default=policy)
        assert set(precisions(gradient(jaxmp.autocast(dot, given)), X, W)) == {asked}
        return
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "float32")
    state = jaxmp.TrainState.create(params=W, tx=tx)
    cast: Any = "all" if way == "cast all" else "products"
    step = jaxmp.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), policy, cast=cast)
    assert set(precisions(step, state, X)) == {asked}
    plain = jaxmp.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), "float32", cast=cast)
    assert set(precisions(plain, state, X)) == {EXACT}


def test_algorithms_are_for_matrix_products() -> None:
    """Compilers drop that of a convolution or a `ragged_dot`; HIGHEST stands for it there."""
    policy = jaxmp.get_policy("precision=BF16_BF16_F32_X3")
    for name in ("convolution", "ragged_dot"):
        assert precisions(jaxmp.autocast(FUNCTIONS[name], policy), X, W) == [EXACT]
    half = precisions(jaxmp.autocast(dot, policy), X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    assert half == [("bfloat16", "none")]
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):  # control: what JAX would do
        half = precisions(dot, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    assert half == [("bfloat16", "bf16_bf16_f32_x3")]


@pytest.mark.parametrize("way", WAYS)
def test_the_option_of_the_user_holds(way: str) -> None:
    with jax.default_matmul_precision("high"):
        assert set(precisions(gradient(WAYS[way](dot)), X, W)) == {("float32", "high")}
    jax.config.update("jax_default_matmul_precision", "default")
    try:
        assert set(precisions(gradient(WAYS[way](dot)), X, W)) == {("float32", "default")}
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert set(precisions(gradient(WAYS[way](dot)), X, W)) == {EXACT}


@pytest.mark.parametrize("rules", [True, False])
def test_a_precision_in_the_policy_holds_over_the_option(rules: bool) -> None:
    policy: Any = jaxmp.get_policy("precision=highest")
    fun = jaxmp.autocast(dot, jaxmp.PolicyRules(default=policy) if rules else policy)
    with jax.default_matmul_precision("high"):
        assert precisions(fun, X, W) == [EXACT]


def test_an_autocast_inside_of_an_exact_part_is_its_own() -> None:
    """What the part around it asks for would keep its products from 16 bits."""
    inner = jaxmp.autocast(dot, BF16)
    assert precisions(jaxmp.full_precision(inner), X, W) == [("bfloat16", "none")]
    both = jaxmp.full_precision(lambda x, w: inner(x, w) + x @ w)
    assert sorted(precisions(both, X, W)) == [("bfloat16", "none"), EXACT]
    # Also where JAX has traced a jitted function before, under the same option of the user's.
    jitted = jax.jit(inner)
    told = pytest.warns(UserWarning, match="asked for by jax.default_matmul_precision")
    with jax.default_matmul_precision("highest"), told:
        assert precisions(jitted, X, W) == [EXACT]
    assert precisions(jaxmp.full_precision(jitted), X, W) == [("bfloat16", "none")]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_else_changes(way: str) -> None:
    """The same bits on a CPU, which multiplies float32 anyway; 16-bit operands stay 16 bits."""
    ours, plain = gradient(WAYS[way](dot))(X, W), gradient(dot)(X, W)
    jax.tree.map(np.testing.assert_array_equal, ours, plain)
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    ((dtypes, asked),) = precisions(WAYS[way](dot), x, w)
    assert dtypes == "bfloat16"
    assert asked == ("none" if way in REWRITTEN else "highest")  # which it does not feel
