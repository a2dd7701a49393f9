"""The benchmarks run, at toy size, and their rows say what their tables claim to."""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from tests.support.surroundings import benchmark_path  # noqa: F401

# What others defend as well: these run, each with so many rows.
TINY = "--width 64 --layers 2 --repeats 2 "
RUNS = {
    "bench_optimizer": (TINY + "--models list --policies bfloat16", 5),
    "bench_eager": ("--layers 1 --repeats 2 --steps 2", 2),
    "bench_nnx_step": ("--layers 2 --repeats 2 --steps 2", 2),
    "bench_tracing": ("--cases gpt-4 24-unlike-layers --repeats 1", 4),
    "bench_train_step": (
        TINY + "--vocab 256 --context 32 --batch 2 --policies mixed_float16",
        2,
    ),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("standard_promotion", "benchmark_path"),
]


@pytest.mark.every_case
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str) -> None:
    arguments, least = RUNS[name]
    rows = importlib.import_module(name).main([*arguments.split(), "--no-write"])
    assert len(rows) >= least
    numbers = [x for row in rows for x in row.values() if isinstance(x, float)]
    assert numbers
    assert all(map(math.isfinite, numbers))


def test_rules() -> None:
    bench = importlib.import_module("bench_rules")
    tiny = ["--layers", "2", "--repeats", "2", "--processes", "1", "--no-write"]
    rows = bench.main([*tiny, "--flax", "linen", "--stacks", "scan"])
    assert [row["author"] for row in rows] == ["by hand", "by hand, again", "rules", "autocast"]
    assert all(row["trace"] > 0 and row["first"] > 0 and row["init"] > 0 for row in rows)
    again, rules, autocast = rows[1:]
    # Python calls hardly differ from run to run, where times do.
    assert again["trace_calls_ratio"] == pytest.approx(1, abs=0.05)
    assert rules["trace_calls_ratio"] < 1.3 < autocast["trace_calls_ratio"]


def test_autocast() -> None:
    bench = importlib.import_module("bench_autocast")
    tiny = ["--layers", "2", "--width", "32", "--repeats", "2", "--no-write"]
    tiny += ["--stacks", "one by one", "--libraries", "nnx"]
    rows = bench.main(tiny)
    case = {r["author"]: r for r in rows if r["case"] == "nnx, 2 layers, one by one"}
    # Python calls hardly differ from run to run, where times do. In tests, many are beartype's.
    assert case["nobody, again"]["calls_ratio"] == pytest.approx(1, abs=0.05)
    assert 1.05 < case["by hand"]["calls_ratio"] < case["autocast"]["calls_ratio"] < 4
    assert all(row["total"] > 0 for row in case.values())
    for what in ("a step of plain JAX", "a call of a small function"):
        run = {row["author"]: row for row in rows if row["case"] == what}
        assert all(row["run"] > 0 for row in run.values())
        # Whoever claims to compute in bfloat16 does so.
        exact = next(row["loss"] for name, row in run.items() if name.startswith("nobody"))
        low = [row["loss"] for name, row in run.items() if not name.startswith("nobody")]
        assert len(low) == 4
        assert all(0 < abs(loss - exact) < 0.02 * abs(exact) for loss in low)


def _with_gradient(loss: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Of a function in which dtypes do not mix by themselves."""
    with jax.numpy_dtype_promotion("strict"):
        return jax.jit(jax.value_and_grad(loss))(*args)


def _distance(found: tuple[Any, Any], expected: tuple[Any, Any]) -> float:
    """The error of loss and gradients, of the array that has the largest one for its size."""
    far = [
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ]
    return max(map(abs, far)) if all(map(math.isfinite, far)) else math.inf


@pytest.mark.parametrize("name", ["gpt", "gemma", "vit", "resnet", "lstm", "moe"])
def test_stacked_models(name: str) -> None:
    """They are the same model however they run; a wrong cast or mask in one way would show."""
    models: Any = importlib.import_module("stacked_models")
    sizes = models.Sizes(layers=2, width=32, batch=2, length=16, heads=4, classes=64)
    make = functools.partial(models.MODELS[name], sizes)
    args = make().params(), make().batch()
    exact = _with_gradient(make().loss, *args)
    assert all(jnp.linalg.norm(x) > 0 for x in jax.tree.leaves(exact))
    dots = jax.checkpoint_policies.dots_saveable
    for same in (
        make(scan=False).loss,
        make(checkpoint=dots).loss,
        jaxmp.recompute(make().loss),
        jaxmp.recompute(make(scan=False).loss, "always"),
    ):
        assert _distance(_with_gradient(same, *args), exact) < 1e-4
    by_hand = _with_gradient(make(by_hand=True).loss, *args)
    autocast = _with_gradient(jaxmp.autocast(make().loss, "mixed_bfloat16"), *args)
    most = 0.5 if name == "moe" else 0.2  # where rounding may send a token to another expert
    assert 1e-3 < _distance(by_hand, exact) < most
    assert 1e-3 < _distance(autocast, exact) < most
    recomputed = _with_gradient(jaxmp.recompute(make(by_hand=True).loss), *args)
    # XLA leaves out roundings by itself, others in each of the two: they differ by roundings.
    assert _distance(recomputed, by_hand) < 1.2 * _distance(by_hand, exact)


def test_recompute_keeps_less_than_casts_by_hand() -> None:
    """Over autocast, in the geometric mean of all models: 0.33 when this was written."""
    models: Any = importlib.import_module("stacked_models")
    sizes = models.Sizes(layers=2, width=64, batch=4, length=64, heads=4, classes=128)
    logs = []
    for model in models.MODELS.values():
        for scan in (True, False):
            plain, by_hand = model(sizes, scan=scan), model(sizes, scan=scan, by_hand=True)
            args = plain.params(), plain.batch()
            low = jaxmp.autocast(plain.loss, "mixed_bfloat16", recompute="auto")
            kept, most = (jaxmp.audit(loss, *args).residual_bytes for loss in (low, by_hand.loss))
            logs.append(math.log(kept / most))
    assert len(logs) == 12
    assert math.exp(sum(logs) / len(logs)) < 0.45
