"""Pairs of programs that one may have to choose between, to see which an estimate finds faster."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jaxmp

Program = tuple[str, Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two programs that one may have to choose between: `(name, function, abstract arguments)`."""

    name: str
    first: Program
    second: Program


def abstract(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An array of which only shape and dtype count."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _layers(part: int, dtype: Any = jnp.bfloat16, count: int = 1) -> tuple[Any, Any]:
    """Feed-forward layers of a transformer: their params and their input."""
    width = 1024 // part
    weights = {
        "scale": abstract(width, dtype=dtype),
        "up": abstract(width, 4 * width, dtype=dtype),
        "down": abstract(4 * width, width, dtype=dtype),
    }
    return [weights] * count, abstract(4096, width, dtype=dtype)


def _layer(x: Any, weights: Any) -> Any:
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    hidden = jax.nn.gelu((normal * weights["scale"]).astype(x.dtype) @ weights["up"])
    return x + hidden @ weights["down"]


def _loss(layer: Callable[..., Any] = _layer) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        for weights in params:
            x = layer(x, weights)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def _recomputation(part: int) -> Pair:
    args = _layers(part, count=2)
    return Pair(
        "checkpoints around layers",
        ("without", jax.grad(_loss()), args),
        ("with", jax.grad(_loss(jax.checkpoint(_layer))), args),
    )


def _fusion(part: int) -> Pair:
    """The same operations; a barrier after each keeps the compiler from fusing them."""

    def mlp(barrier: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, up: Any, down: Any) -> Any:
            wide = barrier(x.astype(jnp.float32))
            mean = barrier(jnp.mean(wide**2, axis=-1, keepdims=True))
            normal = barrier((wide * lax.rsqrt(mean + 1e-6)).astype(x.dtype))
            hidden = barrier(normal @ up)
            active = barrier(jax.nn.gelu(hidden))
            return barrier(x + barrier(active @ down))

        return run

    width = 2048 // part
    args = (abstract(8192, width), abstract(width, 4 * width), abstract(4 * width, width))
    return Pair(
        "a block of a transformer",
        ("fused", mlp(lambda x: x), args),
        ("a kernel for each operation", mlp(lax.optimization_barrier), args),
    )


def _microbatches(part: int) -> Pair:
    params, x = _layers(part, jnp.float32)
    tx = jaxmp.mixed_precision(optax.sgd(1e-3, momentum=0.9), "mixed_bfloat16")
    state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), params)
    whole, split = (
        jaxmp.make_train_step(_loss(), "mixed_bfloat16", microbatches=n) for n in (1, 8)
    )
    return Pair("parts of a batch", ("one", whole, (state, x)), ("eight", split, (state, x)))


def _loops(part: int) -> Pair:
    """Layers that are small beside what a loop copies for each of them."""
    width, layers = 512 // part, 8

    def block(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = weights
        return x + jnp.tanh(x @ up) @ down, None

    def scanned(x: Any, *stacked: Any) -> Any:
        return jnp.sum(lax.scan(block, x, stacked)[0], dtype=jnp.float32)

    def unrolled(x: Any, *stacked: Any) -> Any:
        return jnp.sum(lax.scan(block, x, stacked, unroll=True)[0], dtype=jnp.float32)

    args = (
        abstract(8192, width),
        abstract(layers, width, 2 * width),
        abstract(layers, 2 * width, width),
    )
    return Pair(
        "layers and their gradients",
        ("unrolled", jax.grad(unrolled, (0, 1, 2)), args),
        ("in a scan", jax.grad(scanned, (0, 1, 2)), args),
    )


def _attention(part: int) -> Pair:
    """Causal attention: all scores at once, or those of a window of neighbouring blocks."""
    length, block, heads, size = 4096 // part, 512 // part, 8, 128

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k).astype(jnp.float32) * size**-0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(q.dtype)
        return jnp.einsum("...hqk,...khd->...qhd", weights, v)

    def whole(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, jnp.tril(jnp.ones((length, length), bool)))

    def window(q: Any, k: Any, v: Any) -> Any:
        blocked = [x.reshape(x.shape[0], -1, block, heads, size) for x in (q, k, v)]
        k, v = (
            jnp.concatenate([jnp.roll(x, shift, 1) for shift in (3, 2, 1, 0)], 2)
            for x in blocked[1:]
        )
        mask = jnp.tril(jnp.ones((block, 4 * block), bool), 3 * block)
        return attend(blocked[0], k, v, mask).reshape(q.shape)

    args = (abstract(1, length, heads, size),) * 3
    return Pair("attention", ("in a window", window, args), ("of all", whole, args))


