"""`codes=`: the backward pass reads one byte for each number; the forward pass does not change."""

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp._recompute import codes as codes_module
from jaxmp._recompute.codes import RowFormat, decode_rows, encode_rows
from tests.support.autocast_checks import compiled, error, rows, weights
from tests.support.dots import equations
from tests.support.recompute_checks import (
    dear_operations,
    gradient,
    in_bytes,
    kept,
    kept_bytes,
    norm,
    scalar,
)

pytestmark = pytest.mark.jax

BOTH: tuple[RowFormat, ...] = ("int8", "float8_e4m3fn")
X = rows(64, 128)
W, V = weights(128, 256, seed=1), weights(256, 128, seed=2)
STACKS = weights(4, 128, 256, seed=3) / 2, weights(4, 256, 128, seed=4) / 2


encoded, decoded = (jax.jit(fun, static_argnums=1) for fun in (encode_rows, decode_rows))


def mlp(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.gelu(norm(x) @ w) @ v


def stream(x: Any, w: Any, v: Any) -> Any:
    for _ in range(3):
        x = x + mlp(x, w, v)
    return norm(x)


def scanned(x: Any, ws: Any, vs: Any) -> Any:
    x, _ = lax.scan(lambda x, layer: (x + mlp(x, *layer), None), x, (ws, vs))
    return norm(x)


def attention(x: Any, w: Any, v: Any) -> Any:
    query, key = (norm(x) @ w).reshape(64, 2, 128), norm(x @ w).reshape(64, 2, 128)
    scores = jnp.einsum("qhd,khd->hqk", query, key) / 11
    masked = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), scores, -1e30)
    return jnp.einsum("hqk,kd->qhd", jax.nn.softmax(masked), x).reshape(64, -1) @ v


def branches(x: Any, w: Any, v: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda x: mlp(x, w, v), lambda x: jnp.tanh(x @ w) @ v, x)


def in_checkpoints(x: Any, ws: Any, vs: Any) -> Any:
    def block(x: Any, layer: Any) -> Any:
        return x + mlp(x, *layer), None

    x, _ = lax.scan(jax.checkpoint(block, prevent_cse=False), x, (ws, vs))
    return norm(x)


PROGRAMS = {
    "mlp": (mlp, X, W, V),
    "stream": (stream, X, W, V),
    "scanned": (scanned, X, *STACKS),
    "attention": (attention, X, W, V),
    "branches": (branches, X, W, V),
    "in_checkpoints": (in_checkpoints, X, *STACKS),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_stay_to_the_bit_and_gradients_nearly(name: str, dtype: Any) -> None:
    fun, *args = PROGRAMS[name]
    args = [np.asarray(x).astype(dtype) for x in args]
    plain, coded = jaxmp.recompute(fun), jaxmp.recompute(fun, codes="int8")
    options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    got, want = (jax.jit(f, compiler_options=options)(*args) for f in (coded, plain))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    wide = [x.astype(np.float32) for x in args]
    _, exact = jax.jit(gradient(fun))(*wide)
    (_, got), (_, want) = (jax.jit(gradient(f))(*args) for f in (coded, plain))
    for a, b, c in zip(got, want, exact, strict=True):
        assert a.dtype == b.dtype
        assert error(a, c) < 1.1 * error(b, c) + 0.02


@pytest.mark.parametrize("kept_as", BOTH)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "branches"])
def test_floats_are_kept_in_one_byte(name: str, kept_as: RowFormat) -> None:
    fun, *args = PROGRAMS[name]
    coded = in_bytes(jaxmp.recompute(fun, codes=kept_as), *args)
    assert coded.get(kept_as, 0) > 0
    plain = kept_bytes(jaxmp.recompute(fun), *args)
    assert kept_bytes(jaxmp.recompute(fun, codes=kept_as), *args) < 0.5 * plain


def test_a_value_has_codes_once() -> None:
    """The stream is read by three blocks and the last norm; its codes are made where it is made."""
    program = jax.make_jaxpr(gradient(jaxmp.recompute(stream, codes="int8")))(X, W, V)
    casts = [e for e in equations(program) if e.primitive.name == "convert_element_type"]
    encoded = [e for e in casts if e.outvars[0].aval.dtype == jnp.int8]
    residuals = kept(jaxmp.recompute(stream, codes="int8"), X, W, V)
    assert len(encoded) == len([x for x in residuals if x.dtype == "int8"]) > 0


