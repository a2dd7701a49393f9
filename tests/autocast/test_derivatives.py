"""Autocast and functions with derivatives of their own; autocast under every transformation."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.interpreters import ad, mlir

import jaxmp
from tests.support.autocast_checks import (
    BF16,
    UNIT,
    W,
    X,
    both,
    check,
    error,
    gradient_inside,
    layer,
)
from tests.support.dots import count_dots
from tests.support.ways import both_ways, rounded

pytestmark = pytest.mark.jax


def loss(x: Any, w: Any) -> Any:
    return jnp.mean(layer(layer(x, w), w) ** 2)


# --- custom_jvp -------------------------------------------------------------------------------


@both
def test_relu_and_its_kin(policy: str) -> None:
    for act in (jax.nn.relu, jax.nn.relu6, jax.nn.silu, jax.nn.gelu, jax.nn.leaky_relu):
        check(lambda x, w, act=act: act(x @ w) @ w, X, W, policy=policy, dots={"low": 2})


def test_custom_jvp_with_integers_and_several_outputs() -> None:
    @jax.custom_jvp
    def f(x: Any, n: Any, w: Any) -> Any:
        return jnp.sin(x @ w) * n.astype(jnp.float32), n + 1, x.sum()

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, n, w), (dx, _, dw) = primals, tangents
        out = f(x, n, w)
        zero = np.zeros((), jax.dtypes.float0)
        return out, (jnp.cos(x @ w) * (dx @ w + x @ dw) * 3.0, zero, dx.sum())

    check(f, X, jnp.int32(3), W, dots={"low": 1}, grad_roundings=24)
    check(lambda x, w: f(x @ w, jnp.int32(3), w), X, W, dots={"low": 2}, grad_roundings=24)


def test_custom_jvp_with_nondiff_argnums_and_closures() -> None:
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def apply(fun: Any, x: Any) -> Any:
        return fun(x)

    @apply.defjvp
    def _(fun: Any, primals: Any, tangents: Any) -> Any:
        out, dot = jax.jvp(fun, primals, tangents)
        return out, 0.5 * dot

    check(lambda x: apply(jnp.sin, x @ W), X, dots={"low": 1})


def test_custom_jvp_of_complex_numbers() -> None:
    @jax.custom_jvp
    def twice(z: Any) -> Any:
        return z * 2

    twice.defjvp(lambda p, t: (twice(*p), t[0] * 2))
    z = np.asarray(X[0]) + 1j * np.asarray(X[1])
    np.testing.assert_allclose(
        *both_ways(twice, z, of=lambda f: jax.grad(lambda z: jnp.abs(f(z)).sum()))
    )


# --- custom_vjp -------------------------------------------------------------------------------

# That it is said is tested in test_left_alone.py.
left_alone = pytest.mark.filterwarnings("ignore:autocast leaves .* of the FLOPs")


@jax.custom_vjp
def tripled(x: Any, w: Any) -> Any:
    """A product whose gradient is three times too large, so that one sees which rule ran."""
    return x @ w


tripled.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (3 * g @ r[1].T, 3 * r[0].T @ g))


@left_alone
@both
def test_custom_vjp_is_left_alone(policy: str) -> None:
    options = {"policy": policy, "kernels": "traced"}
    check(lambda x, w: tripled(x @ w, w), X, W, **options, dots={"low": 1, "float32": 1})
    fast = jaxmp.autocast(lambda x, w: tripled(x, w), **options)
    np.testing.assert_array_equal(fast(X, W), X @ W)


@both
def test_custom_vjp_entered(policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        return tripled(tripled(x, w), w)

    check(f, X, W, policy=policy, enter_custom_vjp=True, dots={"low": 2}, grad_dots={"low": 6})
    fast = jaxmp.autocast(f, policy, enter_custom_vjp=True)
    assert count_dots(jax.vmap(fast, (0, None)), X[None], W) == count_dots(fast, X, W)


def test_custom_vjp_with_integer_residuals_and_nondiff_arguments() -> None:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def lookup(x: Any, rows: Any, scale: float) -> Any:
        return x[rows] * scale

    def forward(x: Any, rows: Any, scale: float) -> Any:
        return lookup(x, rows, scale), (rows, x.shape[0])

    def backward(scale: float, residuals: Any, g: Any) -> Any:
        rows, n = residuals
        return jnp.zeros((n, g.shape[1])).at[rows].add(g * scale), None

    lookup.defvjp(forward, backward)

    def f(x: Any, w: Any, rows: Any) -> Any:
        return lookup(x @ w, rows, 2.0) @ w

    rows_ = np.array([0, 0, 3, 1], np.int32)
    for enter in (False, True):
        check(f, X, W, rows_, dots={"low": 2}, enter_custom_vjp=enter)


@left_alone
@pytest.mark.parametrize("enter", [False, True])
def test_custom_vjp_in_scan_checkpoint_and_vmap(enter: bool) -> None:
    def f(x: Any, ws: Any) -> Any:
        body = jax.checkpoint(lambda c, w: (jnp.tanh(tripled(c, w)), None))
        return lax.scan(body, x, ws)[0]

    ws = jnp.stack([W] * 2)
    check(f, X, ws, roundings=12, enter_custom_vjp=enter)

    def mapped(xs: Any, ws: Any) -> Any:
        return jax.vmap(f, (0, None))(xs, ws)

    check(mapped, X.reshape(2, 2, 16), ws, roundings=12, enter_custom_vjp=enter)


@pytest.mark.parametrize("enter", [False, True])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_custom_vjp_that_holds_an_array(kind: Any, enter: bool) -> None:
    table = kind(np.linspace(1, 2, 64, dtype=np.float32).reshape(4, 16))

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x * table

    f.defvjp(lambda x: (f(x), None), lambda _, g: (3 * g * table,))
    check(lambda x, w: f(x @ w), X, W, dots={"low": 1}, enter_custom_vjp=enter)


def test_straight_through_and_stop_gradient() -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        return h + lax.stop_gradient(jnp.round(h * 4) / 4 - h)

    def gradient(f: Any) -> Any:
        return jax.jit(jax.grad(lambda w: f(X, w).sum()))(W)

    assert error(gradient(jaxmp.autocast(f, BF16)), gradient(jnp.matmul)) < 4 * UNIT[BF16]
    stopped = jaxmp.autocast(lambda x, w: (lax.stop_gradient(x @ w) * x).sum(), BF16)
    assert not np.any(jax.grad(stopped, argnums=1)(X, W))


def test_custom_vmap() -> None:
    seen = []

    @jax.custom_batching.custom_vmap
    def f(x: Any, w: Any) -> Any:
        return x @ w

    @f.def_vmap
    def _(size: int, batched: Any, x: Any, w: Any) -> Any:
        seen.append(size)
        return jnp.einsum("bij,jk->bik", x, w), True

    def g(x: Any, w: Any) -> Any:
        return f(jnp.tanh(x @ w), w)

    check(g, X, W, dots={"low": 2}, argnums=())
    xs = X.reshape(2, 2, 16)
    inside, want = both_ways(jax.vmap(g, (0, None)), xs, W)
    assert error(inside, want) < 8 * UNIT[BF16]
    outside = jax.vmap(jaxmp.autocast(g, BF16), (0, None))(xs, W)
    assert error(outside, want) < 8 * UNIT[BF16]
    assert seen


def test_linear_solves_and_roots() -> None:
    def solve(x: Any, w: Any) -> Any:
        return lax.custom_linear_solve(
            lambda v: v * 3.0, x @ w, solve=lambda matvec, b: b / 3.0, symmetric=True
        )

    check(solve, X, W, dots={"low": 1})

    def root(x: Any, w: Any) -> Any:
        target = jnp.sum((x @ w) ** 2)
        return lax.custom_root(
            lambda y: y**2 - target,
            jnp.float32(1.0),
            lambda f, y: lax.fori_loop(0, 20, lambda i, y: y - f(y) / (2 * y), y),
            lambda g, y: y / g(1.0),
        )

    check(root, X, W, dots={"low": 1})


# --- orders of transformations ------------------------------------------------------------------

TRANSFORMS = {
    "grad(autocast)": lambda cast: jax.grad(cast(loss), (0, 1)),
    "autocast(grad)": lambda cast: cast(jax.grad(loss, (0, 1))),
    "jit(grad(jit(autocast)))": lambda cast: jax.jit(jax.grad(jax.jit(cast(loss)), (0, 1))),
    "value_and_grad": lambda cast: jax.value_and_grad(cast(loss), (0, 1)),
    "vmap(autocast)": lambda cast: jax.vmap(cast(layer), (0, None)),
    "autocast(vmap)": lambda cast: cast(jax.vmap(layer, (0, None))),
    "vmap both, out 1": lambda cast: jax.vmap(cast(layer), (1, None), 1),
    "vmap(grad(autocast))": lambda cast: jax.vmap(jax.grad(cast(loss), (0, 1)), (0, None)),
    "grad(vmap(autocast))": lambda cast: jax.grad(
        lambda x, w: jax.vmap(cast(loss), (0, None))(x, w).sum(), (0, 1)
    ),
    "jvp": lambda cast: lambda x, w: jax.jvp(cast(layer), (x, w), (x, w)),
    "autocast(jvp)": lambda cast: cast(lambda x, w: jax.jvp(layer, (x, w), (x, w))),
    "vjp": lambda cast: lambda x, w: jax.vjp(cast(layer), x, w)[1](x),
    "autocast(vjp)": lambda cast: cast(lambda x, w: jax.vjp(layer, x, w)[1](x)),
    "linearize": lambda cast: lambda x, w: jax.linearize(cast(layer), x, w)[1](x, w),
    "linear_transpose": lambda cast: lambda x, w: jax.linear_transpose(cast(lambda x: x @ w), x)(x),
    "jacfwd": lambda cast: lambda x, w: jax.jacfwd(lambda w: cast(loss)(x, w))(w),
    "jacrev": lambda cast: lambda x, w: jax.jacrev(lambda x: cast(layer)(x, w))(x[:1]),
    "forward over reverse": lambda cast: (
        lambda x, w: jax.jvp(jax.grad(cast(loss), 1), (x, w), (x, w))[1]
    ),
    "reverse over reverse": lambda cast: jax.grad(
        lambda x, w: (jax.grad(cast(loss), 1)(x, w) ** 2).sum(), (0, 1)
    ),
    "autocast(hessian product)": lambda cast: cast(
        lambda x, w: jax.jvp(jax.grad(loss, 1), (x, w), (x, w))[1]
    ),
    "grad in scan": lambda cast: cast(
        lambda x, w: lax.scan(lambda w, x: (w - 0.1 * jax.grad(loss, 1)(x, w), None), w, x[None])
    ),
    "grad of autocast in scan": lambda cast: (
        lambda x, w: lax.scan(
            lambda w, x: (w - 0.1 * jax.grad(cast(loss), 1)(x, w), None), w, x[None]
        )
    ),
    "checkpoint(autocast)": lambda cast: jax.grad(jax.checkpoint(cast(loss)), (0, 1)),
    "autocast(autocast)": lambda cast: jax.grad(cast(cast(loss)), (0, 1)),
    "eval_shape": lambda cast: lambda x, w: jnp.zeros(jax.eval_shape(cast(layer), x, w).shape),
}


WITH_A_GRADIENT_INSIDE = (
    "autocast(grad)",
    "autocast(vjp)",
    "autocast(hessian product)",
    "grad in scan",
)


@both
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations(name: str, policy: str) -> None:
    transform = TRANSFORMS[name]
    x = X[:, None] if "vmap" in name else X
    x = x.reshape(1, 4, 16) if "out 1" in name else x
    fast = transform(lambda fun: jaxmp.autocast(fun, policy))
    want = jax.jit(transform(lambda fun: fun))(x, W)
    inside = name in WITH_A_GRADIENT_INSIDE
    with gradient_inside(policy) if inside else contextlib.nullcontext():
        got = jax.jit(fast)(x, W)
    assert error(got, want) < 32 * UNIT[policy]
    assert [g.dtype for g in jax.tree.leaves(got)] == [g.dtype for g in jax.tree.leaves(want)]
    if name != "eval_shape":
        assert "float32" not in count_dots(fast, x, W)
        assert error(got, want) > 0  # it did run in 16 bits


def test_gradient_of_a_closed_over_param() -> None:
    def f(w: Any) -> Any:
        return jaxmp.autocast(lambda x: jnp.sum(layer(x, w) ** 2), BF16)(X)

    want = jax.jit(jax.grad(lambda w: jnp.sum(layer(X, w) ** 2)))(W)
    assert error(jax.grad(f)(W), want) < 0.03
    assert jax.jit(jax.grad(f))(W).dtype == jnp.float32


def test_gradients_of_params_keep_float32() -> None:
    """The product for a param's gradient has a float32 result: it is no multiple of 2**-8."""

    def f(w: Any) -> Any:
        return jnp.sum((X @ w) * jnp.linspace(0, 1, 16)[None])

    got = jax.jit(jax.grad(jaxmp.autocast(f, BF16)))(W)
    assert np.any(got != rounded(got))
    x = X.astype(jnp.bfloat16)
    low = jax.grad(lambda w: jnp.sum(x @ w.astype(jnp.bfloat16)))(W)
    np.testing.assert_array_equal(low, rounded(low))


