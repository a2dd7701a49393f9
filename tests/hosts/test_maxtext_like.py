"""A trainer in MaxText's form: a config of dtypes, scanned layers, logical axes, Flax's TrainState.

MaxText itself, which is large, is in test_maxtext.py. The step is the one of such trainers, without
a line of jaxmp in it; the config names the policy, and the optimizer and the model are given to it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxmp
from tests.support.bits import tree_bits
from tests.support.dots import count_dots

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

CONFIG = {"dtype": "bfloat16", "weight_dtype": "float32", "grad_dtype": "float32"}
TOKENS = jnp.tile(jnp.arange(13) % 5, (4, 1))


class Layer(nn.Module):
    """A layer of the decoder, with names for the axes of its params."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        up = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        down = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        h = nn.gelu(nn.Dense(32, kernel_init=up, name="wi")(nn.RMSNorm(name="norm")(x)))
        return x + nn.Dense(x.shape[-1], kernel_init=down, name="wo")(h), None


class Decoder(nn.Module):
    """Scanned and rematerialised layers between an embedding and a head."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(16, 16, name="token_embedder")(tokens)
        scanned = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = scanned(name="layers")(x, None)
        return nn.Dense(16, name="logits_dense")(nn.RMSNorm(name="decoder_norm")(x))


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """The host's step."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def made(config: dict[str, str]) -> tuple[TrainState, Any]:
    policy = jaxmp.get_policy(
        f"params={config['weight_dtype']},compute={config['dtype']},output=float32,"
        f"reduce={config['grad_dtype']}"
    )
    rules = jaxmp.PolicyRules({"*norm": "float32", "logits_dense": "float32"}, default=policy)
    model = jaxmp.linen.apply_policy(Decoder(), rules)
    params = nn.meta.unbox(model.init(jax.random.key(0), TOKENS[:, :-1])["params"])
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), rules)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx), rules


def test_the_config_decides_the_dtypes() -> None:
    state, _ = made(CONFIG)
    dots = count_dots(state.apply_fn, {"params": state.params}, TOKENS[:, :-1])
    assert dots == {"bfloat16": 2, "float32": 1}  # two in the scanned layer, and the head
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_the_hosts_step_trains(weights: str) -> None:
    state, _ = made(CONFIG | {"weight_dtype": weights})
    # Flax counts from a number of Python, which JAX traces apart from the arrays after it.
    state, traces, losses = state.replace(step=jnp.int32(0)), [], []

    @jax.jit
    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        traces.append(None)
        return train_step(state, tokens)

    for _ in range(25):
        state, loss = step(state, TOKENS)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert len(traces) == 1


def test_a_bad_batch_changes_nothing() -> None:
    state, _ = made(CONFIG)
    state, _ = train_step(state, TOKENS)
    params = state.params
    poisoned = state.replace(
        apply_fn=lambda variables, tokens: state.apply_fn(variables, tokens) * np.nan
    )
    after, _ = train_step(poisoned, TOKENS)
    assert tree_bits(after.params) == tree_bits(params)
    assert int(after.opt_state.skipped) == 1
