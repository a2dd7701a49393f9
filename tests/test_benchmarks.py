"""The benchmarks run, at toy size, and their rows say what their tables claim to."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = ["--width", "64", "--layers", "2", "--repeats", "2", "--no-write"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


@pytest.fixture(autouse=True)
def benchmark_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own folder is on its path, so that benchmarks can share modules."""
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_optimizer() -> None:
    bench = importlib.import_module("bench_optimizer")
    rows = bench.main([*TINY, "--models", "list", "--policies", "bfloat16"])
    by_name = {row["contender"]: row for row in rows}
    float32 = by_name["optax, float32"]
    masters = by_name["jaxmp bfloat16, apply_gradients, none"]
    assert float32["argument"] == pytest.approx(12, abs=0.5)
    assert masters["argument"] == pytest.approx(14, abs=0.5)


def test_train_step() -> None:
    bench = importlib.import_module("bench_train_step")
    more = ["--vocab", "256", "--context", "32", "--batch", "2", "--policies", "mixed_float16"]
    rows = bench.main([*TINY, *more])
    assert {row["contender"] for row in rows} >= {"jaxmp, mixed_float16", "by hand, mixed_float16"}
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_rules() -> None:
    bench = importlib.import_module("bench_rules")
    tiny = ["--layers", "2", "--repeats", "2", "--processes", "1", "--no-write"]
    rows = bench.main([*tiny, "--flax", "linen", "--stacks", "scan"])
    assert [row["author"] for row in rows] == ["by hand", "by hand, again", "rules"]
    assert all(row["trace"] > 0 and row["first"] > 0 and row["init"] > 0 for row in rows)
    again, rules = rows[1:]
    # Python calls hardly differ from run to run, where times do.
    assert again["trace_calls_ratio"] == pytest.approx(1, abs=0.05)
    assert rules["trace_calls_ratio"] < 1.3
