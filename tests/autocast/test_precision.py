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
from jaxmp._autocast.regions import Regions
from tests.support.autocast_checks import BF16, W, X
from tests.support.dots import precisions
from tests.support.ways import both_ways

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
own_passes = jax.custom_vjp(dot)
own_passes.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
OWN: dict[str, Callable[[Any, Any], Any]] = {
    f"{name}{place}": place_in(fun)
    for name, fun in (("custom_jvp", own_rule), ("custom_vjp", own_passes))
    for place, place_in in {
        "": lambda f: f,
        " in a scan": lambda f: lambda x, w: lax.scan(lambda c, w: (f(c, w), None), x, w[None])[0],
        " in a checkpoint": jax.checkpoint,
        " in a jit": jax.jit,
    }.items()
}


def trained(policy: str) -> Callable[..., Any]:
    """A function, to one step of its training under a policy."""

    def step_of(fun: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, w: Any) -> Any:
            tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
            state = jaxmp.TrainState.create(params=w, tx=tx)
            step = jaxmp.make_train_step(lambda w, x: jnp.mean(fun(x, w) ** 2), policy)
            return step(state, x)

        return run

    return step_of


def reduced(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient by the weights, reduced by jaxmp in float32."""
    return jaxmp.grad(lambda x, w: jnp.sum(fun(x, w) ** 2), 1, reduce_dtype="float32")


DIFFERENTIATED: dict[str, Callable[..., Any]] = {
    "in autocast": lambda f: gradient(jaxmp.autocast(f, BF16)),
    "in autocast that enters": lambda f: gradient(jaxmp.autocast(f, BF16, enter_custom_vjp=True)),
    "in float32": lambda f: gradient(jaxmp.autocast(f, "float32")),
    "reduced in float32": reduced,
    "a train step": trained("mixed_bfloat16"),
    "a train step in float32": trained("float32"),
}


@pytest.mark.parametrize("way", DIFFERENTIATED)
@pytest.mark.parametrize("name", OWN)
def test_full_precision_holds_in_derivatives_that_jaxmp_traces(way: str, name: str) -> None:
    """JAX traces these rules after `full_precision` has ended; jaxmp asks in them for the same."""
    plain = gradient(lambda x, w: jaxmp.full_precision(own_passes)(x, w))
    assert precisions(plain, X, W) == [EXACT, PLAIN, PLAIN]  # control: JAX alone
    found = precisions(DIFFERENTIATED[way](jaxmp.full_precision(OWN[name])), X, W)
    assert len(found) >= 2
    assert set(found) == {EXACT}


@pytest.mark.parametrize("way", ["in autocast", "in float32", "reduced in float32"])
@pytest.mark.parametrize("name", OWN)
def test_derivatives_in_full_precision_keep_their_bits(way: str, name: str) -> None:
    """On a CPU, which multiplies float32 in any case."""
    ours = jax.jit(DIFFERENTIATED[way](jaxmp.full_precision(OWN[name])))(X, W)
    plain = jax.jit(gradient(OWN[name]))(X, W)
    plain = plain[1][1] if way == "reduced in float32" else plain
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def test_derivatives_ask_for_what_their_functions_ask_for() -> None:
    """The level that all float32 products of a function have; else nothing; never over their own.

    An algorithm would hold for 16-bit products too, so that HIGHEST stands for it.
    """

    def found(forward: Callable[..., Any], backward: Any = None) -> list[Any]:
        fun = jax.custom_vjp(forward)
        fun.defvjp(
            lambda x, w: (forward(x, w), (x, w)),
            lambda kept, g: (
                jnp.matmul(g, kept[1].T, precision=backward),
                jnp.matmul(kept[0].T, g, precision=backward),
            ),
        )
        return precisions(reduced(fun), X, W)[-2:]

    def asking_for(precision: Any) -> Callable[..., Any]:
        return lambda x, w: jnp.matmul(x, w, precision=precision)

    assert found(asking_for("high")) == [("float32", "high")] * 2
    assert found(asking_for("default")) == [("float32", "default")] * 2
    assert found(asking_for(lax.DotAlgorithmPreset.BF16_BF16_F32_X3)) == [EXACT] * 2
    assert found(asking_for(None)) == [PLAIN] * 2
    assert found(lambda x, w: asking_for("high")(x, w) + x @ w) == [PLAIN] * 2
    assert found(asking_for("highest"), "high") == [("float32", "high")] * 2


def test_derivatives_ask_for_float32_products_alone() -> None:
    """A TPU refuses HIGHEST for a 16-bit `ragged_dot`. A scatter and a scan hold programs, too."""
    half, groups = jnp.bfloat16, jnp.array([len(X)])

    def routed(x: Any, w: Any) -> Any:
        return lax.ragged_dot(x.astype(half), w.astype(half)[None], groups).astype(x.dtype)

    def forward(x: Any, w: Any) -> Any:
        return jnp.matmul(x, w, precision="highest") + routed(x, w)

    def backward(kept: Any, g: Any) -> Any:
        x, w = kept
        by_w, _ = lax.scan(lambda c, _: (c + x.T @ g, None), jnp.zeros_like(w), length=1)
        return routed(g, w.T).at[0].add(1.0), by_w

    fun = jax.custom_vjp(forward)
    fun.defvjp(lambda x, w: (forward(x, w), (x, w)), backward)
    asked = [EXACT, ("bfloat16", "none")]
    assert precisions(reduced(fun), X, W) == asked * 2
    found = precisions(gradient(jaxmp.autocast(fun, "float32")), X, W)
    assert found == asked * 2


def test_full_precision_in_a_derivative_is_float32() -> None:
    """Also where the function itself asks for less."""
    exact = jaxmp.full_precision(dot)
    fun = jax.custom_vjp(lambda x, w: jnp.matmul(x, w, precision="default"))
    fun.defvjp(lambda x, w: (fun(x, w), (x, w)), lambda kept, g: (exact(g, kept[1].T), kept[1]))
    assert precisions(gradient(fun), X, W) == [("float32", "default"), EXACT]  # control
    assert precisions(gradient(jaxmp.autocast(fun, "float32")), X, W)[-1] == EXACT
    assert precisions(reduced(fun), X, W)[-1] == EXACT


def test_derivatives_keep_an_algorithm_that_is_the_option() -> None:
    algorithm = "BF16_BF16_F32_X3"
    with jax.default_matmul_precision(algorithm):
        assert precisions(reduced(own_passes), X, W) == [("float32", algorithm.lower())] * 3
        high = jaxmp.autocast(own_passes, "float32,precision=high")
        assert precisions(gradient(high), X, W) == [("float32", "high")] * 3


def test_full_precision_keeps_the_sums_of_a_scan_over_16_bits() -> None:
    """Autocast asks in the loop, and does not sum the gradients of its constants in float32."""

    @jaxmp.full_precision
    def fun(x: Any, w: Any) -> Any:
        half = w.astype(jnp.bfloat16)
        step = lambda c, row: (c + (row.astype(half.dtype) @ half).astype(x.dtype), None)  # noqa: E731
        return lax.scan(step, jnp.zeros_like(w[0]), jnp.tile(x, (100, 1)))[0]

    jax.tree.map(np.testing.assert_array_equal, *both_ways(fun, X, W, of=gradient))


def test_an_autocast_in_full_precision_keeps_its_rules() -> None:
    """An outer autocast asks in the parts of `full_precision`, but not in an autocast inside."""
    inner = jaxmp.autocast(own_passes, jaxmp.PolicyRules(default=None))
    outer = jaxmp.autocast(jaxmp.full_precision(lambda x, w: inner(x, w) + x @ w), BF16)
    assert precisions(outer, X, W) == [PLAIN, EXACT]


def test_one_trace_in_and_out_of_full_precision() -> None:
    """A rule is traced as code outside is, and so shares jitted functions with it, but no plan."""
    shared = jax.jit(lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, length=1)[0])
    own = jax.custom_jvp(lambda x, w: x)
    own.defjvp(lambda primals, tangents: (primals[0], shared(tangents[0], primals[1])))

    def both(x: Any, w: Any) -> Any:
        exact = jax.checkpoint(jaxmp.full_precision(own))
        return jax.jvp(exact, (x, w), (x, w))[1] + shared(x, w)

    assert precisions(both, X, W) == [PLAIN] * 2  # control
    assert precisions(jaxmp.autocast(both, BF16), X, W) == [EXACT, ("bfloat16", "none")]


def test_parts_of_full_precision_share_no_plan_with_others() -> None:
    """The same program may run in both: the scopes that tell them apart are in the plan's key."""
    regions = Regions(jaxmp.get_policy(BF16))
    within, around = ("block", "jaxmp.full_precision", "dot"), ("block", "dot")
    assert regions.deciding_scopes(within) != regions.deciding_scopes(around)
    assert regions.of(within).precision == "highest"
    assert regions.of(("jaxmp.full_precision", "jaxmp.autocast")).precision is None


@pytest.mark.parametrize("way", WAYS)
def test_rules_of_a_custom_jvp(way: str) -> None:
    """Autocast rewrites a rule. `full_precision` reaches one that JAX traces with the function."""
    fun = WAYS[way](own_rule)
    assert set(precisions(gradient(fun), X, W)) == {EXACT}
    reached = {PLAIN if way == "full_precision" else EXACT}
    assert set(precisions(gradient(jax.jit(fun)), X, W)) == reached


@pytest.mark.parametrize("way", WAYS)
def test_passes_of_a_custom_vjp(way: str) -> None:
    """The same; in float32 parts, autocast enters it for the precision alone."""
    found = precisions(gradient(WAYS[way](own_passes)), X, W)
    assert found == [EXACT, *[PLAIN if way == "full_precision" else EXACT] * 2]
    ours, plain = (jax.jit(gradient(f))(X, W) for f in (WAYS[way](own_passes), own_passes))
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
    positions = jnp.arange(16.0).reshape(4, 4)
    phases = positions @ (1.0 + positions)  # of positions alone: float32
    asked = jnp.matmul(x, w, precision="high")
    default = jnp.matmul(x, w, precision="default")
    return jnp.sum(phases) + jnp.sum(x @ w) + jnp.sum(asked) + jnp.sum(default)


def test_what_autocast_keeps_in_float32_and_what_it_does_not() -> None:
    """Products of positions and lists ask too; own precisions and 16-bit products stay."""
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
    ours, plain = (jax.jit(gradient(f))(X, W) for f in (WAYS[way](dot), dot))
    jax.tree.map(np.testing.assert_array_equal, ours, plain)
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    ((dtypes, asked),) = precisions(WAYS[way](dot), x, w)
    assert dtypes == "bfloat16"
    assert asked == ("none" if way in REWRITTEN else "highest")  # which it does not feel
