"""Equinox models, and one of them in plain JAX."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

X = jnp.asarray(np.random.default_rng(1).standard_normal((16, 8), np.float32))


class Net(eqx.Module):
    """Params, a function among the leaves, and a flag."""

    inner: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    activation: Any
    scaled: bool

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0))
        self.inner = eqx.nn.Linear(8, 16, key=keys[0])
        self.norm = eqx.nn.LayerNorm(16)
        self.head = eqx.nn.Linear(16, 4, key=keys[1])
        self.activation = jax.nn.gelu
        self.scaled = True

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.activation(self.norm(self.inner(x))))


def plain_params(model: Any) -> dict[str, jax.Array]:
    """The params of a `Net`, or their gradients."""
    return {
        "inner_weight": model.inner.weight,
        "inner_bias": model.inner.bias,
        "norm_weight": model.norm.weight,
        "norm_bias": model.norm.bias,
        "head_weight": model.head.weight,
        "head_bias": model.head.bias,
    }


def plain_net(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """`Net` without Equinox."""
    x = params["inner_weight"] @ x + params["inner_bias"]
    mean, variance = jnp.mean(x, keepdims=True), jnp.var(x, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(jnp.maximum(variance, 0.0) + 1e-5)
    x = params["norm_weight"] * x + params["norm_bias"]
    return params["head_weight"] @ jax.nn.gelu(x) + params["head_bias"]


class NormNet(eqx.Module):
    """Batch statistics, in an `equinox.nn.State`."""

    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0))
        self.inner = eqx.nn.Linear(8, 16, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
        self.head = eqx.nn.Linear(16, 4, key=keys[1])

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        x, state = self.norm(self.inner(x), state)
        return self.head(jax.nn.relu(x)), state


# What makes each of them in one program.
net, norm_net = eqx.filter_jit(lambda: Net()), eqx.filter_jit(eqx.nn.make_with_state(NormNet))


def mean_square(model: Any, x: jax.Array) -> jax.Array:
    """A loss of a `Net`."""
    return jnp.mean(jax.vmap(model)(x).astype(jnp.float32) ** 2)


def with_state(model: Any, state: eqx.nn.State, x: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
    """A loss of a `NormNet`, and its new state."""
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    y, state = batched(x, state)
    return jnp.mean(y.astype(jnp.float32) ** 2), state
