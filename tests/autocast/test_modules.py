"""Autocast of live nnx modules and of linen modules: their state, and rules that name them."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

import jaxmp
import jaxmp.nnx
from tests.support import rule_models
from tests.support.reduction_checks import relative_error

pytestmark = [pytest.mark.annotations, pytest.mark.usefixtures("standard_promotion")]


class Branches(nnx.Module):
    """State that changes in every call, and a layer that a rule names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls = nnx.Intermediate(jnp.sum(x))
        return self.head(self.dropout(self.norm(self.dense(x))))

    def encode(self, x: jax.Array) -> jax.Array:
        return self.norm(self.dense(x))


def square(model: Branches, x: jax.Array, power: int = 2) -> jax.Array:
    return jnp.mean(jnp.abs(model(x)) ** power)


X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
WAYS: dict[str, Any] = {
    "a function": lambda cast, model: cast(square)(model, X),
    "keywords": lambda cast, model: cast(square)(model=model, x=X, power=2),
    "the model": lambda cast, model: cast(model)(X),
    "a method": lambda cast, model: cast(model.encode)(X),
    "nnx.jit": lambda cast, model: nnx.jit(cast(square))(model, X),
    "gradients": lambda cast, model: nnx.value_and_grad(cast(square))(model, X),
    "jitted gradients": lambda cast, model: nnx.jit(nnx.value_and_grad(cast(square)))(model, X),
    "scaled gradients": lambda cast, model: nnx.jit(
        jaxmp.nnx.value_and_grad(cast(square), loss_scale=2.0**10)
    )(model, X),
    "checkpoint": lambda cast, model: nnx.remat(cast(square))(model, X),
}


@pytest.mark.programs(120, reason="live modules are called, and differentiated, outside of a jit")
@pytest.mark.parametrize("way", WAYS)
def test_what_nnx_modules_change_is_changed(way: str) -> None:
    ours, plain = Branches(nnx.Rngs(0)), Branches(nnx.Rngs(0))
    cast = functools.partial(jaxmp.nnx.autocast, policy="mixed_bfloat16")
    reference = nnx.jit(lambda model: WAYS[way](lambda fun: fun, model))
    for _ in range(2):
        got, want = WAYS[way](cast, ours), reference(plain)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), want)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == shapes
        assert 0 < relative_error(got, want) < 0.05
    assert type(ours) is Branches
    assert type(ours.norm) is nnx.BatchNorm
    assert ours.norm.mean.get_value().any()
    np.testing.assert_allclose(ours.norm.mean.get_value(), plain.norm.mean.get_value(), atol=2e-3)
    drawn = plain.dropout.rngs.count.get_value()
    assert ours.dropout.rngs.count.get_value() == drawn == (0 if way == "a method" else 2)
    assert hasattr(ours, "calls") == (way != "a method")
    assert not [name for module in (ours, ours.head) for name in vars(module) if "jaxmp" in name]


def test_a_lost_change_is_an_error() -> None:
    model = Branches(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"changes its arguments in place.*jaxmp\.nnx\.autocast"):
        jaxmp.autocast(square, "mixed_bfloat16")(model, X)
    assert not model.norm.mean.get_value().any()
    # A module that is a mapping, too.
    layers = nnx.Dict(norm=nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="changes its arguments in place"):
        jaxmp.autocast(lambda layers, x: layers["norm"](x).sum(), "mixed_bfloat16")(layers, X)
    with pytest.raises(Exception, match=r"trace level|autocast") as info:
        jaxmp.autocast(lambda x: model(x), "mixed_bfloat16")(X)
    said = str(info.value) + " ".join(getattr(info.value, "__notes__", ()))
    assert "jaxmp.nnx.autocast" in said
    model.eval()
    evaluated = jaxmp.autocast(Branches.encode, "mixed_bfloat16")(model, X)
    np.testing.assert_allclose(evaluated, model.encode(X), atol=0.02)


@pytest.mark.parametrize("transform", ["autocast", "recompute"])
def test_a_function_of_a_state_returns_the_new_one(transform: str) -> None:
    """What `nnx.merge` shares with a state may be written to, as under `jax.jit`."""
    graph, state = nnx.split(Branches(nnx.Rngs(0)))

    def loss(state: nnx.State, x: Any) -> tuple[Any, nnx.State]:
        model = nnx.merge(graph, state)
        y = nnx.remat(lambda model, x: model(x))(model, x)
        return jnp.square(y).mean(), nnx.state(model, nnx.BatchStat)

    cast = (
        jaxmp.autocast(loss, "mixed_bfloat16") if transform == "autocast" else jaxmp.recompute(loss)
    )
    (got, statistics), (want, expected) = (jax.jit(f)(state, X) for f in (cast, loss))
    np.testing.assert_allclose(got, want, rtol=0.05)
    for a, b in zip(jax.tree.leaves(statistics), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)


def products_in(fun: Any, *args: Any) -> dict[str, int]:
    return {
        f"{'/'.join(row.path.split('/')[-1:])} {row.operands[0]}": row.count
        for row in jaxmp.audit(fun, *args).product_lines
    }


