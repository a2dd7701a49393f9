"""Counts what XLA compiles, by the events that JAX reports."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

Count = Callable[[], int]


@pytest.fixture
def compilations() -> Iterator[Count]:
    """How many programs XLA has compiled since the test began."""
    count = 0

    def listen(name: str, *_: Any, **__: Any) -> None:
        nonlocal count
        count += "backend_compile" in name

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: count
    jax.monitoring.unregister_event_duration_listener(listen)
