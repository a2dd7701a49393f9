"""Rules on whole models make the very program that annotating every layer by hand makes."""

import functools
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from jaxmp._tools.inspect.api import AuditReport, audit
from tests.support import rule_models
from tests.support.bits import tree_bits
from tests.support.rule_models import Author, Flax, Kind, Stack

pytestmark = pytest.mark.usefixtures("standard_promotion")

What = Literal["forward", "value_and_grad", "loss"]
# Scans are quick, and go through the same rules; the others are traced layer by layer.
CASES = [
    ("linen", "gpt", "scan"),
    ("nnx", "gpt", "scan"),
    *(
        pytest.param(flax, kind, stack, marks=[pytest.mark.slow, pytest.mark.exhaustive])
        for flax in ("linen", "nnx")
        for kind, stack in (
            ("gpt", "loop"),
            ("gpt", "remat"),
            ("gpt with Flax's attention", "loop"),
            ("resnet", "loop"),
            ("resnet", "remat"),
        )
    ),
]
on_every_model = pytest.mark.parametrize(("flax", "kind", "stack"), CASES)
LOW = "bfloat16 bfloat16 -> bfloat16"
FLOAT32 = "float32 float32 -> float32"


class Program(NamedTuple):
    """What JAX traces a function to, and what an audit finds in it."""

    text: str
    report: AuditReport


@functools.cache
def programs(flax: Flax, kind: Kind, stack: Stack, author: Author) -> dict[What, Program]:
    """The programs of a model."""
    if author != "plain":
        jax.clear_caches()  # so that no author is handed what another one's model was traced to
    layers = 4 if stack == "remat" or kind != "gpt" else 12
    return traced(rule_models.make(flax, kind, author, layers=layers, stack=stack), kind)


def program(flax: Flax, kind: Kind, stack: Stack, author: Author, what: What) -> Program:
    return programs(flax, kind, stack, author)[what]


def traced(model: Any, kind: Kind) -> dict[What, Program]:
    f, batch = rule_models.functions(model, kind), rule_models.batch(kind)
    # Jitted, so that both of them look at one trace.
    functions: dict[What, Any] = {
        "forward": jax.jit(f.forward),
        "value_and_grad": jax.jit(f.value_and_grad),
        "loss": jax.jit(f.loss),
    }
    return {
        name: Program(str(jax.make_jaxpr(fun)(f.params, batch)), audit(fun, f.params, batch))
        for name, fun in functions.items()
    }


def products(report: AuditReport) -> dict[str, int]:
    """How many matrix products and convolutions there are of which dtypes."""
    return {f"{' '.join(row.operands)} -> {row.result}": row.count for row in report.products}


def casts(report: AuditReport) -> int:
    return report.count("convert_element_type")


@on_every_model
@pytest.mark.slow
def test_the_same_products_as_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    model = flax, kind, stack
    want = program(*model, "by hand", "value_and_grad").report.products
    assert program(*model, "under rules", "value_and_grad").report.products == want
    forward = products(program(*model, "under rules", "forward").report)
    assert forward == products(program(*model, "by hand", "forward").report)
    plain = program(*model, "plain", "forward").report
    assert products(plain).keys() == {FLOAT32}  # positive control
    low = {("gpt", "loop"): 12 * 6, ("gpt", "remat"): 4 * 6, ("gpt", "scan"): 6}
    low |= {("resnet", stack): 1 + 2 * 4 + 1}
    if (kind, stack) in low:
        assert forward == {LOW: low[kind, stack], FLOAT32: 1}
    else:  # how Flax's attention accumulates is its own business
        assert forward[FLOAT32] == 1
        assert sum(forward.values()) == 4 * 8 + 1
        assert all(key.startswith("bfloat16 bfloat16") for key in forward.keys() - {FLOAT32})


@on_every_model
@pytest.mark.slow
def test_backward_keeps_no_more_than_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    by_hand, under_rules, plain = (
        program(flax, kind, stack, author, "loss").report.residual_bytes
        for author in ("by hand", "under rules", "plain")
    )
    assert under_rules == pytest.approx(by_hand, rel=0.03)
    assert plain > 1.03 * by_hand  # positive control


@pytest.mark.slow
@on_every_model
def test_no_more_casts_than_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    for what in ("forward", "value_and_grad"):
        by_hand = casts(program(flax, kind, stack, "by hand", what).report)
        assert 0 < casts(program(flax, kind, stack, "under rules", what).report) <= by_hand