def test_arguments_masks_and_small_values_keep_their_bits() -> None:
    def loss(x: Any, w: Any, bias: Any, labels: Any) -> Any:
        small = jnp.tanh(x[:4] @ w)
        hidden = jnp.where(x @ w > 0, jnp.tanh(x @ w + bias[None]), 0)
        return (hidden * jax.nn.one_hot(labels, 256)).sum() + small.sum()

    args = X, W, np.zeros(256, np.float32), np.arange(64)
    residuals = kept(jaxmp.recompute(loss, codes="int8"), *args)
    assert {x.dtype.name for x in residuals if x.shape == (4, 256)} == {"float32"}
    by_w = jax.eval_shape(jax.grad(jaxmp.recompute(loss, codes="int8"), 1), *args)
    assert by_w.dtype == jnp.float32


def test_a_function_without_codes_warns() -> None:
    """Such as one of a single example, of which `vmap` makes many."""
    with pytest.warns(UserWarning, match=r"keeps nothing in codes here.*around vmap and scan"):
        exact = jax.grad(jaxmp.recompute(lambda x, w: jnp.sin(x).sum() * w, codes="int8"))(X, 2.0)
    np.testing.assert_array_equal(exact, jax.grad(lambda x, w: jnp.sin(x).sum() * w)(X, 2.0))
    with pytest.raises(ValueError, match="codes='int8' needs mode 'auto', 'always' or 'loops'"):
        jaxmp.recompute(mlp, "never", codes="int8")


@pytest.mark.parametrize("kept_as", BOTH)
def test_codes_are_those_of_the_formula(kept_as: RowFormat) -> None:
    """Against NumPy in 64 bits: a number between two codes may round to the other."""
    x = np.random.default_rng(0).standard_t(3, (64, 128)).astype(np.float32)
    x[3], x[5, 7], x[6, :60], x[7, :2] = 0, 5000, -1e9, (-np.inf, np.nan)
    x[8, ::2], x[9], x[10, 4] = -1e4, 0.3, np.inf
    is_number = np.isfinite(x)
    is_number[5, 7], is_number[6, :60], is_number[8, ::2], is_number[9] = False, False, False, False
    special = np.where(is_number[7:8] | np.isfinite(x), x, np.nan)  # NaN takes infinities along
    special[10, 4] = np.inf
    stored, x = x, np.where(is_number, x, 0)
    wide, largest = x.astype(np.float64), np.abs(x).max(-1, keepdims=True)
    others = np.where((np.abs(x) < largest) | ~is_number.all(-1, keepdims=True), np.abs(wide), 0)
    result = encoded(stored, kept_as)
    most, smallest = (126, 1) if kept_as == "int8" else (416, 2.0**-9)
    with np.errstate(invalid="ignore"):  # the row of zeros
        if kept_as == "int8":
            unit = np.sqrt(others).mean(-1, keepdims=True) ** 2
            levels = (np.arcsinh(np.abs(wide) / unit) / np.arcsinh(largest / unit) * most).round()
        else:
            levels = np.abs(wide) / largest * most
    levels = np.nan_to_num(levels).astype(result.codes.dtype).astype(np.float32)
    codes = np.sign(x) * np.where(x == 0, 0, np.maximum(levels, smallest))
    stored_codes = np.asarray(result.codes, np.float32)
    assert (stored_codes != codes)[is_number].mean() < 1e-3
    got = np.asarray(decoded(result, jnp.float32))
    if kept_as == "int8":
        unit, bound = np.asarray(result.units), np.asarray(result.bounds)
        expected = np.sinh(stored_codes * np.float64(bound) / most) * unit
    else:
        expected = stored_codes * np.float64(largest) / most
    np.testing.assert_allclose(got, np.where(is_number, expected, special), rtol=1e-5)
    np.testing.assert_array_equal(got[3], 0)


def test_the_error_of_normal_rows_is_near_the_least_of_255_codes() -> None:
    """Panter and Dite (1951): 0.0065 for 255 codes; evenly spaced ones have 0.0093."""
    x = rows(64, 1024)
    off = np.subtract(decoded(encoded(x, "int8"), x.dtype), x)
    assert 0.006 < np.linalg.norm(off) / np.linalg.norm(x) < 0.0077


