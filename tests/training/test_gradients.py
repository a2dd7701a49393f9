"""Loss and gradients are the true ones, whatever the scale, the dtypes and the microbatches."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import jaxmp
from jaxmp._training.gradient_options import GradientKeywords
from tests.support.mlp import assert_close, data, loss_fn, mlp
from tests.support.references import mlp_loss_and_grads

pytestmark = pytest.mark.annotations

SCALES = [None, 1.0, 2.0**16, jnp.float32(2.0**20), jaxmp.StaticLossScale(2.0**8).init()]


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 24])
def test_against_numpy(scale: Any, microbatches: int) -> None:
    params, (x, y) = mlp(), data(24)
    want_loss, want = mlp_loss_and_grads(params, x, y)
    fun = jaxmp.value_and_grad(loss_fn, loss_scale=scale, microbatches=microbatches)
    loss, grads = jax.jit(fun)(params, x, y)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    assert_close(grads, want, 5e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_low_precision(dtype: str, microbatches: int) -> None:
    params, (x, y) = mlp(dtype), data()
    wide = {k: np.asarray(v, np.float64) for k, v in params.items()}
    want_loss, want = mlp_loss_and_grads(wide, x, y)
    fun = jaxmp.value_and_grad(loss_fn, loss_scale=2.0**8, microbatches=microbatches)
    loss, grads = jax.jit(fun)(params, x, y)
    assert {g.dtype for g in jax.tree.leaves((loss, grads))} == {jnp.dtype("float32")}
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(loss, want_loss, rtol=8 * eps)
    assert_close(grads, want, 16 * eps)


@pytest.mark.parametrize("scale", [2.0**8, 2.0**14])
def test_power_of_two_scales_change_no_bit(scale: float) -> None:
    params, (x, y) = mlp(), data()
    plain = jax.jit(jax.value_and_grad(loss_fn))(params, x, y)
    scaled = jax.jit(jaxmp.value_and_grad(loss_fn, loss_scale=scale))(params, x, y)
    jax.tree.map(np.testing.assert_array_equal, scaled, plain)


def test_the_scale_keeps_small_gradients() -> None:
    """What loss scaling is for: without it these float16 gradients are all zero."""

    def tiny(w: jax.Array) -> jax.Array:
        return jnp.sum(w * jnp.float16(2.0**-12)).astype(jnp.float32) * 2.0**-14

    w = jnp.ones(4, jnp.float16)
    assert not np.any(jaxmp.grad(tiny, loss_scale=1.0)(w))  # positive control
    np.testing.assert_array_equal(jaxmp.grad(tiny, loss_scale=2.0**10)(w), np.full(4, 2.0**-26))


def test_a_float16_loss_at_the_default_scale_is_finite() -> None:
    """flax returns NaN here: 3 * 65536 is infinite in float16."""
    loss, grad = jaxmp.value_and_grad(lambda w: w * jnp.float16(3.0), loss_scale=2.0**16)(
        jnp.float32(1.0).astype(jnp.float16)
    )
    assert float(loss) == 3.0
    assert loss.dtype == jnp.float32
    assert not np.isfinite(grad)  # 196608 is an overflow, and is seen as one


def test_unscales_with_the_scale_that_was_used() -> None:
    """mpx unscales with the adjusted scale, and is wrong by 2 on every growth."""
    config = jaxmp.DynamicLossScale(init_scale=2.0, growth_interval=1)
    state = config.init()
    for _ in range(5):
        loss, grad = jaxmp.value_and_grad(lambda p: p * p, loss_scale=state)(jnp.float32(0.25))
        assert (float(loss), float(grad)) == (0.0625, 0.5)
        state = config.adjust(state, jnp.array(True))
    assert float(state.scale) == 64.0


@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1, 0), -1, (0,)])
def test_argnums_and_aux(argnums: Any) -> None:
    def fun(a: jax.Array, b: jax.Array, *, c: float = 2.0) -> tuple[jax.Array, dict[str, Any]]:
        return jnp.sum(a * a * b) * c, {"n": jnp.int32(3), "key": jax.random.key(0)}

    a, b = jax.device_put((np.arange(3, dtype=np.float32), np.float32(3.0)))
    want_value, want = jax.jit(jax.value_and_grad(fun, argnums, has_aux=True))(a, b, c=4.0)
    value, grads = jaxmp.value_and_grad(fun, argnums, True, loss_scale=8.0)(a, b, c=4.0)
    jax.tree.map(np.testing.assert_array_equal, (value[0], grads), (want_value[0], want))
    assert value[1]["n"] == 3
    only, aux = jax.jit(jaxmp.grad(fun, argnums, has_aux=True))(a, b, c=4.0)
    jax.tree.map(np.testing.assert_array_equal, only, want)
    assert aux["n"] == 3


def test_wide_dtypes_stay_wide() -> None:
    grads = jax.jit(jaxmp.grad(lambda p: jnp.real(jnp.sum(p["c"])) + p["f"], loss_scale=4.0))(
        {"c": np.ones(2, np.complex64), "f": jnp.float32(1.0)}
    )
    assert grads["c"].dtype == jnp.complex64
    np.testing.assert_array_equal(grads["c"], np.ones(2))
    with jax.enable_x64(True):
        loss, grad = jaxmp.value_and_grad(lambda x: x * x, loss_scale=2.0)(jnp.float64(1.5))
        assert loss.dtype == grad.dtype == jnp.float64
        assert (float(loss), float(grad)) == (2.25, 3.0)


def test_python_and_numpy_params() -> None:
    loss, grads = jaxmp.value_and_grad(lambda p: p["a"] * p["b"])(
        {"a": 2.0, "b": np.float16(3.0).astype(np.float32)}
    )
    assert (float(loss), float(grads["a"]), float(grads["b"])) == (6.0, 3.0, 2.0)


def test_under_vmap_and_second_derivative() -> None:
    hessian = jax.vmap(jax.grad(jaxmp.grad(lambda x: x**3, loss_scale=8.0)))(jnp.arange(4.0))
    np.testing.assert_allclose(hessian, 6 * np.arange(4.0))


@pytest.mark.programs(80, reason="gradients without jit are warned of too")
@pytest.mark.parametrize("compile", [lambda f: f, jax.jit])
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint])
def test_float16_without_a_scale_is_warned_of(around: Any, compile: Any) -> None:
    """Forgetting `loss_scale=` makes float16 gradients zero, and nothing else says so.

    A checkpoint keeps nothing of float16, and computes in it all the same.
    """

    @around
    def loss(params: Any, x: Any) -> Any:
        low = jnp.tanh(x.astype(jnp.float16) @ params["layer"]["w"].astype(jnp.float16))
        return jnp.mean(low.astype(jnp.float32)) * 1e-9

    w, b, x = (np.ones(shape, np.float32) for shape in ((2, 2), 2, (3, 2)))
    params, x = jax.device_put(({"layer": {"w": w}, "b": b}, x))
    with pytest.warns(
        UserWarning, match="gradients of 'b', 'layer/w' pass through float16 without"
    ):
        grads = compile(jaxmp.grad(loss))(params, x)
    assert not np.any(grads["layer"]["w"])  # positive control: this is what is warned of
    # A scale, one that is said to be none, or another dtype: no warning, which would be an error.
    assert np.any(compile(jaxmp.grad(loss, loss_scale=2.0**16))(params, x)["layer"]["w"])
    compile(jaxmp.grad(loss, loss_scale=1.0))(params, x)
    compile(
        jaxmp.grad(
            lambda p, x: jnp.mean(
                x.astype(jnp.bfloat16) @ p["layer"]["w"].astype(jnp.bfloat16)
            ).astype(jnp.float32)
        )
    )(params, x)


def test_float16_inside_of_a_custom_vjp_is_warned_of() -> None:
    """As wrappers of kernels do: what goes in and what comes out is float32."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)

    def forward(x: Any, w: Any) -> Any:
        return product(x, w), (x.astype(jnp.float16), w.astype(jnp.float16))

    def backward(residuals: Any, g: Any) -> Any:
        x, w, g = (a.astype(jnp.float16) for a in (*residuals, g))
        return (g @ w.T).astype(jnp.float32), (x.T @ g).astype(jnp.float32)

    product.defvjp(forward, backward)
    x, w = jnp.ones((2, 3)), jnp.ones((3, 2))
    for around in (lambda f: f, jax.checkpoint):
        with pytest.warns(UserWarning, match="pass through float16 without a loss scale"):
            jax.jit(jaxmp.grad(around(lambda w, x: jnp.mean(product(x, w)))))(w, x)