def _optimizer_state(part: int) -> Pair:
    params = {"w": abstract(8192 // part, 4096, dtype=jnp.float32)}

    def update(**options: Any) -> Program:
        tx = jaxmp.mixed_precision(optax.adamw(1e-3), "float32", **options)

        def step(grads: Any, state: Any, params: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return "", step, (params, jax.eval_shape(tx.init, params), params)

    return Pair(
        "moments of AdamW",
        ("bfloat16", *update(moments="bfloat16")[1:]),
        ("float32", *update()[1:]),
    )


def _convolutions(part: int) -> Pair:
    """Two layers of 3 x 3 see as far as one of 5 x 5 (Simonyan and Zisserman, "VGG", 2014)."""
    channels = 256 // part

    def stack(x: Any, kernels: Any) -> Any:
        for kernel in kernels:
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            wide = y.astype(jnp.float32)
            scale = lax.rsqrt(jnp.mean(wide**2, (1, 2), keepdims=True) + 1e-5)
            x = jax.nn.relu(wide * scale).astype(x.dtype)
        return x

    def program(name: str, size: int, count: int) -> Program:
        kernels = [abstract(size, size, channels, channels)] * count
        return name, stack, (abstract(32, 32, 32, channels), kernels)

    return Pair(
        "layers of convolutions", program("two of 3 x 3", 3, 2), program("one of 5 x 5", 5, 1)
    )


def _lookup(part: int) -> Pair:
    """Rows of a table, taken or multiplied out with ones and zeros."""
    rows, width, tokens = 2048 // part, 1024, 8192

    def taken(table: Any, ids: Any) -> Any:
        return jnp.take(table, ids, axis=0)

    def multiplied(table: Any, ids: Any) -> Any:
        return jax.nn.one_hot(ids, rows, dtype=table.dtype) @ table

    args = (abstract(rows, width), abstract(tokens, dtype=jnp.int32))
    return Pair("an embedding", ("gathered", taken, args), ("multiplied", multiplied, args))


def _norm(part: int) -> Pair:
    def norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred**2, axis=-1, keepdims=True)
        return (centred * lax.rsqrt(variance + 1e-5) * scale).astype(x.dtype)

    def program(dtype: Any) -> Program:
        width = 4096 // part
        return (
            jnp.dtype(dtype).name,
            norm,
            (abstract(8192, width, dtype=dtype), abstract(width, dtype=dtype)),
        )

    return Pair("layer norm, computed in float32", program(jnp.bfloat16), program(jnp.float32))


def _passes(part: int) -> Pair:
    width = 1024 // part
    args = (abstract(4096, width, dtype=jnp.float32), abstract(width, 4 * width, dtype=jnp.float32))

    def program(precision: str) -> Program:
        return precision, functools.partial(jnp.matmul, precision=precision), args

    return Pair("precision of a float32 product", program("default"), program("high"))


def _adapter(part: int) -> Pair:
    """A low-rank adapter (Hu et al., "LoRA", 2021)."""
    width, rank = 2048 // part, 16

    def merged(x: Any, w: Any, a: Any, b: Any) -> Any:
        return x @ (w + a @ b)

    def apart(x: Any, w: Any, a: Any, b: Any) -> Any:
        return x @ w + (x @ a) @ b

    args = (
        abstract(2048, width),
        abstract(width, width),
        abstract(width, rank),
        abstract(rank, width),
    )
    return Pair("a low-rank adapter", ("merged", merged, args), ("apart", apart, args))


def _vocabulary(part: int) -> Pair:
    """Logits of all tokens at once, or of an eighth of them at a time."""

    def loss(x: Any, w: Any, targets: Any) -> Any:
        logits = (x @ w).astype(jnp.float32)
        right = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)

    def chunks(x: Any, w: Any, targets: Any) -> Any:
        def add(total: Any, chunk: Any) -> tuple[Any, None]:
            return total + loss(chunk[0], w, chunk[1]), None

        split = (x.reshape(8, -1, x.shape[-1]), targets.reshape(8, -1))
        return lax.scan(add, jnp.zeros((), jnp.float32), split)[0] / 8

    args = (abstract(4096, 512), abstract(512, 32768 // part), abstract(4096, dtype=jnp.int32))
    return Pair("loss of a vocabulary", ("whole", loss, args), ("in chunks", chunks, args))


def _decoding(part: int) -> Pair:
    """One token against a cache; fewer heads of keys (Ainslie et al., "GQA", 2023)."""

    def program(heads: int) -> Program:
        cache = abstract(32, 4096 // part, heads, 128)
        args = (abstract(32, 1, 8, 128), cache, cache)
        return f"{heads} heads of keys", jax.nn.dot_product_attention, args

    return Pair("decoding with a cache", program(8), program(2))


def _gate(part: int) -> Pair:
    """A gated layer (Shazeer, "GLU variants", 2020); a plain one with half as many params again."""
    width = 768 // part

    def gated(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    def plain(x: Any, up: Any, down: Any) -> Any:
        return jax.nn.silu(x @ up) @ down

    def args(hidden: int, ups: int) -> tuple[Any, ...]:
        return (
            abstract(4096, width),
            *[abstract(width, hidden)] * ups,
            abstract(hidden, width),
        )

    # The gated layer has 8 width^2 params, the plain one 12.
    return Pair(
        "a feed-forward layer",
        ("gated", gated, args(width * 8 // 3, 2)),
        ("plain, half as many params again", plain, args(width * 6, 1)),
    )


def _separable(part: int) -> Pair:
    channels = 256 // part

    def full(x: Any, kernel: Any, groups: int = 1) -> Any:
        return lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    def separable(x: Any, kernel: Any, mixing: Any) -> Any:
        return full(x, kernel, channels) @ mixing

    x = abstract(16, 32, 32, channels)
    return Pair(
        "a convolution",
        ("full", full, (x, abstract(3, 3, channels, channels))),
        ("separable", separable, (x, abstract(3, 3, 1, channels), abstract(channels, channels))),
    )


def _running_sum(part: int) -> Pair:
    length = 1024 // part

    def triangle(x: Any) -> Any:
        return x @ jnp.triu(jnp.ones((length, length), x.dtype))

    args = (abstract(4096, length, dtype=jnp.float32),)
    cumsum = functools.partial(jnp.cumsum, axis=-1)
    return Pair("a running sum", ("cumsum", cumsum, args), ("with a triangle", triangle, args))


def _optimizers(part: int) -> Pair:
    def sgd(grad: Any, m: Any, w: Any) -> Any:
        m = 0.9 * m + grad
        return w - 1e-3 * m, m

    def adam(grad: Any, m: Any, v: Any, w: Any) -> Any:
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad * grad
        return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    x = abstract(4096 // part, 4096, dtype=jnp.float32)
    return Pair("an optimizer", ("momentum", sgd, (x,) * 3), ("Adam", adam, (x,) * 4))


def _experts(part: int) -> Pair:
    """Four experts: each computes all tokens, or a quarter of them."""
    experts, width = 4, 512 // min(part, 2)

    def dense(x: Any, up: Any, down: Any, gate: Any) -> Any:
        hidden = jax.nn.relu(jnp.einsum("td,edf->etf", x, up))
        return jnp.einsum("etf,efd,te->td", hidden, down, gate)

    def sent(x: Any, up: Any, down: Any, gate: Any) -> Any:
        hidden = jax.nn.relu(jnp.einsum("egd,edf->egf", x.reshape(experts, -1, width), up))
        return jnp.einsum("egf,efd->egd", hidden, down).reshape(x.shape) * gate[:, :1]

    args = (
        abstract(4096, width),
        abstract(experts, width, 4 * width),
        abstract(experts, 4 * width, width),
        abstract(4096, experts),
    )
    return Pair("experts", ("dense", dense, args), ("sent", sent, args))


def pairs(small: bool = False) -> list[Pair]:
    """The pairs."""
    part = 4 if small else 1
    return [
        _recomputation(part),
        _fusion(part),
        _microbatches(part),
        _loops(part),
        _attention(part),
        _optimizer_state(part),
        _convolutions(part),
        _lookup(part),
        # From here on, pairs were written down before any of them was compiled.
        _norm(part),
        _passes(part),
        _adapter(part),
        _vocabulary(part),
        _decoding(part),
        _gate(part),
        _separable(part),
        _running_sum(part),
        _optimizers(part),
        _experts(part),
    ]
