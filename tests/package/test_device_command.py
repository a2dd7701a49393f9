"""`make device` on a CPU, at the smallest sizes: every part ends, and what fails stops no other."""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.lab.timing import Contender
from tests.support.surroundings import benchmark_path  # noqa: F401

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
pytestmark = pytest.mark.usefixtures("benchmark_path")


def module(name: str) -> Any:
    return importlib.import_module(f"on_device.{name}")


def run(folder: pathlib.Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Runs the command; returns its status, its results and its page."""
    command = [sys.executable, str(BENCHMARKS / "device.py"), "--small", "--work", str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=600
    )
    (path,) = folder.glob("device_*.json")
    return process.returncode, json.loads(path.read_text()), path.with_suffix(".md").read_text()


def contenders(results: dict[str, Any], part: str) -> dict[str, Any]:
    return {
        row["contender"]: row
        for row in results["rows"]
        if row["part"] == part and "contender" in row
    }


@pytest.mark.slow
def test_a_part_that_fails_stops_no_other(tmp_path: pathlib.Path) -> None:
    """A failed part must not cost the results of the others."""
    parts = "ceilings", "optimizer", "float8"
    status, results, page = run(tmp_path, "--only", *parts, "--fail", "optimizer")
    assert status == 1
    reports = results["parts"]
    assert [reports[part]["status"] for part in parts] == ["ok", "failed: exit 1", "ok"]
    assert "RuntimeError: planted by --fail" in reports["optimizer"]["log"]
    assert "RuntimeError: planted by --fail" in page
    layers = contenders(results, "float8")
    assert layers["tensorwise, 64 x 128 x 128"]["median_ms"] > 0
    assert "| copy |" in page
    assert results["small"]
    assert "A dry run at toy sizes: it measures nothing." in page
    assert not {"holds", "REFUTED"} & {claim["verdict"] for claim in results["claims"]}


@pytest.mark.slow
def test_a_part_ends_when_its_time_is_over(tmp_path: pathlib.Path) -> None:
    """It is ended from outside, and the page written within the budget; later parts do not begin.

    Three seconds are not enough for the tests, and the one that is left not for another part.
    """
    began = time.monotonic()
    status, results, page = run(tmp_path, "--only", "plans", "right", "--budget", "9")
    assert time.monotonic() - began < 15  # with the start of the interpreter
    reports = results["parts"]
    assert reports["right"]["status"] == "ended: out of time"
    assert reports["plans"]["status"] == "not run: out of time"
    assert "ended: out of time" in page
    assert status == 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.every_case
def test_every_part_runs_to_its_end(tmp_path: pathlib.Path) -> None:
    status, results, page = run(tmp_path)
    statuses = {name: report["status"] for name, report in results["parts"].items()}
    if importlib.util.find_spec("torch") is None:
        assert statuses.pop("torch_gpt") == "skipped: torch is not installed"
    assert set(statuses.values()) == {"ok"}
    assert set(results["parts"]) == {part.name for part in module("parts").PARTS}
    assert status == 0
    errors = {row["contender"]: row["error"] for row in results["rows"] if "error" in row}
    assert errors == {}
    assert {row["outcome"] for row in contenders(results, "right").values()} <= {
        "passed",
        "skipped",
    }
    for part in ("gpt", "optimizer", "float8", "vision"):
        rows = contenders(results, part)
        measured = [row for row in rows.values() if row.get("median_ms")]
        assert len(measured) > len(rows) / 2
        assert all(row.get("planned_bytes") for row in measured)
    # CPUs have no allocator that tells its peak, and PyTorch need not be here.
    unseen = [claim["claim"] for claim in results["claims"] if claim["verdict"] == "not measured"]
    assert all(re.search("temporaries|peak|PyTorch|Large layers", text) for text in unseen)
    assert results["seconds"] < 300
    for title in (part.title for part in module("parts").PARTS):
        assert f"## {title}" in page


GPU = {"small": False, "platform": "gpu"}
Rows = list[dict[str, Any]]


def rows(part: str, **contenders: dict[str, Any]) -> Rows:
    return [{"part": part, "contender": name} | row for name, row in contenders.items()]


def beside(part: str, contender: str, **row: Any) -> Rows:
    """A contender and its baseline, which takes 10 ms and 30 bytes."""
    base = {"median_ms": 10.0, "planned_bytes": 30, "state_bytes": 10}
    return rows(part, base=base, **{contender: row | {"baseline": "base"}})


def layer(milliseconds: float, estimate: float) -> dict[str, Any]:
    return {"median_ms": milliseconds, "estimated": estimate, "baseline": "base"}


def outcomes(*texts: str) -> Rows:
    return rows("right", **{f"test_{i}": {"outcome": text} for i, text in enumerate(texts)})


LEAN = "jaxmp, recompute auto, plain attention"
BOUND = {"planned_bytes": 10, "peak_is_bound": True}
FAST, CHECKED = "A step under autocast", "A checked step of the optimizer"
# Bytes in 10 ms, where a copy moves 100.
MOVES = {"median_ms": 10.0, "bytes_moved": 60, "copy_bytes_per_second": 1e4}
COPY = {"jaxmp, float32, skip auto": MOVES}
LAYERS = {"base": {"median_ms": 10}, "a": layer(8, 1.25), "b": layer(8, 1.5), "c": layer(5, 1.5)}
NEAR, FAR = ({"peak_bytes": 100, "planned_bytes": size} for size in (98, 92))
TORCH = {
    "autocast bfloat16, compiled": {"median_ms": 14},
    "autocast and residuals bfloat16, compiled": {"median_ms": 12},
}
# Of each claim: rows, the number by hand, and the verdict. All come to a verdict as the first do.
CASES: dict[str, list[tuple[Rows, float | None, str]]] = {
    "Tests whose truth depends on the device: how many failed": [
        (outcomes("passed", "skipped"), 0, "holds"),
        (outcomes("failed", "not run"), 1, "REFUTED"),
        (outcomes("passed", "not run"), None, "not measured"),
        (outcomes("skipped"), None, "not measured"),
    ],
    f"{FAST}: time over casts by hand": [
        (beside("gpt", "jaxmp, autocast", median_ms=10.4), 1.04, "holds"),
        (beside("gpt", "jaxmp, autocast", median_ms=11), 1.1, "REFUTED"),
    ],
    f"{FAST}: peak over casts by hand": [
        (beside("gpt", "jaxmp, autocast", planned_bytes=33), 1.1, "REFUTED"),
        (beside("gpt", "jaxmp, autocast", peak_bytes=30), None, "not measured"),
    ],
    "`recompute` in a scan: temporaries over casts by hand": [
        (beside("gpt", LEAN, planned_bytes=16, state_bytes=10), 0.3, "holds")
    ],
    "`recompute` in a scan: time over casts by hand": [
        (beside("gpt", "jaxmp, recompute auto", median_ms=12), 1.2, "REFUTED")
    ],
    "`remainder` with int8 moments: peak over float32 masters by hand": [
        (beside("gpt", "jaxmp, remainder and int8", planned_bytes=27), 0.9, "holds")
    ],
    f"{CHECKED}: time over an unchecked one": [
        (beside("optimizer", "jaxmp, float32, skip auto", median_ms=13), 1.3, "REFUTED")
    ],
    f"{CHECKED}: share of the bandwidth of a copy": [(rows("optimizer", **COPY), 0.6, "REFUTED")],
    "Large layers in float8: least speedup over the estimate": [
        (rows("float8", **LAYERS), 1.25 / 1.5, "REFUTED"),
        (rows("float8", **LAYERS | {"c": {"estimated": 1.5}}), None, "not measured"),
    ],
    "A train step of width 4,096 in float8: speedup over casts by hand": [
        (beside("float8", "jaxmp, float8, width 4,096", median_ms=8), 1.25, "holds")
    ],
    "The compiler's peaks: the largest distance from the allocator's": [
        (rows("gpt", near=NEAR, far=FAR, no=FAR | BOUND), 0.08, "REFUTED")
    ],
    "The faster of PyTorch's compiled steps: time over autocast's with `recompute`": [
        (
            rows("gpt", **{"jaxmp, recompute auto": {"median_ms": 10}})
            + rows("torch_gpt", **TORCH),
            1.2,
            "holds",
        )
    ],
}


@pytest.mark.parametrize("text", CASES)
def test_claims(text: str) -> None:
    """What each reads from rows, and its verdict; nothing from none, and no verdict of dry runs."""
    claims = module("claims")

    def claim(rows: Rows, context: dict[str, Any]) -> dict[str, Any]:
        table = {row["claim"]: row for row in claims.verdicts(context, claims.as_rows(rows))}
        assert set(table) == set(CASES)
        return table[text]

    for measured, number, verdict in CASES[text]:
        row = claim(measured, GPU)
        assert row["verdict"] == verdict
        if number is None:
            assert row["measured"] is None
        else:
            assert float(row["measured"]) == pytest.approx(number, abs=1e-3)
        for context in (GPU | {"small": True}, GPU | {"platform": "cpu"}):
            expected = "not measured" if number is None else "dry run"
            assert claim(measured, context)["verdict"] == expected
    assert claim([], GPU)["verdict"] == "not measured"


@pytest.mark.slow
def test_a_run_is_continued(tmp_path: pathlib.Path) -> None:
    """What is there is not measured again, but for what is asked for; other devices' is refused."""
    options = "--only", "optimizer"
    _, first, _ = run(tmp_path, *options)
    (path,) = tmp_path.glob("device_*.json")
    lacking, asked = "jaxmp, float32, skip cond", "jaxmp, bfloat16, master kahan"
    first["rows"] = [row for row in first["rows"] if row.get("contender") != lacking]
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(first))
    path.unlink()
    _, second, _ = run(tmp_path, *options, "--continue", str(earlier), "--again", "kahan")
    before, after = contenders(first, "optimizer"), contenders(second, "optimizer")
    assert set(after) - set(before) == {lacking}
    assert {name for name in before if before[name] != after[name]} == {asked}

    device = importlib.import_module("device")
    first["machine"] = "NVIDIA A100"
    earlier.write_text(json.dumps(first))
    arguments = device._parse(["--continue", str(earlier)])
    with pytest.raises(SystemExit, match=r"those results are of one NVIDIA A100, and this is one"):
        device._continue(arguments, {"name": "NVIDIA H200"}, tmp_path / "rows.jsonl")