STEEP = {
    "root": lambda h: jnp.sqrt(jnp.abs(h) + 1e-6),
    "logarithm": lambda h: jnp.log(jnp.square(h) + 1e-6),
    "inverse": lambda h: 1 / (jnp.square(h) + 1e-4),
    "gelu": jax.nn.gelu,  # a control
}


@pytest.mark.parametrize("name", STEEP)
def test_float8_is_for_functions_that_are_steep_at_zero(name: str) -> None:
    """As docs/recompute.md says: its errors are relative to each number, those of int8 to a row."""
    product = np.asarray(rows(256, 128)) @ np.asarray(weights(128, 128, seed=9))
    slope = jax.jit(jax.vmap(jax.grad(STEEP[name])))

    def off(kept_as: RowFormat) -> float:
        near = np.asarray(decoded(encoded(product, kept_as), jnp.float32))
        got, want = (np.asarray(slope(x.ravel()), np.float64) for x in (near, product))
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    if name == "gelu":
        assert off("int8") < off("float8_e4m3fn") / 2 < 0.02
    else:
        assert off("float8_e4m3fn") < 0.15 < 0.3 < off("int8")


@pytest.mark.parametrize("kept_as", BOTH)
@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1.0, 1e15])
def test_rows_of_any_size_keep_their_numbers(kept_as: RowFormat, scale: float) -> None:
    x = np.asarray(X) * np.float32(scale)
    got = np.asarray(decoded(encoded(x, kept_as), jnp.float32), np.float64)
    assert error(got / scale, np.float64(x) / scale) < 0.04


@pytest.mark.parametrize("kept_as", BOTH)
def test_an_outlier_leaves_the_rest_of_its_row(kept_as: RowFormat) -> None:
    """A token of a language model may have two channels near 1,000, and others near 1."""
    x = np.array(rows(64, 128, seed=3), np.float32)
    x[:, 7], x[:, 9] = 1000, -800
    rest = ~np.isin(np.arange(128), (7, 9))
    got = np.asarray(decoded(encoded(x, kept_as), jnp.float32))
    size = np.linalg.norm(x[:, rest])
    assert np.linalg.norm((got - x)[:, rest]) < 0.15 * size
    # Positive control: evenly spaced codes lose it.
    even = np.round(x / 1000 * 127) / 127 * 1000
    assert np.linalg.norm((even - x)[:, rest]) > 0.9 * size


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kept_as", BOTH)
@pytest.mark.parametrize(
    "activation", [jnp.square, jax.nn.relu, lambda x: jnp.square(jnp.where(x > 0, x, 0))]
)
def test_what_is_not_finite_reaches_the_gradient(
    activation: Any, kept_as: RowFormat, bad: float
) -> None:
    """As it does without codes: also through a relu, for which NaN is not positive."""
    x = np.array(X, np.float32)
    x[5, 3] = bad
    got = np.asarray(decoded(encoded(x, kept_as), jnp.float32))
    np.testing.assert_array_equal(got[5, 3], bad)
    assert np.isfinite(got).sum() == x.size - 1

    def loss(w: Any, v: Any) -> Any:  # finite, whatever the product has
        return jnp.tanh(activation(X @ w) @ v).clip(-1, 1).sum()

    w = np.array(W)
    w[0, 0] = bad
    gradients = [compiled(jax.grad(jaxmp.recompute(loss, codes=k), 1)) for k in (None, kept_as)]
    finite = [np.isfinite(by_v(w, V)).all() for by_v in gradients]
    assert finite[0] == finite[1]


@pytest.mark.parametrize("kept_as", BOTH)
def test_an_infinite_start_of_a_running_maximum_leaves_gradients_finite(kept_as: RowFormat) -> None:
    """Attention in blocks starts from -inf, and a mask may be -1e30 in most of a row."""

    def loss(w: Any, mask: Any) -> Any:
        def turn(carry: Any, keys: Any) -> Any:
            most, total = carry
            scores = jnp.where(jnp.arange(128) < 40, X @ w @ keys, mask)
            new = jnp.maximum(most, scores)
            return (new, total * jnp.exp(most - new) + jnp.exp(scores - new)), None

        start = jnp.full((64, 128), mask), jnp.zeros((64, 128))
        (most, total), _ = lax.scan(turn, start, STACKS[1])
        return (most + jnp.log(total))[:, :40].sum()

    coded, exact = (jax.jit(jax.grad(f)) for f in (jaxmp.recompute(loss, codes=kept_as), loss))
    for mask in (-jnp.inf, -1e30, -1e9, -1e4):
        assert error(coded(W, mask), exact(W, mask)) < (0.03 if kept_as == "int8" else 0.08)


