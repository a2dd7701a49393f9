"""Kauldron's own trainer, with the two lines of docs/hosts.md around it."""

import dataclasses
import pathlib
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from tests.support.bits import tree_bits
from tests.support.reduction_checks import relative_error

pytestmark = [
    pytest.mark.slow,  # Kauldron imports TensorFlow
    pytest.mark.filterwarnings("default"),  # what hosts warn of is theirs
    pytest.mark.usefixtures("standard_promotion"),
]


@pytest.fixture
def kd() -> Any:
    """Kauldron's public names."""
    reason = "Kauldron is not installed: docs/CONTRIBUTING.md says how"
    return pytest.importorskip("kauldron.kd", reason=reason, exc_type=ImportError)


@pytest.fixture
def train_step(kd: Any) -> Any:
    """The module that has Kauldron's forward pass."""
    return pytest.importorskip("kauldron.train.train_step")


class Net(nn.Module):
    """An image classifier with attention and a batch norm."""

    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __kontext_keys__(self) -> dict[str, str]:
        return {"image": "batch.image"}

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        to: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        x = nn.Conv(16, (4, 4), strides=(4, 4), **to)(image)
        x = nn.BatchNorm(use_running_average=False, **to)(x).reshape(-1, 4, 16)
        h = nn.LayerNorm(**to)(x)
        x = x + nn.MultiHeadDotProductAttention(2, **to)(h, h)
        x = x + nn.Dense(16, **to)(nn.gelu(nn.Dense(64, **to)(nn.LayerNorm(**to)(x))))
        return nn.Dense(2, **to)(x.mean(1))


def examples() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(32, 8, 8, 3)).astype(np.float32)
    return {"image": x, "label": (x.mean((1, 2, 3)) > 0).astype(np.int32)[:, None]}


def trainer_of(kd: Any, folder: pathlib.Path, model: Any, optimizer: Any, **fields: Any) -> Any:
    # One batch in each step: a run that goes on begins with the first once more.
    data = {"batch_size": 32, "shuffle": False, "num_epochs": None}
    loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds", labels="batch.label")
    return kd.train.Trainer(
        train_ds=kd.data.InMemoryPipeline(loader=examples, **data),
        model=model,
        optimizer=optimizer,
        log_metrics_every=1,
        train_losses={"loss": loss},
        workdir=str(folder),
        **fields,
    )


def skips(kd: Any) -> Any:
    """The metric of docs/hosts.md: how many steps were skipped before this one."""

    @dataclasses.dataclass(kw_only=True, frozen=True)
    class Skipped(kd.metrics.Metric):
        skipped: kd.kontext.Key = "opt_state.skipped"

        @flax.struct.dataclass
        class State(kd.metrics.AverageState):
            pass

        def get_state(self, skipped: Any) -> Any:
            return self.State.from_values(skipped[None].astype(float))

    return Skipped()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_it_trains_and_restores_every_bit(
    kd: Any, train_step: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, policy: str
) -> None:
    storage = {"master": "remainder", "moments": "int8"} if policy == "bfloat16" else {}
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), policy, **storage)
    net = Net(param_dtype=jaxmp.get_policy(policy).param_dtype)
    forward = jaxmp.autocast(train_step.forward_with_loss, policy, output="computed")
    monkeypatch.setattr(train_step, "forward_with_loss", forward)

    def train(steps: int, folder: str) -> Any:
        saved = kd.ckpts.Checkpointer(save_interval_steps=1)
        fields = {"num_train_steps": steps, "checkpointer": saved}
        metrics = {"train_metrics": {"skipped": skips(kd)}}
        return trainer_of(kd, tmp_path / folder, net, tx, **fields, **metrics).train()

    state, aux = train(6, "whole")
    results = aux.compute(flatten=False)
    assert results.metric_values["skipped"] == 0
    loss = float(results.loss_values["loss"])
    assert loss != float(jnp.bfloat16(loss))  # with the digits that were computed
    train(3, "parts")
    resumed, _ = train(6, "parts")
    assert int(resumed.step) == int(state.step) == 7
    assert tree_bits((resumed.params, resumed.opt_state)) == tree_bits(
        (state.params, state.opt_state)
    )


def test_gradients_are_nearer_to_float32_than_its_own(
    kd: Any, train_step: Any, tmp_path: pathlib.Path
) -> None:
    own, first = train_step.forward_with_loss, None
    ours = jaxmp.autocast(own, "mixed_bfloat16")
    grads = {}
    for name, model, forward in [
        ("exact", Net(), own),
        ("own", Net(jnp.bfloat16), own),
        ("ours", Net(), ours),
    ]:
        trainer = trainer_of(kd, tmp_path, model, optax.sgd(1.0), num_train_steps=1)
        step = trainer.trainstep
        state = step.init(trainer.train_ds.element_spec)
        first = first or state.params
        batch = jax.tree.map(jnp.asarray, next(iter(trainer.train_ds)))

        def loss(params: Any, forward: Any = forward, step: Any = step, state: Any = state) -> Any:
            at = {"state": state.replace(params=params), "batch": batch}  # noqa: B023
            return forward(
                kd.train.Context.from_state_and_batch(**at),
                model=step.model,
                losses=step.aux.losses,
                rngs=step.rng_streams.train_rngs(0),
                is_training=True,
            )[0]

        grads[name] = jax.jit(jax.grad(loss))(first)
    error = {name: relative_error(grads[name], grads["exact"]) for name in ("own", "ours")}
    assert 0 < error["ours"] < error["own"] < 0.1
