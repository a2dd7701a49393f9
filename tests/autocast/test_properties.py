"""Random programs under autocast: shapes, dtypes, and an error that their depth bounds."""

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import jaxmp
from tests.support.autocast_checks import BF16, FP16, LOW, UNIT, compiled

pytestmark = pytest.mark.slow

SIZE = 6
Array = Any


@dataclasses.dataclass(frozen=True)
class Piece:
    """An operation of a program, from (4, SIZE) to (4, SIZE).

    Attributes:
      run: the operation, of activations and params.
      gain: a bound of how much it enlarges an error, relative to the scale of what it returns.
      roundings: how many roundings of 16 bits it may add.
    """

    run: Callable[[Array, dict[str, Array]], Array]
    gain: float
    roundings: int


def _norm(h: Array, p: dict[str, Array]) -> Array:
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 0.1)
    return h * p["scale"][None] + p["bias"][None]


def _embedded(h: Array, p: dict[str, Array]) -> Array:
    return h + p["table"][jnp.array([0, 2, 2, 1])]


# Each keeps its results within about [-3, 3]: products are by matrices whose rows have norm one.
PIECES: dict[str, Piece] = {
    "dot": Piece(lambda h, p: h @ p["w"], 3, 3),
    "einsum": Piece(lambda h, p: jnp.einsum("bi,oi->bo", h, p["w"]), 3, 3),
    "bias": Piece(lambda h, p: 0.5 * (h + p["bias"][None]), 1, 3),
    "scale": Piece(lambda h, p: h * p["scale"][None], 2, 2),
    "tanh": Piece(lambda h, p: jnp.tanh(h), 1, 1),
    "exp": Piece(lambda h, p: jnp.exp(-jnp.abs(h)), 1, 1),
    "norm": Piece(_norm, 8, 6),
    "softmax": Piece(lambda h, p: jax.nn.softmax(h) * 2.0, 3, 2),
    "log": Piece(lambda h, p: jnp.log1p(jnp.abs(h)), 1, 1),
    "where": Piece(lambda h, p: jnp.where(p["scale"][None] > 1, h, -0.5 * h), 1, 1),
    "relu": Piece(lambda h, p: jax.nn.relu(h) - 0.25 * h, 1, 3),
    "gelu": Piece(lambda h, p: jax.nn.gelu(h), 1.2, 6),
    "silu": Piece(lambda h, p: jax.nn.silu(h), 1.2, 3),
    "sin": Piece(lambda h, p: jnp.sin(h), 1, 1),
    "concatenate": Piece(lambda h, p: jnp.concatenate([h[:, 3:], h[:, :3] * 0.5], 1), 1, 1),
    "token": Piece(lambda h, p: jnp.concatenate([p["bias"][None], h[1:]]), 1, 1),
    "pad": Piece(lambda h, p: jnp.pad(h[:, 1:], ((0, 0), (1, 0))), 1, 0),
    "slice": Piece(lambda h, p: lax.dynamic_slice(jnp.tile(h, (2, 1)), (1, 0), (4, SIZE)), 1, 0),
    "reshape": Piece(lambda h, p: h.reshape(SIZE, 4).T[:, ::-1], 1, 0),
    "mean": Piece(lambda h, p: h - h.mean(0, keepdims=True), 2, 2),
    "sum": Piece(lambda h, p: h * 0.5 + jnp.sum(h, -1, keepdims=True) / SIZE, 2, 3),
    "max": Piece(lambda h, p: h - jnp.max(h, -1, keepdims=True), 2, 2),
    "embedding": Piece(lambda h, p: 0.5 * _embedded(h, p), 1, 3),
    "square": Piece(lambda h, p: h * h * 0.25, 2, 3),
    "residual": Piece(lambda h, p: 0.5 * (h + jnp.tanh(h @ p["w"])), 2, 5),
    "update": Piece(lambda h, p: h.at[1].set(p["bias"]).at[:, 0].multiply(0.5), 1, 1),
    "cumsum": Piece(lambda h, p: jnp.cumsum(h, -1) / SIZE, 1, 2),
    "sigmoid": Piece(lambda h, p: jax.nn.sigmoid(h) - 0.5, 1, 2),
}

