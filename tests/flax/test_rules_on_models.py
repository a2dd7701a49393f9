"""Rules on whole models make the very program that annotating every layer by hand makes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmp
from tests.support import rule_models
from tests.support.dots import count_dots
from tests.support.rule_models import Author, Flax, Kind, Stack

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Scans are quick, and go through the same rules; the others are traced layer by layer.
SLOW, EXHAUSTIVE = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.exhaustive]
MODELS: list[tuple[Kind, Stack, Any]] = [
    ("gpt", "scan", ()),
    ("resnet", "loop", SLOW),
    ("gpt", "loop", EXHAUSTIVE),
    ("gpt", "remat", EXHAUSTIVE),
    ("gpt with Flax's attention", "loop", EXHAUSTIVE),
    ("resnet", "remat", EXHAUSTIVE),
]
CASES = [pytest.param(flax, *x[:2], marks=x[2]) for x in MODELS for flax in ("linen", "nnx")]


@pytest.mark.parametrize(("flax", "kind", "stack"), CASES)
def test_the_very_same_program(flax: Flax, kind: Kind, stack: Stack) -> None:
    """The same bits, products and casts, and as much kept for the backward pass."""

    def texts(author: Author) -> list[str]:
        jax.clear_caches()  # so that no author is handed what another one's model was traced to
        layers = 4 if stack == "remat" or kind != "gpt" else 12
        model = rule_models.make(flax, kind, author, layers=layers, stack=stack)
        f, batch = rule_models.functions(model, kind), rule_models.batch(kind)
        return [str(jax.make_jaxpr(fun)(f.params, batch)) for fun in (f.forward, f.value_and_grad)]

    by_hand = texts("by hand")
    assert texts("under rules") == by_hand
    assert texts("plain")[0] != by_hand[0]  # positive control


class NestedNnx(nnx.Module):
    """A container that hands its dtype down, also to its head."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.dtype = dtype
        self.dense = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(8, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(8, 4, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(self.dense(x)))


def test_a_dtype_that_an_nnx_container_handed_down_is_overruled() -> None:
    x, low = jnp.ones((2, 8)), NestedNnx(nnx.Rngs(0), jnp.bfloat16)
    assert count_dots(lambda x: low(x), x) == {"bfloat16": 2}  # positive control
    for model in (low, NestedNnx(nnx.Rngs(0))):
        jaxmp.nnx.apply_policy(model, rule_models.RULES["gpt"])
        # A new function each time: JAX remembers what it traced a function to.
        assert count_dots(lambda x, model=model: model(x), x) == {"bfloat16": 1, "float32": 1}
        assert (model.norm.dtype, model.head.dtype) == (jnp.float32, jnp.float32)
