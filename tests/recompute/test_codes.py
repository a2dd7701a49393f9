"""`kept=`: the backward pass reads one byte for each number; the forward pass does not change."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp._recompute import codes as codes_module
from jaxmp._recompute.codes import Kept, decode_rows, encode_rows
from tests.support.autocast_checks import error, rows, weights
from tests.support.dots import equations
from tests.support.recompute_checks import dear_operations, gradient, kept, kept_bytes, scalar

pytestmark = pytest.mark.jax

BOTH: tuple[Kept, ...] = ("int8", "float8_e4m3fn")
X = rows(64, 128)
W, V = weights(128, 256, seed=1), weights(256, 128, seed=2)
STACKS = weights(4, 128, 256, seed=3) / 2, weights(4, 256, 128, seed=4) / 2


def norm(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


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
    x = x @ w
    return lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x) @ v, lambda x: jax.nn.gelu(x) @ v, x)


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


def in_bytes(fun: Any, *args: Any) -> dict[str, int]:
    """The bytes that a backward pass keeps, by dtype."""
    sizes: dict[str, int] = {}
    for x in kept(fun, *args):
        sizes[x.dtype.name] = sizes.get(x.dtype.name, 0) + x.size * x.dtype.itemsize
    return sizes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_stay_to_the_bit_and_gradients_nearly(name: str, dtype: Any) -> None:
    fun, *args = PROGRAMS[name]
    args = [x.astype(dtype) for x in args]
    plain, coded = jaxmp.recompute(fun), jaxmp.recompute(fun, kept="int8")
    options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    got, want = (jax.jit(f, compiler_options=options)(*args) for f in (coded, plain))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    (_, got), (_, want) = (jax.jit(gradient(f))(*args) for f in (coded, plain))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        difference = jnp.linalg.norm((a - b).astype(jnp.float32))
        assert difference < 0.05 * jnp.linalg.norm(b.astype(jnp.float32))


@pytest.mark.parametrize("kept_as", BOTH)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "branches"])
def test_floats_are_kept_in_one_byte(name: str, kept_as: Kept) -> None:
    fun, *args = PROGRAMS[name]
    coded = in_bytes(jaxmp.recompute(fun, kept=kept_as), *args)
    assert coded.get(kept_as, 0) > 0
    plain = kept_bytes(jaxmp.recompute(fun), *args)
    assert kept_bytes(jaxmp.recompute(fun, kept=kept_as), *args) < 0.5 * plain


def test_a_value_has_codes_once() -> None:
    """The stream is read by three blocks and the last norm; its codes are made where it is made."""
    program = jax.make_jaxpr(gradient(jaxmp.recompute(stream, kept="int8")))(X, W, V)
    made = [e for e in equations(program) if e.outvars[0].aval.dtype == jnp.int8]
    kept_codes = [
        x for x in kept(jaxmp.recompute(stream, kept="int8"), X, W, V) if x.dtype == "int8"
    ]
    assert len([e for e in made if e.primitive.name == "convert_element_type"]) == len(kept_codes)


def test_arguments_masks_and_small_values_keep_their_bits() -> None:
    def loss(x: Any, w: Any, bias: Any, labels: Any) -> Any:
        small = jnp.tanh(x[:4] @ w)
        hidden = jnp.where(x @ w > 0, jnp.tanh(x @ w + bias[None]), 0)
        return (hidden * jax.nn.one_hot(labels, 256)).sum() + small.sum()

    args = X, W, jnp.zeros(256), jnp.arange(64)
    residuals = kept(jaxmp.recompute(loss, kept="int8"), *args)
    assert {x.dtype.name for x in residuals if x.shape == (4, 256)} == {"float32"}
    _, pull_back = jax.vjp(lambda w: jaxmp.recompute(loss, kept="int8")(X, w, *args[2:]), W)
    np.testing.assert_array_equal(pull_back(1.0)[0].dtype, jnp.float32)
    exact = jax.grad(jaxmp.recompute(lambda x, w: jnp.sin(x).sum() * w, kept="int8"))(X, 2.0)
    np.testing.assert_array_equal(exact, jax.grad(lambda x, w: jnp.sin(x).sum() * w)(X, 2.0))


@pytest.mark.parametrize("kept_as", BOTH)
def test_codes_are_those_of_the_formula(kept_as: Kept) -> None:
    x = np.random.default_rng(0).standard_t(3, (64, 128)).astype(np.float32)
    x[3], x[5, 7] = 0, 1000
    scales = np.abs(x).max(-1, keepdims=True)
    shares = np.abs(x) / np.where(scales > 0, scales, 1)
    result = encode_rows(jnp.asarray(x), kept_as)
    np.testing.assert_array_equal(result.scales, scales)
    if kept_as == "int8":
        expected = np.sign(x) * np.round(np.sqrt(shares) * np.float32(127))
    else:
        expected = (np.sign(x) * shares * np.float32(448)).astype(result.codes.dtype)
    np.testing.assert_array_equal(np.asarray(result.codes, np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("kept_as", BOTH)
def test_an_outlier_leaves_the_rest_of_its_row(kept_as: Kept) -> None:
    """A token of a language model may have one channel of 1,000, and others near 1."""
    x = np.array(rows(64, 128, seed=3), np.float32)
    x[:, 7] = 1000
    rest = np.arange(128) != 7
    got = np.asarray(decode_rows(encode_rows(jnp.asarray(x), kept_as), jnp.float32))
    size = np.linalg.norm(x[:, rest])
    assert np.linalg.norm((got - x)[:, rest]) < 0.15 * size
    # Positive control: evenly spaced codes lose it.
    even = np.round(x / 1000 * 127) / 127 * 1000
    assert np.linalg.norm((even - x)[:, rest]) > 0.9 * size


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kept_as", BOTH)
def test_what_is_not_finite_reaches_the_gradient(kept_as: Kept, bad: float) -> None:
    x = np.array(X, np.float32)
    x[5, 3] = bad
    got = np.asarray(decode_rows(encode_rows(jnp.asarray(x), kept_as), jnp.float32))
    assert not np.isfinite(got[5, 3])
    assert np.isfinite(np.delete(got, 5, 0)).all()

    def loss(w: Any, v: Any) -> Any:  # finite, whatever the product has
        return jnp.tanh(jnp.square(X @ w) @ v).clip(-1, 1).sum()

    grads = jax.grad(jaxmp.recompute(loss, kept=kept_as), 1)(W.at[0, 0].set(bad), V)
    assert not jnp.isfinite(grads).all()


def test_a_step_whose_residuals_overflow_is_skipped() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.square(jnp.tanh(x @ params["w"]) @ params["v"]).mean()

    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16")
    state = jaxmp.TrainState.create(params={"w": W, "v": V}, tx=tx)
    step = jaxmp.make_train_step(loss, recompute=lambda f: jaxmp.recompute(f, kept="int8"))
    after, _ = step(state, X.at[0, 0].set(jnp.inf))
    assert int(after.opt_state.skipped) == 1
    np.testing.assert_array_equal(after.params["w"], W)


@pytest.mark.parametrize("name", ["stream", "attention", "scanned"])
def test_the_error_averages_out(name: str) -> None:
    """Over many batches the error of the mean gradient falls, as that of a biased one would not."""
    fun, _, *params = PROGRAMS[name]
    batches = jnp.stack([rows(64, 128, seed=seed) for seed in range(16)])

    def mean_gradient(f: Any) -> Any:
        by_batch = jax.vmap(lambda x: jax.grad(scalar(f), 1)(x, *params))(batches)
        return by_batch.mean(0), by_batch[0]

    (mean, one), (exact_mean, exact_one) = (
        jax.jit(lambda f=f: mean_gradient(f))() for f in (jaxmp.recompute(fun, kept="int8"), fun)
    )
    assert jnp.linalg.norm(mean - exact_mean) < 0.4 * jnp.linalg.norm(one - exact_one)


def test_four_bits_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control of all tests above that compare gradients."""
    want = jax.grad(scalar(stream), 1)(X, W, V)
    eight = jax.grad(scalar(jaxmp.recompute(stream, kept="int8")), 1)(X, W, V)
    monkeypatch.setitem(codes_module.LARGEST, "int8", 7.0)
    four = jax.grad(scalar(jaxmp.recompute(stream, kept="int8")), 1)(X, W, V)
    assert error(eight, want) < 0.01 < 0.05 < error(four, want)


