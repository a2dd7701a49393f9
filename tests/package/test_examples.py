"""The scripts in examples/ do what the README says of them."""

import functools
import importlib
import io
import json
import re
import shutil
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
from rich.console import Console

import jaxmp
from tests.support.bits import tree_bits
from tests.support.dots import count_dots
from tests.support.multiprocess.launcher import retry_ports

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [
    *("--steps", "60", "--batch-size", "2", "--context", "16", "--layers", "1", "--width", "32"),
    *("--eval-every", "7", "--checkpoint-every", "4", "--growth-interval", "2", "--no-plot"),
]
PRECISIONS = ["float32", "mixed_bfloat16", "mixed_float16"]
SPREAD = [
    *("--steps", "3", "--layers", "1", "--width", "64"),
    *("--batch-size", "16", "--context", "16"),
]
NARROW = ("bfloat16", "float16")
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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_digits_learn_in_every_precision(capsys: pytest.CaptureFixture[str]) -> None:
    runs = importlib.import_module("digits_cnn").main(["--steps", "60", "--summary"])
    assert list(runs) == PRECISIONS
    for run in runs.values():
        assert run.before < 0.3
        assert run.accuracy > 0.8
        assert run.steps + run.skipped == len(run.loss) == len(run.loss_scale) == 60
        assert run.loss[0] == pytest.approx(runs["float32"].loss[0], rel=1e-2)
    assert len({run.loss[0] for run in runs.values()}) == 3
    printed = capsys.readouterr().out
    assert all(word in printed for word in [*PRECISIONS, "BatchNorm_2"])


@pytest.mark.slow
def test_digits_keep_their_batch_statistics_when_a_step_is_skipped() -> None:
    example = importlib.import_module("digits_cnn")
    rules, digits = example.precision_rules("mixed_float16"), example.Digits.load()
    model = example.make_model(rules)
    state = example.make_state(model, rules, steps=12, seed=0)
    step = jaxmp.make_train_step(example.make_loss(model), donate=False)
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
def test_digits_accuracy() -> None:
    main = importlib.import_module("digits_cnn").main
    runs = main([])
    for run in runs.values():
        assert run.accuracy >= 0.97
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


def test_earlier_runs_of_every_kind_are_named(tmp_path: Path) -> None:
    earlier = importlib.import_module("lm_report").Earlier
    assert earlier.find(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert "a run without results" in earlier.find(tmp_path).describe(resume=False)
    assert "goes on from its checkpoints" in earlier.find(tmp_path).describe(resume=True)
    for broken in ("", '{"float32": {"val_l', "[]", '{"float32": 3}'):
        (tmp_path / "results.json").write_text(broken)
        assert "a run without results" in earlier.find(tmp_path).describe(resume=False)
        assert earlier.find(tmp_path).losses().endswith(": none.")
    (tmp_path / "results.json").write_text('{"float32": {"val_loss": 1.5}}')
    assert " has a run of " in earlier.find(tmp_path).describe(resume=False)
    assert earlier.find(tmp_path).losses().endswith(": float32 1.5000.")


def test_progress_is_drawn_again_on_a_terminal_alone() -> None:
    report = importlib.import_module("lm_report")

    def shown(*, terminal: bool) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        with report.show_progress(console, 100, 50) as add_run:
            for name in ("one", "two"):
                run = add_run(name)
                for i in (10, 50, 60, 100):
                    run(i, f"loss {i}")
        return console.file.getvalue()

    assert "\x1b" in shown(terminal=True)
    lines = [" ".join(line.split()) for line in shown(terminal=False).splitlines()]
    steps = ("50/100 loss 50", "100/100 loss 100")
    assert lines == [f"{name} {step}" for name in ("one", "two") for step in steps]


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


@pytest.mark.slow
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


# Runs the script that follows, until a file turns up.
KILLED = """
import os, pathlib, runpy, signal, sys, threading, time

def watch(folder, pattern):
    while not any(pathlib.Path(folder).glob(pattern)):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=watch, args=sys.argv[1:3], daemon=True).start()
sys.argv = sys.argv[3:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def job(
    folder: Path, processes: int, *arguments: str, until: str | None = None
) -> tuple[list[int], str]:
    """Runs `fsdp_lm.py` with checkpoints in a folder; process 1 is killed `until` a file is there.

    Returns:
      How each process ended, and what all of them wrote.
    """

    def commands(port: int) -> list[list[str]]:
        job = ["--coordinator", f"localhost:{port}", "--processes", str(processes), *SPREAD]
        job += ["--checkpoints", str(folder), "--checkpoint-every", "2", "--steps", "7", *arguments]
        script = [str(EXAMPLES / "fsdp_lm.py"), *job]
        python = [["env", "JAX_PLATFORMS=cpu", sys.executable] for _ in range(processes)]
        if until:
            python[1] += ["-c", KILLED, str(folder), until]
        return [[*each, *script, "--process-id", str(i)] for i, each in enumerate(python)]

    logs = folder.with_suffix(".logs")
    logs.mkdir(exist_ok=True)
    exits = retry_ports(commands, folder=logs, timeout=400)
    return [each.returncode for each in exits], "".join(each.output for each in exits)


def saved_losses(folder: Path, steps: int) -> list[float]:
    return json.loads((folder / str(steps) / "record" / "metadata").read_text())["history"]["loss"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_job_goes_on_with_the_same_or_other_processes(tmp_path: Path) -> None:
    """One of four is killed while the third checkpoint is written: the second is the last."""
    whole, killed, fewer = (tmp_path / name for name in ("whole", "killed", "fewer"))
    codes, output = job(whole, 4)
    assert codes == [0] * 4, output
    expected = saved_losses(whole, 7)
    assert len(set(expected)) == 7

    codes, output = job(killed, 4, until="6.orbax-checkpoint-tmp*")
    assert codes[1] == -signal.SIGKILL, output
    assert {path.name for path in killed.iterdir() if path.name.isdigit()} == {"2", "4"}
    assert saved_losses(killed, 4) == expected[:4]
    shutil.copytree(killed, fewer)

    codes, output = job(killed, 4, "--resume")
    assert codes == [0] * 4, output
    assert "goes on after step 3" in output
    assert saved_losses(killed, 7) == expected

    # Four processes of two devices, then two of four; and another way to spread the model.
    codes, output = job(fewer, 2, "--resume", "--mode", "hsdp")
    assert codes == [0] * 2, output
    assert saved_losses(fewer, 7)[:4] == expected[:4]
    assert saved_losses(fewer, 7) == pytest.approx(expected, rel=1e-3)


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