@pytest.mark.parametrize(
    "rules",
    [
        {"head": "float32"},
        {lambda path, module: path == "head": "float32"},
        {"type:Branches": "mixed_bfloat16", "re:he.*": None},
    ],
    ids=["glob", "predicate", "expression"],
)
def test_rules_find_nnx_modules(rules: Any) -> None:
    def call(x: Any) -> Any:
        model = Branches(nnx.Rngs(0))
        return jaxmp.nnx.autocast(model, jaxmp.PolicyRules(rules, "mixed_bfloat16"))(x)

    assert products_in(call, X) == {"dense bfloat16": 1, "head float32": 1}


def test_a_rule_about_one_nnx_layer_of_a_scan() -> None:
    model = rule_models.make("nnx", "gpt", "plain", layers=3, stack="scan")
    graphdef, rest = nnx.split(rule_models.real(model))
    rules = jaxmp.PolicyRules({"blocks/down": "float32"}, "mixed_bfloat16")

    def forward(state: Any, tokens: Any) -> Any:
        return jaxmp.nnx.autocast(nnx.merge(graphdef, state), rules)(tokens)

    found = jaxmp.audit(forward, rest, rule_models.batch("gpt")[0])
    names = {row.path.rsplit("/", 1)[-1]: row.operands[0] for row in found.product_lines}
    assert names["down"] == "float32"
    assert {names["up"], names["qkv"], names["head"]} == {"bfloat16"}


@pytest.mark.every_case
@pytest.mark.parametrize(("stack", "block"), [("loop", "block_1"), ("scan", "blocks")])
def test_rules_find_linen_modules(stack: Any, block: str) -> None:
    """Also in a scan of layers under `nn.remat`."""
    module = rule_models.make("linen", "gpt", "plain", layers=2, stack=stack)
    f = rule_models.functions(module, "gpt")
    rules = jaxmp.PolicyRules({f"{block}/**/down": "float32", "/head": "float32"}, "mixed_bfloat16")
    forward = jaxmp.autocast(f.forward, rules)
    rows = jaxmp.audit(forward, f.params, rule_models.batch("gpt")).product_lines
    wide = {row.path for row in rows if row.operands == ("float32", "float32")}
    assert {path.partition("/")[2] for path in wide} == {f"{block}/down", "head"}


def test_rules_that_match_nothing_warn() -> None:
    x = np.ones((2, 2), np.float32)
    rules = jaxmp.PolicyRules({"haed": "float32"}, "mixed_bfloat16")
    with pytest.warns(UserWarning, match="match nothing.*'haed'"):
        jaxmp.autocast(lambda x: x @ x, rules)(x)
    with pytest.warns(UserWarning, match="match nothing.*'haed'"):
        jaxmp.nnx.autocast(Branches(nnx.Rngs(0)), rules)(X)
    with pytest.raises(ValueError, match=r"'type:Dense' can match nothing.*apply_policy"):
        jaxmp.autocast(lambda x: x, jaxmp.PolicyRules({"type:Dense": "float32"}))


class Inside(nn.Module):
    """Autocast within a linen module, around another one."""

    way: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.Dense(3)

        def applied(layer: Any, x: Any) -> Any:
            return layer(x)

        ways = {
            "itself": dense,
            "closed over": lambda x: dense(x),
            "by a function in it": (lambda call: lambda x: call(x))(lambda x: dense(x)),
            "partial": functools.partial(applied, dense),
            "of a partial": (lambda call: lambda x: call(x))(functools.partial(applied, dense)),
            "bound": dense.__call__,
            "in a dictionary": (lambda held: lambda x: held["a"](x))(FrozenDict(a=dense)),
            "in a list": (lambda layers: lambda x: layers[0](x))([dense]),
            "by default": lambda x, layer=dense: layer(x),
        }
        if self.way == "an argument":
            return jaxmp.autocast(applied, "mixed_bfloat16")(dense, x)
        if self.way == "among arguments":
            fast = jaxmp.autocast(lambda given, x: applied(given["layers"][0], x), "mixed_bfloat16")
            return fast({"layers": [dense]}, x)
        return jaxmp.autocast(ways[self.way], "mixed_bfloat16")(x)


class Lazy(Mapping[str, Any]):
    """Cannot read its values."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


def test_what_a_function_holds_is_not_read() -> None:
    held, many = Lazy(), [object()] * 10**7
    fast = jaxmp.autocast(lambda x: x @ x.T + len(held) + len(many), "mixed_bfloat16")
    assert fast(np.ones((2, 2), np.float32)).shape == (2, 2)


def test_linen_modules_inside_of_modules_are_an_error_that_helps() -> None:
    for way in (
        "itself", "closed over", "by a function in it", "partial", "of a partial", "bound",
        "in a dictionary", "in a list", "by default", "an argument", "among arguments",
    ):  # fmt: skip
        module = Inside(way)
        with pytest.raises(ValueError, match=r"around Dense, which.*jaxmp\.autocast\(model\.apply"):
            module.init(jax.random.key(0), X)
        params = {"params": {"Dense_0": {"kernel": np.ones((8, 3), np.float32)}}}
        params["params"]["Dense_0"]["bias"] = np.zeros(3, np.float32)
        assert products_in(module.apply, params, X) == {"Dense_0 bfloat16": 1}
