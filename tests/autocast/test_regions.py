"""Parts of a function that autocast treats differently: full_precision, rules, lists, kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.experimental import pallas as pl

import jaxmp
from tests.support.autocast_checks import BF16, BOTH, FP16, UNIT, W, X, check, error, rows, weights
from tests.support.dots import count_dots, equations

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]
exact = jaxmp.full_precision(lambda x, w: x @ w)


def scoped(name: str, x: Any, w: Any) -> Any:
    with jax.named_scope(name):
        return jnp.tanh(x @ w)


# --- full_precision ----------------------------------------------

EXACT = {
    "bare": lambda x, w: exact(x, w),
    "jit": lambda x, w: jax.jit(exact)(x, w),
    "in a jit": lambda x, w: jax.jit(lambda x, w: exact(x, w))(x, w),
    "scan": lambda x, w: lax.scan(lambda c, _: (exact(c, w), None), x, None, length=1)[0],
    "around a scan": jaxmp.full_precision(
        lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, None, length=1)[0]
    ),
    "while": lambda x, w: lax.fori_loop(0, jnp.int32(1), lambda i, c: exact(c, w), x),
    "cond": lambda x, w: lax.cond(x[0, 0] > -9, exact, lambda x, w: x + w[:4], x, w),
    "checkpoint": lambda x, w: jax.checkpoint(exact)(x, w),
    "around a checkpoint": jaxmp.full_precision(jax.checkpoint(lambda x, w: x @ w)),
    "vmap": lambda x, w: jax.vmap(exact, (0, None))(x, w),
    "around a vmap": jaxmp.full_precision(jax.vmap(lambda x, w: x @ w, (0, None))),
    "scan of checkpoint in jit": lambda x, w: jax.jit(
        lambda x, w: lax.scan(jax.checkpoint(lambda c, w: (exact(c, w), None)), x, w[None])[0]
    )(x, w),
    "method": jaxmp.full_precision(functools.partial(jnp.dot)),
}


@pytest.mark.parametrize("name", EXACT)
def test_full_precision(name: str) -> None:
    fun = EXACT[name]
    fast = jaxmp.autocast(lambda x, w: fun(x, w), BF16)
    assert set(count_dots(fast, X, W)) == {"float32"}
    assert error(fast(X, W), X @ W) < 1e-6
    if name == "while":
        return
    # Also the backward pass, differentiated within and without.
    loss = lambda x, w: jnp.sum(fun(x, w) ** 2)  # noqa: E731
    want = jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), (0, 1))(X, W)
    for grad in (
        jax.grad(jaxmp.autocast(loss, BF16), (0, 1)),
        jaxmp.autocast(jax.grad(loss, (0, 1)), BF16),
    ):
        assert set(count_dots(grad, X, W)) == {"float32"}
        assert error(grad(X, W), want) < 1e-6


def test_full_precision_next_to_16_bits_in_one_loop() -> None:
    def f(x: Any, ws: Any) -> Any:
        @jax.checkpoint
        def body(c: Any, w: Any) -> Any:
            return jnp.tanh(c @ w) + 0.1 * exact(c, w), None

        return lax.scan(body, x, ws)[0]

    ws = jnp.stack([W] * 2)
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


def test_full_precision_around_custom_rules() -> None:
    @jax.custom_vjp
    def f(x: Any, w: Any) -> Any:
        return x @ w

    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    g = jaxmp.full_precision(lambda x, w: jax.nn.relu(f(x, w)))
    grad = jax.grad(lambda x, w: jnp.sum(g(x, w) ** 2), (0, 1))
    for fast in (jaxmp.autocast(grad, BF16), jaxmp.autocast(grad, BF16, enter_custom_vjp=True)):
        assert set(count_dots(fast, X, W)) == {"float32"}
        assert error(fast(X, W), grad(X, W)) < 1e-6


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
    assert np.any(out != out.astype(jnp.bfloat16).astype(jnp.float32))
    within = jaxmp.autocast(lambda x, w: exact(inner(x, w), w), BF16)
    assert count_dots(within, X, W) == {"float16": 1, "float32": 1}


def test_a_float32_policy_changes_nothing() -> None:
    fast = jaxmp.autocast(lambda x, w: jax.nn.softmax(x @ w), "float32")
    np.testing.assert_array_equal(fast(X, W), jax.jit(lambda x, w: jax.nn.softmax(x @ w))(X, W))


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
@pytest.mark.parametrize("around", ["nothing", "a float32 scope"])
def test_rules_for_what_is_inside_of_a_loop(container: str, around: str) -> None:
    """Only the part is low, whatever holds around the loop that it is in."""
    outer = [("outer", "float32")] if around != "nothing" else []
    rules = jaxmp.PolicyRules([("part", BF16), *outer], default="float32")

    def body(x: Any, w: Any) -> Any:
        return scoped("part", x, w) @ w

    def f(x: Any, w: Any) -> Any:
        if around == "nothing":
            return CONTAINERS[container](body)(x, w)
        with jax.named_scope("outer"):
            return CONTAINERS[container](body)(x, w)

    fast = jaxmp.autocast(f, rules)
    assert count_dots(fast, X, W) == {"bfloat16": 1, "float32": 1}
    assert error(fast(X, W), f(X, W)) < 8 * UNIT[BF16]


@pytest.mark.parametrize("container", CONTAINERS)
def test_rules_that_leave_alone_by_default(container: str) -> None:
    rules = jaxmp.PolicyRules([("part", BF16)])

    def f(x: Any, w: Any) -> Any:
        return CONTAINERS[container](lambda x, w: scoped("part", x, w) @ w)(x, w)

    assert count_dots(jaxmp.autocast(f, rules), X, W) == {"bfloat16": 1, "float32": 1}


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


class Block(nn.Module):
    """A norm, and a product around it."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        h = nn.LayerNorm(name="norm")(x)
        return x + nn.Dense(16, name="out")(nn.gelu(nn.Dense(32, name="up")(h))), None