Inner = Callable[[Array, dict[str, Array]], Array]


def _scan(f: Inner) -> Inner:
    return lambda h, p: lax.scan(lambda c, _: (f(c, p), None), h, None, length=1)[0]


CONTAINERS: dict[str, Callable[[Inner], Inner]] = {
    "none": lambda f: f,
    "jit": lambda f: jax.jit(f),
    "scan": _scan,
    "remat": lambda f: jax.checkpoint(f),
    "cond": lambda f: lambda h, p: lax.cond(p["scale"][0] > -9, f, lambda h, p: h, h, p),
    "vmap": lambda f: lambda h, p: jax.vmap(f, (0, None))(h[None], p)[0],
    "switch": lambda f: lambda h, p: lax.switch(jnp.int32(0), [f, lambda h, p: h * 2], h, p),
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Inner, float, str]:
    """A program, the bound of its error in roundings, and its text."""
    text, bound, run = [], 1.0, None
    for _ in range(draw(st.integers(1, 2))):
        names = draw(st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=3))
        container = draw(st.sampled_from(sorted(CONTAINERS)))
        for name in names:
            # An error grows by the gain of each operation, and each adds its own roundings.
            bound = bound * PIECES[name].gain + PIECES[name].roundings

        def block(h: Array, p: dict[str, Array], names: Any = tuple(names)) -> Array:
            for name in names:
                h = PIECES[name].run(h, p)
            return h

        inner, before = CONTAINERS[container](block), run
        run = inner if before is None else (lambda h, p, f=inner, g=before: f(g(h, p), p))
        text.append(f"{container}({' '.join(names)})")
    assert run is not None
    return run, bound, " ".join(text)


def _params() -> dict[str, Array]:
    key = jax.random.key(0)
    w = jax.random.orthogonal(key, SIZE)
    return {
        "w": w,
        "bias": jnp.linspace(-1, 1, SIZE),
        "scale": jnp.linspace(0.5, 1.5, SIZE),
        "table": jax.random.uniform(key, (3, SIZE), minval=-1.0),
        "first": jax.random.orthogonal(jax.random.key(1), SIZE),
    }


PARAMS = _params()
H = jax.random.uniform(jax.random.key(2), (4, SIZE), minval=-1.5, maxval=1.5)


def _distance(got: Any, want: Any) -> float:
    away = np.sqrt(np.mean((np.asarray(got, np.float64) - np.asarray(want, np.float64)) ** 2))
    return float(away)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(program=programs(), policy=st.sampled_from([BF16, FP16]), jitted=st.booleans())
def test_random_programs(program: Any, policy: str, jitted: bool) -> None:
    run, bound, text = program
    hypothesis.note(f"{policy}: {text}")

    def f(p: dict[str, Array], h: Array) -> Array:
        return run(h @ p["first"], p)

    fast = jaxmp.autocast(f, policy)
    weight = jnp.cos(jnp.arange(4.0 * SIZE)).reshape(4, SIZE)

    def with_grad(fun: Any) -> Any:
        def loss(p: Any, h: Any) -> Any:
            out = fun(p, h)
            return jnp.sum(out * weight), out

        return jax.value_and_grad(loss, has_aux=True)

    run_fast = compiled(with_grad(fast)) if jitted else with_grad(fast)
    (_, got), grads = run_fast(PARAMS, H)
    (_, want), want_grads = compiled(with_grad(f))(PARAMS, H)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    # The first product rounds twice, the result once; root mean squares add up more slowly.
    allowed = UNIT[policy] * (3 + bound)
    scale = max(1.0, float(jnp.abs(want).max()))
    assert _distance(got, want) <= allowed * scale
    for name, grad in grads.items():
        assert (grad.shape, grad.dtype) == (PARAMS[name].shape, jnp.float32)
        size = max(1.0, float(jnp.abs(want_grads[name]).max()))
        # Every operation is passed once more on the way back, at a point that has moved.
        assert _distance(grad, want_grads[name]) <= 4 * allowed * size, name
    if policy == BF16 and "dot" in text.split("(")[0]:
        assert LOW[policy] in str(jax.make_jaxpr(fast)(PARAMS, H))