def test_second_derivatives_and_forward_mode_are_refused() -> None:
    coded = scalar(jaxmp.recompute(stream, kept="int8"))
    with pytest.raises(
        NotImplementedError, match=r"reads 8-bit codes \(kept= of jaxmp.recompute\)"
    ):
        jax.grad(lambda w: jnp.square(jax.grad(coded, 1)(X, w, V)).sum())(W)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda w: coded(X, w, V), (W,), (W,))


def test_of_data_without_a_derivative_a_second_one_is_exact() -> None:
    """Nothing is kept in codes of what the outer derivative does not reach."""

    def outer(scale: Any) -> Any:
        inner = jax.grad(scalar(jaxmp.recompute(lambda w: jnp.tanh(X @ w) @ V, kept="int8")))(W)
        return (inner * scale).sum()

    assert float(jax.grad(outer)(2.0)) == pytest.approx(float(outer(1.0)), rel=1e-5)


def test_a_checkpoint_with_a_policy_stays_as_it_is() -> None:
    """What it saves would be computed twice otherwise."""

    def block(x: Any, w: Any, v: Any) -> Any:
        saves = jax.checkpoint(mlp, policy=jax.checkpoint_policies.dots_saveable)
        return saves(x @ W @ V, w, v)

    coded, plain = (
        dear_operations(jaxmp.recompute(block, kept=kept_as), X, W, V) for kept_as in ("int8", None)
    )
    assert coded["dot_general"] == plain["dot_general"]