def test_a_step_whose_residuals_overflow_is_skipped() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.square(jnp.tanh(x @ params["w"]) @ params["v"]).mean()

    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16")
    state = jaxmp.TrainState.create(params={"w": W, "v": V}, tx=tx)
    step = jaxmp.make_train_step(loss, recompute=lambda f: jaxmp.recompute(f, codes="int8"))
    x = np.array(X)
    x[0, 0] = np.inf
    after, _ = step(state, x)
    assert int(after.opt_state.skipped) == 1
    np.testing.assert_array_equal(after.params["w"], W)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stream", "attention", "scanned"])
def test_the_error_averages_out(name: str) -> None:
    """Over many batches the error of the mean gradient falls, as that of a biased one would not."""
    fun, _, *params = PROGRAMS[name]
    batches = jnp.stack([rows(64, 128, seed=seed) for seed in range(16)])

    def mean_gradient(f: Any) -> Any:
        by_batch = jax.vmap(lambda x: jax.grad(scalar(f), 1)(x, *params))(batches)
        return by_batch.mean(0), by_batch[0]

    (mean, one), (exact_mean, exact_one) = (
        jax.jit(lambda f=f: mean_gradient(f))() for f in (jaxmp.recompute(fun, codes="int8"), fun)
    )
    assert jnp.linalg.norm(mean - exact_mean) < 0.4 * jnp.linalg.norm(one - exact_one)


