"""The scripts in examples/ do what the README says of them."""

import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = [
    *("--steps", "60", "--batch-size", "2", "--context", "16", "--layers", "1", "--width", "32"),
    *("--eval-every", "7", "--checkpoint-every", "4", "--growth-interval", "2", "--no-plot"),
]
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(autouse=True)
def example_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own folder is on its path, so that examples can share modules."""
    monkeypatch.syspath_prepend(EXAMPLES)


def test_three_lines_are_three_and_train_alike() -> None:
    result = importlib.import_module("three_lines").main(steps=60)
    assert result.changed == 3
    assert result.float32[-1] < 0.1 * result.float32[0]
    assert result.mixed == pytest.approx(result.float32, rel=0.02)
    # The README shows these very lines.
    readme = (EXAMPLES.parent / "README.md").read_text()
    shown = readme.partition("```diff")[2].partition("```")[0]
    changes = [line for line in result.diff[2:] if line[0] in "+-"]
    assert len(changes) == 6
    assert all(line in shown for line in changes)


@pytest.mark.slow
def test_all_policies_learn_the_same(tmp_path: Path) -> None:
    # Hardly any overflows: in so few steps, each one that is skipped shows in the loss.
    more = ["--out", str(tmp_path), "--plot", "--growth-interval", "1000"]
    results = importlib.import_module("train_lm").main([*SMALL, *more])
    reference = results["float32"]["val_loss"]
    for run in results.values():
        assert run["val_loss"] < 0.75 * run["history"]["loss"][0]
        assert run["val_loss"] == pytest.approx(reference, rel=0.05)
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "results.json").read_text()) == results


def outcome(folder: Path) -> dict[str, Any]:
    run = json.loads((folder / "results.json").read_text())["mixed_float16"]
    del run["steps_per_second"], run["history"]["seconds"], run["history"]["timed_steps"]
    return run


def command(folder: Path, *more: str) -> list[str]:
    script = str(EXAMPLES / "train_lm.py")
    policy = ("--policies", "mixed_float16")
    return [sys.executable, script, *SMALL, *policy, "--out", str(folder), *more]


def kill_while_saving(process: subprocess.Popen[bytes], folder: Path, nth: int) -> None:
    """SIGKILL as soon as the nth unfinished checkpoint is seen on disk."""
    seen: set[str] = set()
    while process.poll() is None:
        found = {path.name for path in folder.glob("checkpoints/*/*.orbax-checkpoint-tmp*")}
        if found - seen and len(seen | found) >= nth:
            process.send_signal(signal.SIGKILL)
            break
        seen |= found
        time.sleep(0.001)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), check=True)
    assert outcome(whole)["skipped"] > 0
    kill_while_saving(subprocess.Popen(command(killed)), killed, 3)
    kill_while_saving(subprocess.Popen(command(killed, "--resume")), killed, 2)
    subprocess.run(command(killed, "--resume"), check=True)
    assert outcome(killed) == outcome(whole)


def test_resume_refuses_other_settings(tmp_path: Path) -> None:
    train_lm = importlib.import_module("train_lm")
    arguments = ["--steps", "4", *SMALL[2:], "--policies", "float32", "--out", str(tmp_path)]
    train_lm.main(arguments)
    with pytest.raises(SystemExit, match=r"lr 0\.003, not 0\.1"):
        train_lm.main([*arguments, "--lr", "0.1", "--resume"])
