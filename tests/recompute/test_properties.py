"""Random programs under `recompute`: the same gradients, and nothing dear twice."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

import jaxmp
from tests.support.autocast_checks import error, rows
from tests.support.recompute_checks import MODES, dear_in, gradient

A, B = rows(4, 4) / 2, rows(4, 4, seed=1) / 2


@jax.custom_vjp
def own(x: Any) -> Any:
    return jnp.sin(x)


own.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (g * cos,))


@jax.jit
def helper(x: Any, y: Any) -> Any:
    return jnp.tanh(x @ y) * x


def low(x: Any, y: Any) -> Any:
    return (x.astype(jnp.bfloat16) @ y.astype(jnp.bfloat16)).astype(jnp.float32)


def norm(x: Any, _: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 0.1)


def dropped(x: Any, y: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, y)


def looped(x: Any, y: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.tanh(c @ y) + row[None], jnp.sum(c)), x, y)[0]


def chosen(x: Any, y: Any) -> Any:
    return lax.cond(jnp.sum(x) > 0, lambda: jnp.tanh(x @ y), lambda: jnp.sin(y) * x)


# Of two arrays of 4 x 4 one of the same shape, whose numbers stay small.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "dot": lambda x, y: x @ y / 2,
    "dot in 16 bits": low,
    "tanh": lambda x, _: jnp.tanh(x),
    "add": lambda x, y: (x + y) / 2,
    "multiply": lambda x, y: x * jnp.tanh(y),
    "gelu": lambda x, _: jax.nn.gelu(x),
    "relu": lambda x, _: jax.nn.relu(x),
    "softmax": lambda x, y: jax.nn.softmax(x) + y / 2,
    "norm": norm,
    "mask": lambda x, y: jnp.where(x > 0, x, y),
    "dropout": dropped,
    "sum": lambda x, y: x + jnp.broadcast_to(y.mean(0, keepdims=True), y.shape),
    "largest": lambda x, y: x - jnp.broadcast_to(y.max(0, keepdims=True), y.shape),
    "cumulative sum": lambda x, y: jnp.cumsum(x, 0) / 4 + y,
    "sort": lambda x, _: jnp.sort(x),
    "gather": lambda x, y: x[jnp.array([3, 0, 0, 1])] + y / 2,
    "scatter": lambda x, y: x.at[jnp.array([0, 2])].add(y[:2]) / 2,
    "set": lambda x, y: x.at[1].set(jnp.sin(y[0])),
    "slice": lambda x, y: jnp.concatenate([x[:2], y[2:]]),
    "transpose": lambda x, _: x.T,
    "cast": lambda x, _: x.astype(jnp.bfloat16).astype(jnp.float32),
    "helper": helper,
    "own gradient": lambda x, y: own(x) * y,
    "checkpoint": jax.checkpoint(lambda x, y: jnp.tanh(jnp.sin(x) @ y)),
    "scan": looped,
    "cond": chosen,
    "no gradient": lambda x, y: lax.stop_gradient(jnp.tanh(x)) * y,
    "dead": lambda x, y: (jnp.sort(jnp.exp(x) @ y), x)[1],
}

Program = list[tuple[str, int, int]]


def run(program: Program, results: int, *args: Any) -> Any:
    """What the last of its values are."""
    values = list(args)
    for name, i, j in program:
        values.append(OPERATIONS[name](values[-1 - i % len(values)], values[-1 - j % len(values)]))
    return values[-results:]


def check(program: Program, results: int, mode: Any) -> None:
    fun = functools.partial(run, program, results)
    lean = jaxmp.recompute(fun, mode)
    now, plain = (jax.make_jaxpr(gradient(each))(A, B) for each in (lean, fun))
    # Operation by operation: nothing is compiled as a whole, and roundings are the same.
    got, want = (core.jaxpr_as_fun(program)(A, B) for program in (now, plain))
    # A gradient that is rounded to 16 bits may be rounded the other way.
    rounds = any("16 bits" in name or name == "cast" for name, _, _ in program)
    # CPUs contract products and sums differently, which shows where they cancel.
    assert error(got, want) <= (0.02 if rounds else 1e-3), program
    before = dear_in(plain)
    more = {name: n for name, n in dear_in(now).items() if n > before.get(name, 0)}
    assert not more, (more, program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 80))]
)
def test_random_programs(seed: int) -> None:
    """Eighty times twenty-five, so that several processes share them."""
    rng = np.random.default_rng(seed)
    names = sorted(OPERATIONS)
    for _ in range(25):
        program = [
            (names[rng.integers(len(names))], int(rng.integers(8)), int(rng.integers(8)))
            for _ in range(rng.integers(2, 13))
        ]
        check(program, int(rng.integers(1, 4)), MODES[rng.integers(2)])
    jax.clear_caches()


def test_the_check_sees_a_wrong_gradient() -> None:
    """Its control: a custom gradient that is off by a hundredth."""

    @jax.custom_vjp
    def wrong(x: Any) -> Any:
        return jnp.tanh(x)

    wrong.defvjp(
        lambda x: (jnp.tanh(x), x), lambda x, g: (1.01 * g * (1 - jnp.square(jnp.tanh(x))),)
    )
    assert error(gradient(wrong)(A), gradient(jnp.tanh)(A)) > 1e-3
