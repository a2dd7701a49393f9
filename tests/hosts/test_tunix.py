"""Tunix's trainer, as it is, with jaxmp's optimizer and models under jaxmp's policies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from tests.support.bits import tree_bits

pytestmark = [
    # What hosts warn of is theirs.
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("standard_promotion"),
]


@pytest.fixture
def trainer() -> Any:
    """The module of Tunix's trainer for supervised training."""
    reason = 'Tunix is not installed: pip install "jaxmp[hosts]"'
    return pytest.importorskip("tunix.sft.peft_trainer", reason=reason, exc_type=ImportError)


class Model(nnx.Module):
    """A small language model without dtypes."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.norm(self.embed(tokens)))


def loss_fn(model: Model, input_tokens: jax.Array, input_mask: jax.Array) -> jax.Array:
    logits = model(input_tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, input_tokens[:, 1:])
    return jnp.sum(losses * input_mask[:, 1:]) / jnp.sum(input_mask[:, 1:])


def batches(trainer: Any, count: int, weight: float = 1.0) -> list[Any]:
    tokens = np.tile(np.arange(12, dtype=np.int32) % 5, (4, 1))
    mask = np.full(tokens.shape, weight, np.float32)
    return [trainer.TrainingInput(input_tokens=tokens, input_mask=mask)] * count


def train(trainer: Any, policy: str, steps: int, **config: Any) -> Any:
    model = jaxmp.nnx.apply_policy(Model(), policy)
    tx = jaxmp.mixed_precision(optax.adam(3e-2), policy)
    settings = trainer.TrainingConfig(eval_every_n_steps=1000, **config)
    host = trainer.PeftTrainer(model, tx, settings)
    host = host.with_loss_fn(loss_fn).with_gen_model_input_fn(
        lambda x: {"input_tokens": x.input_tokens, "input_mask": x.input_mask}
    )
    host.train(batches(trainer, steps))
    return host


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_it_trains(trainer: Any, policy: str) -> None:
    host = train(trainer, policy, 30)
    batch = batches(trainer, 1)[0]
    before = loss_fn(Model(), batch.input_tokens, batch.input_mask)
    after = loss_fn(host.model, batch.input_tokens, batch.input_mask)
    assert float(after) < 0.5 * float(before)
    assert bool(nnx.as_pure(host.optimizer.opt_state.grads_finite))
    # The optimizer saw float32 alone, whatever the params are.
    moments = jax.tree.leaves(nnx.as_pure(host.optimizer.opt_state.inner))
    assert {x.dtype.name for x in moments} == {"float32", "int32"}


def test_an_infinite_loss_changes_nothing(trainer: Any) -> None:
    host = train(trainer, "mixed_bfloat16", 3)
    before = tree_bits(nnx.as_pure(nnx.state(host.model)))
    host.train([*batches(trainer, 3), *batches(trainer, 1, weight=np.nan)])
    assert tree_bits(nnx.as_pure(nnx.state(host.model))) == before
    assert int(nnx.as_pure(host.optimizer.opt_state.skipped)) == 1


def test_its_accumulation_is_refused_with_what_to_do(trainer: Any) -> None:
    """It would put MultiSteps around the optimizer, which tears params and masters apart."""
    with pytest.raises(ValueError, match="MultiSteps"):
        train(trainer, "mixed_bfloat16", 1, gradient_accumulation_steps=2)
