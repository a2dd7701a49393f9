"""Rules on whole models make the very program that annotating every layer by hand makes."""

import collections
import functools
from collections.abc import Iterator
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend import core

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from tests import rule_models
from tests.bits import tree_bits
from tests.rule_models import Author, Flax, Kind, Stack

pytestmark = pytest.mark.usefixtures("standard_promotion")

What = Literal["forward", "value_and_grad", "vjp"]
CASES = [
    pytest.param("linen", "gpt", "loop", marks=pytest.mark.slow),
    ("linen", "gpt", "remat"),
    ("linen", "gpt", "scan"),
    ("linen", "gpt with Flax's attention", "loop"),
    ("linen", "resnet", "loop"),
    ("linen", "resnet", "remat"),
    pytest.param("nnx", "gpt", "loop", marks=pytest.mark.slow),
    ("nnx", "gpt", "remat"),
    ("nnx", "gpt", "scan"),
    ("nnx", "gpt with Flax's attention", "loop"),
    ("nnx", "resnet", "loop"),
    ("nnx", "resnet", "remat"),
]
on_every_model = pytest.mark.parametrize(("flax", "kind", "stack"), CASES)
PROGRAMS = (core.Jaxpr, core.ClosedJaxpr)
LOW = "bfloat16 bfloat16 -> bfloat16"
FLOAT32 = "float32 float32 -> float32"


@functools.cache
def programs(flax: Flax, kind: Kind, stack: Stack, author: Author) -> dict[What, core.Jaxpr]:
    """What JAX traces of a model."""
    if author != "plain":
        jax.clear_caches()  # so that no author is handed what another one's model was traced to
    layers = 4 if stack == "remat" or kind != "gpt" else 12
    return traced(rule_models.make(flax, kind, author, layers=layers, stack=stack), kind)


def program(flax: Flax, kind: Kind, stack: Stack, author: Author, what: What) -> core.Jaxpr:
    return programs(flax, kind, stack, author)[what]


def traced(model: Any, kind: Kind) -> dict[What, core.Jaxpr]:
    f = rule_models.functions(model, kind)

    def vjp(params: Any, batch: Any) -> Any:
        return jax.vjp(lambda params: f.loss(params, batch), params)

    functions: dict[What, Any] = {
        "forward": f.forward,
        "value_and_grad": f.value_and_grad,
        "vjp": vjp,
    }
    batch = rule_models.batch(kind)
    return {name: jax.make_jaxpr(fun)(f.params, batch).jaxpr for name, fun in functions.items()}


def equations(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """All equations, those of nested programs too."""
    for equation in jaxpr.eqns:
        yield equation
        values = list(equation.params.values())
        for value in jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, PROGRAMS)):
            if isinstance(value, PROGRAMS):
                yield from equations(getattr(value, "jaxpr", value))


def products(jaxpr: core.Jaxpr) -> collections.Counter[str]:
    """How many matrix products and convolutions there are of which dtypes."""
    return collections.Counter(
        f"{' '.join(str(x.aval.dtype) for x in e.invars)} -> {e.outvars[0].aval.dtype}"
        for e in equations(jaxpr)
        if e.primitive.name in ("dot_general", "conv_general_dilated")
    )


def casts(jaxpr: core.Jaxpr) -> int:
    return sum(e.primitive.name == "convert_element_type" for e in equations(jaxpr))


def saved_bytes(vjp: core.Jaxpr) -> int:
    """The size of what is kept for the backward pass and is no argument of the forward pass."""
    arguments = {*vjp.invars, *vjp.constvars}
    kept = {x for x in vjp.outvars if isinstance(x, core.Var) and x not in arguments}
    return sum(x.aval.size * x.aval.dtype.itemsize for x in kept)


@on_every_model
def test_the_same_products_as_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    model = flax, kind, stack
    want = products(program(*model, "by hand", "value_and_grad"))
    assert products(program(*model, "under rules", "value_and_grad")) == want
    forward = products(program(*model, "under rules", "forward"))
    assert forward == products(program(*model, "by hand", "forward"))
    assert products(program(*model, "plain", "forward")).keys() == {FLOAT32}  # positive control
    low = {("gpt", "loop"): 12 * 6, ("gpt", "remat"): 4 * 6, ("gpt", "scan"): 6}
    low |= {("resnet", stack): 1 + 2 * 4 + 1}
    if (kind, stack) in low:
        assert forward == {LOW: low[kind, stack], FLOAT32: 1}
    else:  # how Flax's attention accumulates is its own business
        assert forward[FLOAT32] == 1
        assert sum(forward.values()) == 4 * 8 + 1
        assert all(key.startswith("bfloat16 bfloat16") for key in forward.keys() - {FLOAT32})


@on_every_model
def test_backward_keeps_no_more_than_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    by_hand, under_rules, plain = (
        saved_bytes(program(flax, kind, stack, author, "vjp"))
        for author in ("by hand", "under rules", "plain")
    )
    assert under_rules == pytest.approx(by_hand, rel=0.03)
    assert plain > 1.03 * by_hand  # positive control


@on_every_model
def test_no_more_casts_than_by_hand(flax: Flax, kind: Kind, stack: Stack) -> None:
    for what in ("forward", "value_and_grad"):
        by_hand = casts(program(flax, kind, stack, "by hand", what))
        assert 0 < casts(program(flax, kind, stack, "under rules", what)) <= by_hand


def test_a_region_that_is_not_needed_costs_casts_and_memory() -> None:
    """Positive control: each layer `up` leaves its region, and so is cast to float32 and back."""
    # Another policy than that of its surroundings, with the same dtypes for the layer itself.
    elsewhere = "params=float32,compute=bfloat16,output=float32,reduce=bfloat16"
    rules = [*rule_models.RULES["gpt"].rules, ("up", elsewhere)]
    model = rule_models.make("linen", "gpt", "plain", layers=12, stack="scan")
    model = jaxmp.linen.apply_policy(model, jaxmp.PolicyRules(rules, "mixed_bfloat16"))
    got, want = traced(model, "gpt"), programs("linen", "gpt", "scan", "by hand")
    assert casts(got["value_and_grad"]) > casts(want["value_and_grad"])
    assert products(got["value_and_grad"]) == products(want["value_and_grad"])
    model = rule_models.make("nnx", "gpt", "plain", layers=12, stack="scan")
    jaxmp.nnx.apply_policy(model, jaxmp.PolicyRules(rules, "mixed_bfloat16"))
    kept = saved_bytes(programs("nnx", "gpt", "scan", "by hand")["vjp"])
    assert saved_bytes(traced(model, "gpt")["vjp"]) > 1.03 * kept


@on_every_model
def test_the_very_same_program(flax: Flax, kind: Kind, stack: Stack) -> None:
    for what in ("forward", "value_and_grad"):
        by_hand = str(program(flax, kind, stack, "by hand", what))
        assert str(program(flax, kind, stack, "under rules", what)) == by_hand
    plain = str(program(flax, kind, stack, "plain", "forward"))
    assert plain != str(program(flax, kind, stack, "by hand", "forward"))  # positive control


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


def products_of(fun: Any, *args: Any) -> collections.Counter[str]:
    return products(jax.make_jaxpr(fun)(*args).jaxpr)


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
