"""Training with `jax.distributed` on two and four processes: the bits of one, where sums are exact.

A sum of two numbers has one order; for four, models are chosen whose sums float32 holds exactly.
How jobs of several processes are run, and which bits can be compared: `tests/support/multiprocess`.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support.multiprocess import scenarios
from tests.support.multiprocess.launcher import (
    Call,
    JobFailed,
    retry_ports,
    run_job,
    run_together,
    start_job,
)

STEPS = scenarios.STEPS
POISONED = 3
SAVED = 5  # iterations before the checkpoint
STORAGES = ["remainder", "stochastic"]
MIXED = ["mixed_bfloat16", "mixed_float16"]
# The compute dtype overflows where float32 does not, if it can.
POISON = {"mixed_bfloat16": float("inf"), "mixed_float16": 1e6}


def masters(recipe: str = "masters", **kwargs: Any) -> Call:
    """A run with something in every part of the state: masters, moments, a skipped step."""
    return Call("train", recipe=recipe, poison={"2": float("inf")}, **kwargs)


CALLS = {
    **{policy: Call("train", recipe=policy) for policy in MIXED},
    **{
        f"{policy}, poisoned": Call("train", recipe=policy, poison={str(POISONED): POISON[policy]})
        for policy in MIXED
    },
    "stall": Call("stall", recipe="mixed_float16", limit=3),
    **{recipe: masters(recipe) for recipe in STORAGES},
}
CREATED = {"created outside jit": Call("create_outside_jit", recipe="masters")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def one() -> Iterator[Callable[[int, Call], Any]]:
    """Runs a call on so many devices of this process."""

    def run(devices: int, call: Call) -> Any:
        return getattr(scenarios, call.function)(scenarios.make_mesh(devices), **call.kwargs)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield run


@pytest.fixture(scope="module")
def job_of_2(folder: Path) -> list[dict[str, Any]]:
    return run_job(CALLS | CREATED, processes=2, folder=folder / "2")


@pytest.fixture(scope="module")
def job_of_4(folder: Path) -> list[dict[str, Any]]:
    save = masters(folder=str(folder / "of-4"), save_at=[SAVED])
    return run_job(CALLS | {"masters": save}, processes=4, folder=folder / "4")


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Callable[[int], list[dict[str, Any]]]:
    """The results of all calls, of the job of two or of four processes. A job runs once."""
    return lambda processes: request.getfixturevalue(f"job_of_{processes}")


# What depends on the order of a sum, or on how much of the arrays a process has.
NOT_COMPARED = ("grad_norm", "metrics", "kept", "clean")


def assert_same_training(one: Any, many: list[Any]) -> None:
    """Every process of a job reports what one process computed, bit for bit."""
    for result in many:
        for expected, record in zip(one["history"], result["history"], strict=True):
            norm = pytest.approx(expected["grad_norm"], rel=1e-6, nan_ok=True)
            assert record["grad_norm"] == norm
            for key in expected.keys() - NOT_COMPARED:
                assert record[key] == expected[key], (key, record, expected)
        assert result["end"] == one["end"]
        assert result["compilations"] == 1
        printed = [record["metrics"] for record in result["history"]]
        assert printed == [record["metrics"] for record in many[0]["history"]]


def losses(result: Any, start: int = 0) -> list[str]:
    return [record["loss"] for record in result["history"]][start - result["first"] :]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("policy", MIXED)
def test_the_same_losses_as_one_process(policy: str, processes: int, one: Any, job: Any) -> None:
    expected = one(processes, CALLS[policy])
    results = [result[policy] for result in job(processes)]
    assert_same_training(expected, results)
    # Positive controls: the run does move, and the params are sharded.
    assert expected["start"] == results[0]["start"] != expected["end"]
    assert len(set(losses(expected))) == STEPS
    assert expected["history"][-1]["skipped"] == 0
    scales = {record["loss_scale"] for record in expected["history"]}
    assert scales == ({1.0} if policy == "mixed_bfloat16" else {2.0**10, 2.0**11, 2.0**12})
    for result in results:
        assert result["local_shapes"] == {"w1": [16 // processes, 32], "b1": [32]} | {
            "w2": [32 // processes, 8]
        }


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("policy", MIXED)
def test_an_overflow_in_one_process_skips_the_step_in_all(
    policy: str, processes: int, one: Any, job: Any
) -> None:
    poisoned = [result[f"{policy}, poisoned"] for result in job(processes)]
    # Only the last process has the number that overflows.
    clean = [result["history"][POISONED]["clean"] for result in poisoned]
    assert clean == [True] * (processes - 1) + [False]
    for result in poisoned:
        before, at, after = result["history"][POISONED - 1 : POISONED + 2]
        assert (before["grads_finite"], at["grads_finite"], after["grads_finite"]) == (1, 0, 1)
        assert at["kept"] == before["kept"] != after["kept"]
        assert (before["step"], at["step"], after["step"]) == (3, 3, 4)
        assert (at["skipped"], at["consecutive_skips"]) == (1, 1)
        assert (after["skipped"], after["consecutive_skips"]) == (1, 0)
        factor = 1 if policy == "mixed_bfloat16" else 0.5
        assert at["next_loss_scale"] == after["loss_scale"] == factor * at["loss_scale"]
        assert at["growth_count"] == 0
        assert result["history"][-1]["step"] == STEPS - 1
    # Positive control: the same batch without the poison moves what every process holds.
    for result, job_result in zip(poisoned, job(processes), strict=True):
        before, at = job_result[policy]["history"][POISONED - 1 : POISONED + 1]
        assert before["kept"] == result["history"][POISONED]["kept"] != at["kept"]
    assert_same_training(one(processes, CALLS[f"{policy}, poisoned"]), poisoned)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("recipe", STORAGES)
def test_compact_state_is_the_same_in_many_processes(
    recipe: str, processes: int, one: Any, job: Any
) -> None:
    """Random words too, and codes whose blocks lie on several devices."""
    results = [result[recipe] for result in job(processes)]
    assert_same_training(one(processes, CALLS[recipe]), results)
    assert results[0]["history"][-1]["skipped"] == 1
    kept = {"remainder": ".master", "stochastic": ".codes"}[recipe]
    moved = [path for path in results[0]["end"] if kept in path]
    assert moved
    assert all(results[0]["end"][path] != results[0]["start"][path] for path in moved)


@pytest.mark.slow
def test_a_state_created_outside_jit(one: Any, job: Any) -> None:
    """Nothing but its scalars is on one device, and `jit` puts them where they belong."""
    started = one(1, masters())["start"]
    for result in job(2):
        created = result["created outside jit"]
        assert created["digests"] == started
        assert created["converted"] == started
        assert created["has_own_params"]
        assert created["has_average"]
        assert created["finite"]
        assert len(created["sharded"]) == 6  # two matrices, their masters and moments
        assert set(created["sharded"]) == {str(jax.P("data"))}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_every_process_sees_that_training_stalls(processes: int, one: Any, job: Any) -> None:
    said = {result["stall"] for result in job(processes)}
    assert said == {one(processes, CALLS["stall"])}
    assert "3 optimizer steps in a row were skipped" in said.pop()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.exhaustive
def test_a_checkpoint_of_four_processes_restored_on_fewer(
    processes: int, one: Any, job: Any, folder: Path
) -> None:
    saved = job(4)[0]["masters"]
    call = masters(folder=str(folder / "of-4"))
    if processes == 1:
        results = [one(1, call)]
    else:
        jobs = run_job({"restored": call}, processes=2, folder=folder / "restored")
        results = [result["restored"] for result in jobs]
    for result in results:
        assert result["first"] == SAVED
        assert result["start"] == saved["saved"][str(SAVED)]
        assert result["local_shapes"]["w1"] == [16 // processes, 32]
        assert losses(result) == losses(saved, start=SAVED)
        assert result["end"] == saved["end"]
    # The state had something to lose, and is not that of another iteration.
    parts = saved["saved"][str(SAVED)]
    changed = {path for path in parts if parts[path] != saved["start"][path]}
    assert changed == parts.keys() - {
        ".opt_state.consecutive_skips",
        ".opt_state.grads_finite",
    }
    assert all(saved["end"][path] != parts[path] for path in parts if "w1" in path)
    assert_same_training(one(1, masters()), [result["masters"] for result in job(4)])


@pytest.mark.slow
def test_a_killed_job_goes_on_from_its_last_checkpoint(folder: Path, one: Any) -> None:
    """Process 1 is killed in a step, then, in the second attempt, in the middle of a save.

    Params and momentum are rounded at random, so that the counts have to come back too.
    """
    checkpoints = folder / "killed"

    def call(**dies: Any) -> dict[str, Call]:
        save = {"folder": str(checkpoints), "save_at": [2, 4, 6]}
        dies = dies | {"process": 1} if dies else None
        return {"run": masters("stochastic", **save, dies=dies)}

    layout = {"processes": 2, "devices": 2}
    for i, dies in enumerate(({"iteration": 4, "at": "step"}, {"iteration": 5, "at": "save"})):
        started = time.monotonic()
        survivor, victim = start_job(call(**dies), folder=folder / f"attempt-{i}", **layout)
        assert (victim.returncode, victim.terminated) == (-signal.SIGKILL, False), victim.output
        assert survivor.returncode != 0
        assert time.monotonic() - started < 200
        complete, rest = [], []
        for name in sorted(x.name for x in checkpoints.iterdir()):
            (complete if name.isdigit() else rest).append(name)
        assert complete == ["2", "4"]
        assert [name[:2] for name in rest] == (["6."] if dies["at"] == "save" else [])
    for result in run_job(call(), folder=folder / "last attempt", **layout):
        assert result["run"]["first"] == 4
        expected = one(1, masters("stochastic"))
        assert losses(result["run"]) == losses(expected, start=4)
        assert result["run"]["end"] == expected["end"]
        assert result["run"]["local_shapes"]["w1"] == [4, 32]
    assert sorted(x.name for x in checkpoints.iterdir()) == ["2", "4", "6"]


# ------------------------------------------------------------------------------- the launcher


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


HANGS = python("import time; print('hangs', flush=True); time.sleep(100)")


def test_a_failed_process_ends_the_others_and_is_shown_first(tmp_path: Path) -> None:
    started = time.monotonic()
    exits = run_together([HANGS, python("raise SystemExit('boom')")], folder=tmp_path, timeout=60)
    assert time.monotonic() - started < 30
    assert [(e.returncode, e.terminated) for e in exits] == [(-signal.SIGKILL, True), (1, False)]
    message = str(JobFailed(exits))
    assert message.index("boom") < message.index("hangs")


def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    exits = run_together([HANGS, python("print('done')")], folder=tmp_path, timeout=2)
    assert [(e.returncode, e.terminated) for e in exits] == [(-signal.SIGKILL, True), (0, False)]
    assert [e.output for e in exits] == ["hangs\n", "done\n"]


def test_a_taken_port_is_retried(tmp_path: Path) -> None:
    ports = []

    def commands(port: int) -> list[list[str]]:
        ports.append(port)
        taken = len(ports) < 2
        return [python("raise SystemExit('Address already in use')" if taken else "")]

    assert [e.returncode for e in retry_ports(commands, folder=tmp_path, timeout=60)] == [0]
    assert len(ports) == 2


@pytest.mark.slow
def test_what_a_worker_raises_is_shown(tmp_path: Path) -> None:
    calls = {"run": Call("train", recipe="no such recipe")}
    with pytest.raises(JobFailed, match="KeyError: 'no such recipe'"):
        run_job(calls, processes=1, folder=tmp_path)
