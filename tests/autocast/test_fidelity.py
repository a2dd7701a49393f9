"""What autocast must not change: dtypes, bits, lines, effects, arguments."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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
    same_bits,
    types,
)
from tests.support.dots import count_dots, equations
from tests.support.ways import both_ways

# --- the user's own precision ------------------------------------


@pytest.mark.parametrize(
    "precision",
    [lax.Precision.HIGHEST, lax.Precision.HIGH, "highest", ("default", "highest"), "float32"],
)
def test_requested_precision_is_kept(precision: Any) -> None:
    fast = jaxmp.autocast(lambda x, w: jnp.dot(x, w, precision=precision) @ w, BF16)
    assert count_dots(fast, X, W) == {"float32": 1, "bfloat16": 1}
    assert count_dots(jax.grad(lambda x, w: fast(x, w).sum()), X, W)["float32"] == 2


def test_requested_precision_from_a_context() -> None:
    def f(x: Any, w: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            y = x @ w
        with jax.default_matmul_precision("default"):
            return y @ w

    assert count_dots(jaxmp.autocast(f, BF16), X, W) == {"float32": 1, "bfloat16": 1}


def test_default_precision_and_algorithms() -> None:
    fast = jaxmp.autocast(lambda x, w: jnp.dot(x, w, precision="default"), BF16)
    assert count_dots(fast, X, W) == {"bfloat16": 1}
    exact = jaxmp.autocast(
        lambda x, w: jnp.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32), BF16
    )
    assert count_dots(exact, X, W) == {"float32": 1}


def test_explicit_result_dtype_of_16_bit_operands() -> None:
    def f(x: Any, w: Any) -> Any:
        low = [v.astype(jnp.bfloat16) for v in (x, w)]
        return jnp.matmul(*low, preferred_element_type=jnp.float32)

    fast = jaxmp.autocast(f, BF16)
    same_bits(fast(X, W), f(X, W))
    (dot,) = (e for e in equations(jax.make_jaxpr(fast)(X, W)) if e.primitive.name == "dot_general")
    assert dot.outvars[0].aval.dtype == jnp.float32


def test_casts_of_the_user_are_kept() -> None:
    def f(x: Any, w: Any) -> Any:
        h = (x @ w).astype(jnp.float16)
        return h, (h + h).astype(jnp.float32), h.astype(jnp.bfloat16), (x @ w).astype(jnp.int32)

    for policy in BOTH:
        got, want = jaxmp.autocast(f, policy)(X * 4, W), f(X * 4, W)
        assert types(got) == types(want)
        assert error(got[:3], want[:3]) < 4 * UNIT[BF16]
    same_bits(got[1], (got[0] + got[0]).astype(jnp.float32))


@both
def test_a_rounding_that_is_asked_for_is_done(policy: str) -> None:
    """To 16 bits and back: error feedback, fake quantization, the high half of a product."""

    def f(x: Any, w: Any) -> Any:
        high = x.astype(LOW[policy])
        low = (x - high.astype(jnp.float32)).astype(LOW[policy])
        wide = jnp.exp(x @ w)
        again = wide.astype(LOW[policy]).astype(jnp.float32)
        return high.astype(jnp.float32) - x, low, wide - again, jnp.exp(high.astype(jnp.float32))

    got, want = jaxmp.autocast(f, policy)(X, W), f(X, W)
    same_bits(got[:2], want[:2])
    same_bits(got[3], want[3])
    assert all(np.any(each != 0) for each in got)
    assert np.abs(got[2]).max() <= UNIT[policy] * np.abs(np.exp(X @ W)).max()


@both
def test_float64(policy: str) -> None:
    with jax.enable_x64(True):
        x, w = (jax.device_put(np.asarray(a, np.float64)) for a in (X, W))

        def f(x: Any, w: Any, v: Any) -> Any:
            wide = jnp.exp(jnp.tanh(x @ w)) * 1e-30
            return wide, (v @ v).astype(jnp.float64) + 1e-12, lax.cumsum(x) + wide

        got, want = both_ways(f, x, w, W, policy=policy)
        same_bits(got[0], want[0])
        same_bits(got[2], want[2])
        assert types(got) == types(want)
        assert set(count_dots(jaxmp.autocast(f, policy), x, w, W)) == {"float64", LOW[policy]}
        same_bits(*both_ways(lambda x: jnp.sum(jnp.sin(x @ w)), x, policy=policy, of=jax.grad))


def test_float64_in_scan_while_cond_and_custom_rules() -> None:
    with jax.enable_x64(True):
        x, w = (jax.device_put(np.asarray(a, np.float64)) for a in (X, W))

        def f(x: Any, w: Any) -> Any:
            def body(c: Any, _: Any) -> Any:
                return jax.nn.silu(jax.nn.relu(c @ w) + 1), c.sum()

            c, sums = lax.scan(jax.checkpoint(body), x, None, length=2)
            c = lax.cond(sums[0] > 0, jnp.sin, jnp.cos, c)
            return lax.fori_loop(0, 2, lambda i, c: c @ w, c), jax.nn.logsumexp(c)

        for a, b in zip(*both_ways(f, x, w), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
        gradients = lambda f: jax.grad(lambda *args: f(*args)[1], (0, 1))  # noqa: E731
        for a, b in zip(*both_ways(f, x, w, of=gradients), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10)


@pytest.mark.usefixtures("standard_promotion")
def test_complex_numbers() -> None:
    z = np.asarray(X) + 1j * np.asarray(X)[::-1]

    def f(z: Any, x: Any, w: Any) -> Any:
        u = z @ (w + 0j)
        return u * jnp.conj(u), jnp.fft.fft(x @ w), jnp.exp(u).real, jnp.abs(u) @ w

    check(f, z, X, W, dots=None, argnums=(1, 2))
    same_bits(*both_ways(lambda z: z @ (W + 0j), z))
    fast = jaxmp.autocast(lambda z: jnp.abs(z @ (W + 0j)).sum(), BF16)
    assert jax.jit(jax.grad(fast))(z).dtype == jnp.complex64


def test_integers_bools_keys_and_bits() -> None:
    key = jax.random.key(3)

    def f(n: Any, b: Any, key: Any, x: Any) -> Any:
        a, c = jax.random.split(key)
        bits = lax.bitcast_convert_type(x, jnp.int32)
        return n @ n.T, ~b, jax.random.fold_in(a, n[0, 0]), c, bits, n / 3, jnp.nextafter(x, x + 1)

    args = (np.arange(4, dtype=np.int32).reshape(2, 2), np.array([True, False]), key, X)
    with jax.numpy_dtype_promotion("standard"):
        same_bits(*both_ways(f, *args))
    same_bits(*both_ways(jax.random.split, jax.random.PRNGKey(0)))


RANDOM = {
    "normal": lambda k: jax.random.normal(k, (64,)),
    "uniform": lambda k: jax.random.uniform(k, (64,), minval=-3.0, maxval=5.0),
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (64,)),
    "categorical": lambda k: jax.random.categorical(k, jnp.linspace(0, 1, 8), shape=(64,)),
    "gamma": lambda k: jax.random.gamma(k, 2.5, (8,)),
    "poisson": lambda k: jax.random.poisson(k, 4.0, (8,)),
    "dirichlet": lambda k: jax.random.dirichlet(k, jnp.ones(4), (4,)),
    "orthogonal": lambda k: jax.random.orthogonal(k, 4),
}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_the_same(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        draw, key = RANDOM[name], jax.random.key(7)
        got, want = jaxmp.autocast(draw, BF16)(key), jax.jit(draw)(key)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=3e-7)  # the bits are, but for XLA's fusions


def test_dropout_masks_are_the_same() -> None:
    def f(x: Any, w: Any, key: Any) -> Any:
        h = x @ w
        keep = jax.random.bernoulli(key, 0.7, h.shape)
        return jnp.where(keep, h / 0.7, 0.0)

    key = jax.random.key(0)
    got, want = map(np.asarray, both_ways(f, X, W, key))
    np.testing.assert_array_equal(got == 0, want == 0)
    check(f, X, W, key, dots={"low": 1})


def test_weak_types() -> None:
    def f(x: Any, y: Any) -> Any:
        return x * 2, y * 2, 3.0 * y, jnp.sum(x)

    for y in (2.0, jnp.asarray(2.0), 3, np.float32(2.0)):
        plain, fast = jax.jit(f)(X, y), jax.jit(jaxmp.autocast(f, BF16))(X, y)
        assert [a.weak_type for a in plain] == [a.weak_type for a in fast]
        assert types(plain) == types(fast)


@both
def test_output_dtypes(policy: str) -> None:
    def f(x: Any, w: Any) -> Any:
        return x @ w, x.astype(jnp.bfloat16), x.sum(), jnp.argmax(x), x > 0, x

    low = "bfloat16" if policy == BF16 else "float16"
    cast = functools.partial(jaxmp.autocast, f, policy)
    assert [str(y.dtype) for y in cast()(X, W)] == [
        "float32", "bfloat16", "float32", "int32", "bool", "float32"
    ]  # fmt: skip
    assert str(cast(output="computed")(X, W)[0].dtype) == low
    halves = jaxmp.autocast(f, f"params=float32,compute={low},output={low}", output="policy")
    assert [str(y.dtype) for y in halves(X, W)] == [low, low, low, "int32", "bool", low]


@both
def test_the_loss_of_low_params_keeps_its_digits_as_computed(policy: str) -> None:
    """Otherwise it has the dtype that carries of loops and branches beside it have."""

    def f(w: Any, x: Any) -> Any:
        return jnp.mean((x @ w) ** 2)

    low = jnp.bfloat16 if policy == BF16 else jnp.float16
    w, x = W.astype(low), X.astype(low)
    fast = jaxmp.autocast(f, policy)
    total, _ = jax.lax.scan(lambda c, _: (c + fast(w, x), None), jnp.zeros((), low), length=2)
    assert total.dtype == fast(w, x).dtype == f(w, x).dtype == low
    loss = jaxmp.autocast(f, policy, output="computed")(w, x)
    assert loss.dtype == jnp.float32
    assert float(loss) != float(loss.astype(low))
    np.testing.assert_allclose(float(loss), (np.asarray(x @ w, np.float64) ** 2).mean(), rtol=1e-3)


# --- arguments and results ---------------------------------------


def test_static_and_other_arguments() -> None:
    def f(x: Any, w: Any, *, mode: str, n: int, flags: Any, shape: tuple[int, ...] | None) -> Any:
        for _ in range(n):
            x = getattr(jnp, mode)(x @ w)
        return {"x": x if shape is None else x.reshape(shape), "flags": flags, "none": None}

    fast = jaxmp.autocast(f, BF16)
    for options in (
        {"mode": "sin", "n": 1, "flags": {"a": True, "b": "x"}, "shape": None},
        {"mode": "tanh", "n": 2, "flags": [1, 1.0, None], "shape": (64,)},
        {"mode": "cos", "n": 2, "flags": (jnp.float32, len), "shape": (2, -1)},
    ):
        got, want = fast(X, W, **options), f(X, W, **options)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert got["flags"] == want["flags"]
        assert types(got["x"]) == types(want["x"])
        assert error(got["x"], want["x"]) < 8 * UNIT[BF16]


def test_static_arguments_that_are_equal_but_not_the_same() -> None:
    def f(x: Any, n: Any) -> Any:
        return x * (2 if isinstance(n, bool) else 3 if isinstance(n, int) else 4)

    fast = jaxmp.autocast(f, BF16)
    assert [float(fast(jnp.ones(()), n)) for n in (True, 1, 1.0, True)] == [2, 3, 4, 2]
    signs = jaxmp.autocast(lambda x, s: x * np.copysign(1.0, s), BF16)
    assert [float(signs(jnp.ones(()), s)) for s in (0.0, -0.0, float("nan"))] == [1, -1, 1]


def test_python_scalars_are_numbers_that_can_change() -> None:
    fast = jaxmp.autocast(lambda x, s: x * s, BF16)
    assert [float(fast(jnp.ones(()), s)) for s in (1.0, 2.0, 3)] == [1, 2, 3]
    assert jax.grad(fast, 1)(jnp.ones(()), 2.0) == 1.0


def test_unhashable_arguments_and_results() -> None:
    @dataclasses.dataclass
    class Config:
        n: int

        __hash__ = None  # type: ignore[assignment]

    def f(x: Any, config: Any) -> Any:
        return x * config.n, config, {1, 2}, Config(3)

    fast = jaxmp.autocast(f, BF16)
    config = Config(2)
    got = fast(X, config)
    assert got[1] is config
    assert got[2:] == ({1, 2}, Config(3))
    config.n = 5
    same_bits(fast(X, config)[0], X * 5)
    hashable = jaxmp.autocast(lambda x: (x, {1, 2}, Config(3)), BF16)
    assert hashable(X)[1:] == ({1, 2}, Config(3))


def test_strings_of_numpy_and_object_arrays() -> None:
    fast = jaxmp.autocast(lambda x, name: x * len(str(name)), BF16)
    same_bits(fast(X, np.str_("abc")), X * 3)
    same_bits(fast(X, "abc"), X * 3)
    words = np.array(["a", "b"])
    counted = jaxmp.autocast(lambda x, words: x * len(words), BF16)
    same_bits(counted(X, words), X * 2)


def test_functions_that_return_inputs_constants_and_nothing() -> None:
    table = np.arange(3.0, dtype=np.float32)
    check(lambda x, w: (x, w, jnp.float32(3), jnp.asarray(table), x), X, W, argnums=())
    assert jaxmp.autocast(lambda x: None, BF16)(X) is None
    assert jaxmp.autocast(lambda x: (None, "a", 3), BF16)(X) == (None, "a", 3)
    assert jaxmp.autocast(lambda: jnp.ones(2), BF16)().shape == (2,)
    same_bits(jaxmp.autocast(lambda x: table, BF16)(X), jnp.asarray(table))


def test_empty_arrays_and_scalars() -> None:
    def f(x: Any, w: Any) -> Any:
        return x @ w, (x @ w).sum(), jax.nn.softmax(x @ w), jnp.concatenate([x @ w, x])

    check(f, np.zeros((0, 16), np.float32), W)
    check(lambda x, w: (x @ w, x * 2), *(np.zeros(s, np.float32) for s in ((4, 0), (0, 3))))
    check(lambda a, b: jnp.dot(a, b) + jnp.vdot(a, b), jnp.float32(3), jnp.float32(2))


def test_trees_with_none_partials_and_methods() -> None:
    class Model:
        def __init__(self) -> None:
            self.w = W

        def __call__(self, x: Any) -> Any:
            return x @ self.w

        def method(self, p: Any, x: Any) -> Any:
            return (p["a"] @ p["b"]["c"], p["d"], x)

    model = Model()
    assert error(jaxmp.autocast(model, BF16)(X), X @ W) < 0.01
    tree = {"a": X, "b": {"c": W}, "d": None}
    got = jaxmp.autocast(model.method, BF16)(tree, x=[None, X])
    assert got[1] is None
    assert got[2][0] is None
    part = functools.partial(model.method, tree)
    assert error(jaxmp.autocast(part, BF16)(X)[0], X @ W) < 0.01
    makers = [jaxmp.autocast(lambda x, n=n: x * n, BF16) for n in range(3)]
    assert [float(m(jnp.ones(()))) for m in makers] == [0, 1, 2]


def test_names_and_documentation_stay() -> None:
    def model(x: Any) -> Any:
        """Says what it does."""
        return x

    fast = jaxmp.autocast(model, BF16)
    assert (fast.__name__, fast.__doc__, fast.__wrapped__) == ("model", model.__doc__, model)
    exact = jaxmp.full_precision(model)
    assert (exact.__name__, exact.__doc__) == ("model", model.__doc__)


def test_an_exported_function_has_a_size_that_is_not_known() -> None:
    """`jax.export` takes it in 8 bits too; blocks, which `lax.scaled_dot` wants known, stay out."""
    (number,) = jax.export.symbolic_shape("number")
    x, w = jax.ShapeDtypeStruct((number, 64), jnp.float32), jnp.ones((64, 32))

    def exported(products: str) -> Any:
        fast = jaxmp.autocast(jnp.matmul, f"mixed_float8,products={products}")
        return jax.export.export(jax.jit(fast))(x, w)

    of_tensor = exported("tensorwise")
    with pytest.warns(UserWarning, match="M = number, and blocks need a known size above 0"):
        of_blocks = exported("mxfp8")
    assert "f8E4M3FN" in of_tensor.mlir_module()
    assert "f8E4M3FN" not in of_blocks.mlir_module()
    for program in (of_tensor, of_blocks):
        np.testing.assert_array_equal(program.call(jnp.ones((3, 64)), w), np.full((3, 32), 64))
