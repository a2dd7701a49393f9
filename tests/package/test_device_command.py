"""`make device` on a CPU, at the smallest sizes: every part ends, and what fails stops no other."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import jax.numpy as jnp
import pytest

from jaxmp._planning.timing import Contender

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmark_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own folder is on its path."""
    monkeypatch.syspath_prepend(BENCHMARKS)


def module(name: str) -> Any:
    return importlib.import_module(f"on_device.{name}")


def run(folder: pathlib.Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Runs the command; returns its status, its results and its page."""
    command = [sys.executable, str(BENCHMARKS / "device.py"), "--small", "--results", str(folder)]
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
    """It is what a run of minutes on a device that is lent depends on."""
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
    """What was measured until then is kept, and the page is written within the budget."""
    began = time.monotonic()
    status, results, page = run(tmp_path, "--only", "gpt", "--budget", "12")
    assert time.monotonic() - began < 20
    rows = contenders(results, "gpt")
    late = [name for name, row in rows.items() if "out of time" in row.get("remark", "")]
    assert late or status == 1
    assert "not measured: out of time" in page or "out of time," in page


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.every_case
def test_every_part_runs_to_its_end(tmp_path: pathlib.Path) -> None:
    status, results, page = run(tmp_path)
    assert {name: report["status"] for name, report in results["parts"].items()} == {
        part.name: "ok" for part in module("parts").PARTS
    }
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
    assert all(re.search("memory|temporaries|peak|PyTorch|1.3 and more", text) for text in unseen)
    assert results["seconds"] < 300
    for title in (part.title for part in module("parts").PARTS):
        assert f"## {title}" in page


@pytest.mark.parametrize(
    ("milliseconds", "verdict"), [(1.0, "holds"), (1.2, "REFUTED"), (None, "not measured")]
)
def test_a_claim_holds_or_is_refuted(milliseconds: float | None, verdict: str) -> None:
    claims = module("claims")
    rows = [
        {"part": "gpt", "contender": "by hand, bfloat16", "median_ms": 1.0},
        {
            "part": "gpt",
            "contender": "jaxmp, autocast",
            "median_ms": milliseconds,
            "baseline": "by hand, bfloat16",
        },
    ]
    by_part = claims.as_rows(rows)
    (row,) = (
        claim
        for claim in claims.verdicts({"small": False, "platform": "gpu"}, by_part)
        if "as fast as casts by hand" in claim["claim"]
    )
    assert row["verdict"] == verdict
    (row,) = (
        claim
        for claim in claims.verdicts({"small": True, "platform": "gpu"}, by_part)
        if "as fast as casts by hand" in claim["claim"]
    )
    assert row["verdict"] == ("not measured" if milliseconds is None else "dry run")


def test_a_peak_is_of_the_contender_that_raises_the_mark(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an allocator that is not here: in the second round, none raises it. Batches of others,
    which lie there all the while, are no part of a peak."""
    steps, recorder = module("steps"), module("recorder")
    batch = jnp.ones(4, jnp.float32)

    def case(name: str, size: int) -> Any:
        return steps.Case(
            Contender(
                name,
                lambda: jnp.zeros(size),
                lambda state, batch: (state + batch[0], {"loss": jnp.sum(batch)}),
            ),
            batch,
        )

    # In use before the state is there; the mark with it, and after the steps.
    turns = [
        *[("small", (100, 100, 300)), ("middle", (100, 300, 300)), ("large", (100, 350, 400))],
        *[("large", (100, 400, 400)), ("middle", (100, 400, 400)), ("small", (100, 400, 400))],
    ]
    said = iter([number for _, numbers in turns for number in numbers])
    monkeypatch.setattr(steps, "_allocated", lambda what: next(said))
    writer = recorder.Recorder(tmp_path / "rows.jsonl", "gpt", time.time() + 60, small=True)
    steps.measure(writer, [case("large", 4096), case("small", 8), case("middle", 512)])
    assert list(said) == []
    rows = {row["contender"]: row for row in writer.rows("gpt") if "contender" in row}
    assert [rows[name]["peak_bytes"] for name in ("small", "middle", "large")] == [216, None, 316]
    assert [len(rows[name]["seconds"]) for name in rows] == [4, 4, 4]
    assert {row["loss"] for row in rows.values()} == {4.0}
    assert [rows[name]["order"] for name in ("large", "small", "middle")] == [0, 1, 2]


def test_rows_survive_a_process_that_is_ended(tmp_path: pathlib.Path) -> None:
    recorder = module("recorder")
    path = tmp_path / "rows.jsonl"
    writer = recorder.Recorder(path, "gpt", time.time() + 10, small=True)
    writer.record(contender="a", median_ms=2.0, loss=float("nan"))
    writer.record(contender="b", median_ms=3.0)
    writer.record(contender="a", median_ms=1.0, loss=float("inf"))
    with path.open("a") as file:
        file.write('{"part": "gpt", "contender": "c", "medi')
    rows = {row["contender"]: row for row in recorder.read_rows(path)}
    assert rows["a"] == {"part": "gpt", "contender": "a", "median_ms": 1.0, "loss": "inf"}
    assert set(rows) == {"a", "b"}
    assert 9 < writer.seconds_left() <= 10


def results(date: str, platform: str = "gpu", small: bool = False) -> dict[str, Any]:
    return {
        "machine": f"Card of {date}",
        "platform": platform,
        "small": small,
        "date": date,
        "versions": {"jax": "0.11.2", "torch": "2.11.0"},
        "rows": [],
    }


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
