"""Small losses, one for each way in which a param can be used; and how they can be cast.

Each is a function `(p, x, c)` of params, of a batch, and of what casts a param where it is used.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmp

BATCH, WIDTH = 64, 16
F32 = jnp.float32
Params = dict[str, Any]


class Batch(NamedTuple):
    """What an example has: floats, images, a sequence, tokens, a choice."""

    x: Any
    image: Any
    tokens: Any
    choice: Any


class Model(NamedTuple):
    """A loss and the shapes of its params.

    Attributes:
      loss: the loss, of params, batch and cast.
      shapes: those of the params; a scalar or 1-dimensional one starts at 1.
    """

    loss: Callable[[Params, Batch, Callable[[Any], Any]], Any]
    shapes: dict[str, tuple[int, ...]]


MODELS: dict[str, Model] = {}


def model(**shapes: tuple[int, ...]) -> Callable[[Any], Any]:
    def register(loss: Any) -> Any:
        MODELS[loss.__name__.replace("_", " ").strip()] = Model(loss, shapes)
        return loss

    return register


def end(y: Any) -> Any:
    """A loss whose gradient is of one size and of both signs."""
    return jnp.mean(jnp.sin(y.astype(F32)) ** 2)


@model(w=(16, 24))
def matmul(p: Params, b: Batch, c: Any) -> Any:
    return end(b.x @ c(p["w"]))


@model(w=(16, 24))
def float32_result(p: Params, b: Batch, c: Any) -> Any:
    return end(jnp.matmul(b.x, c(p["w"]), preferred_element_type=F32))


@model(w=(3, 3, 3, 8))
def conv(p: Params, b: Batch, c: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return end(lax.conv_general_dilated(b.image, c(p["w"]), (1, 1), "SAME", None, None, numbers))


@model(w=(3, 3, 1, 9))
def conv_grouped_and_dilated(p: Params, b: Batch, c: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
        b.image, c(p["w"]), (1, 1), "SAME", None, (2, 1), numbers, feature_group_count=3
    )
    return end(y)


@model(e=(32, 16))
def embedding(p: Params, b: Batch, c: Any) -> Any:
    return end(c(p["e"])[b.tokens])


@model(e=(32, 16))
def tied_embeddings(p: Params, b: Batch, c: Any) -> Any:
    return end(jnp.tanh(c(p["e"])[b.tokens]) @ c(p["e"]).T)


@model(w=(4, 16, 8))
def experts_by_index(p: Params, b: Batch, c: Any) -> Any:
    return end(jnp.einsum("bd,bdo->bo", b.x, c(p["w"])[b.choice]))


@model(w=(4, 16, 8))
def ragged(p: Params, b: Batch, c: Any) -> Any:
    sizes = jnp.asarray([10, 0, 30, 24], jnp.int32)
    return end(lax.ragged_dot(b.x, c(p["w"]), sizes))


def rms(x: Any, scale: Any) -> Any:
    wide = x.astype(F32)
    y = wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


@model(s=(16,))
def rms_norm(p: Params, b: Batch, c: Any) -> Any:
    return end(rms(b.x, c(p["s"])))


@model(w=(16, 8), b=(8,))
def dense(p: Params, b: Batch, c: Any) -> Any:
    return end(jax.nn.gelu(b.x @ c(p["w"]) + c(p["b"])))


@model(b=(1, 16), s=(1, 16))
def bias_of_rank_two(p: Params, b: Batch, c: Any) -> Any:
    return end(b.x * c(p["s"]) + c(p["b"]))


@model(b=(1, 16))
def power(p: Params, b: Batch, c: Any) -> Any:
    return end(jnp.abs(b.x) ** c(p["b"]))


@model(t=(), s=(16,))
def scalars(p: Params, b: Batch, c: Any) -> Any:
    return end(b.x * jnp.exp(c(p["t"])) * c(p["s"]) / (c(p["t"]) + 1))


@model(e=(32, 16))
def positions(p: Params, b: Batch, c: Any) -> Any:
    x = b.x.reshape(-1, 4, 4)
    return end(x + c(p["e"])[4:8, :4][None])


@model(q=(4, 16))
def learned_queries(p: Params, b: Batch, c: Any) -> Any:
    q = jnp.broadcast_to(c(p["q"])[None], (BATCH, 4, 16))
    y = jnp.concatenate([q, b.x[:, None]], 1)
    return end(jnp.einsum("bqd,bkd->bqk", y, y))


@model(e=(4, 16), w=(16, 8))
def tokens_by_choice(p: Params, b: Batch, c: Any) -> Any:
    """Which row is used depends on the example; then what looks like params meets params."""
    rows = jnp.where((b.choice > 1)[:, None], c(p["e"])[0][None], c(p["e"])[1][None])
    return end(jnp.tanh(rows) @ c(p["w"]))


@model(w=(16, 8), g=(8,))
def weight_norm(p: Params, b: Batch, c: Any) -> Any:
    w = c(p["w"])
    norm = jnp.sqrt(jnp.sum(w.astype(F32) ** 2, 0, keepdims=True)).astype(w.dtype)
    return end(b.x @ (w / norm * c(p["g"])))


@model(w=(16, 8))
def weight_standardisation(p: Params, b: Batch, c: Any) -> Any:
    w = c(p["w"])
    w = (w - jnp.mean(w, 0, keepdims=True)) / (
        jnp.std(w, 0, keepdims=True) + jnp.asarray(1e-3, w.dtype)
    )
    return end(b.x @ w)


@model(w=(16, 24), a=(16, 4), v=(4, 24))
def lora(p: Params, b: Batch, c: Any) -> Any:
    return end(b.x @ (c(p["w"]) + c(p["a"]) @ c(p["v"])))


@model(w=(16, 24), a=(16, 4), v=(4, 24))
def lora_in_float32(p: Params, b: Batch, c: Any) -> Any:
    return end(b.x @ c(p["w"] + p["a"] @ p["v"]))


@model(a=(16, 4), v=(4, 24))
def lora_of_frozen_weights(p: Params, b: Batch, c: Any) -> Any:
    frozen = c(jnp.asarray(np.linspace(-1, 1, 16 * 24).reshape(16, 24), F32))
    return end(b.x @ (frozen + c(p["a"]) @ c(p["v"])))


STACK = {"w": (3, 16, 16), "b": (3, 16), "s": (3, 16)}


def layer(h: Any, p: Params, c: Any) -> Any:
    return h + jnp.tanh(rms(h, c(p["s"])) @ c(p["w"]) + c(p["b"]))


def scanned(p: Params, b: Batch, c: Any, wrap: Any = lambda f: f, **options: Any) -> Any:
    def body(h: Any, p: Params) -> tuple[Any, None]:
        return layer(h, p, c), None

    return end(lax.scan(wrap(body), b.x, p, **options)[0])


@model(**STACK)
def scan(p: Params, b: Batch, c: Any) -> Any:
    return scanned(p, b, c)


@model(**STACK)
def scan_remat(p: Params, b: Batch, c: Any) -> Any:
    return scanned(p, b, c, jax.checkpoint)


@model(**STACK)
def scan_remat_names(p: Params, b: Batch, c: Any) -> Any:
    def body(h: Any, p: Params) -> tuple[Any, None]:
        h = checkpoint_name(layer(h, p, c), "h")
        w = checkpoint_name(c(p["w"]), "w")
        return jnp.tanh(h @ w), None

    policy = jax.checkpoint_policies.save_only_these_names("h")
    return end(lax.scan(jax.checkpoint(body, policy=policy), b.x, p)[0])


@model(w=(16, 16), b=(16,))
def scan_shared(p: Params, b: Batch, c: Any) -> Any:
    def body(h: Any, _: None) -> tuple[Any, None]:
        return jnp.tanh(h @ c(p["w"]) + c(p["b"])), None

    return end(lax.scan(body, b.x, None, length=3)[0])


@model(w=(16, 16))
def scan_carries(p: Params, b: Batch, c: Any) -> Any:
    def body(carry: Any, _: None) -> tuple[Any, None]:
        w, h = carry
        return (w, jnp.tanh(h @ w)), None

    (w, h), _ = lax.scan(body, (c(p["w"]), b.x), None, length=3)
    return end(h @ w)


@model(w=(16, 16))
def scan_carries_cast(p: Params, b: Batch, c: Any) -> Any:
    def body(carry: Any, _: None) -> tuple[Any, None]:
        w, h = carry
        return (w, jnp.tanh(h @ c(w))), None

    (w, h), _ = lax.scan(body, (p["w"], b.x), None, length=3)
    return end(h @ c(w))


@model(w=(3, 16, 16))
def scan_returns_params(p: Params, b: Batch, c: Any) -> Any:
    def body(h: Any, w: Any) -> tuple[Any, Any]:
        return jnp.tanh(h @ w), (w, w * w)

    h, (w, squares) = lax.scan(body, b.x, c(p["w"]))
    return end(h @ w[0] + h @ squares[1])


@model(w=(16, 16), u=(16, 16))
def cond(p: Params, b: Batch, c: Any) -> Any:
    table = np.linspace(0, 1, 16, dtype=np.float32)

    def branch(h: Any) -> Any:
        return h @ c(p["w"]) + jnp.asarray(table, h.dtype)

    return end(lax.cond(b.choice[0] >= 0, branch, lambda h: h @ c(p["u"]), b.x))


@model(w=(16, 16), u=(16, 16))
def cond_unlike(p: Params, b: Batch, c: Any) -> Any:
    w = lax.cond(b.choice[0] >= 0, lambda: c(p["w"]), lambda: c(p["u"]) * b.x[:16])
    return end(b.x @ w)


@model(w=(16, 16))
def lax_map(p: Params, b: Batch, c: Any) -> Any:
    return end(lax.map(lambda x: jnp.tanh(x @ c(p["w"])), b.x.reshape(4, 16, 16)))


@model(w=(16, 16))
def while_loop(p: Params, b: Batch, c: Any) -> Any:
    norm = lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, lax.stop_gradient(c(p["w"])[0, 0]))
    )[1]
    return end(b.x @ c(p["w"]) * norm)


@model(b=(16,), t=())
def softplus_of_params(p: Params, b: Batch, c: Any) -> Any:
    return end(b.x * jax.nn.softplus(c(p["b"])) + jax.nn.sigmoid(c(p["t"])))


@jax.custom_jvp
def prelu(x: Any, slope: Any) -> Any:
    return jnp.where(x > 0, x, x * slope)


@prelu.defjvp
def _prelu_jvp(primals: Any, tangents: Any) -> Any:
    (x, slope), (dx, dslope) = primals, tangents
    zero = jnp.zeros_like(x)
    return prelu(x, slope), jnp.where(x > 0, dx, dx * slope) + jnp.where(x > 0, zero, x * dslope)


@model(s=(16,))
def custom_jvp(p: Params, b: Batch, c: Any) -> Any:
    return end(prelu(b.x, c(p["s"])))


@jax.custom_jvp
def tanh_dense(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@tanh_dense.defjvp
def _tanh_dense_jvp(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    y = tanh_dense(x, w)
    return y, (1 - y * y) * (dx @ w + x @ dw)


@model(w=(16, 16))
def custom_jvp_of_a_product(p: Params, b: Batch, c: Any) -> Any:
    return end(tanh_dense(b.x, c(p["w"])))


@jax.custom_vjp
def relu_dense(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.relu(x @ w + b)


def _relu_dense_back(kept: Any, ct: Any) -> Any:
    x, w, y = kept
    ct = jnp.where(y > 0, ct, 0)
    return ct @ w.T, x.T @ ct, jnp.sum(ct, axis=0)


relu_dense.defvjp(lambda x, w, b: ((y := relu_dense(x, w, b)), (x, w, y)), _relu_dense_back)


@model(w=(16, 16), b=(16,))
def custom_vjp(p: Params, b: Batch, c: Any) -> Any:
    return end(relu_dense(b.x, c(p["w"]), c(p["b"])))


@jax.custom_vjp
def chunked_head(x: Any, w: Any) -> Any:
    return jnp.mean((x @ w).astype(F32) ** 2)


def _chunked_head_back(kept: Any, ct: Any) -> Any:
    """Goes through the batch in parts, as fused losses do, and adds up the gradient of weights."""
    x, w = kept
    parts = x.reshape(BATCH // 8, 8, -1).swapaxes(0, 1)

    def body(dw: Any, part: Any) -> tuple[Any, Any]:
        scale = 2 * ct / (BATCH * w.shape[1])
        logits = ((part @ w).astype(F32) * scale).astype(w.dtype)
        return dw + part.T @ logits, logits @ w.T

    dw, dx = lax.scan(body, jnp.zeros_like(w), parts)
    return dx.swapaxes(0, 1).reshape(x.shape), dw


chunked_head.defvjp(lambda x, w: (chunked_head(x, w), (x, w)), _chunked_head_back)


@model(w=(16, 24))
def custom_vjp_in_parts(p: Params, b: Batch, c: Any) -> Any:
    return chunked_head(b.x, c(p["w"]))


@jax.custom_vjp
def lookup(table: Any, tokens: Any) -> Any:
    return table[tokens]


lookup.defvjp(
    lambda table, tokens: (table[tokens], (table, tokens)),
    lambda kept, ct: (jnp.zeros_like(kept[0]).at[kept[1]].add(ct), None),
)


@model(t=(32, 16))
def custom_vjp_of_a_lookup(p: Params, b: Batch, c: Any) -> Any:
    return end(lookup(c(p["t"]), b.tokens))


@model(w=(16, 16))
def orthogonalized(p: Params, b: Batch, c: Any) -> Any:
    w = c(p["w"]) / 4
    w = lax.fori_loop(0, 4, lambda _, w: 1.5 * w - 0.5 * w @ w.T @ w, w)
    return end(b.x @ w)


@model(w=(16, 48), o=(16, 16))
def attention(p: Params, b: Batch, c: Any) -> Any:
    x = b.x.reshape(8, 8, 16)
    q, k, v = jnp.split((x @ c(p["w"])).reshape(8, 8, 2, 24), 3, -1)
    y = jax.nn.dot_product_attention(q, k, v)
    return end(y.reshape(8, 8, 16) @ c(p["o"]))


@model(w=(16, 8), b=(8,))
def per_example_loop(p: Params, b: Batch, c: Any) -> Any:
    def one(x: Any) -> Any:
        def body(h: Any, _: None) -> Any:
            return jnp.tanh(h @ c(p["w"]) @ c(p["w"]).T), None

        return lax.scan(body, x, None, length=2)[0] @ c(p["w"]) + c(p["b"])

    return end(jax.vmap(one)(b.x))


@model(w=(16, 8), u=(16, 8))
def per_example_branch(p: Params, b: Batch, c: Any) -> Any:
    def one(x: Any, choice: Any) -> Any:
        return lax.cond(choice > 1, lambda: x @ c(p["w"]), lambda: x @ c(p["u"]))

    return end(jax.vmap(one)(b.x, b.choice))


@model(w=(16, 8), v=(8, 4))
def gradient_penalty(p: Params, b: Batch, c: Any) -> Any:
    def critic(x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ c(p["w"])) @ c(p["v"]))

    slopes = jax.grad(critic)(b.x)
    return end(b.x @ c(p["w"])) + jnp.mean((jnp.sum(slopes.astype(F32) ** 2, -1) - 1) ** 2)


@model(w=(16, 8))
def max_of_params(p: Params, b: Batch, c: Any) -> Any:
    w = c(p["w"])
    return end(b.x @ jnp.clip(w / jnp.max(jnp.abs(w)), -0.5, 0.5))


@model(w=(16, 8), v=(8, 16))
def block_of_params(p: Params, b: Batch, c: Any) -> Any:
    w = jnp.zeros((16, 16), b.x.dtype).at[:, :8].set(c(p["w"])).at[8:].add(c(p["v"]))
    w = jnp.concatenate([w, jnp.pad(c(p["w"]), ((0, 0), (0, 2)))], 1)
    return end(b.x @ w)


@model(w=(16, 8), b=(8,))
def in_another_dtype(p: Params, b: Batch, c: Any) -> Any:
    """Some of it in float32: what is kept in float32 by hand."""
    return end((b.x @ c(p["w"])).astype(F32) + p["b"])


@model(s=(16,))
def clipped_by_params(p: Params, b: Batch, c: Any) -> Any:
    return end(jnp.clip(b.x, -c(p["s"]), c(p["s"]) * 0.5))


@model(w=(16, 16))
def squared(p: Params, b: Batch, c: Any) -> Any:
    w = c(p["w"])
    return end(b.x @ w) + 0.1 * jnp.mean((w @ w.T).astype(F32)) + jnp.sum(w.astype(F32) ** 2)


@model(w=(16, 8))
def barrier_and_name(p: Params, b: Batch, c: Any) -> Any:
    w = lax.optimization_barrier(c(p["w"]))
    return end(b.x @ checkpoint_name(w, "w"))


@dataclasses.dataclass(frozen=True)
class Author:
    """Who casts, and where: at each use, all at once, or jaxmp.autocast."""

    how: str
    dtype: Any

    def loss(self, loss: Any) -> Callable[[Params, Batch], Any]:
        def cast(w: Any) -> Any:
            return w.astype(self.dtype)

        if self.how == "autocast":
            policy = f"mixed_{jnp.dtype(self.dtype).name}"
            return jaxmp.autocast(lambda p, b: loss(p, b, lambda w: w), policy)
        if self.how == "at use":
            return lambda p, b: loss(p, b._replace(x=cast(b.x), image=cast(b.image)), cast)
        return lambda p, b: loss(
            jax.tree.map(cast, p), b._replace(x=cast(b.x), image=cast(b.image)), lambda w: w
        )

    def __str__(self) -> str:
        return f"{self.how}, {jnp.dtype(self.dtype).name}"


AT_USE, BEFORE, AUTOCAST = (Author(how, jnp.bfloat16) for how in ("at use", "before", "autocast"))
Names = dict[Author, set[str]]


def cases(quick: Names, slow: Names, faults: dict[Any, str] = {}) -> Any:  # noqa: B006
    """Parametrizes by authors and models; slow ones are marked so, and known faults."""
    params = []
    for author in dict.fromkeys((*quick, *slow)):
        for name in sorted(quick.get(author, set()) | slow.get(author, set())):
            is_quick = name in quick.get(author, ())
            marks = [] if is_quick else [pytest.mark.slow, pytest.mark.exhaustive]
            if reason := faults.get((author, name)):
                marks.append(pytest.mark.xfail(strict=True, reason=reason))
            params.append(pytest.param(author, name, marks=marks, id=f"{name}-{author}"))
    return pytest.mark.parametrize(("author", "name"), params)


def params_of(model: Model) -> Params:
    """Params that are what their rounding is."""
    random = np.random.default_rng(1)
    return {
        name: bfloat16_numbers(
            0.3 * random.normal(size=shape)
            if len(shape) > 1
            else 1 + 0.1 * random.normal(size=shape)
        )
        for name, shape in model.shapes.items()
    }


def bfloat16_numbers(x: Any) -> jax.Array:
    """Numbers of 16 bits, in float32."""
    return jax.device_put(np.asarray(x).astype(jnp.bfloat16).astype(F32))


def batch() -> Batch:
    random = np.random.default_rng(0)
    return Batch(
        bfloat16_numbers(random.normal(size=(BATCH, WIDTH))),
        bfloat16_numbers(random.normal(size=(BATCH, 6, 6, 3))),
        jax.device_put(random.integers(0, 32, (BATCH, 8))),
        jax.device_put(random.integers(0, 4, BATCH)),
    )
