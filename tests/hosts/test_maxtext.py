"""MaxText's own loop and loss, with the two lines of docs/hosts.md around them."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules

import jaxmp
from tests.support.reduction_checks import relative_error

pytestmark = [
    pytest.mark.slow,  # MaxText sets itself up in ten seconds
    pytest.mark.filterwarnings("default"),  # what hosts warn of is theirs
    pytest.mark.usefixtures("standard_promotion"),
]

TINY = """
    hardware=cpu dataset_type=synthetic per_device_batch_size=2 max_target_length=32
    base_emb_dim=32 base_mlp_dim=64 base_num_query_heads=2 base_num_kv_heads=2 head_dim=16
    base_num_decoder_layers=2 vocab_size=64 attention=dot_product learning_rate=3e-3
    skip_jax_distributed_system=True enable_goodput_recording=False monitor_goodput=False
    log_config=False run_name=tiny
"""


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of MaxText's loop."""
    monkeypatch.setenv("DECOUPLE_GCLOUD", "TRUE")
    reason = "MaxText is not installed: docs/CONTRIBUTING.md says how"
    name = "maxtext.trainers.pre_train.train"
    return pytest.importorskip(name, reason=reason, exc_type=ImportError)


def argv(train: Any, folder: pathlib.Path, *settings: str) -> list[str]:
    base = pathlib.Path(train.__file__).parents[2] / "configs/base.yml"
    return ["train.py", str(base), f"base_output_directory={folder}", *TINY.split(), *settings]


def losses(train: Any, folder: pathlib.Path, *settings: str) -> dict[int, float]:
    """Runs MaxText's main, and returns the losses that it logged, by step; none was skipped."""
    folder.mkdir(exist_ok=True)
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    train.main(argv(train, folder, f"metrics_file={log}", *settings))
    rows = list(map(json.loads, log.read_text().splitlines()))
    assert {row["optim/steps_skipped"] for row in rows if "learning/loss" in row} == {0}
    return {int(row["step"]): row["learning/loss"] for row in rows if "learning/loss" in row}


def patch(train: Any, monkeypatch: pytest.MonkeyPatch, policy: str, **storage: Any) -> None:
    """The two lines."""
    from maxtext.optimizers import optimizers

    own = optimizers.get_optimizer
    monkeypatch.setattr(
        optimizers,
        "get_optimizer",
        lambda *args, **kwargs: jaxmp.mixed_precision(own(*args, **kwargs), policy, **storage),
    )
    monkeypatch.setattr(train, "loss_fn", jaxmp.nnx.autocast(train.loss_fn, policy))


def log_skips(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The further lines, for a metric."""
    own_step = train.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        state, metrics = own_step(*args, **kwargs)
        skipped = state["optimizer"]["opt_state"]["skipped"]
        metrics["scalar"]["optim/steps_skipped"] = skipped[...].astype(float)
        return state, metrics

    monkeypatch.setattr(train, "train_step", train_step)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_it_trains_and_resumes(
    train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, policy: str
) -> None:
    """Of a run that stopped in the middle, the rest has the losses of one that did not."""
    storage = {"master": "remainder", "moments": "bfloat16"} if policy == "bfloat16" else {}
    weights = "bfloat16" if policy == "bfloat16" else "float32"
    settings = ["dtype=float32", f"weight_dtype={weights}", "mu_dtype=float32"]
    patch(train, monkeypatch, policy, **storage)
    log_skips(train, monkeypatch)
    saving = [*settings, "enable_checkpointing=True", "async_checkpointing=False"]
    whole = losses(train, tmp_path / "whole", *settings, "steps=6", "enable_checkpointing=False")
    # The length of a run decides its schedule, so that it stays; the second call resumes.
    schedule = ["learning_rate_schedule_steps=6", "checkpoint_period=1"]
    first = losses(train, tmp_path / "parts", *saving, *schedule, "steps=3")
    rest = losses(train, tmp_path / "parts", *saving, *schedule, "steps=6")
    assert list(first) == [0, 1, 2]
    assert list(rest) == [3, 4, 5]
    assert first | rest == whole
    assert whole[5] < whole[0]


def test_gradients_are_nearer_to_float32_than_its_own(
    train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    from maxtext.configs import pyconfig
    from maxtext.utils import train_utils

    own, batch, params = train.loss_fn, None, None
    grads = {}
    for name, dtype in (("exact", "float32"), ("own", "bfloat16"), ("ours", "float32")):
        loss_fn = jaxmp.nnx.autocast(own, "mixed_bfloat16") if name == "ours" else own
        settings = [f"dtype={dtype}", "steps=2", "enable_checkpointing=False"]
        config = pyconfig.initialize(argv(train, tmp_path, *settings))
        _, _, _, _, mesh, _, _, loader, _, _, state = train_utils.setup_train_loop(config, None)
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            batch = batch or loader.load_next_batch()
            graph, own_params, rest = nnx.split(state.model, nnx.Param, ...)
            params = params or own_params

            def loss(params: Any, loss_fn: Any = loss_fn, config: Any = config) -> Any:
                model = nnx.merge(graph, params, rest, copy=True)  # noqa: B023 (called here)
                return loss_fn(model, config, dict(batch), None, None)[0]  # noqa: B023

            grads[name] = jax.jit(jax.grad(loss))(params)
    error = {name: relative_error(grads[name], grads["exact"]) for name in ("own", "ours")}
    assert 0 < error["ours"] < error["own"] < 0.1
    assert np.isfinite(error["ours"])
