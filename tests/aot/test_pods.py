"""A GPT of 1.1 billion params on pods: it fits as planned, and each layer sends as on eight."""

import importlib
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from tests.aot.conftest import Compiler
from tests.support.surroundings import benchmark_path  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion", "benchmark_path")]

# Devices of a slice, and slices.
TPUS = {
    **{"8 TPUs": (8, 1), "64 TPUs": (64, 1), "128 TPUs": (128, 1), "256 TPUs": (256, 1)},
    **{"2 x 16 TPUs": (16, 2), "3 x 8 TPUs": (8, 3), "4 x 8 TPUs": (8, 4)},
}
GPUS = {"8 H100": (8, 1), "64 H100": (64, 1)}
# Attention has 4 d * d weights, the hidden layer 8 d * d, in millions.
LAYER = 12 * 2048**2 / 1e6
HBM = 16_000


def verify(pod: str, mode: str, devices: int, slices: int) -> None:
    bench: Any = importlib.import_module("bench_pods")
    assert bench.PODS.keys() == TPUS.keys() | GPUS.keys()
    row = bench.compiled_step(pod, mode)
    tensor = {"fsdp": 1, "fsdp+tp": 4}[mode]
    # Each layer is gathered twice in bfloat16 and summed once in float32, on any number of devices.
    # (The scales of its norms are whole, and summed along with the rest.)
    assert row["gathers"] == pytest.approx(2 * LAYER / tensor, rel=1e-3)
    assert row["sums"] == pytest.approx(LAYER / tensor, rel=1e-3)
    assert row["gathers_float32"] == row["sums_bfloat16"] == 0
    # Between slices goes what a device of a slice holds.
    assert row["between"] == pytest.approx(LAYER / devices if slices > 1 else 0, rel=1e-3)
    assert row["state"] == pytest.approx(row["planned"], rel=0.005)
    assert row["temp"] < 1.25 * row["temp_planned"]
    assert row["state"] + row["temp"] < HBM


# Before each change lands, one of each kind; the others take turns.
LANDING = {("64 TPUs", "fsdp"), ("2 x 16 TPUs", "fsdp+tp"), ("64 H100", "fsdp")}


def cases(pods: Iterable[str]) -> list[Any]:
    keys = itertools.product(pods, ("fsdp", "fsdp+tp"))
    return [pytest.param(*k, marks=[] if k in LANDING else pytest.mark.exhaustive) for k in keys]


@pytest.mark.parametrize(("pod", "mode"), cases(TPUS))
def test_tpus(tpu: Compiler, pod: str, mode: str) -> None:
    verify(pod, mode, *TPUS[pod])


@pytest.mark.parametrize(("pod", "mode"), cases(GPUS))
def test_gpus(gpu: Compiler, pod: str, mode: str) -> None:
    verify(pod, mode, *GPUS[pod])
