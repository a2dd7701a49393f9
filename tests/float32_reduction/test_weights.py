"""Weights that are computed from params and from what is no param: their gradients are sums too."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._program.program import equations_in
from jaxmp.sharding import FSDP, fully_sharded
from tests.support.bits import tree_bits
from tests.support.reduction_checks import (
    MESH,
    compiled,
    narrow_sums,
    ones,
    relative_error,
    representable,
    split_over,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F32 = jnp.bfloat16, jnp.float32
IDENTITY = np.eye(16, dtype=np.float32)
TRIANGLE = np.tri(16, dtype=bool)
BELOW = np.tril_indices(16)
ROWS = np.random.default_rng(1).permutation(16)
FROZEN_ROWS = np.full((4, 16), 0.5, np.float32)


class Frozen(NamedTuple):
    """What a weight is made of beside params, and what is given to the loss beside the batch."""

    weight: Any
    mask: Any
    temperature: Any
    rows: Any
    key: Any


# Each is a weight of params, frozen numbers, and of what casts a param where it is used.
WEIGHTS: dict[str, Callable[[Any, Frozen, Any], Any]] = {}


def weight(make: Any) -> Any:
    WEIGHTS[make.__name__.replace("_", " ")] = make
    return make


def normed(w: Any) -> Any:
    return w / jnp.sqrt(jnp.sum(w * w, axis=0))


@weight
def dora(p: Any, f: Frozen, c: Any) -> Any:
    return c(p["g"]) * normed(f.weight.astype(c(p["w"]).dtype) + 2 * c(p["a"]) @ c(p["v"]))


@weight
def pruned_and_normed(p: Any, f: Frozen, c: Any) -> Any:
    return normed(c(p["w"]) * f.mask)


@weight
def dropconnect_and_normed(p: Any, f: Frozen, c: Any) -> Any:
    return normed(jnp.where(jax.random.bernoulli(f.key, 0.5, (16, 16)), c(p["w"]), 0))


@weight
def masked_softmax(p: Any, f: Frozen, c: Any) -> Any:
    return jax.nn.softmax(jnp.where(TRIANGLE, c(p["w"]), -1e9))


@weight
def adjusted_twice(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    return jnp.tanh(w * f.mask + jax.random.normal(f.key, w.shape, w.dtype))


@weight
def inverted(p: Any, f: Frozen, c: Any) -> Any:
    return jnp.linalg.inv(p["w"] / 8 + IDENTITY)


@weight
def large_ones(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    return jnp.tanh(jnp.where(jnp.abs(w) > 0.1, w, 0))


@weight
def sorted_rows(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    return jnp.tanh(w[jnp.argsort(w[:, 0])])


@weight
def top_rows(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    least = lax.top_k(jnp.abs(lax.stop_gradient(w)), 4)[0][:, -1:]
    return jnp.tanh(jnp.where(jnp.abs(w) >= least, w, 0))


@weight
def spread_logsumexp(p: Any, f: Frozen, c: Any) -> Any:
    return jnp.tile(jax.nn.logsumexp(c(p["w"]), 0, keepdims=True), (16, 1))


def spectral(w: Any, f: Frozen) -> Any:
    """Divided by an estimate of its norm, of two vectors that are state."""
    u, v = f.weight[0].astype(w.dtype), f.weight[1].astype(w.dtype)
    return w / (jnp.abs(u @ w @ v) + 1)


@weight
def pruned_and_spectral(p: Any, f: Frozen, c: Any) -> Any:
    return spectral(c(p["w"]) * f.mask, f)


@weight
def lora_and_spectral(p: Any, f: Frozen, c: Any) -> Any:
    low = c(p["a"]) @ c(p["v"])
    return spectral(f.weight.astype(low.dtype) + low, f)


@weight
def pruned_with_learned_noise(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"]) * f.mask
    return jnp.tanh(w + c(p["g"]) * f.weight.astype(w.dtype))


@weight
def pruned_and_generated(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"]) * f.mask
    return jnp.tanh(w + (f.weight[:, :4].astype(w.dtype) @ c(p["v"])))


@weight
def triangular(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    return jnp.tanh(jnp.zeros_like(w).at[BELOW].set(w[BELOW]))


@weight
def orthogonal(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    lower = jnp.zeros_like(w).at[f.rows, f.rows[::-1]].set(w[0])
    skew = lower - lower.T
    return jnp.eye(16, dtype=w.dtype) + skew + skew @ skew / 2


@weight
def frozen_rows(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    return jnp.concatenate([w[:12], jnp.asarray(FROZEN_ROWS, w.dtype)])


@weight
def trained_rows(p: Any, f: Frozen, c: Any) -> Any:
    v = c(p["v"])
    return jnp.tanh(f.weight.astype(v.dtype).at[f.rows[:4]].set(v))


@weight
def permuted(p: Any, f: Frozen, c: Any) -> Any:
    return jnp.tanh(c(p["w"])[ROWS])


@weight
def clipped(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    most = f.temperature.astype(w.dtype)
    return jnp.tanh(jnp.maximum(jnp.clip(w, -most, most), -most / 2))


@weight
def of_a_given_power(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    return normed((jnp.abs(w) + 1) ** f.temperature.astype(w.dtype))


@weight
def either_frozen(p: Any, f: Frozen, c: Any) -> Any:
    w = c(p["w"])
    return jnp.tanh(lax.cond(f.mask[0, 0], lambda: w, lambda: f.weight.astype(w.dtype)))


@weight
def either_transposed(p: Any, f: Frozen, c: Any) -> Any:
    return c(lax.cond(f.mask[0, 0], lambda: p["w"], lambda: p["w"].T))


@weight
def either_product(p: Any, f: Frozen, c: Any) -> Any:
    return c(lax.cond(f.mask[0, 0], lambda: p["w"], lambda: p["a"] @ p["v"]))


@weight
def either_float8(p: Any, f: Frozen, c: Any) -> Any:
    narrow = jnp.float8_e4m3fn
    made = lax.cond(f.mask[0, 0], lambda: p["w"].astype(narrow), lambda: jnp.ones((16, 16), narrow))
    return made.astype(BF16)


@weight
def through_float8(p: Any, f: Frozen, c: Any) -> Any:
    return p["w"].astype(jnp.float8_e4m3fn).astype(BF16)


# What is written into an array of 16 bits: its gradient is rounded, when it has been summed.
WRITTEN = {"triangular", "orthogonal", "trained rows"}


def at_use(x: Any) -> Any:
    return x.astype(BF16)


def as_it_is(x: Any) -> Any:
    return x


# Weights that are computed in float32, and cast then, are like those that are computed in 16 bits.
CASTS = [
    pytest.param(cast, marks=[] if cast is at_use else [pytest.mark.slow, pytest.mark.exhaustive])
    for cast in (at_use, as_it_is)
]


def loss_of(name: str, cast: Any, dtype: Any = BF16) -> Callable[..., Any]:
    def loss(p: Any, x: Any, frozen: Frozen) -> Any:
        w = WEIGHTS[name](p, frozen, cast).astype(dtype)
        return jnp.mean(jnp.sin((x.astype(dtype) @ w).astype(F32)) ** 2)

    return loss


def arguments() -> tuple[Any, Any, Frozen]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jax.device_put(rng.normal(size=shape))

    params = {"w": normal(16, 16), "a": normal(16, 4), "v": normal(4, 16), "g": 1 + normal(16) / 8}
    numbers = rng.normal(size=(16, 16)), rng.normal(size=(16, 16)) > 0, np.float32(1.7), ROWS
    frozen = Frozen(*jax.device_put(numbers), jax.random.key(0))
    return params, normal(64, 16), frozen


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_are_sums_in_float32(name: str, cast: Any) -> None:
    loss_fn = loss_of(name, cast)
    params, x, frozen = arguments()
    ours = jaxmp.value_and_grad(loss_fn, reduce_dtype="float32")
    plain = jax.value_and_grad(loss_fn)
    loss, grads = compiled(ours)(params, x, frozen)
    plain_loss, plain_grads = compiled(plain)(params, x, frozen)
    np.testing.assert_array_equal(tree_bits(loss), tree_bits(plain_loss))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(F32)}
    exact = compiled(jax.grad(loss_of(name, as_it_is, F32)))(params, x, frozen)
    if "float8" not in name:  # to which plain JAX rounds the gradients too
        # Both are near the truth where the weight alone is narrow: 1e-4 is a fortieth of that.
        assert relative_error(grads, exact) <= 1.1 * relative_error(plain_grads, exact) + 1e-4
    used = [g for g in jax.tree.leaves(grads) if np.any(g)]
    assert used
    if cast is at_use and name not in WRITTEN:
        assert all(representable(g, BF16) < 0.6 for g in used)

    args = split_over(params), split_over(x, "data"), split_over(frozen)
    assert narrow_sums(jaxmp.sharding.collectives(ours, *args)) == 0
    assert narrow_sums(jaxmp.sharding.collectives(plain, *args)) > 0  # positive control


SPLIT = ["dora", "masked softmax", "large ones", "inverted", "frozen rows"]
SPLIT += ["either transposed", "either product", "either frozen", "either float8"]


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_are_sums_in_float32_of_what_is_split(name: str) -> None:
    params, x, frozen = arguments()
    shardings = fully_sharded(params, MESH, min_size=1)
    fsdp = FSDP(shardings=shardings)
    ours = jaxmp.value_and_grad(loss_of(name, at_use), reduce_dtype="float32", fsdp=fsdp)
    args = jax.device_put(params, shardings), split_over(x, "data"), split_over(frozen)
    report = jaxmp.sharding.collectives(ours, *args)
    # The value of a product, a norm or a softmax of split weights is a sum of its own dtype.
    weights = [row for row in report if row.dtype == "bfloat16" and row.reducer == "add"]
    assert all(row.direction == "forward" for row in weights), report
    whole = jaxmp.value_and_grad(loss_of(name, at_use), reduce_dtype="float32")
    one, another = compiled(whole), compiled(ours)
    for mask in (frozen.mask, ~np.asarray(frozen.mask)):  # its first number chooses a branch
        each = frozen._replace(mask=mask)
        _, wanted = one(params, x, each)
        _, grads = another(*args[:2], split_over(each))
        for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
            assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["through float8", "either float8"])
def test_gradients_of_float8_are_those_of_what_was_rounded(name: str) -> None:
    """Plain JAX rounds them to float8 as well."""
    params, x, frozen = arguments()
    rounded = np.asarray(params["w"]).astype(jnp.float8_e4m3fn).astype(F32)
    exact = compiled(jax.grad(lambda w: jnp.mean(jnp.sin(x @ w) ** 2)))(rounded)
    errors = [
        relative_error(compiled(grad)(params, x, frozen)["w"], exact)
        for grad in (
            jaxmp.grad(loss_of(name, at_use), reduce_dtype="float32"),
            jax.grad(loss_of(name, at_use)),
        )
    ]
    assert errors[0] < 0.02 < errors[1]


def wide_activations(grad: Any, *args: Any) -> int:
    """How many arrays of 32 x 16 are computed in float32, in programs within programs too."""
    equations = equations_in([jax.make_jaxpr(grad)(*args)])
    results = (var.aval for equation in equations for var in equation.outvars)
    return sum((aval.shape, aval.dtype) == ((32, 16), F32) for aval in results)


def block(h: Any, p: Any) -> Any:
    return h + jnp.tanh(normed(h) @ p["w"].astype(BF16))


def embedded(p: Any, x: Any) -> Any:
    """Of the shape of positions, or of embeddings of nodes."""
    return x.astype(BF16) + p["positions"].astype(BF16) + p["bias"].astype(BF16)


def stream(layers: int, p: Any, x: Any) -> Any:
    h = embedded(p, x)
    for _ in range(layers):
        h = block(h, p)
    return jnp.mean(h.astype(F32) ** 2)


def stages(layers: int, p: Any, x: Any) -> Any:
    """Each adds what went into the first to what a loop carries."""
    h = first = embedded(p, x)
    for _ in range(layers):
        h, _ = lax.scan(lambda h, _: (block(normed(h + first), p), None), h, length=3)
    return jnp.mean(h.astype(F32) ** 2)


def dropped_layers(layers: int, p: Any, x: Any) -> Any:
    h = p["positions"].astype(BF16)[jnp.arange(32) + x[0, 0].astype(int)]
    for i in range(layers):
        h = lax.cond(x[0, i] > 0, block, lambda h, p: h, h, p)
    return jnp.mean(h.astype(F32) ** 2)


def integers(layers: int, p: Any, x: Any) -> Any:
    """Images of bytes, or noise from a key: no floats come in."""
    noise = jax.random.normal(x["key"], (32, 16))
    return stream(layers, {**p, "positions": noise}, x["bytes"] / 255)


def chosen(layers: int, p: Any, x: Any) -> Any:
    """Data tells which numbers of the program, beside params."""
    one = lambda bias: (jnp.ones((32, 16)), bias)  # noqa: E731
    other = lambda bias: (jnp.zeros((32, 16)), 2 * bias)  # noqa: E731
    numbers, bias = lax.cond(x[0, 0] > 0, one, other, p["bias"])
    return stream(layers, {**p, "bias": bias}, numbers)


def called(layers: int, p: Any, x: Any) -> Any:
    """A function of Python's gives the batch, and is given nothing."""
    like = jax.ShapeDtypeStruct((32, 16), F32)
    return stream(layers, p, jax.jit(lambda: jax.pure_callback(lambda: x, like))())


