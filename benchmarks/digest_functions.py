"""Programs of plain JAX functions for the digests: hand-written, autocast, lean, in float8."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from digest_program import Loss, Make, Program, abstract, by_jmp, gradient, named, under_autocast
from gpt import GPT as NamedGPT
from jaxtyping import Array, PyTree
from stacked_models import GPT, LSTM, MoE, ResNet, Sizes

import jaxmp

SIZES = Sizes(layers=2, width=32, batch=4, length=16, heads=4, classes=64)
_IMAGES = Sizes(layers=2, width=16, batch=4, length=8, classes=16)
_RECIPES = ("tensorwise", "rowwise", "rowwise_hp")
_ROWS = jax.ShapeDtypeStruct((16, 32), jnp.float32)

# What a model is: its loss of params and batch, and both of them, abstract.
Parts = tuple[Loss, PyTree, PyTree]


def _stacked(kind: Any, sizes: Sizes = SIZES, **options: Any) -> Parts:
    model = kind(sizes, **options)
    return model.loss, abstract(model.params), abstract(model.batch)


def square(*count: int) -> Any:
    """Abstract weights."""
    return jax.ShapeDtypeStruct((*count, 32, 32), jnp.float32)


def mlp() -> Parts:
    """Three layers with biases."""
    bias = jax.ShapeDtypeStruct((32,), jnp.float32)

    def loss(params: PyTree, x: Array) -> Array:
        for layer in params:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return loss, [{"w": square(), "b": bias}] * 3, _ROWS


def _branches() -> Parts:
    """A `cond`, a `while` that no gradient goes through, and a `fori_loop` that one does."""

    def rough_norm(w: Array) -> Array:
        def smaller(state: tuple[Array, Array]) -> tuple[Array, Array]:
            x, times = state
            return jnp.tanh(x @ w) * 0.5, times + 1

        start = jnp.ones((1, w.shape[0]), w.dtype), jnp.int32(0)
        return jax.lax.while_loop(lambda s: s[1] < 3, smaller, start)[0].sum()

    def loss(params: PyTree, x: Array) -> Array:
        first, second = params["first"], params["second"]
        scale = jax.lax.stop_gradient(rough_norm(jax.lax.stop_gradient(first)))
        narrow = x.astype(first.dtype)
        y = jax.lax.cond(
            jnp.sum(x) > 0, lambda: jnp.tanh(narrow @ first), lambda: narrow @ first @ second
        )
        y = jax.lax.fori_loop(0, 3, lambda _, h: jnp.sin(h @ second), y)
        return jnp.mean(jnp.square((y * scale).astype(jnp.float32)))

    return loss, {"first": square(), "second": square()}, _ROWS


@jax.custom_vjp
def _clipped(x: Array, w: Array) -> Array:
    return x @ w


def _clipped_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ w, (x, w)


def _clipped_backward(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = kept
    g = jnp.clip(g, -1, 1)
    return g @ w.T, x.T @ g


_clipped.defvjp(_clipped_forward, _clipped_backward)


@jax.custom_jvp
def _bent(x: Array) -> Array:
    return x * jax.nn.sigmoid(1.7 * x)


@_bent.defjvp
def _bent_tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (t,) = primals, tangents
    return _bent(x), t * jax.nn.sigmoid(1.7 * x)


def _custom() -> Parts:
    """Functions with derivatives of their own, backward and forward."""

    def loss(params: PyTree, x: Array) -> Array:
        x = _bent(_clipped(x.astype(params["first"].dtype), params["first"]))
        return jnp.mean(jnp.square((x @ params["second"]).astype(jnp.float32)))

    return loss, {"first": square(), "second": square()}, _ROWS


def _regions() -> Parts:
    """A head that stays as it is written."""

    @jaxmp.full_precision
    def head(x: Array, w: Array) -> Array:
        return jax.nn.log_softmax(x @ w)

    def loss(params: PyTree, x: Array) -> Array:
        x = jnp.tanh(x @ params["first"])
        return -jnp.mean(head(x, params["second"])[:, 0])

    return loss, {"first": square(), "second": square()}, _ROWS


def _ragged() -> Parts:
    """Experts whose rows stand one after another."""

    def loss(params: PyTree, batch: tuple[Array, Array]) -> Array:
        x, counts = batch
        x = jax.lax.ragged_dot(x.astype(params["experts"].dtype), params["experts"], counts)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    counts = jax.ShapeDtypeStruct((4,), jnp.int32)
    return loss, {"experts": square(4)}, (_ROWS, counts)


def _of_any_dtype(remat: bool = False) -> Parts:
    """A GPT that computes in the dtype of its params."""
    model = NamedGPT(layers=2, width=32, heads=4, vocab=64, context=16, remat=remat)
    return model.loss, abstract(model.init), jax.ShapeDtypeStruct((4, 17), jnp.int32)


# Under autocast, in both dtypes.
_MODELS: dict[str, Callable[[], Parts]] = {
    "mlp": mlp,
    "branches": _branches,
    "custom": _custom,
    "resnet": lambda: _stacked(ResNet, _IMAGES),
    "gpt-scan": lambda: _stacked(GPT),
    "gpt-unrolled": lambda: _stacked(GPT, scan=False),
    "lstm": lambda: _stacked(LSTM),
}
# Under autocast in bfloat16.
_MORE: dict[str, Callable[[], Parts]] = {
    "checkpoint": lambda: _stacked(GPT, checkpoint=jax.checkpoint_policies.nothing_saveable),
    "regions": _regions,
    "ragged": _ragged,
    "moe": lambda: _stacked(MoE),
}
# With casts by jmp, of all params at once. These compute in the dtype of their params.
_UNDER_JMP: dict[str, Callable[[], Parts]] = {
    "mlp": mlp,
    "branches": _branches,
    "custom": _custom,
    "gpt": _of_any_dtype,
    "checkpoint": lambda: _of_any_dtype(remat=True),
}


def _by_jmp(make: Callable[[], Parts], dtype: str) -> Program:
    loss, params, batch = make()
    return gradient(by_jmp(loss, dtype), params, batch, dtype=dtype)


def _autocast(make: Callable[[], Parts], dtype: str, policy: Any = None, **options: Any) -> Program:
    loss, params, batch = make()
    lowered = under_autocast(loss, policy or dtype, **{"kernels": "traced", **options})
    return gradient(lowered, params, batch, dtype=dtype)


def _written_out(kind: Any, sizes: Sizes = SIZES, **options: Any) -> Program:
    """Casts by hand where they belong, and not of all params at once."""
    loss, params, batch = _stacked(kind, sizes, by_hand=True, **options)
    return gradient(loss, params, batch, dtype="bfloat16")


def _under_rules(rules: jaxmp.PolicyRules) -> Program:
    loss, params, tokens = _of_any_dtype()
    lowered = under_autocast(loss, rules)
    return gradient(lowered, params, tokens, dtype="bfloat16")


def _recomputed(mode: Any, **options: Any) -> Program:
    kind = options.pop("kind", GPT)
    return _autocast(lambda: _stacked(kind, **options), "bfloat16", recompute=mode)


def _recomputed_by_hand(mode: Any) -> Program:
    loss, params, batch = _stacked(GPT, by_hand=True)
    lean = jaxmp.recompute(loss, mode)
    return gradient(lean, params, batch, dtype="bfloat16")


def _float8(recipe: str, scan: bool) -> Program:
    policy = jaxmp.get_policy("mixed_bfloat16").with_products(f"{recipe}:minimum=none")
    return _autocast(lambda: _stacked(GPT, scan=scan), "bfloat16", policy=policy)


def _functions() -> dict[str, Make]:
    programs: dict[str, Make] = {}
    for dtype in ("bfloat16", "float16"):
        for name, make in _MODELS.items():
            programs |= named(f"{name}-autocast-{dtype}", _autocast, make, dtype)
        for name in ("mlp", "gpt"):
            programs |= named(f"{name}-jmp-{dtype}", _by_jmp, _UNDER_JMP[name], dtype)
    for name in ("branches", "custom", "checkpoint"):
        programs |= named(f"{name}-jmp-bfloat16", _by_jmp, _UNDER_JMP[name], "bfloat16")
    for name, make in _MORE.items():
        programs |= named(f"{name}-autocast-bfloat16", _autocast, make, "bfloat16")
    low, entered = {"kernels": "low"}, {"enter_custom_vjp": True}
    programs |= named("custom-low-bfloat16", _autocast, _custom, "bfloat16", **low)
    programs |= named("custom-entered-bfloat16", _autocast, _custom, "bfloat16", **entered)
    programs |= named("gpt-scan-written-bfloat16", _written_out, GPT)
    programs |= named("gpt-unrolled-written-bfloat16", _written_out, GPT, scan=False)
    programs |= named("resnet-written-bfloat16", _written_out, ResNet, _IMAGES)
    programs |= named("lstm-written-bfloat16", _written_out, LSTM)
    paths = {"head": "float32"}
    programs |= named("gpt-rules-path", _under_rules, jaxmp.PolicyRules(paths, "mixed_bfloat16"))
    for mode in ("auto", "always"):
        for name, scan in (("scan", True), ("unrolled", False)):
            programs |= named(f"gpt-{name}-recompute-{mode}", _recomputed, mode, scan=scan)
    programs |= named("lstm-recompute-auto", _recomputed, "auto", kind=LSTM)
    programs |= named("gpt-written-recompute-auto", _recomputed_by_hand, "auto")
    for recipe in _RECIPES:
        programs |= named(f"gpt-scan-float8-{recipe}", _float8, recipe, True)
        programs |= named(f"gpt-unrolled-float8-{recipe}", _float8, recipe, False)
    return programs


FUNCTIONS = _functions()
