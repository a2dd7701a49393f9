"""Plain float32 models under autocast are what hand-annotated bfloat16 models are, or better."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest

import jaxmp
import jaxmp.nnx
from jaxmp import AuditReport
from tests import rule_models
from tests.rule_models import Flax, Kind, Stack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

How = Literal["plain", "by hand", "autocast"]
CASES = [
    pytest.param("linen", "gpt", "loop"),
    ("linen", "gpt", "scan"),
    ("linen", "gpt", "remat"),
    pytest.param("nnx", "gpt", "loop"),
    ("nnx", "gpt", "scan"),
    ("nnx", "gpt", "remat"),
    ("linen", "gpt with Flax's attention", "loop"),
    ("linen", "resnet", "loop"),
    ("nnx", "resnet", "loop"),
]
on_every_model = pytest.mark.parametrize(("flax", "kind", "stack"), CASES)
LOW = ("bfloat16", "bfloat16")


def layers_of(kind: Kind, stack: Stack) -> int:
    return 12 if kind == "gpt" and stack != "remat" else 4


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
    layers = 1 if stack == "scan" else layers_of(kind, stack)
    weights = {"gpt": 4 * layers + 1, "resnet": 1 + 2 * 4 + 1 + 1}.get(kind, 6 * layers + 1)
    assert products(audits(flax, kind, stack, "autocast")[1])[LOW, "float32"] == weights
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
    assert ours <= 1.03 * by_hand
    assert plain > 1.03 * by_hand  # positive control


def compiled(flax: Flax, kind: Kind, stack: Stack, how: How) -> Any:
    jax.clear_caches()
    loss, params, batch = model(flax, kind, stack, how)
    return rule_models.quick_jit(jax.value_and_grad(loss)).lower(params, batch).compile()


@pytest.mark.slow
@pytest.mark.parametrize("flax", ["linen", "nnx"])
@pytest.mark.parametrize(("kind", "stack"), [("gpt", "scan"), ("gpt", "loop"), ("resnet", "loop")])
def test_closer_to_float32_than_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    programs = {how: compiled(flax, kind, stack, how) for how in ("plain", "by hand", "autocast")}
    _, params, batch = model(flax, kind, stack, "plain")
    loss, grads = programs["plain"](params, batch)

    def error(how: How) -> tuple[float, float]:
        value, found = programs[how](params, batch)
        pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True))
        off = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
        return abs(float(value - loss)), (off / sum(float(jnp.sum(b**2)) for _, b in pairs)) ** 0.5

    (loss_error, grad_error), (by_hand_loss, by_hand_grad) = error("autocast"), error("by hand")
    assert 0 < grad_error <= 1.02 * by_hand_grad
    assert loss_error <= max(by_hand_loss, 2e-3)
    if kind == "gpt":
        temporary = {
            how: program.memory_analysis().temp_size_in_bytes for how, program in programs.items()
        }
        assert temporary["autocast"] <= 1.02 * temporary["by hand"]