def stored(layers: int, p: Any, x: Any) -> Any:
    """What is read from a mutable array was written there last."""
    ref = jax.new_ref(jnp.zeros((32, 16)))
    ref[...] = x * p["bias"]
    return stream(layers, p, ref[...])


BATCHES = {
    **dict.fromkeys((stream, stages, dropped_layers, chosen, called, stored), ones(32, 16)),
    integers: {"bytes": ones(32, 16).astype(jnp.uint8), "key": jax.random.key(0)},
}


@pytest.mark.parametrize("given", ["argument", "closed over", "closed over under jit"])
@pytest.mark.parametrize("model", BATCHES)
def test_a_stream_of_activations_is_no_param(model: Any, given: str) -> None:
    """Nor is what follows on what was added to positions, and has their shape."""
    params = {"positions": ones(32, 16), "bias": ones(16), "w": jax.device_put(np.eye(16))}
    batch = BATCHES[model]

    def per_layer(transform: Any, **options: Any) -> int:
        def of(layers: int) -> int:
            loss = functools.partial(model, layers)
            if given == "argument":
                return wide_activations(transform(loss, **options), params, batch)

            def grad(p: Any, x: Any) -> Any:
                return transform(lambda p: loss(p, x), **options)(p)

            if given == "closed over":
                return wide_activations(lambda p: grad(p, batch), params)
            return wide_activations(grad, params, batch)

        return (of(6) - of(2)) // 4

    plain, ours = per_layer(jax.grad), per_layer(jaxmp.grad, reduce_dtype="float32")
    # Where streams meet, the gradient of the sum and what the loop returns: not all of the norm.
    assert ours <= plain + 5
    if given == "argument" and model in (stream, stages, dropped_layers):
        # Positive control: the batch is a param too.
        assert per_layer(jaxmp.grad, reduce_dtype="float32", argnums=(0, 1)) > plain + 20


