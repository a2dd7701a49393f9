"""Products in float8 by policies on Flax models: which layers, from which numbers, who decides."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax

import jaxmp
from jaxmp import PolicyRules
from tests.support.bits import tree_bits
from tests.support.dots import count_dots, equations
from tests.support.reduction_checks import relative_error

pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
FLOAT8, BOTH8 = "float8_e4m3fn", "float8_e5m2,float8_e4m3fn"
X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 32, 16), np.float32))
# Each kernel of the models below has its own shape, which tells the products apart.
UP, DOWN, HEAD = (16, 48), (48, 32), (32, 64)
QKV, OUT = (32, 2, 80), (2, 80, 32)


class LinenNet(nn.Module):
    """A model with a layer of each kind; the head has a size that float8 would take."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.DenseGeneral(32, name="down")(nn.relu(nn.Dense(48, name="up")(x)))
        attention = nn.MultiHeadDotProductAttention(2, qkv_features=160, name="attention")
        x = nn.LayerNorm(name="norm")(attention(x, x))
        return nn.Dense(64, name="head")(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 48, rngs=rngs)
        self.down = nnx.LinearGeneral(48, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, 160, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(self.attention(self.down(nnx.relu(self.up(x))))))


class Subject(NamedTuple):
    """A model under rules as a function of its params."""

    call: Callable[..., Any]
    params: Any


def linen_subject(rules: Any, module: nn.Module | None = None, x: jax.Array = X) -> Subject:
    model = jaxmp.linen.apply_policy(LinenNet() if module is None else module, rules)
    return Subject(model.apply, jax.jit(model.init)(KEY, x))


def nnx_subject(rules: Any, make: Callable[[nnx.Rngs], Any] = NnxNet) -> Subject:
    model = jaxmp.nnx.apply_policy(nnx.jit(make)(nnx.Rngs(0)), rules)
    graphdef, params = nnx.split(model)
    return Subject(lambda params, x: nnx.merge(graphdef, params)(x), params)


SUBJECTS = pytest.mark.parametrize("subject", [linen_subject, nnx_subject])


def kernels(subject: Subject, x: jax.Array = X) -> list[tuple[int, ...]]:
    """The shapes of the right operands of products in float8 in the forward pass, sorted."""
    return sorted(
        equation.invars[1].aval.shape
        for equation in equations(jax.make_jaxpr(subject.call)(subject.params, x))
        if equation.primitive.name == "dot_general"
        and all(each.aval.dtype == jnp.float8_e4m3fn for each in equation.invars)
    )


def loss(subject: Subject) -> Callable[..., jax.Array]:
    return lambda params, x: jnp.mean(jnp.square(subject.call(params, x).astype(jnp.float32)))


def dtypes(tree: Any) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(tree)}


@SUBJECTS
def test_both_backward_products_are_in_float8_and_gradients_in_float32(subject: Any) -> None:
    made = subject("mixed_float8")
    gradient = jax.grad(loss(made), argnums=(0, 1))
    dots = count_dots(gradient, made.params, X)
    assert (dots[FLOAT8], dots[BOTH8]) == (6, 12)
    other = subject("mixed_bfloat16")
    plain = count_dots(jax.grad(loss(other), argnums=(0, 1)), other.params, X)
    assert sum(dots.values()) == sum(plain.values())
    found = jax.jit(gradient)(made.params, X)
    assert dtypes(found) == dtypes(made.params) == {"float32"}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@SUBJECTS
def test_int8_is_where_float8_is(subject: Any) -> None:
    """Both forward and for the cotangents of activations; gradients of weights have 16 bits."""
    model = subject("mixed_int8")
    assert count_dots(model.call, model.params, X) == {"int8": 6, "bfloat16": 3}
    dots = count_dots(jax.grad(loss(model), argnums=(0, 1)), model.params, X)
    assert (dots["int8"], sum(dots.values())) == (12, 3 * 9)
    gradients = jax.jit(jax.grad(loss(model)))(model.params, X)
    exact = jax.jit(jax.grad(loss(subject("float32"))))(model.params, X)
    assert dtypes(gradients) == {"float32"}
    assert 0 < relative_error(gradients, exact) < 0.03


def float8_of(kernel: Any) -> np.ndarray[Any, Any]:
    """What is left of a kernel in float8: the largest is scaled below 448 by a power of two."""
    wide = np.asarray(kernel).astype(np.float64)
    scale = 2.0 ** np.floor(np.log2(448 / np.abs(wide).max()))
    codes = (wide * scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) / scale


@pytest.mark.parametrize("make", ["linen", "nnx"])
def test_a_kernel_is_rounded_once_from_float32(make: str) -> None:
    x = np.eye(16, dtype=np.float32)
    if make == "linen":
        module = nn.Dense(512, use_bias=False)
        made = linen_subject("mixed_float8", module, x)
        kernel = made.params["params"]["kernel"]
    else:
        made = nnx_subject("mixed_float8", lambda r: nnx.Linear(16, 512, use_bias=False, rngs=r))
        kernel = made.params["kernel"].get_value()
    got = np.asarray(made.call(made.params, x)).astype(np.float64)
    np.testing.assert_array_equal(got, float8_of(kernel))
    # The control: a kernel that was rounded to bfloat16 before has other codes.
    assert (float8_of(np.asarray(kernel).astype(jnp.bfloat16)) != got).sum() > 20