def case(
    name: str, size: int = 4, step: Any = lambda state, batch: (state, {}), **facts: str
) -> Any:
    """A contender with a state of some numbers, and a batch of four."""
    contender = Contender(name, lambda: jnp.zeros(size), step)
    return module("steps").Case(contender, jnp.ones(4, jnp.float32), facts)


def measured(folder: pathlib.Path, cases: list[Any], seconds: float = 60.0) -> dict[str, Any]:
    """The rows that are recorded in so much time."""
    recorder = module("recorder")
    writer = recorder.Recorder(folder / "rows.jsonl", "gpt", time.time() + seconds, small=True)
    module("steps").measure(writer, cases)
    return {row["contender"]: row for row in writer.rows("gpt") if "contender" in row}


def test_a_peak_is_of_the_contender_that_raises_the_mark(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of others it is a bound. Batches of others, which lie there all the while, do not count.

    The allocator is told here what to say: that of a CPU says nothing.
    """

    def step(state: Any, batch: Any) -> Any:
        return state + batch[0], {"loss": jnp.sum(batch)}

    # In use before the state is there; the mark with it, and after the steps. Then a second round.
    turns = [
        *[("small", (100, 100, 300)), ("middle", (100, 300, 300)), ("large", (100, 350, 400))],
        *[("large", (100, 400, 400)), ("middle", (100, 400, 400)), ("small", (100, 400, 400))],
    ]
    said = iter([number for _, numbers in turns for number in numbers])
    monkeypatch.setattr(module("steps"), "_allocated", lambda what: next(said))
    sizes = {"large": 4096, "small": 8, "middle": 512}
    rows = measured(tmp_path, [case(name, size, step) for name, size in sizes.items()])
    assert list(said) == []
    assert [rows[name]["peak_bytes"] for name in ("small", "middle", "large")] == [216, 216, 316]
    assert [rows[name]["peak_is_bound"] for name in rows] == [name == "middle" for name in rows]
    assert [len(rows[name]["seconds"]) for name in rows] == [4, 4, 4]
    assert {row["loss"] for row in rows.values()} == {4.0}
    assert [rows[name]["order"] for name in ("large", "small", "middle")] == [0, 1, 2]


def test_a_first_compilation_that_is_slow_stops_no_other(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are compiled and measured meanwhile, and their rows say so."""
    steps, ended = module("steps"), threading.Event()
    compile_step = steps._compile

    def slow(first: Any, alone_until: float, case: Any, *lowered: Any) -> Any:
        if case.name == "slow":
            ended.wait(60)
        return compile_step(first, alone_until, case, *lowered)

    monkeypatch.setattr(steps, "_compile", slow)
    try:
        rows = measured(tmp_path, [case("slow"), case("quick")], seconds=6)
    finally:
        ended.set()
    assert rows["slow"]["remark"] == "not measured: out of time"
    assert rows["quick"]["median_ms"] > 0
    assert rows["quick"]["remark"] == "while another contender was compiled"
    assert rows["quick"]["peak_is_bound"]


def test_a_contender_that_raises_stops_no_other(tmp_path: pathlib.Path) -> None:
    """Nor does one that cannot be traced, or for which there is no time. A NaN spoils no page."""

    def nan(state: Any, batch: Any) -> Any:
        return state, {"loss": jnp.nan * state[0]}

    def raises(state: Any, batch: Any) -> Any:
        raise ValueError("two\nlines")

    def fails(state: Any, batch: Any) -> Any:
        def callback(x: Any) -> Any:
            raise MemoryError("none left")

        return jax.pure_callback(callback, state, state), {}

    cases = case("right", 4, nan), case("does not trace", 4, raises), case("fails", 4, fails)
    rows = measured(tmp_path, list(cases))
    measured(tmp_path, [case("late", remark="a fact")], seconds=0)
    assert rows["right"]["median_ms"] > 0
    assert rows["does not trace"]["error"] == "ValueError: two lines"
    assert rows["fails"]["error"]
    context = {"machine": "a card", "date": "today", "versions": {"jax": "1"}, "driver": None}
    context |= {"small": False, "platform": "gpu", "command": "", "seconds": 1.0}
    context["parts"] = {"gpt": {"status": "ok", "seconds": 1.0, "log": ""}}
    written = module("recorder").read_rows(tmp_path / "rows.jsonl")
    text = module("page").write(tmp_path / "out", context, written).read_text()
    assert "| nan |" in text
    assert "| not measured: out of time |" in text
    assert "| ValueError: two lines |" in text


def test_rows_survive_a_process_that_is_ended(tmp_path: pathlib.Path) -> None:
    recorder = module("recorder")
    path = tmp_path / "rows.jsonl"
    writer = recorder.Recorder(path, "gpt", time.time() + 10, small=True)
    writer.record(contender="a", median_ms=2.0, loss=float("nan"))
    writer.record(contender="b", median_ms=3.0)
    writer.record(contender="a", median_ms=1.0, loss=float("inf"))
    with path.open("a") as file:
        file.write('{"part": "gpt", "contender": "c", "medi')
    assert len(recorder.read_rows(path)) == 2
    rows = {row["contender"]: row for row in recorder.read_rows(path)}
    assert rows["a"] == {"part": "gpt", "contender": "a", "median_ms": 1.0, "loss": "inf"}
    assert set(rows) == {"a", "b"}
    assert 9 < writer.seconds_left() <= 10


def results(date: str, **more: Any) -> dict[str, Any]:
    machine = {"machine": f"Card of {date}", "platform": "gpu", "small": False, "date": date}
    return machine | {"versions": {"jax": "0.11.2", "torch": "2.11.0"}, "rows": []} | more


def test_the_site_says_what_the_newest_results_say(tmp_path: pathlib.Path) -> None:
    page = module("page")
    text = f"before\n\n{page.BEGIN}\n\nold\n\n{page.END}\n\nafter\n"
    empty = page.filled(text, tmp_path)
    assert "No result of `make device`" in empty
    assert "old" not in empty
    assert empty.startswith("before\n")
    assert empty.endswith("after\n")
    everything = [
        results("2026-01-02"),
        results("2026-01-01"),
        results("2026-01-03", platform="cpu"),
        results("2026-01-04", small=True),
    ]
    for number, each in enumerate(everything):
        (tmp_path / f"device_{number}.json").write_text(json.dumps(each))
    filled = page.filled(text, tmp_path)
    assert "Measured on one Card of 2026-01-02 on 2026-01-02, with jax 0.11.2 and PyTorch" in filled
    assert page.filled(filled, tmp_path) == filled
    with pytest.raises(ValueError, match="no section between <!-- device: begin -->"):
        page.filled("nothing", tmp_path)


def test_docs_have_the_section_of_the_results_that_are_here() -> None:
    """`python benchmarks/device.py --fill-docs` writes it."""
    text = (ROOT / "docs" / "why.md").read_text()
    assert module("page").filled(text, BENCHMARKS / "results") == text


def test_no_part_needs_more_than_python_to_be_started(tmp_path: pathlib.Path) -> None:
    """The process that starts the parts must not touch the device, nor need what wheels bring."""
    program = (
        "import sys; import device; "
        "print({'jax', 'numpy', 'jaxmp', 'torch', 'jmp'} & {x.split('.')[0] for x in sys.modules})"
    )
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert process.stdout.strip() == "set()", process.stderr