def test_numpy_arrays_are_a_part_of_the_program() -> None:
    """A batch that is one is taken for numbers, and what is made of it for params."""
    params = {"positions": ones(32, 16), "bias": ones(16), "w": jax.device_put(np.eye(16))}

    def widened(x: Any) -> int:
        return wide_activations(
            jaxmp.grad(lambda p: stream(4, p, x), reduce_dtype="float32"), params
        )

    assert widened(np.ones((32, 16))) > widened(ones(32, 16)) + 4 * 20


def in_a_loop(p: Any, x: Any, frozen: Frozen) -> Any:
    """A key and a counter are carried, of which masks and noise are made."""

    def body(i: Any, carry: Any) -> Any:
        h, key = carry
        key, *keys = jax.random.split(key, 3)
        w = p["w"].astype(BF16) + frozen.weight.astype(BF16)
        w = w * jax.random.bernoulli(keys[0], 0.9, w.shape)
        w = w + jax.random.normal(keys[1], w.shape, w.dtype) / 16
        w = jnp.where(jnp.arange(16)[:, None] == i, 0, w)
        return jnp.tanh(h @ normed(w)), key

    h, _ = lax.fori_loop(0, 3, body, (x.astype(BF16), frozen.key))
    return jnp.mean(h.astype(F32) ** 2)


def test_weights_of_what_a_loop_carries() -> None:
    params, x, frozen = arguments()
    args = split_over(params), split_over(x, "data"), split_over(frozen)
    ours = jaxmp.grad(in_a_loop, reduce_dtype="float32")
    assert narrow_sums(jaxmp.sharding.collectives(ours, *args)) == 0
    assert (
        narrow_sums(jaxmp.sharding.collectives(jax.grad(in_a_loop), *args)) > 0
    )  # positive control


def test_mutable_arrays_of_params() -> None:
    """They have the shape and dtype of a param, and are none."""

    def loss(p: Any, x: Any) -> Any:
        low, wide = jax.new_ref(p["w"].astype(BF16)), jax.new_ref(p["w"])
        low[0] = low[0] * 2
        return jnp.sum((x.astype(BF16) @ low[...]).astype(F32) ** 2) + jnp.sum(x @ wide[...])

    params, x, _ = arguments()
    wanted = compiled(jax.value_and_grad(loss))(params, x)
    found = compiled(jaxmp.value_and_grad(loss, reduce_dtype="float32"))(params, x)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-3)
    assert relative_error(found[1], wanted[1]) < 0.01
