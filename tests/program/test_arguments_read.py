"""Which arguments a program reads, through calls, loops and branches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmp._program.facts import arguments_read
from jaxmp._program.program import read

pytestmark = pytest.mark.jax


def reads(fun: Callable[..., Any], count: int, wanted: list[bool] | None = None) -> list[bool]:
    program = read(jax.make_jaxpr(fun)(*(jnp.float32(i) for i in range(count))))
    return arguments_read(program, wanted or [True] * len(program.outputs))


def scanned(x: Any, y: Any, z: Any) -> Any:
    # A turn makes the first from the second, the second from the third; the third stays.
    return lax.scan(lambda c, _: ((c[1] + 1, c[2] + 1, c[2]), c[0]), (x, y, z), None, length=3)


def looped(x: Any, y: Any, z: Any) -> Any:
    return lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0] * 2, c[1] + 1, c[2]), (x, y, z))


def printed(x: Any, y: Any) -> Any:
    jax.debug.print("{}", y)
    return x


def branched(p: Any, x: Any, y: Any, z: Any) -> Any:
    return lax.cond(p > 0, lambda x, y, z: x, lambda x, y, z: y * 2, x, y, z)


@pytest.mark.parametrize(
    ("fun", "wanted", "want"),
    [
        (lambda x, y: x + 0 * y, None, [True, True]),
        (lambda x, y: (jnp.sin(x), jnp.sin(y)), [False, True], [False, True]),
        (jax.jit(lambda x, y: (jnp.sin(x), jnp.sin(y))), [False, True], [False, True]),
        (jax.checkpoint(lambda x, y: (jnp.sin(x), y)), [True, False], [True, False]),
        (scanned, [False, False, True, False], [False, False, True]),
        (scanned, [False, True, False, False], [False, True, True]),
        (scanned, [True, False, False, False], [True, True, True]),
        # How long a loop runs is read for each of its results; the third passes it by.
        (looped, [True, False, False], [True, True, False]),
        (looped, [False, False, True], [False, False, True]),
        (branched, None, [True, True, True, False]),
        (printed, None, [True, True]),
    ],
)
def test_what_is_read(fun: Any, wanted: list[bool] | None, want: list[bool]) -> None:
    assert reads(fun, len(want), wanted) == want
