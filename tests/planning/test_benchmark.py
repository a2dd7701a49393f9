"""Policies timed on the device at hand: what is timed, how it is compared, and what is said."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmp import PolicyRules
from jaxmp._tools.planning.benchmark import BenchmarkReport, PolicyTiming, benchmark

PARAMS = {"w": jnp.ones((8, 8)), "count": jnp.zeros((), jnp.int32)}
BATCH = jnp.ones((4, 8))


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["w"]) ** 2)


def test_policies_take_turns() -> None:
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
    assert [row.loss for row in report.rows] == [2.0, 2.0]
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
        assert row.loss == pytest.approx(start, rel=0.1)
        assert row.loss < start  # it trained
        assert row.temporary_bytes > 0
    assert jnp.all(params["w"] == 1), "a copy is trained"


def test_rules_and_a_model_that_casts_are_timed() -> None:
    """Rules have no name of a policy; "none" is an option of the step, for every policy."""

    def loss(params: Any, x: Any) -> Any:
        with jax.named_scope("head"):
            return jnp.mean((x @ params["w"]) ** 2)

    rules = PolicyRules([("head", "float32")], default="mixed_bfloat16")
    args = loss, {"w": jnp.ones((8, 8))}, jnp.ones((4, 8))
    options: Any = {"optimizer": optax.sgd(1e-3), "rounds": 1, "steps": 1}
    report = benchmark(*args, policies=("float32", rules), **options)
    assert [row.policy for row in report.rows] == ["float32", str(rules)]
    plain = benchmark(*args, policies=("float32",), policy="none", **options)
    assert plain.rows[0].loss == report.rows[0].loss


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down in the third round slows both: the ratio does not see it."""
    times, first = (0.5, 1.0, 2.2), (1.0, 2.0, 4.0)
    ratios = tuple(a / b for a, b in zip(times, first, strict=True))
    rows = (
        PolicyTiming("float32", first, (1.0, 1.0, 1.0), 3 * 2**20, 1.25),
        PolicyTiming("fast", times, ratios, 2**20, 1.26),
    )
    report = BenchmarkReport(rows, "NVIDIA H100")
    assert report.rows[1].ratio == 0.5
    text = " ".join(str(report).split())
    for words in ("A train step on NVIDIA H100", "0.50 (0.50 to 0.55)", "over float32", "3.00 MiB"):
        assert words in text
    read = json.loads(json.dumps(report.as_dict()))
    assert [row["ratio"] for row in read["rows"]] == [1.0, 0.5]


def test_wrong_arguments_are_errors() -> None:
    for policies in ("float32", ()):
        with pytest.raises(ValueError, match="give policies as a sequence"):
            benchmark(loss_fn, PARAMS, BATCH, policies=policies)
    with pytest.raises(ValueError, match="rounds=0 and steps=5"):
        benchmark(loss_fn, PARAMS, BATCH, rounds=0)
    abstract = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(TypeError, match=r"params must be arrays, since steps run"):
        benchmark(loss_fn, {"w": abstract}, BATCH)