def test_a_weight_over_a_norm_of_products_is_a_weight() -> None:
    """As in spectral normalization: the gradient of `w / sigma` is that of a weight, in float32."""
    x, scale = rounded(X), rounded(np.linspace(0.1, 1, 16, dtype=np.float32))[None]

    def f(w: Any) -> Any:
        sigma = lax.stop_gradient(jnp.linalg.norm(w @ scale[0]))
        return jnp.sum((x @ (w / sigma)) * scale), sigma

    got, sigma = jax.jit(jax.grad(jaxmp.autocast(f, BF16), has_aux=True))(W)
    np.testing.assert_allclose(got * sigma, x.T @ np.repeat(scale, len(x), 0), rtol=1e-6)


@jax.custom_jvp
def own_rule(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


@own_rule.defjvp
def _own_rule_jvp(primals: Any, tangents: Any) -> Any:
    (w, x), (dw, dx) = primals, tangents
    y = own_rule(w, x)
    return y, (1 - y**2) * (jax.jit(jnp.dot)(x, dw) + jnp.dot(dx, w))


@pytest.mark.parametrize(
    "name", ["linear_transpose", "the rule of a custom_jvp", "its second derivative"]
)
def test_what_is_linear_in_a_param_has_a_float32_gradient(name: str) -> None:
    """JAX transposes it without a derivative."""
    if name == "linear_transpose":
        (got,) = jax.linear_transpose(jaxmp.autocast(lambda w: X @ w, BF16), W)(X)
    else:
        gradient = jax.grad(jaxmp.autocast(lambda w: jnp.sum(own_rule(w, X) ** 2), BF16))
        if name == "its second derivative":
            gradient = jax.grad(lambda w, first=gradient: jnp.sum(first(w) ** 2))
        got = jax.jit(gradient)(W)
    assert got.dtype == jnp.float32
    assert not np.array_equal(got, rounded(got))


# --- programs in params of primitives that jaxmp does not know ---------------------------------


def holder(closed: bool, others: int) -> Any:
    """A primitive that holds its program: closed, or open, with a constant that only it knows."""
    scale = jax.device_put(np.arange(1, 17, dtype=np.float32) / 16)

    def function(x: Any, *others: Any) -> Any:
        return jnp.sin(x) * scale + sum(0 * other for other in others)

    program = jax.make_jaxpr(lambda x: jnp.sin(x) * scale)(scale)
    params = {"held": program if closed else program.jaxpr}
    primitive = core.Primitive("holds_a_program")
    primitive.def_impl(lambda *args, held: function(*args))
    primitive.def_abstract_eval(lambda x, *others, held: x)
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda *args, held: function(*args), multiple_results=False)
    )
    ad.primitive_jvps[primitive] = lambda primals, tangents, held: (
        primitive.bind(*primals, held=held),
        jax.jvp(function, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))[1],
    )
    return lambda x: primitive.bind(x, *[x] * others, **params)


