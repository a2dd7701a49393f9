"""Plain float32 models under autocast are what hand-annotated bfloat16 models are, or better."""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
import jaxmp.nnx
from jaxmp._tools.inspect.api import AuditReport
from tests.support import rule_models
from tests.support.rule_models import Flax, Kind, Stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("standard_promotion"),
]

How = Literal["plain", "by hand", "autocast"]
CASES = [
    ("linen", "gpt", "loop"),
    ("linen", "gpt", "scan"),
    ("linen", "gpt", "remat"),
    ("nnx", "gpt", "loop"),
    ("nnx", "gpt", "scan"),
    ("nnx", "gpt", "remat"),
    ("linen", "gpt with Flax's attention", "loop"),
    ("linen", "resnet", "loop"),
    ("nnx", "resnet", "loop"),
]
on_every_model = pytest.mark.parametrize(("flax", "kind", "stack"), CASES)
LOW = ("bfloat16", "bfloat16")


def layers_of(kind: Kind, stack: Stack) -> int:
    return 12 if kind == "gpt" and stack == "scan" else 4


@functools.cache
def model(flax: Flax, kind: Kind, stack: Stack, how: How) -> tuple[Any, Any, Any]:
    """Loss, params and batch."""
    author: Any = "by hand, head too" if how == "by hand" else "plain"
    made = rule_models.make(flax, kind, author, layers=layers_of(kind, stack), stack=stack)
    f = rule_models.functions(made, kind)
    loss = jaxmp.autocast(f.loss, "mixed_bfloat16") if how == "autocast" else f.loss
    return loss, f.params, rule_models.batch(kind)


@functools.cache
def audits(flax: Flax, kind: Kind, stack: Stack, how: How) -> tuple[AuditReport, AuditReport]:
    """Of the loss, and of its value and gradient."""
    jax.clear_caches()  # JAX hands a module the trace of an equal one
    loss, params, batch = model(flax, kind, stack, how)

    def gradients(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(loss)(params, batch)[1]

    return jaxmp.audit(loss, params, batch), jaxmp.audit(gradients, params, batch)


def products(report: AuditReport) -> dict[tuple[tuple[str, str], str], int]:
    return {(row.operands, row.result): row.count for row in report.products}


def casts(report: AuditReport) -> int:
    return sum(row.count for row in report.converts)


@on_every_model
def test_as_many_low_products_as_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    which = flax, kind, stack
    (forward, both), (by_hand_forward, by_hand) = (
        audits(*which, "autocast"),
        audits(*which, "by hand"),
    )
    both.check(products="bfloat16", upcasts=0)
    assert products(forward) == products(by_hand_forward)
    # Every product of the gradients, but those of params have a float32 result.
    found = products(both)
    assert set(found) == {(LOW, "bfloat16"), (LOW, "float32")}
    assert found[LOW, "bfloat16"] + found[LOW, "float32"] == sum(products(by_hand).values())
    assert products(audits(*which, "plain")[1]).keys() == {(("float32", "float32"), "float32")}


@on_every_model
def test_gradients_of_params_are_float32(flax: Flax, kind: Kind, stack: Stack) -> None:
    """Of what the first layer reads, too: no product has touched embeddings."""
    layers = 1 if stack == "scan" else layers_of(kind, stack)
    embedded = {"gpt": 1, "gpt with Flax's attention": 3}.get(kind, 0) if stack != "scan" else 0
    weights = {"gpt": 4 * layers + 1, "resnet": 1 + 2 * 4 + 1 + 1}.get(kind, 6 * layers + 1)
    assert products(audits(flax, kind, stack, "autocast")[1])[LOW, "float32"] == weights + embedded
    by_hand = products(audits(flax, kind, stack, "by hand")[1])
    assert (LOW, "float32") not in by_hand  # positive control


@on_every_model
def test_no_more_casts_than_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    for ours, by_hand in zip(
        audits(flax, kind, stack, "autocast"), audits(flax, kind, stack, "by hand"), strict=True
    ):
        assert 0 < casts(ours) <= casts(by_hand)


@on_every_model
def test_backward_keeps_no_more_than_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    ours, by_hand, plain = (
        audits(flax, kind, stack, how)[0].residual_bytes for how in ("autocast", "by hand", "plain")
    )
    # The first checkpoint keeps the sum of the embeddings as it finds it, in float32.
    shape = (*rule_models.batch(kind)[0].shape, rule_models.WIDTH)
    embedded = 2 * math.prod(shape) if stack == "remat" else 0
    assert ours <= 1.03 * by_hand + embedded
    assert plain > 1.03 * by_hand + embedded  # positive control


def compiled(flax: Flax, kind: Kind, stack: Stack, how: How) -> Any:
    jax.clear_caches()
    loss, params, batch = model(flax, kind, stack, how)
    return rule_models.quick_jit(jax.value_and_grad(loss)).lower(params, batch).compile()


PARAM_DRAWS = 6


@pytest.mark.parametrize("flax", ["linen", "nnx"])
@pytest.mark.parametrize(("kind", "stack"), [("gpt", "scan"), ("gpt", "loop"), ("resnet", "loop")])
def test_closer_to_float32_than_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    programs = {how: compiled(flax, kind, stack, how) for how in ("plain", "by hand", "autocast")}
    _, params, batch = model(flax, kind, stack, "plain")
    errors: dict[str, list[tuple[float, float]]] = {"by hand": [], "autocast": []}
    for seed in range(PARAM_DRAWS):
        at = _moved(params, seed)
        loss, grads = programs["plain"](at, batch)
        for how, found in errors.items():
            value, got = programs[how](at, batch)
            found.append((abs(float(value - loss)), _relative(got, grads)))
    (by_hand_loss, by_hand_grad), (loss_error, grad_error) = np.mean(list(errors.values()), axis=1)
    assert 0 < grad_error <= 1.02 * by_hand_grad
    assert loss_error <= max(by_hand_loss, 2e-3)


def _moved(params: Any, seed: int) -> Any:
    """Params in the neighbourhood of others: one draw alone is luck, of either program."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    return jax.tree.unflatten(treedef, [x + jax.random.normal(k, x.shape) / 16 for k, x in pairs])


def _relative(got: Any, want: Any) -> float:
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    off = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
    return (off / sum(float(jnp.sum(b**2)) for _, b in pairs)) ** 0.5
