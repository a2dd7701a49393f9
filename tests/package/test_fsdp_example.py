"""The language model on several devices and processes: examples/fsdp_lm.py."""

import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxmp
from tests.support.multiprocess.launcher import retry_ports
from tests.support.surroundings import example_path  # noqa: F401

EXAMPLES = Path(__file__).parents[2] / "examples"
SPREAD = [
    *("--steps", "3", "--layers", "1", "--width", "64"),
    *("--batch-size", "16", "--context", "16"),
]
NARROW = ("bfloat16", "float16")
pytestmark = pytest.mark.usefixtures("standard_promotion", "example_path")


@functools.cache
def spread(arguments: str) -> Any:
    """What `fsdp_lm.py` found, which is slow to compile."""
    return importlib.import_module("fsdp_lm").main([*SPREAD, *arguments.split()])


def over_batch(result: Any) -> Any:
    """What a step of it sends over the axes that share out the batch."""
    axes = [axis for axis, _ in result.collectives.mesh_axes if axis != "model"]
    return result.collectives.select(axis=axes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--mode fsdp --check",
        "--mode fsdp+tp",
        *(
            pytest.param(arguments, marks=pytest.mark.exhaustive)
            for arguments in (
                "--mode tp",
                "--mode hsdp",
                "--mode per-shard --comm-dtype bfloat16",
                "--mode fsdp --policy mixed_float16 --microbatches 2",
                "--mode fsdp --policy bfloat16",
            )
        ),
    ],
)
def test_a_model_learns_the_same_however_it_is_spread(arguments: str) -> None:
    result, reference = spread(arguments), spread("--mode ddp")
    assert result.loss == pytest.approx(reference.loss, rel=1e-3)
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=2e-2)
    # Positive control: three steps move both far more.
    assert reference.loss[-1] < 0.95 * reference.loss[0]
    assert min(reference.grad_norm) < 0.9 * max(reference.grad_norm)
    assert over_batch(result).bytes(dtype=NARROW, reducer="add") == 0
    assert (result.bytes_on_device < result.bytes_in_all) == ("per-shard" not in arguments)


@pytest.mark.slow
def test_what_devices_send_each_other() -> None:
    example = importlib.import_module("language_model")
    kernels = 64 * (3 * 64 + 64 + 4 * 64 + 4 * 64)  # of the block
    head = 64 * example.Corpus.load().vocab_size  # computes in float32
    ddp = over_batch(spread("--mode ddp"))
    assert ddp.bytes(dtype="float32", reducer="add") > 4 * (kernels + head)
    assert ddp.bytes(dtype=NARROW) == 0
    fsdp = over_batch(spread("--mode fsdp --check"))
    # Gathered once for the model, and once more for its gradients; but the embedding is a lookup.
    assert fsdp.bytes("all-gather", "bfloat16") == 2 * (2 * kernels + head)
    # The head is float32 by the model's own choice, and nothing else is.
    assert fsdp.bytes("all-gather", "float32") in (4 * head, 2 * 4 * head)
    per_shard = over_batch(spread("--mode per-shard --comm-dtype bfloat16"))
    assert per_shard.bytes("all-to-all", "bfloat16") > 2 * (kernels + head)
    # Positive control: in plain JAX sums are narrow, and `--check` says so.
    with pytest.raises(jaxmp.AuditError, match=r"bfloat16  all-reduce over data .*language_model"):
        spread("--mode ddp --plain --check")


@pytest.mark.exhaustive
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    def commands(port: int) -> list[list[str]]:
        job = ["--coordinator", f"localhost:{port}", "--processes", "2", *SPREAD]
        script = ["env", "JAX_PLATFORMS=cpu", sys.executable, str(EXAMPLES / "fsdp_lm.py")]
        return [[*script, *job, "--process-id", str(i)] for i in range(2)]

    first, second = retry_ports(commands, folder=tmp_path, timeout=300)
    assert (first.returncode, second.returncode) == (0, 0), first.output + second.output
    assert "loss" not in second.output
    losses = [float(x) for x in re.findall(r"loss (\S+)", first.output)]
    loss = spread("--mode fsdp --check").loss
    assert losses == pytest.approx([loss[0], loss[-1]], abs=1e-3)
    assert "8 data" in first.output


@pytest.mark.slow
def test_a_resumed_run_in_one_process(tmp_path: Path) -> None:
    """It ends with the losses of one that was left alone, and says what it cannot go on from."""
    main = importlib.import_module("fsdp_lm").main
    run = [*SPREAD, "--checkpoints", str(tmp_path / "run")]
    main([*run, "--steps", "2"])
    with pytest.raises(SystemExit, match=r"has a checkpoint of 2 steps: .* --resume"):
        main(run)
    with pytest.raises(SystemExit, match=r"other settings: lr 0\.001, not 0\.1"):
        main([*run, "--resume", "--lr", "0.1"])
    assert main([*run, "--resume"]).loss == spread("--mode fsdp --check").loss
    assert main([*run, "--resume"]).loss == spread("--mode fsdp --check").loss  # nothing is left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "needs --checkpoints"),
        (["--checkpoint-every", "0"], "must be at least 1"),
        (["--comm-dtype", "bfloat16"], "needs --mode per-shard"),
        (["--mode", "per-shard", "--plain"], "is not plain JAX"),
        (["--processes", "2"], "needs --coordinator"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("fsdp_lm").main(arguments)
    assert message in capsys.readouterr().err
