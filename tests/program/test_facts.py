"""Facts go through every operation that contains programs as values do."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jaxmp._program.facts import NONE, ForwardAnalysis, Labels, arguments_read, made_of, propagate
from jaxmp._program.program import read

pytestmark = pytest.mark.jax

MESH = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))


def both(f: Callable[..., Any]) -> Callable[..., Any]:
    """Of x, y and z: one result of x and y, one of z."""
    return lambda x, y, z: (f(x) + y, 2 * z)


def swapped(x: Any, y: Any, z: Any) -> Any:
    """What enters the first carry reaches the last one in the third turn, and no sooner."""
    return lax.fori_loop(0, 3, lambda i, c: (c[0] + 1, c[0] + c[1], c[1] + c[2]), (x, y, z))


def scanned(x: Any, y: Any, z: Any) -> Any:
    def turn(carry: Any, row: Any) -> Any:
        a, b = carry
        return (a, a + b), (b * row, row)

    return lax.scan(turn, (x[0], y[0]), z)


def chosen(x: Any, y: Any, z: Any) -> Any:
    return lax.cond(jnp.isnan(x[0] - x[0]) | (x[0] > 0), lambda: (y, z), lambda: (y, y + z))


@jax.custom_vjp
def with_own_gradient(x: Any) -> Any:
    return jnp.sin(x)


with_own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,))

PROGRAMS: dict[str, Callable[..., Any]] = {
    "plain": both(jnp.sin),
    "jit": both(jax.jit(jnp.sin)),
    "a jit in a jit": both(jax.jit(lambda x: jax.jit(jnp.sin)(x) * 2)),
    "checkpoint": both(jax.checkpoint(jnp.sin)),
    "custom_jvp": both(jax.nn.relu),
    "custom_vjp": both(with_own_gradient),
    "while": swapped,
    "scan": scanned,
    "a scan that forgets": lambda x, y, z: lax.scan(lambda c, row: (row, c), x[0], y)[0] + z,
    "shard_map": jax.jit(
        jax.shard_map(
            both(jnp.sin), mesh=MESH, in_specs=(P("d"), P("d"), P("d")), out_specs=(P("d"), P("d"))
        )
    ),
    "linear solve": lambda x, y, z: (
        lax.custom_linear_solve(lambda v: v * 2, x + y, lambda _, b: b / 2, symmetric=True),
        z,
    ),
}
ARGUMENTS = jax.device_put(tuple(np.linspace(0.1, 0.4 + i, 4) for i in range(3)))


def labels_of(fun: Callable[..., Any], given: Sequence[Labels]) -> list[Labels]:
    closed = jax.make_jaxpr(fun)(*ARGUMENTS)
    union = lambda equation, found: NONE.union(*found)  # noqa: E731
    return made_of(closed, given, union, lambda aval: True)


def reached_by_nan(fun: Callable[..., Any]) -> list[set[int]]:
    """From which arguments each result is computed, as a NaN in one of them shows."""
    found: list[set[int]] = [set() for _ in jax.tree.leaves(jax.eval_shape(fun, *ARGUMENTS))]
    for i in range(len(ARGUMENTS)):
        args = [x * np.nan if i == j else x for j, x in enumerate(map(np.asarray, ARGUMENTS))]
        for result, reached in zip(jax.tree.leaves(jax.jit(fun)(*args)), found, strict=True):
            if np.isnan(result).any():
                reached.add(i)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_labels_go_where_values_go(name: str) -> None:
    made = labels_of(PROGRAMS[name], [frozenset({i}) for i in range(3)])
    assert list(map(set, made)) == reached_by_nan(PROGRAMS[name])


def test_a_branch_joins_what_either_makes() -> None:
    """What decides between branches is no part of what they make."""
    made = labels_of(chosen, [frozenset({i}) for i in range(3)])
    assert made == [{1}, {1, 2}]


def test_a_function_is_followed_once_for_each_way_that_it_is_called() -> None:
    """Else 2 ** 12 calls of the innermost function would each be followed."""
    f: Callable[[Any], Any] = jnp.sin
    for _ in range(12):
        f = jax.jit(lambda x, f=f: f(f(x)))
    runs: collections.Counter[str] = collections.Counter()

    def rule(equation: Any, found: Sequence[Labels]) -> Labels:
        runs[equation.primitive.name] += 1
        return NONE.union(*found)

    closed = jax.make_jaxpr(f)(jnp.float32(1))
    assert made_of(closed, [frozenset({"x"})], rule, lambda aval: True) == [{"x"}]
    assert runs["sin"] == 2  # those of the innermost function


def test_a_question_may_forget_literals_and_types() -> None:
    """Zeros through a loop, as `_training.frozen` asks: all of what is joined must be zero."""
    is_zero: ForwardAnalysis[bool] = ForwardAnalysis(
        bottom=False,
        join=lambda a, b: a and b,
        transfer=lambda op, found: [all(found)] * len(op.outputs),
        literal=lambda atom: bool(np.all(atom.val == 0)),
        restrict=lambda aval, fact: fact and jnp.issubdtype(aval.dtype, jnp.floating),
    )

    def ask(fun: Callable[..., Any], given: list[bool]) -> list[bool]:
        closed = jax.make_jaxpr(fun)(*ARGUMENTS[: len(given)])
        return propagate(read(closed), given, is_zero)

    turn = lambda c, _: ((c[0] + c[1], c[1]), None)  # noqa: E731
    loop = lambda x, y: lax.scan(turn, (x, y), None, length=3)[0]  # noqa: E731
    assert ask(loop, [True, True]) == [True, True]
    assert ask(loop, [True, False]) == [False, False]
    assert ask(loop, [False, True]) == [False, True]
    assert ask(lambda x: (x * 0.0, x.astype(int)), [True]) == [True, False]


def test_what_joins_is_the_same_in_any_order() -> None:
    """A fixpoint must not depend on the order of the branches."""
    swap = lambda f, g: lambda x, y, z: lax.switch(0, [f, g, f], x, y, z)  # noqa: E731
    first, second = (lambda x, y, z: x + y), (lambda x, y, z: z)
    given = [frozenset({i}) for i in range(3)]
    assert labels_of(swap(first, second), given) == labels_of(swap(second, first), given)
    assert functools.reduce(frozenset.union, labels_of(swap(first, second), given)) == {0, 1, 2}


# --- which arguments a program reads -----------------------------------------------------------


def reads(fun: Callable[..., Any], count: int, wanted: list[bool] | None = None) -> list[bool]:
    program = read(jax.make_jaxpr(fun)(*(jnp.float32(i) for i in range(count))))
    return arguments_read(program, wanted or [True] * len(program.outputs))


def rotated(x: Any, y: Any, z: Any) -> Any:
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
        (rotated, [False, False, True, False], [False, False, True]),
        (rotated, [False, True, False, False], [False, True, True]),
        (rotated, [True, False, False, False], [True, True, True]),
        # How long a loop runs is read for each of its results; the third passes it by.
        (looped, [True, False, False], [True, True, False]),
        (looped, [False, False, True], [False, False, True]),
        (branched, None, [True, True, True, False]),
        (printed, None, [True, True]),
    ],
)
def test_what_is_read(fun: Any, wanted: list[bool] | None, want: list[bool]) -> None:
    assert reads(fun, len(want), wanted) == want