@pytest.mark.programs(60, reason="find_overflow runs one operation at a time")
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("precision", ["highest", None])
def test_programs_that_unknown_primitives_hold(closed: bool, others: int, precision: Any) -> None:
    """Equinox and Lineax hold open jaxprs, with constants among the operands or out of sight."""
    held = holder(closed, others)

    @jax.custom_jvp
    def solve(w: Any, x: Any) -> Any:
        return jnp.dot(held(x), w, precision=precision)

    @solve.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (w, x), (dw, dx) = primals, tangents
        products = [jnp.dot(held(x), dw, precision=precision)]
        products.append(jnp.dot(held(dx), w, precision=precision))
        return solve(w, x), sum(products)

    def f(w: Any, x: Any) -> Any:
        return jnp.mean(held(x[1] @ w) * solve(w, x[0]))

    fast = jaxmp.autocast(f, BF16)
    assert error(*both_ways(f, W, X)) < 0.02
    got, wanted = both_ways(f, W, X, of=jax.grad)
    assert error(got, wanted) < 0.03
    others = jax.jit(lambda *a: [g(*a) for g in (jaxmp.grad(fast), jax.grad(jaxmp.recompute(f)))])
    reduced, recomputed = others(W, X)
    assert error(reduced, wanted) < 0.03
    assert error(recomputed, wanted) < 1e-5
    assert jaxmp.audit(jax.grad(fast), W, X).products
    assert jaxmp.sharding.collectives(jax.grad(fast), W, X) is not None
    assert jaxmp.diagnostics.find_overflow(fast, W, X) is None