def test_four_bits_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control of all tests above that compare gradients."""
    want = compiled(jax.grad(scalar(stream), 1))(X, W, V)
    eight = compiled(jax.grad(scalar(jaxmp.recompute(stream, codes="int8")), 1))(X, W, V)
    monkeypatch.setitem(codes_module._LARGEST, "int8", 7.0)
    four = compiled(jax.grad(scalar(jaxmp.recompute(stream, codes="int8")), 1))(X, W, V)
    assert error(eight, want) < 0.01 < 0.05 < error(four, want)


def of_gradient(inner: Any) -> Any:
    return lambda w: jnp.square(jax.grad(lambda w: jnp.square(inner(X, w)).sum())(w)).sum()


def in_a_scan(layer: Any) -> Any:
    return lambda x, w: lax.scan(lambda x, _: (layer(x, w), None), x, length=2)[0]


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ w.T)


CODED = functools.partial(jaxmp.recompute, codes="int8")
SECOND_DERIVATIVES = {
    "grad of grad": of_gradient(CODED(layer)),
    "of a jitted gradient": of_gradient(jax.jit(CODED(layer))),
    "around a scan": of_gradient(CODED(in_a_scan(layer))),
    "in a scan": of_gradient(in_a_scan(CODED(layer))),
    "by data": lambda w: jnp.square(jax.grad(lambda v: CODED(layer)(X @ w @ w.T, v).sum())(W)),
    "of a coded gradient": lambda w: CODED(jax.grad(lambda w: CODED(layer)(X, w).sum()))(w),
}


@pytest.mark.parametrize("is_forward", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", SECOND_DERIVATIVES)
def test_second_derivatives_are_refused(name: str, is_forward: bool) -> None:
    def first(w: Any) -> Any:
        return SECOND_DERIVATIVES[name](w).sum()

    with pytest.raises(
        NotImplementedError, match=r"8-bit codes \(codes= of jaxmp.recompute\).*Leave codes= out"
    ):
        jax.eval_shape(jax.jacfwd(first) if is_forward else jax.grad(first), W)


def test_a_derivative_straight_through_a_rounding() -> None:
    """The rule says what the derivative is; the program, which has none, does not."""

    @jax.custom_jvp
    def rounded(x: Any) -> Any:
        return lax.stop_gradient(jnp.round(x * 16) / 16)

    rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))

    def fun(x: Any, w: Any, v: Any) -> Any:
        return jnp.tanh(rounded(jnp.tanh(x @ w))) @ v

    got, want = (compiled(jax.grad(scalar(f), (1, 2)))(X, W, V) for f in (CODED(fun), fun))
    assert error(got, want) < 0.05


def test_forward_mode_has_the_derivative_of_reverse_mode() -> None:
    def coded(w: Any) -> Any:
        return scalar(CODED(stream))(X, w, V)

    _, tangent = compiled(lambda w: jax.jvp(coded, (w,), (w,)))(W)
    gradient_there = compiled(jax.grad(coded))(W)
    assert float(tangent) == pytest.approx(float(np.vdot(gradient_there, W)), rel=1e-4)
    pulled_back = compiled(lambda w: jax.vjp(coded, w)[1](1.0)[0])(W)
    np.testing.assert_allclose(pulled_back, gradient_there, rtol=1e-5, atol=1e-6)


def test_of_data_without_a_derivative_a_second_one_is_exact() -> None:
    """Nothing is kept in codes of what the outer derivative does not reach."""

    def outer(scale: Any) -> Any:
        inner = jax.grad(scalar(jaxmp.recompute(lambda w: jnp.tanh(X @ w) @ V, codes="int8")))(W)
        return (inner * scale).sum()

    slope, value = compiled(jax.grad(outer))(2.0), compiled(outer)(1.0)
    assert float(slope) == pytest.approx(float(value), rel=1e-5)


def test_a_checkpoint_with_a_policy_stays_as_it_is() -> None:
    """What it saves would be computed twice otherwise."""

    def block(x: Any, w: Any, v: Any) -> Any:
        saves = jax.checkpoint(mlp, policy=jax.checkpoint_policies.dots_saveable)
        return saves(x @ W @ V, w, v)

    coded, plain = (
        dear_operations(jaxmp.recompute(block, codes=kept_as), X, W, V)
        for kept_as in ("int8", None)
    )
    assert coded["dot_general"] == plain["dot_general"]


@pytest.mark.slow
def test_in_a_shard_map() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    alone = rows(512, 128)  # of which a device has enough to keep codes
    x = jax.device_put(alone, NamedSharding(mesh, P("data")))

    def fourth_powers(x: Any, ws: Any, vs: Any) -> Any:
        return (jaxmp.recompute(scanned, codes="int8")(x, ws, vs) ** 4).sum()

    def local(*args: Any) -> Any:
        return lax.psum(fourth_powers(*args), "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P())
    want = jax.grad(fourth_powers, 1)(alone, *STACKS)
    # A sum in another order may round to the next code.
    assert error(jax.jit(jax.grad(mapped, 1))(x, *STACKS), want) < 1e-3


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_in_a_train_step(reduce_dtype: str) -> None:
    """Under a policy, with gradients in float32 or not, as without codes."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.square(scanned(x, *params) - jnp.roll(x, 1, -1)).mean()

    policy = f"params=float32,compute=bfloat16,output=float32,reduce={reduce_dtype}"
    tx = jaxmp.mixed_precision(optax.sgd(0.3, momentum=0.9), policy)

    def losses(recompute: Any) -> list[float]:
        state = jaxmp.TrainState.create(params=STACKS, tx=tx)
        step = jaxmp.make_train_step(loss, recompute=recompute)
        results = []
        for _ in range(10):
            state, metrics = step(state, X)
            results.append(float(metrics["loss"]))
        return results

    coded = losses(lambda f: jaxmp.recompute(f, "loops", codes="int8"))
    np.testing.assert_allclose(coded, losses("loops"), rtol=0.01)
    assert coded[-1] < 0.9 * coded[0]


def test_a_result_without_a_derivative_may_go_where_none_exists() -> None:
    """A stopped value may enter a loop that counts by itself, which has no backward pass."""

    def loss(w: Any, v: Any) -> Any:
        hidden = jnp.tanh(X @ w)
        scale = lax.while_loop(
            lambda s: s.max() > 1, lambda s: s / 2, lax.stop_gradient(hidden) * 9
        )
        return (hidden @ v).sum() + (hidden * scale).sum()

    got = jax.jit(jax.grad(jaxmp.recompute(loss, codes="int8")))(W, V)
    assert error(got, compiled(jax.grad(loss))(W, V)) < 0.02


