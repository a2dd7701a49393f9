"""Losses, params and batches for jobs of several processes, and how they are sharded."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmp

BATCH = 32
WIDTH = 16


def shardings(mesh: Mesh, tree: Any) -> Any:
    """FSDP: matrices, with their masters and moments, are split by rows; the rest is replicated."""
    return jax.tree.map(lambda x: NamedSharding(mesh, P("data") if len(x.shape) > 1 else P()), tree)


# Every number of this model is a small multiple of a power of two, and stays so: x and y are
# whole, Lion moves a param by its learning rate or not at all, the gradient of the hinge is a
# constant, and margins are rounded. float32 holds all sums of such numbers exactly, so that their
# order does not matter.


def hinge_params() -> dict[str, np.ndarray]:
    """Params of two layers, multiples of 1/16."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return rng.integers(-15, 16, shape).astype(np.float32) / 16

    return {"w1": weight(WIDTH, 32), "b1": weight(32), "w2": weight(32, 8)}


def hinge_batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Small whole numbers, and labels of 1 and -1."""
    x = rng.integers(-2, 3, (BATCH, WIDTH)).astype(np.float32)
    return {"x": x, "y": 2 * rng.integers(0, 2, (BATCH, 8)).astype(np.float32) - 1}


def hinge(params: Any, batch: Any) -> Any:
    """The mean hinge loss of a network with one hidden layer."""
    hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"][None])
    margin = (batch["y"] * (hidden @ params["w2"])).astype(jnp.float32)
    rounding = jax.lax.stop_gradient(jnp.round(64 * margin) / 64 - margin)
    return jnp.mean(jax.nn.relu(1 - (margin + rounding)))


def _lion() -> optax.GradientTransformation:
    return optax.lion(2.0**-9, weight_decay=0.0)


def _compact_lion() -> optax.GradientTransformation:
    return jaxmp.storage.compact_state(_lion(), "int8", min_size=1)


# Grows within the few steps of a test.
_QUICK = jaxmp.DynamicLossScale(init_scale=2.0**10, growth_interval=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how."""

    policy: str
    optimizer: Callable[[], optax.GradientTransformation] = _lion
    master: Any = "float32"
    loss_scale: Any = _QUICK


RECIPES = {
    "mixed_bfloat16": Recipe(policy="mixed_bfloat16", loss_scale="auto"),
    "mixed_float16": Recipe(policy="mixed_float16"),
    # bfloat16 params with float32 masters, which are finer than the params.
    "masters": Recipe(policy="bfloat16"),
    "remainder": Recipe(policy="bfloat16", master="remainder"),
    # Rounded at random: params, and momentum in codes.
    "stochastic": Recipe(policy="bfloat16", master="stochastic", optimizer=_compact_lion),
}