def by_hand(params: Any, x: jax.Array) -> jax.Array:
    """Two layers as their author would write them with `jaxmp.float8`."""

    def layer(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        product = jaxmp.float8.dot_general(x, kernel, numbers, recipe="rowwise")
        return product + bias.astype(jnp.bfloat16)

    x = nn.relu(layer(x.astype(jnp.bfloat16), **params["layers_0"]))
    return layer(x, **params["layers_2"]).astype(jnp.float32)


def test_value_and_gradient_are_those_of_the_model_written_by_hand() -> None:
    module = nn.Sequential([nn.Dense(48), nn.relu, nn.Dense(32)])
    rules = jaxmp.get_policy("mixed_bfloat16").with_products("rowwise")
    made = linen_subject(rules, module)
    params = made.params["params"]
    expected = tree_bits(jax.jit(by_hand)(params, X))
    assert tree_bits(jax.jit(made.call)(made.params, X)) == expected
    got = jax.jit(jax.grad(loss(made)))(made.params, X)["params"]
    assert tree_bits(got) == tree_bits(jax.jit(jax.grad(loss(Subject(by_hand, params))))(params, X))

    def sequential(rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(
            nnx.Linear(16, 48, rngs=rngs), nnx.relu, nnx.Linear(48, 32, rngs=rngs)
        )

    made = nnx_subject(rules, sequential)
    given = jax.tree.unflatten(jax.tree.structure(made.params), jax.tree.leaves(params))
    assert tree_bits(jax.jit(made.call)(given, X)) == expected


HEAD_IN = PolicyRules({"head": "mixed_float8"}, default="mixed_float8")
ATTENTION_OUT = PolicyRules({"attention": "mixed_bfloat16"}, default="mixed_float8")
ONE_OUT = PolicyRules({"attention/out": "mixed_bfloat16"}, default="mixed_float8")
ONE_IN = PolicyRules({"up": "mixed_float8"}, default="mixed_bfloat16")
RULES = {
    "a rule names the head": (HEAD_IN, [UP, DOWN, QKV, QKV, QKV, OUT, HEAD]),
    "attention follows its rule": (ATTENTION_OUT, [UP, DOWN]),
    "a projection has its own": (ONE_OUT, [UP, DOWN, QKV, QKV, QKV]),
    "one layer alone": (ONE_IN, [UP]),
    "by type": (
        PolicyRules(
            {"type:Dense": "mixed_float8", "type:Linear": "mixed_float8"}, default="mixed_bfloat16"
        ),
        [UP, HEAD],
    ),
    "none": (PolicyRules({"up": None}, default="mixed_float8"), [DOWN, QKV, QKV, QKV, OUT]),
    "params in bfloat16": (
        "params=bfloat16,compute=bfloat16,output=bfloat16,products=tensorwise",
        [UP, DOWN, QKV, QKV, QKV, OUT],
    ),
    "compute in float16": (
        "params=float32,compute=float16,output=float32,products=rowwise",
        [UP, DOWN, QKV, QKV, QKV, OUT],
    ),
}


@SUBJECTS
@pytest.mark.parametrize("case", RULES)
@pytest.mark.filterwarnings("ignore:rules that match nothing")
def test_rules_decide(case: str, subject: Any) -> None:
    rules, expected = RULES[case]
    made = subject(rules)
    assert kernels(made) == sorted(expected)
    default = rules.default if isinstance(rules, PolicyRules) else jaxmp.get_policy(rules)
    gradient = jax.eval_shape(jax.grad(loss(made)), made.params, X)
    assert dtypes(gradient) == dtypes(made.params) == {default.param_dtype.name}
    assert jax.eval_shape(made.call, made.params, X).dtype == default.output_dtype


@pytest.mark.slow
@SUBJECTS
def test_nothing_is_cast_between_layers_in_float8_and_layers_that_are_not(subject: Any) -> None:
    def casts(rules: Any) -> int:
        made = subject(rules)
        return sum(
            equation.primitive.name == "convert_element_type"
            and equation.params["new_dtype"] == jnp.float32
            and equation.outvars[0].aval.ndim == 3
            for equation in equations(jax.make_jaxpr(made.call)(made.params, X))
        )

    out = PolicyRules({"down": "mixed_bfloat16", "head": "mixed_bfloat16"}, default="mixed_float8")
    assert casts(out) == casts("mixed_bfloat16")
    # The control: policies with other dtypes do cast.
    other = PolicyRules({"down": "mixed_float16"}, default="mixed_float8")
    assert casts(other) > casts("mixed_bfloat16")


class MyRouter(nn.Module):
    """A router by its class alone, with a layer inside."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(48)(x)


class Routed(nn.Module):
    """Calls the same class of layer in a router, in a list of heads, and in neither."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(64, name="up")(MyRouter(name="gate")(x))


class NnxRouter(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(16, 48, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


class NnxRouted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate, self.up = NnxRouter(rngs), nnx.Linear(48, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(self.gate(x))


@pytest.mark.parametrize("make", ["linen", "nnx"])
def test_what_is_in_a_router_follows_it(make: str) -> None:
    def found(rules: Any) -> list[tuple[int, ...]]:
        if make == "linen":
            return kernels(linen_subject(rules, Routed()))
        return kernels(nnx_subject(rules, NnxRouted))

    assert found("mixed_float8") == [(48, 64)]
    assert found(PolicyRules({"gate": "mixed_float8"}, default="mixed_float8")) == [UP, (48, 64)]
    assert found(PolicyRules({"gate": "mixed_bfloat16"}, default="mixed_float8")) == [(48, 64)]


@SUBJECTS
@pytest.mark.filterwarnings("ignore:a policy asks for products in 8 bits")
def test_an_explicit_precision_is_not_float8(subject: Any) -> None:
    if subject is linen_subject:
        made = linen_subject("mixed_float8", nn.Dense(48, precision="highest"))
    else:
        layer = functools.partial(nnx.Linear, 16, 48, precision=lax.Precision.HIGHEST)
        made = nnx_subject("mixed_float8", lambda rngs: layer(rngs=rngs))
    assert kernels(made) == []


def linen_summary(rules: Any) -> dict[str, str]:
    model = jaxmp.linen.apply_policy(LinenNet(), rules)
    return {row.path: row.compute for row in jaxmp.linen.summary(model, KEY, X).rows}


def nnx_summary(rules: Any) -> dict[str, str]:
    model = jaxmp.nnx.apply_policy(nnx.jit(NnxNet)(nnx.Rngs(0)), rules)
    return {row.path: row.compute for row in jaxmp.nnx.summary(model).rows}


@pytest.mark.parametrize("summary", [linen_summary, nnx_summary])
def test_the_summary_names_the_recipe(summary: Callable[[Any], dict[str, str]]) -> None:
    names = ("up", "down", "attention/query", "attention/out", "norm", "head")
    inside, outside = "bfloat16, products float8 (tensorwise)", "bfloat16"
    found = summary("mixed_float8")
    assert [found[name] for name in names] == [*[inside] * 4, outside, outside]
    assert summary("mixed_int8")["up"] == "bfloat16, products int8 (int8)"
    found = summary(PolicyRules({"up": "c=bf16,products=rowwise"}, default="mixed_bfloat16"))
    assert [found[name] for name in ("up", "down")] == [
        "bfloat16, products float8 (rowwise)",
        outside,
    ]


def test_the_summary_shows_layers_whose_sizes_are_left_out() -> None:
    layers = {
        "narrow": functools.partial(nnx.Linear, 16, 10),
        "precise": functools.partial(nnx.Linear, 16, 16, precision=lax.Precision.HIGHEST),
        "heads": functools.partial(nnx.LinearGeneral, (2, 8), (4, 4), axis=(-2, -1)),
        "batched": functools.partial(nnx.LinearGeneral, 16, 24, batch_axis={0: 4}),
        "experts": functools.partial(nnx.LinearGeneral, 16, 32, batch_axis={0: 4}),
    }
    made = nnx.jit(lambda rngs: nnx.Dict({name: layers[name](rngs=rngs) for name in layers}))
    model = jaxmp.nnx.apply_policy(made(nnx.Rngs(0)), "mixed_float8")
    rows = {row.path: row.compute for row in jaxmp.nnx.summary(model).rows}
    inside = "bfloat16, products float8 (tensorwise)"
    assert [rows[name] for name in layers] == [*["bfloat16"] * 2, inside, "bfloat16", inside]


@pytest.mark.parametrize(("features", "shown"), [(32, ", products float8 (tensorwise)"), (24, "")])
def test_the_summary_of_stacked_layers_has_the_sizes_of_one(features: int, shown: str) -> None:
    """Three layers for a scan: the number of layers is no size of a product."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def layers(key: Any) -> Any:
        return nnx.Linear(16, features, rngs=nnx.Rngs(params=key))

    with nullcontext() if shown else pytest.warns(UserWarning, match="N = 24 is no multiple"):
        model = jaxmp.nnx.apply_policy(layers(jax.random.split(KEY, 3)), "mixed_float8")
    assert jaxmp.nnx.summary(model).rows[0].compute == f"bfloat16{shown}"


def test_the_summary_looks_into_boxes_with_shardings() -> None:
    init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    layer = nn.Dense(48, kernel_init=init)
    rows = jaxmp.linen.summary(jaxmp.linen.apply_policy(layer, "mixed_float8"), KEY, X).rows
    assert rows[0].compute == "bfloat16, products float8 (tensorwise)"
