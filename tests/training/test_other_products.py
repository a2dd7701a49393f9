"""Who wraps an optimizer for 16 bits, and forgets to cast, is told so; nobody else is."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax

import jaxmp
import jaxmp.equinox
import jaxmp.linen

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]

X = np.random.default_rng(0).standard_normal((16, 16), np.float32)
BF16, F16 = jnp.bfloat16, jnp.float16


grad = functools.partial(jaxmp.grad, loss_scale=1.0)


def params() -> dict[str, Any]:
    return {"up": jax.device_put(X), "down": jax.device_put(X.T.copy())}


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)


def wrapped(policy: Any = "mixed_bfloat16", inner: Any = None) -> jaxmp.MixedPrecision:
    return jaxmp.mixed_precision(inner or optax.sgd(0.1), policy)


def trained(
    loss: Callable[..., Any],
    policy: Any = "mixed_bfloat16",
    *,
    differentiate: Any = grad,
    clip: bool = False,
    apply: str = "update",
    model: Any = None,
    inner: Any = None,
) -> None:
    """One traced update of an own loop."""
    tx = wrapped(policy, inner)
    start = params() if model is None else model
    state = tx.init(start)

    def step(p: Any, state: Any, x: Any) -> Any:
        grads = differentiate(loss)(p, x)
        if clip:
            norm = optax.tree.norm(grads)
            grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
        if apply == "update":
            return tx.update(grads, state, p)
        return tx.apply_gradients(grads, state, p)

    jax.eval_shape(step, start, state, X)


def by_hand(dtype: Any) -> Callable[..., Any]:
    def cast(p: Any, x: Any) -> Any:
        return loss(jax.tree.map(lambda w: w.astype(dtype), p), x.astype(dtype)).astype(jnp.float32)

    return cast


def scanned(p: Any, x: Any) -> Any:
    stacked = jnp.stack([p["up"], p["down"]])
    return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stacked)[0] ** 2)


def convolved(p: Any, x: Any) -> Any:
    image = x.reshape(1, 16, 16, 1)
    kernel = p["up"].reshape(16, 16, 1, 1)
    return jnp.mean(lax.conv_general_dilated(image, kernel, (1, 1), "SAME") ** 2)


def accumulated(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of two halves, added up in a scan."""

    def gradients(p: Any, x: Any) -> Any:
        def part(total: Any, half: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(p, half)), None

        zeros = jax.tree.map(jnp.zeros_like, p)
        return lax.scan(part, zeros, x.reshape(2, 8, 16))[0]

    return gradients


def in_a_jit(loss: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(jax.grad(loss))


class Net(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.up(x))


def nnx_loss(model: Net, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def live(policy: str, loss: Callable[..., Any] = nnx_loss, model_policy: str | None = None) -> None:
    """One traced update of a live module, by a loop of its own."""
    model = Net()
    if model_policy is not None:
        jaxmp.nnx.apply_policy(model, model_policy)
    optimizer = jaxmp.nnx.Optimizer(model, wrapped(policy))

    def step(model: Net, optimizer: jaxmp.nnx.Optimizer, x: Any) -> None:
        grads = jaxmp.nnx.grad(loss, loss_scale=optimizer.loss_scale)(model, x)
        optimizer.update(model, grads)

    nnx.eval_shape(step, model, optimizer, X)


def of_linen(policy: str, model_policy: str | None) -> None:
    model: Any = nn.Dense(16)
    if model_policy is not None:
        model = jaxmp.linen.apply_policy(model, model_policy)
    variables = model.init(jax.random.key(0), X)
    trained(lambda v, x: jnp.mean(model.apply(v, x) ** 2), policy, model=variables)


def of_equinox(policy: str, model_policy: str | None) -> None:
    model: Any = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    if model_policy is not None:
        model = jaxmp.equinox.apply_policy(model, model_policy)
    tx = wrapped(policy)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model: Any, state: Any, x: Any) -> Any:
        def mean(model: Any, x: Any) -> Any:
            return jnp.mean(jax.vmap(model)(x) ** 2)

        grads = jaxmp.equinox.filter_grad(mean)(model, x)
        return tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))

    eqx.filter_eval_shape(step, model, state, X)


def step_of(policy: str, step_policy: Any, loss: Callable[..., Any] = loss, **options: Any) -> None:
    state = jaxmp.TrainState.create(params=params(), tx=wrapped(policy))
    jaxmp.make_train_step(loss, step_policy, **options).trace(state, X)


autocast = jaxmp.autocast