@pytest.mark.filterwarnings("ignore:autocast leaves")
def test_a_linear_solve_in_a_derivative_of_one_precision() -> None:
    """Its programs are in a tuple with names."""

    def solve(w: Any, b: Any) -> Any:
        matrix = w @ w.T + jnp.eye(16)

        def matvec(x: Any) -> Any:
            return jnp.dot(matrix, x, precision="highest")

        return lax.custom_linear_solve(matvec, b, lambda _, b: jnp.linalg.solve(matrix, b))

    @jax.custom_jvp
    def twice(w: Any, x: Any) -> Any:
        return jnp.dot(w, solve(jnp.eye(16), x), precision="highest")

    @twice.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        return twice(*primals), twice(tangents[0], primals[1]) + twice(primals[0], tangents[1])

    def f(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w)) + jnp.sum(twice(w, x[0]))

    assert error(*both_ways(f, W, X, of=jax.grad)) < 0.03


# --- a function with a derivative of its own that closes over what is traced --------------------


def with_own_derivative(w: Any, x: Any) -> Any:
    @jax.custom_vjp
    def f(w: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w))

    def backward(w: Any, g: Any) -> Any:
        return (g * (x.T @ (1 - jnp.tanh(x @ w) ** 2)),)

    f.defvjp(lambda w: (f(w), w), backward)
    return f(w)


