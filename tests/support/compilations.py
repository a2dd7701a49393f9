"""Counts what XLA compiles, by the events that JAX reports."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

Count = Callable[[], int]

# Of one operation each, they take half a second.
MOST_PROGRAMS = 30


@pytest.fixture
def compilations() -> Iterator[Count]:
    """How many programs XLA has compiled since the test began."""
    count = 0

    def listen(name: str, *_: Any, **__: Any) -> None:
        nonlocal count
        count += "backend_compile" in name

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: count
    with contextlib.suppress(AssertionError):  # Tunix removes everybody's listeners
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True)
def budget(request: pytest.FixtureRequest, compilations: Count) -> Iterator[None]:
    """Fails a quick case that compiles more programs than it may.

    Inputs and comparisons by NumPy compile nothing, nor does `jax.device_put`; one `jax.jit` around
    what a case computes is one program. `@pytest.mark.programs(N, reason=...)` is for cases about
    operations outside of `jit`.
    """
    yield
    mark = request.node.get_closest_marker("programs")
    most = mark.args[0] if mark else MOST_PROGRAMS
    is_quick = not any(map(request.node.get_closest_marker, ("slow", "exhaustive")))
    if is_quick and (count := compilations()) > most:
        pytest.fail(f"compiled {count} programs, where {most} are allowed: see {__name__}")