# What computes in float32, or in another 16-bit dtype than the optimizer was wrapped for.
FORGOTTEN: dict[str, Callable[[], None]] = {
    "plain grad": lambda: trained(loss),
    "jax.grad": lambda: trained(loss, differentiate=jax.grad),
    "clipped": lambda: trained(loss, clip=True),
    "apply_gradients": lambda: trained(loss, apply="apply_gradients"),
    "float16": lambda: trained(loss, "mixed_float16"),
    "float8": lambda: trained(loss, "mixed_float8"),
    "params in 16 bits alone": lambda: trained(loss, "bfloat16"),
    "rules": lambda: trained(loss, jaxmp.rules.keep_norms_float32("mixed_bfloat16")),
    "scan": lambda: trained(scanned),
    "convolution": lambda: trained(convolved),
    "recomputed": lambda: trained(jax.checkpoint(loss)),
    "accumulated": lambda: trained(loss, differentiate=accumulated),
    "a jit inside": lambda: trained(loss, differentiate=in_a_jit),
    "under float32": lambda: trained(autocast(loss, "float32")),
    "another dtype": lambda: trained(autocast(loss, "mixed_bfloat16"), "mixed_float16"),
    "another dtype by hand": lambda: trained(by_hand(BF16), "mixed_float16"),
    "live": lambda: live("mixed_bfloat16"),
    "live, another dtype": lambda: live("mixed_float16", model_policy="mixed_bfloat16"),
    "linen": lambda: of_linen("mixed_bfloat16", None),
    "equinox": lambda: of_equinox("mixed_bfloat16", None),
    "rules by name": lambda: trained(
        loss, jaxmp.PolicyRules({"*norm": "float32"}, default="mixed_bfloat16")
    ),
    "a step whose model does not cast": lambda: step_of("mixed_bfloat16", "none"),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_who_forgets_to_cast_is_told_once(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FORGOTTEN[name]()
    texts = [str(x.message) for x in caught]
    assert sum("and all products behind its gradients are" in text for text in texts) == 1, texts


def test_float64_is_as_float32() -> None:
    with (
        jax.enable_x64(True),
        pytest.warns(UserWarning, match="are float32 and float64: the loss runs"),
    ):
        trained(lambda p, x: loss(jax.tree.map(lambda w: w.astype(jnp.float64), p), x * 1.0))


def two_players() -> None:
    """A GAN: each network has its optimizer, and its loss goes through the other."""
    for name, other in (("up", "down"), ("down", "up")):
        fixed = params()[other]

        def of_one(p: Any, x: Any, name: str = name, other: str = other, fixed: Any = fixed) -> Any:
            return loss({name: p, other: fixed}, x)

        trained(autocast(of_one, "mixed_bfloat16"), model=params()[name])


def frozen_base(p: Any, x: Any) -> Any:
    """The head alone has gradients; the base is float32 by the rules of the user."""
    with jax.named_scope("base"):
        h = jnp.tanh(x @ lax.stop_gradient(p["up"]))
    return jnp.mean((h @ p["down"]) ** 2)


def all_in_float32_by_rules(p: Any, x: Any) -> Any:
    with jax.named_scope("head"):
        return loss(p, x)


def through_int8(p: Any, x: Any) -> Any:
    codes = lax.stop_gradient(jnp.round(x * 10)).astype(jnp.int8)
    product = jnp.matmul(codes, codes.T, preferred_element_type=jnp.int32)
    return jnp.mean(product.astype(jnp.float32)) * jnp.sum(p["up"])


def experts(p: Any, x: Any) -> Any:
    """Tokens of 16 bits by groups, behind a router in float32."""
    scores = x @ p["up"]
    groups = jnp.array([x.shape[0]], jnp.int32)
    out = lax.ragged_dot(x.astype(BF16), p["up"].astype(BF16)[None], groups)
    return jnp.mean(out.astype(jnp.float32) * scores)


def from_another_program() -> None:
    """Gradients that come into the program say nothing of how they were made."""
    tx = wrapped()
    state = tx.init(params())

    def project(grads: Any, state: Any, p: Any) -> Any:
        angle = jnp.vdot(grads["up"], grads["down"])
        return tx.update(jax.tree.map(lambda g: g * angle, grads), state, p)

    jax.eval_shape(project, params(), state, params())


def of_a_critic(p: Any, x: Any) -> Any:
    """A float32 part by rules, of a live model under them."""
    model = Net()
    jaxmp.nnx.apply_policy(model, jaxmp.PolicyRules({"up": "float32"}, default="mixed_bfloat16"))
    return jnp.mean((model(x) @ p["up"]) ** 2)


def with_a_precision(p: Any, x: Any) -> Any:
    preset = lax.DotAlgorithmPreset.BF16_BF16_F32
    return jnp.mean(jnp.matmul(x, p["up"], precision=preset) ** 2)


def linear(p: Any, x: Any) -> Any:
    narrow = x.astype(BF16), p["up"].astype(BF16)
    return jnp.mean(jnp.matmul(*narrow, preferred_element_type=jnp.float32))


HEAD = jaxmp.PolicyRules({"head": "float32"}, default="mixed_bfloat16")
BASE = jaxmp.PolicyRules({"base": "float32"}, default="mixed_bfloat16")
LABELS = {"up": "a", "down": "b"}
SPLIT = optax.multi_transform({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, LABELS)
FROZEN = optax.multi_transform({"a": optax.set_to_zero(), "b": optax.adam(0.1)}, LABELS)
fast = autocast(loss, "mixed_bfloat16")

SILENT: dict[str, Callable[[], None]] = {
    "autocast": lambda: trained(fast),
    "jax.grad": lambda: trained(fast, differentiate=jax.grad),
    "clipped": lambda: trained(fast, clip=True),
    "apply_gradients": lambda: trained(fast, apply="apply_gradients"),
    "float16": lambda: trained(autocast(loss, "mixed_float16"), "mixed_float16"),
    "float8": lambda: trained(autocast(loss, "mixed_float8"), "mixed_float8"),
    "int8": lambda: trained(autocast(loss, "mixed_int8"), "mixed_int8"),
    "by hand": lambda: trained(by_hand(BF16)),
    "by hand in float16": lambda: trained(by_hand(F16), "mixed_float16"),
    "float32 baseline": lambda: trained(loss, "float32"),
    "float64 baseline": lambda: trained(loss, "float64"),
    "scan": lambda: trained(autocast(scanned, "mixed_bfloat16")),
    "convolution": lambda: trained(autocast(convolved, "mixed_bfloat16")),
    "recomputed": lambda: trained(jax.checkpoint(fast)),
    "recompute": lambda: trained(autocast(loss, "mixed_bfloat16", recompute="always")),
    "accumulated": lambda: trained(fast, differentiate=accumulated),
    "a jit inside": lambda: trained(fast, differentiate=in_a_jit),
    "GAN": two_players,
    "multi_transform": lambda: trained(fast, inner=SPLIT),
    "MultiSteps": lambda: trained(fast, inner=optax.MultiSteps(optax.sgd(0.1), 2)),
    "frozen by the optimizer": lambda: trained(fast, inner=FROZEN),
    "a base in float32": lambda: trained(autocast(frozen_base, BASE), BASE),
    "all in float32 by rules": lambda: trained(autocast(all_in_float32_by_rules, HEAD), HEAD),
    "that in a jit": lambda: trained(
        jax.jit(autocast(all_in_float32_by_rules, HEAD)), HEAD, differentiate=in_a_jit
    ),
    "that in a checkpoint": lambda: trained(
        jax.checkpoint(autocast(all_in_float32_by_rules, HEAD)), HEAD, differentiate=accumulated
    ),
    "that in a live model": lambda: trained(
        of_a_critic, jaxmp.PolicyRules({"up": "float32"}, default="mixed_bfloat16")
    ),
    "a precision of 16 bits": lambda: trained(with_a_precision),
    "a linear loss": lambda: trained(linear),
    "no products": lambda: trained(lambda p, x: jnp.sum(p["up"] * x) + jnp.sum(p["down"])),
    "experts and a router": lambda: trained(experts),
    "products of integers": lambda: trained(through_int8),
    "one product by hand in float32": lambda: trained(
        lambda p, x: by_hand(BF16)(p, x) + jnp.mean(x @ p["up"])
    ),
    "from another program": from_another_program,
    "live": lambda: live("mixed_bfloat16", jaxmp.nnx.autocast(nnx_loss, "mixed_bfloat16")),
    "live, casts": lambda: live("mixed_float16", model_policy="mixed_float16"),
    "live, float32": lambda: live("float32"),
    "linen": lambda: of_linen("mixed_bfloat16", "mixed_bfloat16"),
    "equinox": lambda: of_equinox("mixed_bfloat16", "mixed_bfloat16"),
    "a step": lambda: step_of("mixed_bfloat16", None),
    "a step that casts all": lambda: step_of("mixed_bfloat16", None, cast="all"),
    "a step by hand": lambda: step_of("mixed_bfloat16", "none", by_hand(BF16)),
    "microbatches": lambda: step_of("mixed_bfloat16", None, microbatches=2),
}


@pytest.mark.parametrize("name", SILENT)
def test_nobody_else_is_told(name: str) -> None:
    """Warnings are errors here."""
    SILENT[name]()
