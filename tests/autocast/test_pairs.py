"""Programs that mean the same come out in the same dtype: docs/autocast.md says which do not."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxmp
from tests.support.autocast_checks import BF16, compiled, error, rows, weights
from tests.support.dots import equations
from tests.support.ways import both_ways, in_16_bits

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]

X, W, S = rows(4, 8, 32), weights(32, 32), jnp.linspace(0.5, 1.5, 32)
POSITIONS = rows(8, 32, seed=3)
ENCODED = np.sin(np.arange(8)[:, None] * np.exp(-np.arange(32) / 8)).astype(np.float32)
MASK = np.tile(np.arange(32) % 3 > 0, (4, 8, 1))
KEY = jax.random.key(1)
MESH = jax.make_mesh((8,), ("ep",), axis_types=(AxisType.Auto,))


def encoded() -> Any:
    return jnp.sin(jnp.arange(8.0)[:, None] * jnp.exp(-jnp.arange(32.0) / 8)[None])


def norm(h: Any) -> Any:
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)


def kept(h: Any) -> Any:
    return jax.random.bernoulli(KEY, 0.9, h.shape)


# Of an activation; the first column of a pair is what most people write.
PAIRS: dict[str, tuple[str, list[Callable[[Any], Any]]]] = {
    "squares of a norm": (
        "float32",
        [lambda h: norm(h) ** 2, lambda h: norm(h) * norm(h), lambda h: jnp.square(norm(h))],
    ),
    "squares": ("bfloat16", [lambda h: h**2, lambda h: h * h, jnp.square]),
    "masks": (
        "bfloat16",
        [
            lambda h: h * MASK,
            lambda h: h * MASK.astype(np.int32),
            lambda h: h * MASK.astype(np.float32),
            lambda h: jnp.where(MASK, h, 0),
            lambda h: jnp.where(MASK, h, 0.0),
        ],
    ),
    "tables": (
        "bfloat16",
        [
            lambda h: h * jnp.full(32, 0.5),
            lambda h: h * jnp.linspace(0, 1, 32),
            lambda h: h * np.linspace(0, 1, 32, dtype=np.float32),
        ],
    ),
    "divisors": (
        "bfloat16",
        [lambda h: h * 0.25, lambda h: h / jnp.sqrt(16), lambda h: h / jnp.sqrt(jnp.float32(16))],
    ),
    "reciprocals": ("bfloat16", [lambda h: h / S, lambda h: h * (1 / S)]),
    "gates by params": (
        "bfloat16",
        [lambda h, f=f: h * f(S) for f in (jax.nn.sigmoid, jnp.exp, jax.nn.softplus)],
    ),
    "gates by activations": (
        "bfloat16",
        [
            lambda h: h * jax.nn.sigmoid(h @ W),
            lambda h: h * jnp.exp(h @ W),
            lambda h: h * jax.nn.softplus(h @ W),
            lambda h: h / (1 + jnp.exp(-(h @ W))),
        ],
    ),
    "streams": (
        "bfloat16",
        [
            lambda h: h + jax.nn.gelu(h @ W),
            lambda h: h + jax.nn.elu(h @ W),
            lambda h: h + jnp.where(h > 0, h, jnp.expm1(h)),
            lambda h: h + jax.nn.mish(h @ W),
            lambda h: h + h * jnp.tanh(jnp.log1p(jnp.exp(h))),
            lambda h: h + jax.nn.softplus(h),
        ],
    ),
    "positions": (
        "bfloat16",
        [
            lambda h: h + ENCODED,
            lambda h: h + encoded(),
            lambda h: h + POSITIONS[None],
            lambda h: h[:1] + POSITIONS[:8][None],
            lambda h: h[:1] + POSITIONS[jnp.arange(8)],
        ],
    ),
    "dropout": (
        "bfloat16",
        [
            lambda h: jnp.where(kept(h), h / 0.9, 0),
            lambda h: jnp.where(kept(h), h / (1 - lax.stop_gradient(0.1)), 0),
            lambda h: h * jnp.floor(0.9 + jax.random.uniform(KEY, h.shape)) / 0.9,
        ],
    ),
    "logarithms of sums": (
        "float32",
        [
            lambda h: jax.nn.logsumexp(h, -1),
            lambda h: jnp.log(jnp.exp(h).sum(-1)),
            lambda h: h.max(-1) + jnp.log(jnp.exp(h - h.max(-1, keepdims=True)).sum(-1)),
        ],
    ),
}
# Said on the page: what the second of these gives, the first does not.
APART: dict[str, list[Callable[[Any], Any]]] = {
    "positions of a batch of one": [lambda x, p: x[:1] @ W + p, lambda x, p: x @ W + p],
    "softplus": [lambda x, p: jnp.log1p(jnp.exp(x @ W)), lambda x, p: jax.nn.softplus(x @ W)],
    "means as products": [
        lambda x, p: (x @ W) + (x @ W).mean(1, keepdims=True),
        lambda x, p: (x @ W) + jnp.full((8, 8), 1 / 8) @ (x @ W),
    ],
}


def dtype_of(fun: Any, *args: Any) -> str:
    computed = jaxmp.autocast(fun, BF16, output="computed")
    return str(jax.eval_shape(computed, *args).dtype)


@pytest.mark.parametrize("name", PAIRS)
def test_programs_that_mean_the_same(name: str) -> None:
    dtype, programs = PAIRS[name]
    found = [dtype_of(lambda x, f=f: f(x @ W), X) for f in programs]
    assert found == [dtype] * len(programs)


@pytest.mark.parametrize("name", APART)
def test_programs_that_the_page_says_differ(name: str) -> None:
    assert [dtype_of(f, X, POSITIONS[None]) for f in APART[name]] == ["float32", "bfloat16"]


# What stays exact beside 16 bits: the factor of its argument, and the largest relative error.
EXACT: dict[str, tuple[str, Callable[[Any], Any], float, float]] = {
    "an argument that a branch returns": (
        "mixed_float16",
        lambda x: lax.cond(True, lambda: x, lambda: x @ W),
        1e6,
        0.0,
    ),
    "an argument that is chosen": (
        "mixed_bfloat16",
        lambda x: jnp.where(x > 0, x, 1e-4 * (x @ W)),
        1.0,
        1e-5,
    ),
    "variance far from zero": ("mixed_bfloat16", lambda x: jnp.var(x @ W + 100.0), 1.0, 0.01),
    "exponential of a sum": ("mixed_bfloat16", lambda x: jnp.exp(x @ W + 10.0), 0.25, 0.01),
    "a comparison with 1e-8": (
        "mixed_float16",
        lambda x: (jax.nn.relu(x @ W) < 1e-8).astype(jnp.float32),
        1.0,
        0.0,
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_stays_exact(name: str) -> None:
    policy, fun, factor, most = EXACT[name]
    x = factor * X
    assert error(compiled(jaxmp.autocast(fun, policy))(x), compiled(fun)(x)) <= most


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: lax.cond(x[0, 0] > 0, f, lambda x: f(x), x),
        lambda f: jax.shard_map(
            f, mesh=MESH, in_specs=PartitionSpec("ep"), out_specs=PartitionSpec("ep")
        ),
    ],
    ids=["", "jit", "checkpoint", "cond", "shard_map"],
)
def test_what_only_float32_reads_is_float32_in_every_wrapping(wrap: Any) -> None:
    """The sigmoid before a logarithm, of which 1 - p is left: 16 bits have no such p but one."""

    def loss(x: Any) -> Any:
        p = wrap(lambda x: jax.nn.sigmoid(x @ jnp.eye(8)))(x)
        return -jnp.log(1 - p).mean()

    x = np.linspace(6, 9, 64, dtype=np.float32).reshape(8, 8)
    assert error(*both_ways(loss, x)) < 0.01
    assert (in_16_bits(jax.nn.sigmoid, BF16, x) == 1).any()  # where the logarithm is infinite


def test_layers_with_merged_weights_are_layers() -> None:
    """LoRA merged before a scan, or in its body: as with weights of its own."""
    ws, a, b = jnp.stack([W] * 3), jnp.ones((3, 32, 4)), jnp.ones((3, 4, 32))

    def before(x: Any, ws: Any, a: Any, b: Any) -> Any:
        return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ ws[0], ws + a @ b)[0]

    def inside(x: Any, ws: Any, a: Any, b: Any) -> Any:
        body = lambda h, w: (h + jnp.tanh(h @ (w[0] + w[1] @ w[2])), None)  # noqa: E731
        return lax.scan(body, x @ ws[0], (ws, a, b))[0]

    for f in (before, inside):
        assert dtype_of(f, X, ws, a, b) == "bfloat16"


def test_custom_vmap_of_a_product_is_no_argument() -> None:
    @jax.custom_batching.custom_vmap
    def multiplied(x: Any) -> Any:
        return x @ W

    multiplied.def_vmap(lambda size, batched, x: (x @ W, True))
    assert dtype_of(lambda x: x @ W + multiplied(x), X) == "bfloat16"


@pytest.mark.filterwarnings("ignore:autocast leaves .* of the FLOPs")
def test_a_kernel_at_the_beginning_widens_no_stream() -> None:
    """What it multiplies is no argument any more."""
    dense = jax.custom_vjp(lambda x: x @ W)
    dense.defvjp(lambda x: (x @ W, None), lambda _, g: (g @ W.T,))
    for first in (dense, lambda x: jnp.dot(x, W, precision="highest")):
        assert dtype_of(lambda x, f=first: f(x) + jnp.tanh(f(x) @ W), X) == "bfloat16"


def test_a_stage_adds_in_the_16_bits_that_it_is_given() -> None:
    """A stage of a pipeline, whose activations are arguments."""

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w).astype(x.dtype)

    def stage(x: Any, ws: Any) -> Any:
        return functools.reduce(layer, ws, x)

    def scanned(x: Any, ws: Any) -> Any:
        return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

    ws = jnp.stack([W, W])
    for f in (stage, scanned):
        assert dtype_of(f, X.astype(jnp.bfloat16), ws) == "bfloat16"
        assert dtype_of(f, X, ws) == "float32"  # positive control: data that layers update


def test_small_steps_from_16_bits_that_were_cast_to_float32() -> None:
    """The program asked for float32: each step is smaller than what 16 bits leave."""

    def steps(x: Any, w: Any) -> Any:
        s = x.astype(jnp.float32)
        for _ in range(100):
            s = s + 0.0025 * jnp.tanh(s @ w)
        return s

    x = (4 * X[0]).astype(jnp.bfloat16)
    want = compiled(steps)(x, W) - x.astype(jnp.float32)
    fast = jaxmp.autocast(steps, BF16)
    assert error(compiled(fast)(x, W) - x.astype(jnp.float32), want) < 0.03
    s = x  # positive control: in 16 bits they are lost
    for _ in range(100):
        s = s + (0.0025 * jnp.tanh(s @ W)).astype(s.dtype)
    assert error((s - x).astype(jnp.float32), want) > 0.1


def test_an_exact_part_joins_a_stream_where_it_is_rounded() -> None:
    exact = jaxmp.full_precision(lambda x: jnp.tanh(x @ W))
    assert dtype_of(lambda x: x @ W + lax.reduce_precision(exact(x), 8, 7), X) == "bfloat16"
    assert dtype_of(lambda x: x @ W + exact(x), X) == "float32"


@pytest.mark.parametrize("made", ["closed over", "computed", "argument"])
def test_biases_of_scores_are_added_in_float32(made: str) -> None:
    """Of ALiBi, as BLOOM has it: at 2,048 tokens half of the largest is 256 apart in 16 bits."""
    positions = np.arange(2048.0, dtype=np.float32) / 2
    biases = {
        "closed over": lambda given: positions,
        "computed": lambda given: jnp.arange(2048.0) / 2,
        "argument": lambda given: given,
    }

    def attend(x: Any, given: Any) -> Any:
        h = x @ W
        scores = jnp.where(jnp.arange(2048) < 2000, h @ h.T / 6, -1e9)
        return jax.nn.softmax(scores + biases[made](given)) @ h

    x = jnp.tile(X.reshape(32, 32), (64, 1))
    fast = jaxmp.autocast(attend, BF16)
    assert error(compiled(fast)(x, positions), compiled(attend)(x, positions)) < 0.02


def test_sums_of_lifted_values_do_not_overflow() -> None:
    """Blocks of attention that are merged, in float16: the sums are divided by what lifts them."""

    def merged(x: Any) -> Any:
        h = x @ W
        blocks = [jnp.exp(h @ h[i : i + 8].T - 1).sum(-1, keepdims=True) for i in (0, 8, 16, 24)]
        parts = [h * 300 * total for total in blocks]
        return sum(parts[1:], parts[0]) / sum(blocks[1:], blocks[0])

    x = X.reshape(32, 32)
    assert error(compiled(jaxmp.autocast(merged, "mixed_float16"))(x), compiled(merged)(x)) < 0.01


@pytest.mark.filterwarnings("ignore:autocast leaves .* of the FLOPs")
def test_a_product_asked_for_in_another_dtype_is_left_alone() -> None:
    for policy, other in (("mixed_bfloat16", jnp.float16), ("mixed_float16", jnp.bfloat16)):
        fast = jaxmp.autocast(
            lambda x, other=other: lax.dot(x[0], W, preferred_element_type=other),
            policy,
            output="computed",
        )
        assert fast(X).dtype == other


def inner_loss(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ w - y) ** 2)


LOOPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "python": lambda step, w, n: [w := step(w) for _ in range(n)][-1],
    "scan": lambda step, w, n: lax.scan(lambda w, _: (step(w), None), w, None, length=n)[0],
    "while": lambda step, w, n: lax.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (0, w)
    )[1],
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("tasks", ["one", "vmap"])
def test_inner_training_updates_in_float32(loop: str, tasks: str) -> None:
    """A bias and a batched update have the same shape: where a gradient comes from decides."""

    def adapt(w: Any, x: Any, y: Any) -> Any:
        return LOOPS[loop](lambda w: w - 2e-3 * jax.grad(inner_loss)(w, x, y), w, 20)

    def train(w: Any, x: Any, y: Any) -> Any:
        if tasks == "one":
            return adapt(w, x[0], y[0])
        return jax.vmap(adapt, (None, 0, 0))(w, x, y)

    args = W, rows(8, 16, 32, seed=4), rows(8, 16, 32, seed=5)
    want = compiled(train)(*args) - W
    assert error(compiled(jaxmp.autocast(train, BF16))(*args) - W, want) < 0.02
    rounded = (want + W).astype(jnp.bfloat16).astype(jnp.float32) - W
    assert error(rounded, want) > 0.02  # positive control: what 16 bits make of the params


RING = [(i, (i + 1) % 8) for i in range(8)]
COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_to_all": lambda y: lax.all_to_all(y, "ep", 0, 0, tiled=True),
    "ppermute": lambda y: lax.ppermute(y, "ep", RING),
    "all_gather": lambda y: lax.all_gather(y, "ep", tiled=True)[:8],
}
AROUND: dict[str, Callable[[Any, Any, Any], Any]] = {
    "product": lambda x, y, w: y @ w,
    "gate": lambda x, y, w: y * x[:, :1],
    "stream of data": lambda x, y, w: x + y,
    "exponential": lambda x, y, w: jnp.exp(y),
    "sum": lambda x, y, w: y.sum(-1, keepdims=True) * x,
}


@pytest.mark.parametrize("after", AROUND)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_carry_16_bits(name: str, after: str) -> None:
    """Whatever reads them: it is widened behind them."""

    def f(w: Any, x: Any) -> Any:
        return AROUND[after](x, COLLECTIVES[name](x @ w), w)

    rows_of = PartitionSpec("ep")
    mapped = jax.shard_map(f, mesh=MESH, in_specs=(PartitionSpec(), rows_of), out_specs=rows_of)
    closed = jax.make_jaxpr(jaxmp.autocast(mapped, BF16))(W, rows(64, 32))
    found = [e.outvars[0].aval.dtype for e in equations(closed) if e.primitive.name == name]
    assert found == [jnp.bfloat16]


def test_gradients_of_merged_weights_are_float32() -> None:
    """LoRA and weight norm: a product with a weight that is computed from params."""

    def loss(p: Any, x: Any) -> Any:
        merged = p["w"] + p["a"] @ p["b"]
        merged = p["g"] * merged / jnp.linalg.norm(merged, axis=0)
        return jnp.sum(x @ merged)

    p = {"w": W, "a": weights(32, 4), "b": weights(4, 32), "g": S}
    closed = jax.make_jaxpr(jax.grad(jaxmp.autocast(loss, BF16)))(p, rows(4096, 32))
    products = [e for e in equations(closed) if e.primitive.name == "low_precision_product"]
    by_data = [e for e in products if 4096 in e.invars[0].aval.shape]
    assert {str(e.outvars[0].aval.dtype) for e in by_data} == {"float32"}