def test_float16_inside_of_a_kernel_of_the_backward_pass_is_warned_of() -> None:
    """Its operands and results are float32; only its program shows what it computes in."""

    def kernel(kept: Any, given: Any, made: Any) -> None:
        low = given[...].astype(jnp.float16)
        made[...] = (low * kept[...].astype(jnp.float16)).astype(jnp.float32)

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return 2 * x

    def backward(kept: Any, g: Any) -> Any:
        like = jax.ShapeDtypeStruct(g.shape, g.dtype)
        return (pl.pallas_call(kernel, out_shape=like, interpret=True)(kept, g),)

    scaled.defvjp(lambda x: (2 * x, (2 * jnp.ones_like(x)).astype(jnp.float16)), backward)
    with pytest.warns(UserWarning, match="pass through float16 without a loss scale"):
        jaxmp.grad(lambda x: jnp.sum(scaled(x)))(jnp.ones(8))


@pytest.mark.parametrize("kept", [jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    "ask", [bool, float, np.asarray, "{:.1f}".format, lambda g: [1][int(g) * 0]]
)
def test_a_backward_pass_that_asks_for_numbers_runs(ask: Any, kept: Any) -> None:
    """Without `jit` a `custom_vjp` may do what it likes in Python: nobody looks through that."""

    @jax.custom_vjp
    def asking(x: Any) -> Any:
        return x

    def backward(residual: Any, g: Any) -> Any:
        ask(g)
        return (g + residual.astype(g.dtype),)

    asking.defvjp(lambda x: (x, x.astype(kept)), backward)
    assert jaxmp.grad(lambda x: asking(x) * 5)(jnp.float32(1)) == 6


def test_float16_behind_a_reference_is_warned_of() -> None:
    def loss(w: Any, x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(2))
        ref[...] = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
        return (ref[0] + 2 * ref[1]) * 1e-9

    with pytest.warns(UserWarning, match="pass through float16 without a loss scale"):
        grads = jax.jit(jaxmp.grad(loss))(jnp.ones(3), jnp.ones((2, 3)))
    assert not np.any(grads)


def test_float16_that_a_loop_carries_is_warned_of() -> None:
    """Into the carry of the backward loop it comes in one turn, and is float16 in the next."""

    def turn(carry: Any, x: Any) -> tuple[Any, None]:
        first, second = carry
        return (second.astype(jnp.float16).astype(jnp.float32), x * jnp.sin(first)), None

    def loss(w: Any, xs: Any) -> Any:
        return lax.scan(jax.checkpoint(turn), (w, w), xs)[0][1] * 1e-9

    with pytest.warns(UserWarning, match="pass through float16 without a loss scale"):
        jaxmp.grad(loss)(jnp.float32(1), jnp.ones(3))


def test_float16_data_is_not_warned_of() -> None:
    """What the backward pass keeps may be data, of which the gradients are float32."""
    wide = jax.checkpoint(lambda w, x: jnp.mean(jnp.sin(x.astype(jnp.float32) @ w)))
    assert np.any(jaxmp.grad(wide)(np.ones(3, np.float32), np.ones((2, 3), np.float16)))

    @jax.checkpoint
    def taught(w: Any, x: Any) -> Any:
        """A checkpoint computes its data again: here in float16."""
        teacher = jnp.tanh(x.astype(jnp.float16) * 2).astype(jnp.float32)
        return jnp.mean((jnp.tanh(teacher @ w) - teacher[:, 0]) ** 2)

    def mapped(w: Any, xs: Any) -> Any:
        return lax.map(lambda x: taught(w, x), xs).sum()

    xs = np.ones((2, 2, 3), np.float32)
    assert np.any(jax.jit(jaxmp.grad(taught))(xs[0, 0], xs[0]))
    assert np.any(jax.jit(jaxmp.grad(mapped))(xs[0, 0], xs))


@pytest.mark.parametrize("function", [jaxmp.grad, jaxmp.value_and_grad])
def test_an_unknown_option_is_named(function: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        function(loss_fn, scale=2.0)


def test_grad_has_the_options_of_value_and_grad() -> None:
    params_of = inspect.signature(jaxmp.value_and_grad).parameters.values()
    own = {x.name for x in params_of if x.kind is inspect.Parameter.KEYWORD_ONLY}
    assert own == set(GradientKeywords.__annotations__)
    params, batch = mlp(), data()
    options: Any = {"loss_scale": 2.0**10, "microbatches": 4, "reduce_dtype": jnp.float32}
    _, grads = jax.jit(jaxmp.value_and_grad(loss_fn, **options))(params, *batch)
    assert_close(jax.jit(jaxmp.grad(loss_fn, **options))(params, *batch), grads, 0)
    with_aux = jaxmp.grad(lambda *args: (loss_fn(*args), 1), has_aux=True, **options)
    got = jax.jit(with_aux)(params, *batch)
    assert_close(got[0], grads, 0)
    assert got[1].shape == (4,)
