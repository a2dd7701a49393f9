"""The carry of what linen repeats keeps its dtype, however other transforms lie between."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jaxmp

pytestmark = pytest.mark.usefixtures("standard_promotion")

IDS = jnp.zeros((2, 4), jnp.int32)
KEY = jax.random.key(0)
# The embedding hands a float32 carry to blocks that compute in bfloat16.
RULES = jaxmp.PolicyRules([("embed", "float32")], default="mixed_bfloat16")


class Gain(nn.Module):
    """What it returns has the dtype that it computes in, not that of its carry."""

    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        return nn.tanh(nn.Dense(8)(x)), None


class Residual(nn.Module):
    """What it returns is promoted to the dtype of its carry."""

    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        return x + nn.tanh(nn.Dense(8)(x)), None


class CarryOnly(nn.Module):
    """The form that nn.remat_scan wants."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.tanh(nn.Dense(8)(x))


def scan(block: Any) -> Any:
    axes: Any = {"params": 0}
    return nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)


def vmap(block: Any) -> Any:
    axes: Any = {"params": None}
    return nn.vmap(block, variable_axes=axes, split_rngs={"params": False}, in_axes=(0, None))


ARRANGEMENTS: dict[str, Callable[[Any], Any]] = {
    "scan": scan,
    "scan of remat": lambda block: scan(nn.remat(block)),
    "scan of remat with a policy": lambda block: scan(
        nn.remat(block, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
    ),
    "remat of scan": lambda block: nn.remat(scan(block)),
    "scan of remat of vmap": lambda block: scan(nn.remat(vmap(block))),
    "scan of scan of remat": lambda block: scan(scan(nn.remat(block))),
    "scan of jit of remat": lambda block: scan(nn.jit(nn.remat(block))),
}


class Net(nn.Module):
    """An embedding, and blocks that are repeated."""

    blocks: Any
    carry_only: bool = False

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(16, 8, name="embed")(ids)
        blocks = self.blocks(name="blocks")
        return blocks(x) if self.carry_only else blocks(x, None)[0]


def check(net: nn.Module) -> None:
    plain = jax.eval_shape(net.init, KEY, IDS)
    model = jaxmp.linen.apply_policy(net, RULES)
    variables = jax.jit(model.init)(KEY, IDS)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, plain)
    assert jax.eval_shape(model.apply, variables, IDS).dtype == jnp.float32
    products = jaxmp.audit(lambda v: model.apply(v, IDS), variables).products
    assert {row.operands for row in products} == {("bfloat16", "bfloat16")}
    grads = jax.jit(jax.grad(lambda v: jnp.sum(model.apply(v, IDS))))(variables)
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.parametrize("block", [Gain, Residual])
@pytest.mark.parametrize("how", ARRANGEMENTS)
@pytest.mark.slow
def test_a_block_that_is_scanned(how: str, block: Any) -> None:
    check(Net(ARRANGEMENTS[how](block)))


def test_a_decorated_block_that_is_scanned() -> None:
    decorated = jaxmp.linen.with_policy("mixed_bfloat16")(Gain)
    check(Net(scan(nn.remat(decorated))))


def test_remat_scan() -> None:
    check(Net(nn.remat_scan(CarryOnly, lengths=(2, 2)), carry_only=True))
