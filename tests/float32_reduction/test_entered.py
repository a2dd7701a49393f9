"""Functions with derivatives of their own inside of a loss; programs that hold a param twice."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from tests.support.bits import tree_bits
from tests.support.dots import equations
from tests.support.reduction_checks import (
    MESH,
    compiled,
    narrow_sums,
    relative_error,
    representable,
    split_over,
)
from tests.support.reduction_models import end, relu_dense, tanh_dense

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F32 = jnp.bfloat16, jnp.float32


def arguments() -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    w, b, x = (random.normal(size=shape) for shape in ((16, 16), (16,), (512, 16)))
    return jax.device_put((w / 4, b / 4, x))


def loss_of(layer: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda w, b, x: end(layer(x.astype(BF16), w.astype(BF16)) * b.astype(BF16))


def own_vjp(w: Any, b: Any, x: Any) -> Any:
    return end(relu_dense(x.astype(BF16), w.astype(BF16), b.astype(BF16)))


@jax.custom_vjp
def cast_dense(x: Any, w: Any, b: Any) -> Any:
    return jnp.tanh(x.astype(BF16) @ w.astype(BF16) + b.astype(BF16))


def _cast_dense_back(kept: Any, ct: Any) -> Any:
    x, w, y = kept
    ct = ct * (1 - y * y)
    dx, dw = ct @ w.astype(BF16).T, x.astype(BF16).T @ ct
    return dx.astype(F32), dw.astype(F32), jnp.sum(ct, axis=0).astype(F32)


cast_dense.defvjp(lambda x, w, b: ((y := cast_dense(x, w, b)), (x, w, y)), _cast_dense_back)


OWN = {
    "custom_jvp": loss_of(tanh_dense),
    "custom_vjp": own_vjp,
    "casts its params": lambda w, b, x: end(cast_dense(x, w, b)),
}


mapped_dense = jax.shard_map(
    lambda w, x: jnp.tanh(x @ w), mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data")
)


@jax.custom_vjp
def mapped_back(x: Any, w: Any) -> Any:
    return mapped_dense(w, x)


mapped_back.defvjp(
    lambda x, w: (mapped_dense(w, x), (x, w)),
    lambda kept, ct: jax.vjp(lambda x, w: mapped_dense(w, x), *kept)[1](ct),
)


@jax.custom_vjp
def looped_back(x: Any, w: Any) -> Any:
    return x @ w


def _looped_back(kept: Any, ct: Any) -> Any:
    """Goes through the batch in a `while`, as for a length that data decides."""
    x, w = kept

    def turn(state: Any) -> Any:
        i, dw = state
        part, dots = (lax.dynamic_slice_in_dim(a, 8 * i, 8) for a in (x, ct))
        return i + 1, dw + part.T @ dots

    done = lax.while_loop(lambda s: s[0] < len(x) // 8, turn, (0, jnp.zeros_like(w)))
    return ct @ w.T, done[1]


looped_back.defvjp(lambda x, w: (x @ w, (x, w)), _looped_back)


autocast_vjp = jaxmp.autocast(
    lambda w, b, x: end(relu_dense(x, w, b)), "mixed_bfloat16", enter_custom_vjp=True
)


@jax.custom_vjp
def clipped_back(x: Any, w: Any) -> Any:
    return x @ w


clipped_back.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, ct: (ct @ kept[1].T, jnp.clip(kept[0].T @ ct, -0.01, 0.01)),
)


@jax.custom_vjp
def placed_back(x: Any, w: Any) -> Any:
    return x @ w[1:]


placed_back.defvjp(
    lambda x, w: (x @ w[1:], (x, w)),
    lambda kept, ct: (
        ct @ kept[1][1:].T,
        jnp.zeros_like(kept[1]).at[jnp.arange(1, 16)].set(kept[0].T @ ct),
    ),
)


def backward_sets(w: Any, b: Any, x: Any) -> Any:
    return end(placed_back(x[:, 1:].astype(BF16), w.astype(BF16)) * b.astype(BF16))


BACKWARD = {
    "plain": own_vjp,
    "shard_map": loss_of(mapped_back),
    "while": loss_of(looped_back),
    "clip": loss_of(clipped_back),
    "set": backward_sets,
    "autocast": autocast_vjp,
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_passes_sum_in_float32(name: str) -> None:
    """A `shard_map`, a `while` and the products of autocast in them are followed, too."""
    loss = BACKWARD[name]
    w, b, x = arguments()
    args = split_over(w), split_over(b), split_over(x, "data")
    ours = jaxmp.grad(loss, argnums=(0, 1), reduce_dtype="float32")
    plain = jax.grad(loss, argnums=(0, 1))
    exact = compiled(jaxmp.grad(lambda *args: loss(*args), argnums=(0, 1)))(w, b, x)
    grads = compiled(ours)(*args)
    assert all(representable(g, BF16) < 0.6 for g in grads)
    assert relative_error(grads, exact) < 0.1
    assert narrow_sums(jaxmp.sharding.collectives(ours, *args)) == 0
    if name != "autocast":
        assert narrow_sums(jaxmp.sharding.collectives(plain, *args)) > 0  # positive control


def test_products_of_wider_operands_keep_them() -> None:
    """A backward pass may multiply float32, and round the result alone."""

    @jax.custom_vjp
    def exact_back(x: Any, w: Any) -> Any:
        return x @ w

    def back(kept: Any, ct: Any) -> Any:
        x, w = kept
        algorithm = lax.DotAlgorithmPreset.F32_F32_F32
        wide = lax.dot(
            x.T.astype(F32) / 3, ct.astype(F32), precision=algorithm, preferred_element_type=BF16
        )
        return ct @ w.T, wide

    exact_back.defvjp(lambda x, w: (x @ w, (x, w)), back)
    w, _, x = arguments()
    ours, want = (
        compiled(jaxmp.grad(loss_of(f), reduce_dtype="float32"))(w, np.ones(16), x)
        for f in (exact_back, jnp.matmul)
    )
    np.testing.assert_allclose(ours, np.divide(want, 3), rtol=1e-5, atol=1e-7)


def test_a_loop_in_a_backward_pass_adds_up_in_float32() -> None:
    """2,048 terms of one sign: in bfloat16 the sum stands still at a part of them."""
    w, _, x = arguments()
    x = np.abs(np.tile(x, (32, 1)))

    def loss(w: Any, dtype: Any) -> Any:
        y = looped_back(x.astype(dtype), w.astype(dtype)).astype(F32)
        return jnp.mean((y - 3) ** 2)

    exact = compiled(jax.grad(lambda w: loss(w, F32)))(w)
    ours = compiled(jaxmp.grad(lambda w: loss(w, BF16), reduce_dtype="float32"))(w)
    plain = compiled(jax.grad(lambda w: loss(w, BF16)))(w)
    assert relative_error(ours, exact) < 0.02 < 0.2 < relative_error(plain, exact)


def in_scan(loss: Any) -> Any:
    def scanned(w: Any, b: Any, x: Any) -> Any:
        return (
            lax.scan(
                lambda total, part: (total + loss(w, b, part), None), 0.0, x.reshape(4, -1, 16)
            )[0]
            / 4
        )

    return scanned


def in_cond(loss: Any) -> Any:
    return lambda w, b, x: lax.cond(x[0, 0] > 9, lambda *_: 0.0, loss, w, b, x)


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "cond": in_cond,
    "recompute": functools.partial(jaxmp.recompute, mode="always"),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("name", OWN)
def test_a_derivative_of_its_own_within_others(name: str, wrapped: str) -> None:
    loss = WRAPPED[wrapped](OWN[name])
    w, b, x = arguments()
    ours = jaxmp.value_and_grad(loss, argnums=(0, 1), reduce_dtype="float32")
    value, grads = compiled(ours)(w, b, x)
    plain_value, plain_grads = compiled(jax.value_and_grad(loss, argnums=(0, 1)))(w, b, x)
    assert tree_bits(value) == tree_bits(plain_value)
    assert relative_error(grads, plain_grads) < 0.02
    assert all(representable(g, BF16) < 0.6 for g in grads)


@pytest.mark.parametrize("name", OWN)
def test_derivatives_of_such_gradients(name: str) -> None:
    """Under `vmap`, and by the data; forward only where the function allows it."""
    loss = OWN[name]
    w, b, x = arguments()

    def grads_of(transform: Any) -> Any:
        mapped = compiled(jax.vmap(transform(loss), (0, None, None)))
        return mapped(np.stack([w, np.negative(w)]), b, x)

    ours = grads_of(functools.partial(jaxmp.grad, reduce_dtype="float32"))
    # On CPUs jaxlib 0.12 may sum products in 16 bits, where JAX alone rounds gradients to them.
    assert relative_error(ours, grads_of(jax.grad)) < 0.03
    if name != "custom_jvp":
        return

    def slope(transform: Any) -> Any:
        along = compiled(lambda x, t: jax.jvp(lambda x: transform(loss)(w, b, x), (x,), (t,)))
        return along(x, np.ones_like(x))[1]

    second = slope(functools.partial(jaxmp.grad, reduce_dtype="float32"))
    assert relative_error(second, slope(jax.grad)) < 0.05


@pytest.mark.parametrize("name", OWN)
def test_second_derivatives_by_params(name: str) -> None:
    """What the forward pass keeps of a param has a derivative, too."""
    w, b, x = arguments()

    def norm_of(transform: Any) -> Any:
        return compiled(jax.grad(lambda w: 1e3 * jnp.sum(transform(OWN[name])(w, b, x) ** 2)))(w)

    ours, plain = norm_of(functools.partial(jaxmp.grad, reduce_dtype="float32")), norm_of(jax.grad)
    assert relative_error(ours, plain) < 0.05


def test_an_argument_that_is_not_differentiated_is_none_to_the_function() -> None:
    """A rule may refuse to differentiate some of its arguments."""

    @jax.custom_vjp
    def scaled(x: Any, w: Any, steps: Any) -> Any:
        return x @ w * steps

    def ahead(x: Any, w: Any, steps: Any) -> Any:
        if steps.perturbed:
            raise ValueError("steps cannot be differentiated")
        return scaled(x.value, w.value, steps.value), (x.value, w.value, steps.value)

    def back(kept: Any, ct: Any) -> Any:
        x, w, steps = kept
        return (ct * steps) @ w.T, x.T @ (ct * steps), None

    scaled.defvjp(ahead, back, symbolic_zeros=True)
    w, _, x = arguments()

    def loss(w: Any, x: Any) -> Any:
        return end(scaled(x.astype(BF16), w.astype(BF16), jnp.asarray(2, BF16)))

    grad = compiled(jaxmp.grad(loss, reduce_dtype="float32"))(w, x)
    assert representable(grad, BF16) < 0.6
    assert relative_error(grad, compiled(jax.grad(loss))(w, x)) < 0.02


def test_a_custom_jvp_may_refuse_an_argument() -> None:
    @jax.custom_jvp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    def rule(primals: Any, tangents: Any) -> Any:
        (x, w), (dx, dw) = primals, tangents
        if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
            raise ValueError("x cannot be differentiated")
        return product(x, w), x @ dw

    product.defjvp(rule, symbolic_zeros=True)
    w, _, x = arguments()

    def loss(w: Any, x: Any) -> Any:
        return end(product(x.astype(BF16), w.astype(BF16)))

    grad = compiled(jaxmp.grad(loss, reduce_dtype="float32"))(w, x)
    assert representable(grad, BF16) < 0.6
    assert relative_error(grad, compiled(jax.grad(loss))(w, x)) < 0.02
    low = jaxmp.autocast(lambda w, x: end(product(x, w)), "mixed_bfloat16")
    assert relative_error(compiled(jax.grad(low))(w, x), grad) < 0.02
    with pytest.raises(ValueError, match="x cannot be differentiated"):
        jaxmp.grad(loss, argnums=1, reduce_dtype="float32")(w, x)


def adapters(start: Any, w: Any, b: Any, x: Any) -> Any:
    """A weight that a loop makes of params, from numbers of the program."""
    made, _ = lax.scan(lambda total, part: (total + part, None), start, w.reshape(4, 4, 16))
    return end(x.astype(BF16) @ jnp.tile(made, (4, 1)))


def counted(w: Any, b: Any, x: Any) -> Any:
    """A carry of activations, beside a counter."""

    def turn(carry: Any, _: None) -> Any:
        h, i = carry
        return (jnp.tanh(h @ w) * i, i + 1), None

    return end(lax.scan(turn, (x.astype(BF16), jnp.asarray(1, BF16)), length=3)[0][0])


FOLLOWED = {
    "sum of weights": lambda w, b, x: adapters(jnp.zeros((4, 16), BF16), w, b, x),
    "counter": counted,
}


def looked_up(layer: Any) -> Any:
    """An embedding, and at once a layer with a derivative of its own: no float is data."""

    def loss(w: Any, b: Any, x: Any) -> Any:
        return end(layer(w[(jnp.abs(x[:, 0]) * 8).astype(int) % 16], w))

    return loss


FOLLOWED["rows meet a custom_jvp"] = looked_up(tanh_dense)
FOLLOWED["rows meet a custom_vjp"] = looked_up(lambda x, w: relu_dense(x, w, jnp.zeros(16, BF16)))


@pytest.mark.parametrize("name", FOLLOWED)
def test_values_without_float_data_are_followed(name: str) -> None:
    w, b, x = arguments()
    args = split_over(w), split_over(b), split_over(x, "data")

    def loss(w: Any, b: Any, x: Any) -> Any:
        return FOLLOWED[name](w.astype(BF16), b.astype(BF16), x)

    ours = jaxmp.value_and_grad(loss, reduce_dtype="float32")
    value, grads = compiled(ours)(*args)
    plain_value, plain = compiled(jax.value_and_grad(loss))(*args)
    assert tree_bits(value) == tree_bits(plain_value)
    assert representable(grads, BF16) < 0.6
    assert relative_error(grads, plain) < 0.1
    assert narrow_sums(jaxmp.sharding.collectives(ours, *args)) == 0
    assert narrow_sums(jaxmp.sharding.collectives(jax.grad(loss), *args)) > 0  # positive control


def test_rows_that_a_loop_carries_are_activations() -> None:
    """Embeddings, then layers: sums of activations over a tensor-parallel axis stay narrow."""
    w, _, x = arguments()
    tokens = (np.abs(np.asarray(x)[:, 0]) * 8).astype(np.int32) % 16

    def loss(w: Any, tokens: Any) -> Any:
        h, _ = lax.scan(
            lambda h, v: (h + jnp.tanh(h @ v), None), w[0].astype(BF16)[tokens], w[1:].astype(BF16)
        )
        return end(h)

    stack = np.stack([w, w.T, w])
    program = jax.make_jaxpr(jaxmp.grad(loss, reduce_dtype="float32"))(stack, tokens)
    loops = [each for each in equations(program) if each.primitive.name == "scan"]
    made = {str(var.aval) for loop in loops for var in loop.outvars if var.aval.shape == (512, 16)}
    assert made == {"bfloat16[512,16]"}, made  # of the carry, and of its gradient


def test_a_rule_without_sums_keeps_its_gradients() -> None:
    """What cannot be followed back is computed as it is written: a gradient of signs."""

    @jax.custom_vjp
    def signs(x: Any, w: Any) -> Any:
        return x * w

    signs.defvjp(
        lambda x, w: (x * w, (x, w)),
        lambda kept, ct: (ct * kept[1], jnp.sign(jnp.max(ct * kept[0], axis=0))),
    )
    _, b, x = arguments()

    def loss(b: Any, x: Any) -> Any:
        return end(signs(x.astype(BF16), b.astype(BF16)))

    grad = compiled(jaxmp.grad(loss, reduce_dtype="float32"))(b, x)
    np.testing.assert_array_equal(grad, compiled(jax.grad(loss))(b, x))


# A param that was rounded and widened again has two arrays of one type: what the program computes,
# and what its gradient is for.
def _of_two_arrays(inside: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda p, x: jnp.sum(inside(x, p.astype(jnp.bfloat16).astype(jnp.float32)))


ENTRIES: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda x, w: jax.jit(lambda x, w: x @ w)(x, w),
    "a jit with shardings": lambda x, w: jax.jit(
        lambda x, w: x @ w, out_shardings=jax.NamedSharding(DEVICES, P("data"))
    )(x, w),
    "checkpoint": lambda x, w: jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w),
    "a checkpoint that is differentiated": lambda x, w: jax.grad(
        lambda h: jnp.sum(jax.checkpoint(lambda h: jnp.sin(h @ w))(h))
    )(x),
    "scan": lambda x, w: lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0],
    "cond": lambda x, w: lax.cond(jnp.sum(x) > 0, lambda w: x @ w, lambda w: x, w),
    "a cond that returns it": lambda x, w: (
        x @ lax.cond(jnp.sum(x) > 0, lambda w: w, lambda w: w.T, w)
    ),
    "shard_map": lambda x, w: jax.shard_map(
        lambda x, w: x @ w, mesh=DEVICES, in_specs=(P("data"), P()), out_specs=P("data")
    )(x, w),
}
DEVICES = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("name", ENTRIES)
def test_a_param_of_two_arrays_of_one_type(name: str) -> None:
    loss = _of_two_arrays(ENTRIES[name])
    p, x = jax.device_put((np.eye(4) * 1.3, np.ones((2, 4))))
    value, gradient = jax.jit(jaxmp.value_and_grad(loss, reduce_dtype="float32"))(p, x)
    want, exact = jax.jit(jax.value_and_grad(loss))(p, x)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    # JAX rounds the gradient on its way through bfloat16; here it goes to the float32 array.
    np.testing.assert_allclose(gradient, exact, rtol=2**-7, atol=1e-6)
