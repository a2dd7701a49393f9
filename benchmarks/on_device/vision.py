"""Train steps of ViT-B/16 in plain JAX, and of ResNet-50 in linen with its batch statistics."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jaxtyping import Array, PyTree
from lab.timing import Contender
from stacked_models import Sizes, ViT

import jaxmp
import jaxmp.linen
from on_device.gpt import optimizer, steps_by_hand, with_jaxmp
from on_device.recorder import Recorder
from on_device.resnet import ResNet
from on_device.steps import Case, measure

VIT = "ViT-B, by hand, bfloat16"
RESNET = "ResNet-50, by hand, bfloat16"

_BASE = Sizes(layers=12, width=768, batch=128, length=14 * 14, heads=12, classes=1000)
_SMALL = Sizes(layers=2, width=32, batch=2, length=4, heads=2, classes=16)


def run(recorder: Recorder) -> None:
    """Records a row for each contender."""
    sizes = _SMALL if recorder.small else _BASE
    stages = {"blocks": (1, 1), "width": 8, "kinds": 16} if recorder.small else {}
    vit, resnet = vit_cases(sizes), resnet_cases(stages, sizes.batch, 32 if recorder.small else 224)
    # In turn, so that both are there where time is short.
    cases = [case for pair in zip(vit, resnet, strict=True) for case in pair]
    measure(recorder, cases, steps=5)


def vit_cases(sizes: Sizes) -> list[Case]:
    """Of a transformer whose layers are in a scan; attention is plain."""
    plain, cast = ViT(sizes), ViT(sizes, by_hand=True)
    init = jax.jit(plain.params)
    case = functools.partial(Case, batch=plain.batch(), items=sizes.batch, unit="images")
    policy = "mixed_bfloat16"
    others = {
        "ViT-B, jaxmp, autocast": with_jaxmp(plain.loss, init, policy),
        "ViT-B, jaxmp, recompute auto": with_jaxmp(plain.loss, init, policy, recompute="auto"),
    }
    return [
        case(Contender(VIT, *steps_by_hand(cast.loss, init, "float32"))),
        *(case(Contender(x, *y), facts={"baseline": VIT}) for x, y in others.items()),
        case(
            Contender("ViT-B, float32 (TF32)", *steps_by_hand(plain.loss, init, "float32")),
            facts={"baseline": VIT},
        ),
    ]


def resnet_cases(stages: dict[str, Any], batch: int, pixels: int) -> list[Case]:
    """Of a network with batch statistics, by linen's own `dtype` and by policies."""
    images = jax.random.normal(jax.random.key(1), (batch, pixels, pixels, 3))
    kinds = jax.random.randint(jax.random.key(2), (batch,), 0, stages.get("kinds", 1000))
    plain, cast = ResNet(**stages), ResNet(**stages, dtype=jnp.bfloat16)
    module = jaxmp.linen.apply_policy(plain, "mixed_bfloat16")

    @jax.jit
    def init() -> PyTree:
        return plain.init(jax.random.key(0), jnp.zeros((1, pixels, pixels, 3)))

    case = functools.partial(Case, batch=(images, kinds), items=batch, unit="images")
    others = {
        "ResNet-50, jaxmp, linen under a policy": _with_jaxmp(module, init, "none"),
        "ResNet-50, jaxmp, autocast": _with_jaxmp(plain, init, "mixed_bfloat16"),
        "ResNet-50, float32 (TF32)": _by_hand(plain, init),
    }
    return [
        case(Contender(RESNET, *_by_hand(cast, init))),
        *(case(Contender(x, *y), facts={"baseline": RESNET}) for x, y in others.items()),
    ]


def _loss(module: nn.Module) -> Callable[..., tuple[Array, PyTree]]:
    def loss(params: PyTree, batch: PyTree, batch_stats: PyTree) -> tuple[Array, PyTree]:
        images, kinds = batch
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = module.apply(variables, images, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, kinds)
        return losses.mean(), dict(updated)

    return loss


def _by_hand(module: nn.Module, init: Callable[[], PyTree]) -> tuple[Any, Any]:
    loss, tx = _loss(module), optimizer()

    def start() -> Any:
        variables = init()
        return variables["params"], variables["batch_stats"], tx.init(variables["params"])

    def step(state: Any, batch: PyTree) -> tuple[Any, dict[str, Any]]:
        params, stats, opt_state = state
        (value, updated), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, stats)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
        return (params, updated["batch_stats"], opt_state), metrics

    return start, step


def _with_jaxmp(module: nn.Module, init: Callable[[], PyTree], policy: str) -> tuple[Any, Any]:
    tx = jaxmp.mixed_precision(optimizer(), "mixed_bfloat16")

    def start() -> Any:
        variables = init()
        stats = variables["batch_stats"]
        return jaxmp.TrainState.create(params=variables["params"], tx=tx, batch_stats=stats)

    return start, jaxmp.make_train_step(_loss(module), policy, donate=False)
