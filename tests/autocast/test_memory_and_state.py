"""What autocast keeps for the backward pass, what it casts, and the state of nnx modules."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, LOW, UNIT, W, X, both, error, rows, weights
from tests.support.dots import count_dots, equations
from tests.support.recompute_checks import in_bytes
from tests.support.ways import both_ways

pytestmark = pytest.mark.usefixtures("standard_promotion")


def block(p: dict[str, Any], x: Any) -> Any:
    """A transformer's: norm, a product with a bias, gelu, a product, a residual."""
    for _ in range(2):
        mean = x.mean(-1, keepdims=True)
        var = jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)
        h = (x - mean) * lax.rsqrt(var + 1e-6) * p["scale"] + p["bias"]
        h = jax.nn.gelu(h @ p["up"] + p["b"])
        x = x + (h @ p["down"] + p["bias"])
    return x


def params() -> dict[str, Any]:
    zeros = functools.partial(np.zeros, dtype=np.float32)
    return {
        "scale": zeros(16) + 1, "bias": zeros(16), "b": zeros(64), "embed": W,
        "up": weights(16, 64, seed=5), "down": weights(64, 16, seed=6),
    }  # fmt: skip


@both
def test_activations_are_kept_in_16_bits(policy: str) -> None:
    def f(p: Any, x: Any) -> Any:
        return jnp.mean(block(p, x @ p["embed"]) ** 2)

    x = rows(32, 16)
    plain, low = in_bytes(f, params(), x), in_bytes(jaxmp.autocast(f, policy), params(), x)
    assert set(plain) == {"float32"}
    assert low[LOW[policy]] >= 0.5 * sum(low.values())
    # What a norm keeps is float32; the wide activations of the products are not.
    assert sum(low.values()) < 0.75 * sum(plain.values())


def test_the_residual_stream_stays_in_16_bits() -> None:
    def f(p: Any, x: Any) -> Any:
        return block(p, x @ p["embed"])

    fast = jaxmp.autocast(f, BF16, output="computed")
    assert jax.eval_shape(fast, params(), rows(32, 16)).dtype == jnp.bfloat16
    # Whatever the batch: a bias is one by where it comes from, not by its shape.
    assert jax.eval_shape(fast, params(), rows(1, 16)).dtype == jnp.bfloat16
    shapes = jax.eval_shape(fast, params(), np.zeros((1, 1, 16), np.float32))
    assert shapes.dtype == jnp.bfloat16


@pytest.mark.parametrize("bias", [(16,), (1, 16), (1, 1, 16), ()])
def test_a_bias_does_not_widen(bias: tuple[int, ...]) -> None:
    def f(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(x @ w + b)

    fast = jaxmp.autocast(f, BF16, output="computed")
    assert fast(rows(2, 4, 16), W, np.ones(bias, np.float32)).dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [1, 3])
def test_embeddings_positions_and_dropout_do_not_widen(size: int) -> None:
    def f(p: Any, tokens: Any, key: Any) -> Any:
        h = p["table"][tokens] + p["positions"][: tokens.shape[1]]
        keep = jax.random.bernoulli(key, 0.9, h.shape)
        h = jnp.where(keep, h / 0.9, 0.0)
        return h + jnp.tanh(h @ p["w"])

    p = {"table": rows(8, 16), "positions": rows(6, 16), "w": W}
    tokens = np.zeros((size, 6), np.int32)
    fast = jaxmp.autocast(f, BF16, output="computed")
    assert jax.eval_shape(fast, p, tokens, jax.random.key(0)).dtype == jnp.bfloat16


def test_converts_are_few() -> None:
    """A cast for each weight, bias and scale, and around each norm: no chains of them."""

    def f(p: Any, x: Any) -> Any:
        return block(p, x @ p["embed"])

    jaxpr = jax.make_jaxpr(jaxmp.autocast(f, BF16))(params(), rows(32, 16))
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    makers = {id(e.outvars[0]): e for e in equations(jaxpr)}
    for cast in casts:
        made_by = makers.get(id(cast.invars[0]))
        assert made_by is None or made_by.primitive.name != "convert_element_type"
    assert len(casts) <= 36


def test_arguments_that_are_changed_in_place() -> None:
    def f(tree: Any, x: Any) -> Any:
        tree["seen"] = x.sum()
        return x * 2

    for run in (jaxmp.autocast(f, BF16), jax.jit(jaxmp.autocast(f, BF16))):
        with pytest.raises(TypeError, match="in place"):
            run({"seen": np.float32(0)}, X)


def test_a_linen_train_step() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
            x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
            return nn.Dense(3)(x)

    net = Net()
    variables = jax.jit(net.init, static_argnums=2)(jax.random.key(0), X, False)

    def loss(p: Any, stats: Any, x: Any, key: Any) -> Any:
        out, new = net.apply(
            {"params": p, "batch_stats": stats}, x, True,
            mutable=["batch_stats"], rngs={"dropout": key},
        )  # fmt: skip
        return jnp.mean(out**2), new

    args = (variables["params"], variables["batch_stats"], rows(64, 16), jax.random.key(1))
    gradient = functools.partial(jax.value_and_grad, has_aux=True)
    got, wanted = both_ways(loss, *args, of=gradient)
    ((value, new), grads), ((want, plain), want_grads) = got, wanted
    assert error(value, want) < 4 * UNIT[BF16]
    assert error(new, plain) < 4 * UNIT[BF16]
    for layer in ("Dense_1", "BatchNorm_0"):
        assert error(grads[layer], want_grads[layer]) < 24 * UNIT[BF16]
    assert set(count_dots(gradient(jaxmp.autocast(loss, BF16)), *args)) == {"bfloat16"}
