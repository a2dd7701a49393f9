"""What is around a test: the folder of a script on its path, compilers that are not looked for."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def example_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")


@pytest.fixture
def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers for devices that are not here, where they are installed, would take their time."""
    hidden, find = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find(name)
    )
