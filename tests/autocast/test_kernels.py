"""`kernels="low"`: what nobody can look into runs in 16 bits, as if all had been cast before."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas
from jax.experimental.ode import odeint

import jaxmp
import jaxmp.nnx
from tests.support.autocast_checks import BF16, FP16, compiled, rows, weights
from tests.support.dots import equations
from tests.support.ways import rounded

SEEN: list[tuple[str, ...]] = []
KEYS = ("q", "k", "v", "o")
PARAMS: dict[str, Any] = {
    **{key: weights(16, 16, seed=i) for i, key in enumerate(KEYS)},
    "bias": jnp.full(16, 0.01),
    "scale": jnp.ones(16),
}
# Labels that 16 bits would round, far more than the tolerance.
BATCH = {
    "x": rows(8, 16, seed=8),
    "y": 1.001 + 0.001 * rows(8, 16, seed=9),
    "t": 900.0 + 7.3 * jnp.arange(8.0),
}


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    jax.clear_caches()  # JAX hands out the trace of an equal function
    SEEN.clear()
    with jax.numpy_rank_promotion("allow"):
        yield


def note(name: str, *arrays: Any) -> None:
    SEEN.append((name, *(str(x.dtype) for x in arrays)))


def attend(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax((q @ k.T).astype(jnp.float32)).astype(v.dtype) @ v


@jax.custom_vjp
def attention(q: Any, k: Any, v: Any) -> Any:
    """A kernel, as a fused attention is one."""
    note("attention", q, k, v)
    return attend(q, k, v)


def _attention_forward(*given: Any) -> Any:
    note("attention forward", *given)
    return attend(*given), given


def _attention_backward(given: Any, grad: Any) -> Any:
    note("attention backward", *given, grad)
    return jax.vjp(attend, *given)[1](grad)


attention.defvjp(_attention_forward, _attention_backward)


def squared(predictions: Any, labels: Any) -> Any:
    off = jnp.ravel(predictions.astype(jnp.float32) - labels.astype(jnp.float32))
    return jnp.dot(off, off) / off.size  # a product, as it is in a fused loss


@jax.custom_vjp
def loss_kernel(predictions: Any, labels: Any) -> Any:
    note("loss", predictions, labels)
    return squared(predictions, labels)


loss_kernel.defvjp(
    lambda *given: (loss_kernel(*given), given),
    lambda given, grad: jax.vjp(squared, *given)[1](grad),
)


@jax.custom_jvp
def tanh_kernel(x: Any) -> Any:
    """A Pallas kernel with a product, by one; its derivative calls it again."""
    note("pallas", x)

    def body(given: Any, made: Any) -> None:
        same = given[...] @ jnp.eye(x.shape[-1], dtype=x.dtype)
        made[...] = jnp.tanh(same.astype(jnp.float32)).astype(made.dtype)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(body, out_shape=shape, interpret=True)(x)


@tanh_kernel.defjvp
def _tanh_kernel_jvp(primals: Any, tangents: Any) -> Any:
    y = tanh_kernel(*primals)
    return y, tangents[0] * (1 - y * y)


def block(params: Any, x: Any) -> Any:
    """A norm, projections with a bias, attention: nothing says anything about dtypes."""
    x = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * params["scale"]
    q, k, v = (x @ params[key] + params["bias"] for key in "qkv")
    return attention(q, k, v) @ params["o"]


def model(params: Any, batch: Any) -> Any:
    return loss_kernel(block(params, batch["x"]), batch["y"])


def layers(params: Any, batch: Any) -> Any:
    def layer(x: Any, _: Any) -> tuple[Any, None]:
        return jnp.tanh(x + block(params, x)), None

    x, _ = lax.scan(jax.checkpoint(layer), batch["x"] @ params["o"], None, length=2)
    return loss_kernel(x, batch["y"])


MODELS: dict[str, Callable[..., Any]] = {
    "function": model,
    "jit": jax.jit(model),
    "checkpoint": jax.checkpoint(model),
    "scan of checkpoints": layers,
    "cond": lambda params, batch: lax.cond(
        batch["x"][0, 0] < 100, model, lambda *args: 0.0, params, batch
    ),
    "vmap": lambda params, batch: jnp.mean(
        jax.vmap(lambda x, y: loss_kernel(block(params, x[None])[0], y))(batch["x"], batch["y"])
    ),
    "labels in one column": lambda params, batch: loss_kernel(
        block(params, batch["x"])[:, 0], batch["y"][:, 0]
    ),
    "labels that were scaled": lambda params, batch: loss_kernel(
        block(params, batch["x"]), batch["y"] * 2 - 1
    ),
}


def low(fun: Callable[..., Any], policy: Any = BF16, **options: Any) -> Callable[..., Any]:
    return jaxmp.autocast(fun, policy, **options)


def close(got: Any, want: Any, bound: float = 0.1) -> None:
    for key, each in want.items():
        assert np.linalg.norm(got[key] - each) <= bound * np.linalg.norm(each) + 1e-6, key


@pytest.mark.parametrize("policy", [BF16, FP16])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_get_16_bits_and_labels_float32(name: str, policy: str) -> None:
    want, want_grads = compiled(jax.value_and_grad(MODELS[name]))(PARAMS, BATCH)
    assert {dtype for _, *dtypes in SEEN for dtype in dtypes} == {"float32"}  # control
    jax.clear_caches()
    SEEN.clear()
    loss, grads = compiled(jax.value_and_grad(low(MODELS[name], policy)))(PARAMS, BATCH)
    half = policy.removeprefix("mixed_")
    seen = {name: dtypes for name, *dtypes in SEEN if half in dtypes}
    assert seen["attention"] == seen["attention forward"] == [half] * 3
    assert seen["attention backward"] == [half] * 4
    assert seen["loss"] == [half, "float32"]
    passes = [
        dtypes for name, *dtypes in SEEN if name in ("attention forward", "attention backward")
    ]
    assert all(set(dtypes) == {half} for dtypes in passes)
    np.testing.assert_allclose(loss, want, rtol=0.02)
    close(grads, want_grads)


def test_kernels_of_pallas() -> None:
    def fun(params: Any, batch: Any) -> Any:
        hidden = tanh_kernel(batch["x"] @ params["q"] + params["bias"])
        return jnp.mean((hidden @ params["o"] - batch["y"]) ** 2)

    fast = low(fun)
    grads = compiled(jax.grad(fast))(PARAMS, BATCH)
    assert ("pallas", "bfloat16") in SEEN
    close(grads, {key: x for key, x in compiled(jax.grad(fun))(PARAMS, BATCH).items() if x.any()})
    assert _operands(jax.make_jaxpr(fast)(PARAMS, BATCH), "pallas_call") == ["bfloat16"]
    traced = jaxmp.autocast(fun, BF16, kernels="traced")
    assert _operands(jax.make_jaxpr(traced)(PARAMS, BATCH), "pallas_call") == ["float32"]  # control
    got = compiled(jax.vmap(fast, (None, 0)))(PARAMS, jax.tree.map(lambda x: x[:, None], BATCH))
    np.testing.assert_allclose(np.mean(got), fun(PARAMS, BATCH), rtol=0.02)


def _operands(jaxpr: Any, name: str) -> list[str]:
    return [str(e.invars[0].aval.dtype) for e in equations(jaxpr) if e.primitive.name == name]


def test_kernels_without_a_product_stay() -> None:
    """A sum over a row in the kernel's dtype: 1 in float32, 11 in bfloat16."""

    def body(x: Any, out: Any) -> None:
        def add(i: Any, total: Any) -> Any:
            return total + lax.dynamic_slice_in_dim(x[...], i, 1, 1)

        rows = x[...]
        total = lax.fori_loop(0, rows.shape[1], add, jnp.zeros((rows.shape[0], 1), rows.dtype))
        out[...] = rows / total

    def share(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["w"]
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        made = pallas.pallas_call(body, out_shape=shape, interpret=True)(x)
        return jnp.mean(jnp.sum(made, 1))

    params, batch = {"w": jnp.full((4, 2048), 0.25)}, {"x": jnp.ones((2, 4))}
    for fun in (share, low(share)):
        np.testing.assert_allclose(compiled(fun)(params, batch), 1.0, rtol=1e-2)


def test_kernels_in_live_modules() -> None:
    """An `nnx.Param` is a param: a bias behind a product is cast, or the kernel read float32."""

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.q, self.bias = nnx.Param(PARAMS["q"]), nnx.Param(PARAMS["bias"])

        def __call__(self, x: Any, y: Any) -> Any:
            hidden = tanh_kernel(x @ self.q[...] + self.bias[...])
            return jnp.mean(hidden - y)

    def operands(**options: Any) -> list[str]:
        graphdef, state = nnx.split(Block())

        def fun(state: Any, x: Any, y: Any) -> Any:
            return jaxmp.nnx.autocast(nnx.merge(graphdef, state), BF16, **options)(x, y)

        return _operands(jax.make_jaxpr(fun)(state, BATCH["x"], BATCH["y"]), "pallas_call")

    assert operands() == ["bfloat16"]
    assert operands(kernels="traced") == ["float32"]  # control


@jax.custom_vjp
def matmul(x: Any, w: Any) -> Any:
    note("matmul", x, w)
    return x @ w


matmul.defvjp(lambda x, w: (matmul(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


def test_kernels_in_place_of_all_products() -> None:
    """No product leads to them: what they read themselves does."""

    def fun(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(matmul(batch["x"], params["q"]) + params["bias"])
        return jnp.mean((matmul(hidden, params["o"]) - batch["y"]) ** 2)

    compiled(jax.grad(low(fun)))(PARAMS, BATCH)
    assert [x for x in SEEN if "bfloat16" in x] == [("matmul", "bfloat16", "bfloat16")] * 4
    stacked = {"w": jnp.stack([PARAMS[key] for key in "qk"])}

    def scanned(params: Any, batch: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (jnp.tanh(matmul(x, w)), None), batch["x"], params["w"])
        return jnp.mean((x - batch["y"]) ** 2)

    SEEN.clear()
    compiled(jax.grad(low(scanned)))(stacked, BATCH)
    assert ("matmul", "bfloat16", "bfloat16") in SEEN


def test_kernels_that_are_to_stay_exact() -> None:
    """Under `full_precision`, rules, and with `kernels="traced"`."""
    exact = jaxmp.full_precision(block)

    def scoped(params: Any, batch: Any) -> Any:
        with jax.named_scope("body"):
            x = block(params, batch["x"])
        return jnp.mean((x - batch["y"]) ** 2)

    rules = jaxmp.PolicyRules([("body", "float32")], default=BF16)
    for fun in (
        low(lambda params, batch: jnp.mean((exact(params, batch["x"]) - batch["y"]) ** 2)),
        low(scoped, rules),
        jaxmp.autocast(model, BF16, kernels="traced"),
    ):
        SEEN.clear()
        compiled(jax.grad(fun))(PARAMS, BATCH)
        ran = [
            dtypes for name, *dtypes in SEEN if name in ("attention forward", "attention backward")
        ]
        assert ran
        assert all(set(dtypes) == {"float32"} for dtypes in ran)


def test_a_function_without_kernels_is_traced_once() -> None:
    traced = 0

    def fun(params: Any, batch: Any) -> Any:
        nonlocal traced
        traced += 1
        return jnp.mean(batch["x"] @ params["q"])

    jax.make_jaxpr(low(fun))(PARAMS, BATCH)
    assert traced == 1
    exact = jaxmp.full_precision(lambda params, batch: fun(params, batch) + model(params, batch))
    jax.make_jaxpr(low(exact))(PARAMS, BATCH)
    assert traced == 2


SHARED = jax.jit(loss_kernel)


def _more_kernels(params: Any, batch: Any) -> Any:
    count = 1 if batch["x"].dtype == jnp.float32 else 2
    return sum(model(params, batch) for _ in range(count))


def _fails(params: Any, batch: Any) -> Any:
    if batch["x"].dtype != jnp.float32:
        raise RuntimeError("float32 is all that this can do")
    return model(params, batch)


def _other_shape(params: Any, batch: Any) -> Any:
    x = batch["x"] @ params["q"]
    return loss_kernel(*((x, batch["y"]) if x.dtype == jnp.float32 else (x[:4], batch["y"][:4])))


def _shared(params: Any, batch: Any) -> Any:
    x = batch["x"] @ params["q"]
    return sum(SHARED(*given) for given in ((x, batch["y"]), (batch["y"], x), (x, batch["y"])))


MISFITS: dict[str, tuple[Callable[..., Any], str]] = {
    "more kernels": (_more_kernels, "it calls 4 kernels with them, and 2 without"),
    "an error": (_fails, r"the function fails with them \(RuntimeError: float32 is all that"),
    "other shapes": (_other_shape, "loss_kernel has other operands or results with them"),
    "one trace": (_shared, "loss_kernel is traced once for calls with several dtypes"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_kernels_that_do_not_fit_stay_and_that_is_said(name: str) -> None:
    fun, reason = MISFITS[name]
    with pytest.warns(UserWarning, match=f"kernels='low' .* stay as they were traced, .*{reason}"):
        got = compiled(low(fun))(PARAMS, BATCH)
    want = compiled(jaxmp.autocast(fun, BF16, kernels="traced"))(PARAMS, BATCH)
    np.testing.assert_array_equal(got, want)


@jax.custom_vjp
def squares(predictions: Any, labels: Any) -> Any:
    """A loss for each example, with a derivative of its own and no product inside."""
    return (predictions - labels) ** 2


squares.defvjp(
    lambda p, y: (squares(p, y), (p, y)),
    lambda kept, g: (2 * g * (kept[0] - kept[1]), -2 * g * (kept[0] - kept[1])),
)


@jax.custom_vjp
def unchanged(x: Any) -> Any:
    return x * 1


unchanged.defvjp(lambda x: (x * 1, None), lambda _, g: (g,))

# Predictions are float32 by hand, as is right near 1,000.
LABELLED: dict[str, Callable[..., Any]] = {
    "no product": lambda p, x, y: jnp.mean(squares(p["w"] * x[:, 0] + 1000.0, y)),
    "a product behind": lambda p, x, y: jnp.dot(
        squares((x @ p["m"]).astype(jnp.float32)[:, 0] + 1000.0, y), jnp.ones(8) / 8
    ),
    "labels alone": lambda p, x, y: jnp.mean(
        ((x @ p["m"]).astype(jnp.float32)[:, 0] + 1000.0 - unchanged(y)) ** 2
    ),
    "of other numbers": lambda p, x, y: jnp.mean(
        squares((x @ p["m"]).astype(jnp.float32)[:5, 0] + 1000.0, y[:5])
    ),
    "an odd step": lambda p, x, y: jnp.mean(
        squares((x @ p["m"]).astype(jnp.float32)[:, 0] * (y - 1000.0), y - 1000.0)
    ),
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_of_kernels_without_products_are_exact(name: str) -> None:
    """Whatever comes behind a kernel, and whatever else it reads, labels are no operands."""
    params = {"w": jnp.float32(0.5), "m": weights(16, 16)}
    x, y = rows(8, 16), 1000.0 + np.asarray(rows(8, 16, seed=3))[:, 0]
    with jax.numpy_dtype_promotion("standard"):
        got = compiled(jax.grad(low(LABELLED[name])))(params, x, y)
        want = compiled(jax.grad(LABELLED[name]))(params, x, y)
    close(got, want, 0.03)
    low_labels = rounded(y)
    with jax.numpy_dtype_promotion("standard"):
        off = compiled(jax.grad(LABELLED[name]))(params, x, low_labels)
    key = "w" if name == "no product" else "m"
    assert np.linalg.norm(off[key] - want[key]) > 0.1 * np.linalg.norm(want[key])  # control


@jax.custom_vjp
def rms_norm(x: Any, scale: Any) -> Any:
    return _rms_norm(x, scale)


def _rms_norm(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-8) * scale


rms_norm.defvjp(
    lambda *given: (rms_norm(*given), given), lambda given, g: jax.vjp(_rms_norm, *given)[1](g)
)


@jax.custom_vjp
def cross_entropy(logits: Any, labels: Any) -> Any:
    return _cross_entropy(logits, labels)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    right = jnp.take_along_axis(logits, labels[:, None], -1)
    return jnp.sum(jax.nn.logsumexp(logits, -1) - right[:, 0])


cross_entropy.defvjp(
    lambda logits, labels: (cross_entropy(logits, labels), (logits, labels)),
    lambda given, g: (jax.vjp(lambda x: _cross_entropy(x, given[1]), given[0])[1](g)[0], None),
)


@jax.custom_vjp
def embedding(times: Any) -> Any:
    phases = times[:, None] * jnp.exp(jnp.linspace(0.0, -3.0, 8))
    return jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1)


embedding.defvjp(lambda t: (embedding(t), t), lambda t, _: (jnp.zeros_like(t),))

# Products are around these kernels, and none within: 16 bits gain them nothing.
WITHOUT_PRODUCTS: dict[str, Callable[..., Any]] = {
    "a norm, in which float16 loses 1e-8": lambda p, b: jnp.mean(
        (rms_norm(b["x"].at[0].set(0.0) @ p["q"], p["scale"]) @ p["o"] - b["y"]) ** 2
    ),
    "a sum over more examples than float16 holds": lambda p, b: (
        cross_entropy(jnp.tile(b["x"] @ p["q"], (4096, 1)), jnp.arange(8 * 4096) % 16) / 8 / 4096
    ),
    "phases of time stamps": lambda p, b: jnp.mean((embedding(b["t"]) @ p["q"] - b["y"]) ** 2),
}


@pytest.mark.parametrize("policy", [BF16, FP16])
@pytest.mark.parametrize("name", WITHOUT_PRODUCTS)
def test_kernels_without_products_are_exact(name: str, policy: str) -> None:
    """A norm gave NaN in float16, a loss infinity, and phases near 1,000 were rounded."""
    fun = WITHOUT_PRODUCTS[name]
    want, want_grads = compiled(jax.value_and_grad(fun))(PARAMS, BATCH)
    got, grads = compiled(jax.value_and_grad(low(fun, policy)))(PARAMS, BATCH)
    np.testing.assert_allclose(got, want, rtol=2e-3)
    close(grads, want_grads, 0.03)


def test_statistics_of_labels_are_exact() -> None:
    """Collections are no params: a fused loss that takes off a mean near 1,000 needs all of it."""

    def loss(params: Any, batch: Any, mean: Any) -> Any:
        predictions = batch["x"] @ params["q"] * 0.0 + mean
        return loss_kernel(predictions, batch["y"] - 1.001 + mean), {}

    tx = jaxmp.mixed_precision(optax.sgd(0.1), BF16)
    state = jaxmp.TrainState.create(params=PARAMS, tx=tx, mean=jnp.full(16, 1001.37))
    _, metrics = jaxmp.make_train_step(loss, BF16)(state, BATCH)
    assert metrics["loss"] < 1e-4  # 0.4 with a mean of 16 bits


@jax.custom_vjp
def bisected(x: Any) -> Any:
    """How often a solver turns whose loop a flag ends, which its condition only hands on."""

    def turn(state: Any) -> Any:
        count, low, high, _ = state
        middle = (low + high) * 0.5
        above = jnp.dot(middle[None], middle[None]) > x
        low, high = jnp.where(above, low, middle), jnp.where(above, middle, high)
        return count + 1, low, high, (high - low >= 1e-4) & (count < 500)

    begin = (0, jnp.zeros_like(x), x, jnp.asarray(True))
    return lax.while_loop(lambda state: state[3], turn, begin)[0] * x


bisected.defvjp(lambda x: (bisected(x), x), lambda x, g: (g,))


def test_a_solver_whose_loop_a_flag_ends() -> None:
    fun = low(lambda p, x: bisected(jnp.sum(x @ p) * 0.0 + x[0]))
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.filterwarnings("ignore", "autocast leaves")
        turns = compiled(fun)(jnp.ones((2, 2)), jnp.array([2.0, 1.0])) / 2.0
    assert turns < 20


@pytest.mark.parametrize("limit", ["closed over", "carried"])
def test_a_loop_that_counts_to_a_limit_is_no_solver(limit: str) -> None:
    """Its condition reads a flag and a float that no turn changes."""

    @jax.custom_vjp
    def power(x: Any, w: Any, on: Any, end: Any) -> Any:
        def goes_on(state: Any) -> Any:
            count, _, last = state
            return (count.astype(last.dtype) < (last if limit == "carried" else end)) & on

        def turn(state: Any) -> Any:
            return state[0] + 1, (state[1] @ w).astype(x.dtype), state[2]

        # Then its count comes out of one equation with floats.
        turn = jax.jit(turn) if limit == "closed over" else turn
        return lax.while_loop(goes_on, turn, (jnp.int32(0), x, end))[1]

    power.defvjp(lambda *args: (power(*args), args), lambda kept, g: (g, kept[1], None, kept[3]))
    fun = low(lambda w, x, on, end: power(x @ w, w, on, end))
    program = jax.make_jaxpr(fun)(jnp.ones((4, 4)), jnp.ones((4, 4)), True, jnp.float32(3))
    assert _operands(program, "custom_vjp_call") == ["bfloat16"]


def _field(y: Any, t: Any, p: Any) -> Any:
    return jnp.tanh(jnp.append(y, t) @ p["in"]) @ p["out"]


FIELDS: dict[str, Callable[..., Any]] = {
    "time beside the state": _field,
    "time times the state": lambda y, t, p: _field(y, 0.0, p) * jnp.cos(t),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.slow
def test_a_solver_is_exact(name: str) -> None:
    """It goes on until its errors are small, which in 16 bits may never be: it did not end."""
    field = FIELDS[name]

    def solved(p: Any, y0: Any, times: Any) -> Any:
        return jnp.mean(odeint(field, y0, times, p, mxstep=100) ** 2)

    params = {"in": weights(5, 4), "out": weights(4, 4, seed=1)}
    y0, times = rows(4), jnp.array([10.0, 10.37, 11.013])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "autocast leaves")  # its products, too
        got, grads = compiled(jax.value_and_grad(low(solved)))(params, y0, times)
        want, want_grads = compiled(jax.value_and_grad(solved))(params, y0, times)
    np.testing.assert_allclose(got, want, rtol=0.01)
    close(grads, want_grads, 0.03)