class Model(nn.Module):
    """Blocks in a scan, under remat, and a head."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(16, name="embed")(x)
        blocks = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(3, name="head")(x)


@pytest.mark.slow
def test_linen_names() -> None:
    model = Model()
    params = model.init(jax.random.key(0), X)
    rules = jaxmp.PolicyRules([("head", "float32"), ("blocks/up", FP16)], default=BF16)
    fast = jaxmp.autocast(model.apply, rules)
    assert count_dots(fast, params, X) == {"bfloat16": 2, "float16": 1, "float32": 1}
    grad = jax.grad(lambda p: jnp.sum(fast(p, X) ** 2))
    want = jax.grad(lambda p: jnp.sum(model.apply(p, X) ** 2))(params)
    assert error(grad(params), want) < 24 * UNIT[BF16]
    assert error(fast(params, X), model.apply(params, X)) < 8 * UNIT[BF16]


@pytest.mark.slow
@pytest.mark.parametrize("policy", BOTH)
def test_linen_layers(policy: str) -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1, 8)
            x = nn.MultiHeadDotProductAttention(2)(x, x)
            return nn.RNN(nn.OptimizedLSTMCell(8))(x) + nn.RNN(nn.GRUCell(8))(x)

    net, x = Net(), rows(2, 4, 4, 3)
    variables = net.init(jax.random.key(0), x)
    fast = jaxmp.autocast(lambda v, x: net.apply(v, x, mutable=["batch_stats"]), policy)
    assert set(count_dots(fast, variables, x)) == {"float16" if policy == FP16 else "bfloat16"}
    (out, state), (want, plain) = (
        fast(variables, x),
        net.apply(variables, x, mutable=["batch_stats"]),
    )
    assert error(out, want) < 24 * UNIT[policy]
    assert error(state, plain) < 4 * UNIT[policy]
    assert {str(s.dtype) for s in jax.tree.leaves(state)} == {"float32"}


def test_linen_inside_of_a_module_says_what_to_do() -> None:
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            dense = nn.Dense(16)
            return jaxmp.autocast(lambda x: dense(x), BF16)(x)

    params = {"params": {"Dense_0": {"kernel": W, "bias": jnp.zeros(16)}}}
    with pytest.raises(ValueError, match=r"around Dense, which.*around model\.apply"):
        Inner().init(jax.random.key(0), X)
    assert count_dots(Inner().apply, params, X) == {"bfloat16": 1}  # nothing is lost here


def test_nnx_models_by_split_and_merge() -> None:
    model = nnx.Sequential(
        nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.LayerNorm(16, rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(model)
    fast = jaxmp.autocast(lambda state, x: nnx.merge(graph, state)(x), BF16)
    assert count_dots(fast, state, X) == {"bfloat16": 1}
    assert error(fast(state, X), model(X)) < 8 * UNIT[BF16]


# --- lists and kernels -------------------------------------------


def test_lists() -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.exp(jax.nn.silu(x @ w)) @ w

    def dtypes(**lists: Any) -> dict[str, str]:
        jaxpr = jax.make_jaxpr(jaxmp.autocast(f, BF16, **lists))(X, W)
        return {e.primitive.name: str(e.outvars[0].aval.dtype) for e in equations(jaxpr)}

    assert dtypes()["exp"] == "float32"
    assert dtypes(lower=["exp"])["exp"] == "bfloat16"
    assert dtypes(promote=["exp"])["exp"] == "bfloat16"
    assert dtypes(float32=["silu"])["logistic"] == "float32"
    assert dtypes(float32=["dot_general"])["dot_general"] == "float32"
    assert set(count_dots(jaxmp.autocast(f, BF16, float32=["dot_general"]), X, W)) == {"float32"}


def test_lists_by_the_name_of_a_jitted_function() -> None:
    @jax.jit
    def router(x: Any, w: Any) -> Any:
        return jax.nn.softmax(x @ w)

    def f(x: Any, w: Any) -> Any:
        return router(x @ w, w)

    fast = jaxmp.autocast(f, BF16, float32=["router"])
    assert count_dots(fast, X, W) == {"bfloat16": 1, "float32": 1}


@pytest.mark.parametrize("name", ["scatter-add", "reduce_sum", "sort", "cumsum", "select_n"])
@pytest.mark.parametrize("option", ["lower", "float32", "promote"])
def test_lists_of_all_kinds_of_operations(option: str, name: str) -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        total = lax.fori_loop(0, jnp.int32(2), lambda i, c: c + h, x)
        return h.at[jnp.array([0, 0])].add(1.0), h.sum(), jnp.sort(h), jnp.cumsum(h, 0), total

    fast = jaxmp.autocast(f, BF16, **{option: [name]})
    assert error(fast(X, W), f(X, W)) < 16 * UNIT[BF16]


def test_pallas_kernels_are_left_alone() -> None:
    def kernel(x: Any, w: Any, out: Any) -> None:
        out[...] = jnp.tanh(x[...] @ w[...])

    def f(x: Any, w: Any) -> Any:
        call = pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct((4, 16), jnp.float32), interpret=True
        )
        return call(x @ w, w) @ w

    fast = jaxmp.autocast(f, BF16, kernels="traced")
    assert count_dots(fast, X, W) == {"float32": 1, "bfloat16": 2}
    assert error(fast(X, W), f(X, W)) < 8 * UNIT[BF16]


def test_each_weight_is_cast_once() -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w.T) @ w

    jaxpr = jax.make_jaxpr(jaxmp.autocast(f, BF16))(X, W)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    assert sum(e.invars[0].aval.shape == (16, 16) for e in casts) == 1
    # Nothing goes from 16 bits to float32 and back.
    made = {id(e.outvars[0]): e for e in casts}
    assert not any(id(e.invars[0]) in made for e in casts)
    assert weights(2, 2).shape == (2, 2)


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
