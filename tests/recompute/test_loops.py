"""`recompute="loops"`: what a scan keeps, and nothing else."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._program.compat import scan_counts
from tests.support.autocast_checks import compiled, error, rows, weights
from tests.support.dots import equations
from tests.support.recompute_checks import gradient, kept_bytes, norm

pytestmark = pytest.mark.jax

W, V, X = weights(16, 64, seed=1), weights(64, 16, seed=2), rows(8, 16)
LAYERS = jax.device_put({"up": np.stack([W] * 3), "down": np.stack([V] * 3)})


def layer(x: Any, w: Any) -> Any:
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None


def scanned(layers: Any, x: Any) -> Any:
    return jnp.sum(jnp.square(lax.scan(layer, x, layers)[0]))


def unrolled(layers: Any, x: Any) -> Any:
    for i in range(3):
        x, _ = layer(x, jax.tree.map(lambda stack, i=i: stack[i], layers))
    return jnp.sum(jnp.square(x))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def turned(layers: Any, x: Any) -> Any:
    """A `while`, whose derivative is asked for forward alone, and what it does not touch."""
    turns = lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
    return unrolled(layers, x) * turns


WITHOUT: dict[str, Callable[..., Any]] = {
    "layers": unrolled,
    "jit": jax.jit(unrolled),
    "jit with a name": lambda layers, x: jax.jit(jax.nn.silu)(unrolled(layers, x)),
    "checkpoint": jax.checkpoint(unrolled),
    "cond": lambda layers, x: lax.cond(x[0, 0] > 0, unrolled, lambda *_: 0.0, layers, x),
    "derivatives of its own": lambda layers, x: unrolled(layers, clipped(jax.nn.relu(x))),
    "while": turned,
    "a scan without derivatives": lambda layers, x: unrolled(
        layers, x + lax.stop_gradient(jax.random.permutation(jax.random.key(0), x))
    ),
    "a print": lambda layers, x: (jax.debug.print("x"), unrolled(layers, x))[1],
    "a checkpoint around a scan": jax.checkpoint(scanned),
}


def text_of(fun: Callable[..., Any]) -> str:
    text = str(jax.make_jaxpr(jax.grad(fun))(LAYERS, X))
    return re.sub(r"0x[0-9a-f]+|<lambda>|name=\w+", "", text)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_program_without_loops_stays_to_the_letter(name: str) -> None:
    fun = WITHOUT[name]
    assert text_of(jaxmp.recompute(fun, "loops")) == text_of(fun)


def test_auto_changes_such_a_program() -> None:
    """The control of the test above."""
    assert text_of(jaxmp.recompute(unrolled, "auto")) != text_of(unrolled)


def on_devices(fun: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def of_shard(layers: Any, x: Any) -> Any:
        return lax.psum(fun(layers, x), "data")

    return jax.shard_map(of_shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())


WITH: dict[str, Callable[..., Any]] = {
    "scan": scanned,
    "jit": jax.jit(scanned),
    "cond": lambda layers, x: lax.cond(x[0, 0] < 100, scanned, lambda *_: 0.0, layers, x),
    "scan in a scan": lambda layers, x: lax.scan(
        lambda x, _: (lax.scan(layer, x, layers)[0], None), x, None, length=2
    )[0].sum(),
    "vmap": lambda layers, x: jax.vmap(lambda row: scanned(layers, row[None]))(x).sum(),
    "shard_map": on_devices(scanned),
}


@pytest.mark.parametrize("name", WITH)
def test_a_scan_keeps_what_auto_keeps(name: str) -> None:
    """Wherever it stands, with the same gradients; by itself JAX keeps more."""
    fun = WITH[name]
    lean, auto = jaxmp.recompute(fun, "loops"), jaxmp.recompute(fun, "auto")
    got, want = compiled(gradient(lean))(LAYERS, X), compiled(gradient(fun))(LAYERS, X)
    assert error(got, want) <= 1e-5
    assert kept_bytes(lean, LAYERS, X) < 0.7 * kept_bytes(fun, LAYERS, X)
    assert kept_bytes(lean, LAYERS, X) < 1.3 * kept_bytes(auto, LAYERS, X)


SCORES: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, w: x + jax.nn.softmax(x @ w) @ w.T,
    "log_softmax": lambda x, w: x - jax.nn.log_softmax(x @ w),
    "logsumexp": lambda x, w: x + jax.nn.logsumexp(x @ w, -1, keepdims=True),
}


@pytest.mark.parametrize("mode", ["loops", "auto", "always"])
@pytest.mark.parametrize("name", SCORES)
def test_statistics_fit_what_is_computed_again(name: str, mode: Any) -> None:
    """XLA made the maximum of scores before their rounding: gradients were off by up to 4e5."""
    # Draws without scores that are nearly equal, which 16 bits cannot tell apart.
    x, w = rows(16, 64, seed=12), 80 * np.asarray(weights(2, 64, 64, seed=13))

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda x, w: (SCORES[name](x, w), None), x, w)[0] ** 2)

    def gradient_error(mode: Any) -> float:
        fast = jaxmp.autocast(loss, "mixed_bfloat16", recompute=mode)
        return error(compiled(jax.grad(fast))(w, x), compiled(jax.grad(loss))(w, x))

    assert gradient_error(mode) < 1.5 * gradient_error("never") + 0.02


SIDE = 64  # of a mask of 256 kB, in eight heads


def masks(kind: str, x: Any) -> Any:
    """Masks and biases of scores that no turn changes."""
    if kind == "tril":
        return jnp.broadcast_to(jnp.tril(jnp.ones((SIDE, SIDE), bool)), (16, SIDE, SIDE))
    if kind == "iota":
        first, second = (lax.broadcasted_iota("int32", (16, SIDE, SIDE), i) for i in (1, 2))
        return first >= second
    bias = jnp.cos(jnp.arange(SIDE) + x[0, 0, 0] * 0)
    return jnp.broadcast_to(bias[:, None], (16, SIDE, SIDE)) > 0


def handed_in(fun: Callable[..., Any], *args: Any) -> set[str]:
    """The types of the large arrays that the first scan of a gradient gets from outside."""
    first = next(
        each
        for each in equations(jax.make_jaxpr(jax.grad(fun))(*args))
        if each.primitive.name == "scan"
    )
    consts = first.invars[: scan_counts(first.params)[0]]
    return {each.aval.str_short() for each in consts if each.aval.size >= 16 * SIDE * SIDE}


@pytest.mark.parametrize("kind", ["tril", "iota"])
def test_a_mask_is_made_in_each_turn(kind: str) -> None:
    """JAX writes it, and what it puts behind it, before the loop, to read them in each turn."""
    x, w = rows(16 * SIDE, SIDE).reshape(16, SIDE, SIDE), weights(3, SIDE, SIDE)

    def loss(w: Any, x: Any) -> Any:
        def attend(x: Any, w: Any) -> Any:
            scores = jnp.where(masks(kind, x), jnp.einsum("hqd,dk->hqk", x, w), -1e30)
            return x + jax.nn.softmax(scores), None

        return jnp.mean(lax.scan(attend, x, w)[0] ** 2)

    assert f"bool[16,{SIDE},{SIDE}]" in handed_in(loss, w, x)  # positive control
    lean = jaxmp.recompute(loss, "loops")
    assert not handed_in(lean, w, x)
    assert error(*(compiled(jax.grad(f))(w, x) for f in (lean, loss))) <= 1e-5


def test_a_product_without_a_turn_runs_once() -> None:
    """With what it needs, though that repeats a smaller array."""
    x, w, table = rows(SIDE, SIDE), weights(3, SIDE, SIDE), weights(16, SIDE, seed=3)

    def loss(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            places = jnp.arange(SIDE * SIDE) % 16
            bias = jax.nn.one_hot(places, 16) @ table  # as of relative positions
            return jnp.tanh(x @ w + bias.reshape(SIDE, SIDE, SIDE).sum(0)), None

        return jnp.sum(lax.scan(layer, x, w)[0])

    def products(fun: Any) -> int:
        """In the bodies of loops."""
        closed = jax.make_jaxpr(jax.grad(fun))(w, x)
        scans = [each for each in equations(closed) if each.primitive.name == "scan"]
        inside = (inner for each in scans for inner in equations(each.params["jaxpr"]))
        return sum(inner.primitive.name == "dot_general" for inner in inside)

    assert products(jaxmp.recompute(loss, "loops")) == products(loss) == 3


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_a_train_step_does_so_by_default(policy: str) -> None:
    """And does not with `"never"`; without loops both are the same program."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    state = jaxmp.TrainState.create(params=LAYERS, tx=tx)

    def step(loss: Any, **options: Any) -> Any:
        return jaxmp.make_train_step(loss, donate=False, **options)

    assert jaxmp.audit(step(scanned), state, X).recomputed
    assert not jaxmp.audit(step(scanned, recompute="never"), state, X).recomputed
    got, want = step(scanned)(state, X), step(scanned, recompute="never")(state, X)
    assert error(got[0].params, want[0].params) <= 1e-2

    def text(**options: Any) -> str:
        return re.sub(r"0x[0-9a-f]+", "", str(step(unrolled, **options).trace(state, X).jaxpr))

    assert text() == text(recompute="never")