def test_in_a_shard_map_and_over_eight_devices() -> None:
    """RowCodes lie where their values lie: no device sends them, or a scale."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    alone = rows(512, 128)  # of which a device has enough to keep codes
    x = jax.device_put(alone, NamedSharding(mesh, P("data")))
    want = jax.grad(scalar(jaxmp.recompute(scanned, kept="int8")), 1)(alone, *STACKS)

    compiled = jax.jit(jax.grad(scalar(jaxmp.recompute(scanned, kept="int8")), 1))
    # A sum in another order may round to the next code.
    assert error(compiled(x, *STACKS), want) < 1e-3
    plain = jaxmp.collectives(jax.jit(jax.grad(scalar(jaxmp.recompute(scanned)), 1)), x, *STACKS)
    coded = jaxmp.collectives(compiled, x, *STACKS)
    assert coded.bytes() == plain.bytes() > 0

    def fourth_powers(x: Any, ws: Any, vs: Any) -> Any:
        return (jaxmp.recompute(scanned, kept="int8")(x, ws, vs) ** 4).sum()

    def local(*args: Any) -> Any:
        return lax.psum(fourth_powers(*args), "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P())
    want = jax.grad(fourth_powers, 1)(alone, *STACKS)
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

    coded = losses(lambda f: jaxmp.recompute(f, "loops", kept="int8"))
    np.testing.assert_allclose(coded, losses("loops"), rtol=0.01)
    assert coded[-1] < 0.9 * coded[0]


def test_an_unknown_dtype_of_codes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kept must be 'int8' or 'float8_e4m3fn', got 'int4'"):
        jaxmp.recompute(stream, kept="int4")  # type: ignore[arg-type]