def test_choices_are_those_of_the_forward_pass() -> None:
    """A straight-through choice, of scores that codes do not tell apart."""
    table = weights(256, 128, seed=5)

    def loss(w: Any, table: Any) -> Any:
        scores = X @ w
        chosen = jax.nn.one_hot(scores.argmax(-1), 256)
        shares = jax.nn.softmax(scores)
        return (jnp.sin((chosen + shares - lax.stop_gradient(shares)) @ table)).sum()

    args = 1 + np.asarray(W) / 1000, table
    got, want = (np.asarray(compiled(jax.grad(f, 1))(*args)) for f in (CODED(loss), loss))
    np.testing.assert_array_equal(got != 0, want != 0)


def test_nothing_is_kept_for_frozen_weights() -> None:
    def loss(w: Any, v: Any) -> Any:
        return jnp.tanh(jnp.tanh(X @ V.T) @ w.T @ w @ v).sum()

    sizes = [
        sum(x.size * x.dtype.itemsize for x in kept(jaxmp.recompute(loss, codes=k), W, V))
        for k in (None, "int8")
    ]
    assert sizes[1] < 0.5 * sizes[0]
    frozen = jax.make_jaxpr(jax.grad(lambda v: jaxmp.recompute(loss, codes="int8")(W, v)))(V)
    trained = jax.make_jaxpr(jax.grad(jaxmp.recompute(loss, codes="int8"), (0, 1)))(W, V)
    products = [
        len([e for e in equations(program) if e.primitive.name == "dot_general"])
        for program in (frozen, trained)
    ]
    assert products[0] < products[1]


@pytest.mark.parametrize(("mode", "barriers"), [("auto", False), ("always", True)])
def test_always_forbids_the_compiler_to_keep(mode: Any, barriers: bool) -> None:
    gradient_by_w = jax.jit(jax.grad(scalar(jaxmp.recompute(stream, mode, codes="int8")), 1))
    assert ("optimization_barrier" in gradient_by_w.lower(X, W, V).as_text()) == barriers


def test_a_callback_in_a_checkpoint_runs_as_often_as_without_codes() -> None:
    calls: list[int] = []

    @jax.checkpoint
    def block(x: Any, w: Any) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return jnp.tanh(x @ w)

    def loss(w: Any, v: Any) -> Any:
        return (block(X @ w, v) @ w).sum()

    counts = []
    for kept_as in (None, "int8"):
        jax.block_until_ready(compiled(jax.grad(jaxmp.recompute(loss, codes=kept_as)))(W, V))
        jax.effects_barrier()
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] > 0


def test_a_shared_statistic_fits_the_codes_of_its_operand() -> None:
    """Exact sums of exponentials beside rounded scores would not add up to one."""

    def loss(w: Any, v: Any) -> Any:
        scores = 20 * norm(X @ w)
        total = jax.nn.logsumexp(scores, -1, keepdims=True)
        return (jnp.exp(scores - total) @ v).sum() + jnp.square(total @ v[:1]).sum()

    got = compiled(jax.grad(jaxmp.recompute(loss, codes="int8"), 1))(W, V)
    assert error(got, compiled(jax.grad(loss, 1))(W, V)) < 0.03


def test_audit_shows_codes_at_the_line_of_their_value() -> None:
    report = jaxmp.audit(scalar(jaxmp.recompute(scanned, codes="int8")), X, *STACKS)
    assert report.recomputed
    assert {row.dtype for row in report.residuals} == {"int8", "float32"}
    files = {row.line.partition(":")[0] for row in report.residuals}
    assert files == {"test_codes.py", "recompute_checks.py"}  # which has the norm


def test_axes_of_unknown_length_count_as_long() -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 128), jnp.float32)
    lean = jaxmp.recompute(mlp, codes="int8")
    coded = jax.jit(jax.grad(lambda x, w, v: jnp.square(lean(x, w, v)).sum(), 1))
    exported = jax.export.export(coded)(x, W, V)
    assert "xi8>" in exported.mlir_module()
    assert error(exported.call(X, W, V), coded(X, W, V)) < 1e-3


def test_an_unknown_dtype_of_codes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"codes must be 'int8' or 'float8_e4m3fn', got 'int4'"):
        jaxmp.recompute(stream, codes="int4")  # type: ignore[arg-type]
