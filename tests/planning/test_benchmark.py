"""Policies timed on the device at hand: what is timed, how it is compared, and what is said."""

import json
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

from jaxmp._inspect.tables import as_text
from jaxmp._planning.benchmark_report import BenchmarkReport, PolicyTiming
from jaxmp._planning.timing import Measurement
from jaxmp.diagnostics import benchmark

PARAMS = {"w": jnp.ones((8, 8)), "count": jnp.zeros((), jnp.int32)}
BATCH = jnp.ones((4, 8))


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["w"]) ** 2)


def test_policies_take_turns_and_train() -> None:
    calls: list[str] = []

    def factory(policy: str) -> Any:
        def start() -> Any:
            calls.append(policy)
            return jnp.zeros(())

        return start, lambda state, batch: (state + 1, {"loss": state})

    report = benchmark(factory, None, BATCH, policies=("float32", "bfloat16"), rounds=3, steps=2)
    assert [row.policy for row in report.rows] == ["float32", "bfloat16"]
    traced, timed = calls[:2], calls[2:]
    assert traced == ["float32", "bfloat16"]
    assert timed == ["float32", "bfloat16"] * 3  # one after the other in each round
    # A step that is not timed, and two that are.
    assert [row.metrics["loss"] for row in report.rows] == [2.0, 2.0]
    assert all(len(row.seconds) == 3 and min(row.seconds) > 0 for row in report.rows)
    assert report.rows[0].ratios == (1.0, 1.0, 1.0)


@pytest.mark.jax
def test_a_model_is_trained_under_each_policy() -> None:
    params = {"w": jnp.ones((8, 8))}
    report = benchmark(
        loss_fn,
        params,
        BATCH,
        policies=("float32", "mixed_float16"),
        optimizer=optax.sgd(1e-3),
        rounds=2,
        steps=1,
    )
    start = float(loss_fn(params, BATCH))
    for row in report.rows:
        assert row.metrics["loss"] == pytest.approx(start, rel=0.1)
        assert row.metrics["loss"] < start  # it trained
        assert row.state_bytes >= 8 * 8 * 4
        assert row.peak_bytes >= row.state_bytes + row.temporary_bytes
        assert row.compile_seconds > 0 < row.trace_seconds
    assert jnp.all(params["w"] == 1), "a copy is trained"
    text = str(report)
    assert "this says nothing about an accelerator" in text
    assert "over float32" in text


def timing(policy: str, *seconds: float, first: tuple[float, ...], **metrics: float) -> Any:
    mine, base = Measurement(list(seconds)), Measurement(list(first))
    return PolicyTiming(
        policy=policy,
        seconds=seconds,
        ratios=tuple(mine.ratios(base)),
        trace_seconds=0.5,
        compile_seconds=1.5,
        peak_bytes=3 * 2**20,
        state_bytes=2**20,
        temporary_bytes=2**20,
        metrics=metrics,
    )


def made(platform: str = "gpu") -> BenchmarkReport:
    first = (1.0, 2.0, 4.0)
    rows = (
        timing("float32", *first, first=first, loss=1.25),
        timing("fast", 0.5, 1.0, 2.2, first=first, loss=1.26),
        timing("unsure", 0.9, 2.2, 4.0, first=first, skipped=1.0),
    )
    return BenchmarkReport(rows, "NVIDIA H100", platform, rounds=3, steps=2)


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down in the third round slows both: the ratio does not see it."""
    _, fast, unsure = made().rows
    assert fast.ratios == pytest.approx((0.5, 0.5, 0.55))
    assert fast.ratio == 0.5
    assert fast.median == statistics.median((0.5, 1.0, 2.2))
    assert fast.differs
    assert not unsure.differs


def test_the_report_says_what_a_reader_must_know() -> None:
    text = " ".join(str(made()).split())
    assert "A train step on NVIDIA H100" in text
    assert "0.50 (0.50 to 0.55)" in text
    assert "what is faster than float32 and what is slower: unsure." in text
    assert "Under unsure steps were skipped" in text
    assert "says nothing about an accelerator" not in text
    assert "says nothing about an accelerator" in " ".join(str(made("cpu")).split())
    read = json.loads(json.dumps(made().as_dict()))
    assert [row["ratio"] for row in read["rows"]] == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("width", [20, 60, 80])
def test_no_terminal_is_too_narrow_for_a_number(width: int) -> None:
    """Rich would cut "500 ms" to "500", and names to nothing."""
    text = as_text(made(), Console(width=width))
    for words in ("fast", "500 ms", "2.20 s", "3.00 MiB", "1.26"):
        assert words in text


def test_a_picture_is_drawn(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "times.svg"
    made().plot(path)
    text = path.read_text()
    # Names and ratios are drawn as curves, with the words in comments.
    assert [f"<!-- {words} -->" in text for words in ("unsure", "0.50 x", "0.51 x")] == [
        True,
        True,
        False,
    ]


def test_without_matplotlib_a_picture_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        made().plot(tmp_path / "times.png")


def test_wrong_arguments_are_errors() -> None:
    for policies in ("float32", ()):
        with pytest.raises(ValueError, match="give policies as a sequence"):
            benchmark(loss_fn, PARAMS, BATCH, policies=policies)
    with pytest.raises(ValueError, match="every policy is timed once, got O1, O1"):
        benchmark(loss_fn, PARAMS, BATCH, policies=("O1", "O1"))
    with pytest.raises(ValueError, match="rounds=1 and steps=5"):
        benchmark(loss_fn, PARAMS, BATCH, rounds=1)
    with pytest.raises(ValueError, match="every step donates its state"):
        benchmark(loss_fn, PARAMS, BATCH, donate=False)
    for options in ({"microbatches": 2}, {"optimizer": optax.sgd(0.1)}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} would change nothing"):
            benchmark(loss_fn, None, BATCH, **options)
    abstract = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(TypeError, match=r"params must be arrays.*estimate takes abstract ones"):
        benchmark(loss_fn, {"w": abstract}, BATCH)


def test_an_error_names_the_policy_that_it_came_under() -> None:
    def broken(params: Any, batch: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        benchmark(broken, {"w": jnp.ones(2)}, BATCH, optimizer=optax.sgd(1.0), rounds=2)
    assert "under the policy 'float32'" in caught.value.__notes__