def with_the_batch_as_an_argument(w: Any, x: Any) -> Any:
    @jax.custom_vjp
    def f(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w))

    def backward(saved: Any, g: Any) -> Any:
        w, x = saved
        return x.T @ (g * (1 - jnp.tanh(x @ w) ** 2)), jnp.zeros_like(x)

    f.defvjp(lambda w, x: (f(w, x), (w, x)), backward)
    return f(w, x)


@pytest.mark.filterwarnings("ignore:autocast leaves")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: jaxmp.autocast(f, BF16),
        lambda f: jaxmp.autocast(f, BF16, enter_custom_vjp=True),
        jaxmp.recompute,
    ],
)
def test_a_custom_vjp_that_closes_over_the_batch(wrap: Any) -> None:
    """JAX refuses it under an inner `jit` too. The error says what to do."""
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        jax.grad(wrap(with_own_derivative))(W, X)
    assert "pass them to it as arguments" in caught.value.__notes__[0]
    with pytest.raises((jax.errors.UnexpectedTracerError, TypeError)):  # the control: JAX alone
        jax.grad(jax.checkpoint(with_own_derivative))(W, X)
    # What to do instead.
    given = jax.jit(jax.grad(wrap(with_the_batch_as_an_argument)))(W, X)
    assert error(given, jax.jit(jax.grad(with_own_derivative))(W, X)) < 0.03
