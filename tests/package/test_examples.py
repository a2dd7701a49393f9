"""The scripts in examples/ do what the README says of them."""

import importlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from tests.support.bits import tree_bits
from tests.support.dots import count_dots
from tests.support.surroundings import example_path  # noqa: F401

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [
    *("--steps", "60", "--batch-size", "2", "--context", "16", "--layers", "1", "--width", "32"),
    *("--eval-every", "7", "--checkpoint-every", "4", "--growth-interval", "2", "--no-plot"),
]
PRECISIONS = ["float32", "mixed_bfloat16", "mixed_float16"]
pytestmark = pytest.mark.usefixtures("standard_promotion", "example_path")


@pytest.mark.slow
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
def test_a_llama_learns_without_a_gradient_buffer() -> None:
    example = importlib.import_module("llama")
    losses = example.main(["--steps", "8"])
    assert losses[-1] < losses[0] - 1
    # Both steps start alike; later, fusions round differently.
    buffered = example.main(["--steps", "2", "--gradients", "buffered"])
    assert losses[:2] == pytest.approx(buffered, rel=1e-3)


@pytest.mark.slow
def test_digits_keep_their_batch_statistics_when_a_step_is_skipped() -> None:
    example = importlib.import_module("digits_cnn")
    rules, digits = example.precision_rules("mixed_float16"), example.Digits.load()
    model = example.make_model(rules)
    state = example.make_state(model, rules, steps=12, seed=0)
    step = jaxmp.make_train_step(example.make_loss(model), "none", donate=False)
    taken = []
    for i in range(12):
        old = state
        state, metrics = step(old, digits.batch(0, i))
        taken.append(bool(metrics["grads_finite"]))
        moved = tree_bits(old.batch_stats) != tree_bits(state.batch_stats)
        assert moved == taken[-1]
    assert set(taken) == {True, False}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_digits_learn_in_every_precision(capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module("digits_cnn").main
    runs = main(["--summary"])
    assert list(runs) == PRECISIONS
    printed = capsys.readouterr().out
    assert all(word in printed for word in [*PRECISIONS, "BatchNorm_2"])
    for run in runs.values():
        assert run.before < 0.3
        assert run.accuracy >= 0.97
        assert run.steps + run.skipped == len(run.loss) == len(run.loss_scale)
        assert run.loss[0] == pytest.approx(runs["float32"].loss[0], rel=1e-2)
    assert [run.skipped > 0 for run in runs.values()] == [False, False, True]
    low = runs["mixed_float16"]
    assert low.loss_scale[0] > low.loss_scale[-1] > 1
    assert main(["--precisions", "mixed_float16"])["mixed_float16"].loss == low.loss
    other = main(["--precisions", "mixed_float16", "--steps", "1", "--seed", "1"])
    assert other["mixed_float16"].loss[0] != low.loss[0]


def small_gpt() -> tuple[Any, Any]:
    example = importlib.import_module("language_model")
    size = example.Size(vocab=11, context=8, layers=1, width=16, heads=2)
    return example, example.GPT(size, nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PRECISIONS, "bfloat16"])
def test_gpt_computes_as_its_rules_say(name: str) -> None:
    """Seven products: q, k and v, two in the attention, its output, two in the MLP, the head."""
    example, model = small_gpt()
    policy = jaxmp.get_policy(name)
    low, ids = str(policy.compute_dtype), jnp.zeros((1, 4), jnp.int32)

    def dots() -> dict[str, int]:
        return count_dots(lambda ids: model(ids), ids)  # a new function: traces are cached

    assert dots() == {"float32": 7}  # plain Flax
    jaxmp.nnx.apply_policy(model, policy)
    assert dots() == {low: 7}  # a policy without rules
    jaxmp.nnx.apply_policy(model, example.precision_rules(policy))
    assert dots() == ({"float32": 7} if low == "float32" else {low: 6, "float32": 1})
    assert jax.eval_shape(lambda ids: model(ids), ids).dtype == jnp.float32
    rows = jaxmp.nnx.summary(model).rows
    norms = [row.compute for row in rows if "norm" in row.path]
    assert norms == ["float32"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_gpt_has_the_same_masters_under_every_policy(name: str) -> None:
    example, model = small_gpt()
    policy = jaxmp.get_policy(name)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)

    def params() -> Any:
        return nnx.as_pure(nnx.state(model, nnx.Param))

    plain = tree_bits(params())
    jaxmp.nnx.apply_policy(model, example.precision_rules(policy))
    state = jaxmp.TrainState.create(params=params(), tx=tx)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {policy.param_dtype}
    assert tree_bits(state.opt_state.master) == plain
    # Positive control: where the model itself holds 16 bits, the masters start from those.
    jaxmp.nnx.apply_policy(model, policy)
    state = jaxmp.TrainState.create(params=params(), tx=tx)
    assert tree_bits(state.opt_state.master) != plain


@pytest.mark.exhaustive
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


@pytest.mark.slow
def test_a_demo_says_where_its_picture_is_and_names_the_run_it_replaces(tmp_path: Path) -> None:
    """In a process whose output is no terminal: plain lines, no bars that are drawn again."""

    def demo() -> str:
        arguments = ["--steps", "4", *SMALL[2:-1], "--eval-every", "2", "--policies", "float32"]
        script = [sys.executable, str(EXAMPLES / "train_lm.py"), *arguments, "--out", str(tmp_path)]
        return subprocess.run(script, check=True, capture_output=True, text=True).stdout

    first = demo()
    assert "\x1b" not in first
    assert "\r" not in first
    assert re.findall(r"^float32 +(\d/4)  loss", first, re.M) == ["2/4", "4/4"]
    assert "vary a little between machines" in first
    assert f"Picture: {tmp_path / 'loss.png'}\n" in first
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert "replaces it" not in first  # control: there was none
    loss = json.loads((tmp_path / "results.json").read_text())["float32"]["val_loss"]
    second = demo()
    assert re.search(rf"^{tmp_path} has a run of \S+ \S+: this one replaces it", second)
    assert re.search(rf"^Validation losses of the run of .*: float32 {loss:.4f}\.$", second, re.M)


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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), check=True)
    assert outcome(whole)["skipped"] > 0
    kill_while_saving(subprocess.Popen(command(killed)), killed, 3)
    kill_while_saving(subprocess.Popen(command(killed, "--resume")), killed, 2)
    subprocess.run(command(killed, "--resume"), check=True)
    assert outcome(killed) == outcome(whole)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_resume_refuses_other_settings(tmp_path: Path) -> None:
    train_lm = importlib.import_module("train_lm")
    arguments = ["--steps", "4", *SMALL[2:], "--policies", "float32", "--out", str(tmp_path)]
    train_lm.main(arguments)
    with pytest.raises(SystemExit, match=r"lr 0\.003, not 0\.1"):
        train_lm.main([*arguments, "--lr", "0.1", "--resume"])