@pytest.mark.slow
def test_a_region_that_is_not_needed_costs_casts_and_memory() -> None:
    """Positive control: each layer `up` leaves its region, and so is cast to float32 and back."""
    # Another policy than that of its surroundings, with the same dtypes for the layer itself.
    elsewhere = "params=float32,compute=bfloat16,output=float32,reduce=bfloat16"
    rules = [*rule_models.RULES["gpt"].rules, ("up", elsewhere)]
    model = rule_models.make("linen", "gpt", "plain", layers=12, stack="scan")
    model = jaxmp.linen.apply_policy(model, jaxmp.PolicyRules(rules, "mixed_bfloat16"))
    got = traced(model, "gpt")["value_and_grad"].report
    want = program("linen", "gpt", "scan", "by hand", "value_and_grad").report
    assert casts(got) > casts(want)
    assert got.products == want.products
    model = rule_models.make("nnx", "gpt", "plain", layers=12, stack="scan")
    jaxmp.nnx.apply_policy(model, jaxmp.PolicyRules(rules, "mixed_bfloat16"))
    kept = program("nnx", "gpt", "scan", "by hand", "loss").report.residual_bytes
    assert traced(model, "gpt")["loss"].report.residual_bytes > 1.03 * kept


@on_every_model
def test_the_very_same_program(flax: Flax, kind: Kind, stack: Stack) -> None:
    for what in ("forward", "value_and_grad"):
        by_hand = program(flax, kind, stack, "by hand", what).text
        assert program(flax, kind, stack, "under rules", what).text == by_hand
    plain = program(flax, kind, stack, "plain", "forward").text
    assert plain != program(flax, kind, stack, "by hand", "forward").text  # positive control


def result(flax: Flax, kind: Kind, stack: Stack, author: Author) -> Any:
    f = rule_models.functions(rule_models.make(flax, kind, author, stack=stack), kind)
    return rule_models.quick_jit(f.value_and_grad)(f.params, rule_models.batch(kind))


@pytest.mark.slow
@pytest.mark.parametrize("flax", ["linen", "nnx"])
@pytest.mark.parametrize(("kind", "stack"), [("gpt", "scan"), ("resnet", "loop")])
def test_the_same_bits_as_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    loss, grads, statistics = want = result(flax, kind, stack, "by hand")
    assert tree_bits(result(flax, kind, stack, "under rules")) == tree_bits(want)
    assert jnp.isfinite(loss)
    assert all(x.dtype == jnp.float32 and x.any() for x in jax.tree.leaves((grads, statistics)))
    assert bool(jax.tree.leaves(statistics)) == (kind == "resnet")
    if (flax, kind) == ("nnx", "resnet"):  # positive control
        assert tree_bits(result(flax, kind, stack, "plain")) != tree_bits(want)


class Nested(nn.Module):
    """A container that hands its dtype down, as most public models do; also to its head."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(nn.Dense(8, dtype=self.dtype)(x))
        return nn.Dense(4, dtype=self.dtype, name="head")(x)


class NestedNnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.dtype = dtype
        self.dense = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(8, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(8, 4, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(self.dense(x)))


def products_of(fun: Any, *args: Any) -> dict[str, int]:
    return products(audit(fun, *args))


def test_a_dtype_that_a_container_hands_down_is_overruled() -> None:
    x, module = jnp.ones((2, 8)), Nested()
    variables = module.init(jax.random.key(0), x)
    under_rules = jaxmp.linen.apply_policy(module, rule_models.RULES["gpt"])
    assert products_of(under_rules.apply, variables, x) == {LOW: 1, FLOAT32: 1}
    by_hand = jaxmp.linen.apply_policy(Nested(jnp.bfloat16), rule_models.RULES["gpt"])
    assert products_of(by_hand.apply, variables, x) == {LOW: 1, FLOAT32: 1}

    def fill_in(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Positive control: what is set where nothing was set; containers come first."""
        called = context.module
        if called.dtype is None:
            named = called.name in ("head", "norm")
            object.__setattr__(called, "dtype", jnp.float32 if named else jnp.bfloat16)
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(fill_in):
        assert products_of(module.apply, variables, x) == {LOW: 2}


def test_a_dtype_that_an_nnx_container_handed_down_is_overruled() -> None:
    x, low = jnp.ones((2, 8)), NestedNnx(nnx.Rngs(0), jnp.bfloat16)
    assert products_of(lambda x: low(x), x) == {LOW: 2}  # positive control
    for model in (low, NestedNnx(nnx.Rngs(0))):
        jaxmp.nnx.apply_policy(model, rule_models.RULES["gpt"])
        # A new function each time: JAX remembers what it traced a function to.
        assert products_of(lambda x, model=model: model(x), x) == {LOW: 1, FLOAT32: 1}
        assert (model.norm.dtype, model.head.dtype) == (jnp.float32, jnp.float32)
