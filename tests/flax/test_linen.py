"""Policies on linen modules: every way in which linen builds models, and what must not change."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxmp
from jaxmp import PolicyRules
from tests.support.bits import tree_bits
from tests.support.dots import count_dots

pytestmark = [
    pytest.mark.jax,
    pytest.mark.annotations,
    pytest.mark.usefixtures("standard_promotion"),
]

X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 16), np.float32))
KEY = jax.random.key(0)
RULES = PolicyRules([("*norm*", "float32"), ("head", "float32")], default="mixed_bfloat16")


class Block(nn.Module):
    """Four projections, two products of activations, one dense layer, handing its dtype down."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        h = nn.LayerNorm(name="norm", dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype, name="attention")(h, h)
        return x + nn.Dense(16, dtype=self.dtype, name="mlp")(h), None


JittedBlock = nn.jit(Block)
IN_A_BLOCK = 7


class SetupNet(nn.Module):
    """Submodules made in setup, a second method, and every transform that repeats a block."""

    mode: str = "plain"

    def setup(self) -> None:
        scanned = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        kinds = {"plain": Block, "remat": nn.remat(Block), "jit": JittedBlock, "scan": scanned}
        count = 1 if self.mode == "scan" else 3
        self.blocks = [kinds[self.mode]() for _ in range(count)]
        self.head = nn.Dense(5)

    def encode(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x, _ = block(x, None)
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.encode(x))


class CompactNet(nn.Module):
    """The same in one compact method, with a shared block and a module given from outside."""

    head: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shared = Block(name="block")
        x, _ = shared(x)
        x, _ = shared(x)
        x = nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})(16)(x)
        return self.head(x)


def abstract(model: nn.Module) -> Any:
    """The variables of a model without their values: enough to trace with."""
    return jax.eval_shape(model.init, KEY, X)


def dtype_of(model: nn.Module, variables: Any, **options: Any) -> Any:
    """The dtype of what a call returns."""
    return jax.eval_shape(lambda v: model.apply(v, X, **options), variables).dtype


def ruled(module: nn.Module, rules: Any = RULES) -> nn.Module:
    return jaxmp.linen.apply_policy(module, rules, strict=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "setup": (SetupNet, {"bfloat16": 3 * IN_A_BLOCK, "float32": 1}),
    "remat": (lambda: SetupNet("remat"), {"bfloat16": 3 * IN_A_BLOCK, "float32": 1}),
    "jit": (lambda: SetupNet("jit"), {"bfloat16": 3 * IN_A_BLOCK, "float32": 1}),
    "scan": (lambda: SetupNet("scan"), {"bfloat16": IN_A_BLOCK, "float32": 1}),
    "compact": (lambda: CompactNet(nn.Dense(5)), {"bfloat16": 2 * IN_A_BLOCK + 1, "float32": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_build_a_model(name: str) -> None:
    make, expected = MODELS[name]
    plain = make()
    variables = jax.jit(plain.init)(KEY, X)
    model = ruled(plain)
    assert tree_bits(jax.jit(model.init)(KEY, X)) == tree_bits(variables)
    assert count_dots(model.apply, variables, X) == expected
    out = jax.jit(model.apply)(variables, X)
    assert out.dtype == jnp.float32
    exact = jax.jit(plain.apply)(variables, X)
    assert 0 < jnp.abs(out - exact).max() < 0.1
    # Positive control, and the plain module is as it was, nn.jit's cache included.
    assert count_dots(plain.apply, variables, X) == {"float32": sum(expected.values())}
    gradients = jax.eval_shape(jax.grad(lambda v: model.apply(v, X).sum()), variables)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, variables)


def test_ways_to_call_a_method() -> None:
    model = ruled(SetupNet())
    variables = abstract(model)
    for method in ("encode", SetupNet.encode, lambda m, x: m.encode(x)):
        call = functools.partial(model.apply, method=method)
        assert count_dots(call, variables, X) == {"bfloat16": 3 * IN_A_BLOCK}
        assert dtype_of(model, variables, method=method) == jnp.float32
    head = functools.partial(model.apply, method=lambda m, x: m.head(x))
    assert count_dots(head, variables, X) == {"float32": 1}
    assert jax.eval_shape(model.init_with_output, KEY, X)[0].dtype == jnp.float32
    assert "float32" in model.tabulate(KEY, X)


def test_mutable_collections_and_rngs() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
            x = nn.Dropout(0.5, deterministic=False)(x)
            self.sow("intermediates", "features", x)
            return nn.Dense(2)(x)

    model = ruled(Net(), "float16")
    variables = jax.jit(model.init)({"params": KEY, "dropout": KEY}, X)
    assert {x.dtype.name for x in jax.tree.leaves(variables["params"])} == {"float16"}
    assert {x.dtype.name for x in jax.tree.leaves(variables["batch_stats"])} == {"float32"}

    @jax.jit
    def apply(key: jax.Array) -> Any:
        mutable = ["batch_stats", "intermediates"]
        return model.apply(variables, X, mutable=mutable, rngs={"dropout": key})

    out, changed = apply(KEY)
    assert out.dtype == jnp.float16
    assert changed["intermediates"]["features"][0].dtype == jnp.float16
    assert {x.dtype.name for x in jax.tree.leaves(changed["batch_stats"])} == {"float32"}
    masks = [tree_bits(apply(key)) for key in (KEY, KEY, jax.random.key(1))]
    assert masks[0] == masks[1] != masks[2]


def test_norms_are_float32_under_o2() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.BatchNorm(use_running_average=False, name="bn")(nn.Dense(8, name="body")(x))
            return nn.Dense(2, name="head")(x)

    model = ruled(Net(), "O2")
    params = abstract(model)["params"]
    dtypes = {name: {x.dtype.name for x in jax.tree.leaves(params[name])} for name in params}
    assert dtypes == {"bn": {"float32"}, "body": {"float16"}, "head": {"float16"}}
    rows = {row.path: row for row in jaxmp.linen.summary(model, KEY, X).rows}
    assert (rows["bn"].compute, rows["bn"].output) == ("float32", "float16")
    assert rows[""].output == "float32"


def test_params_are_the_rounded_ones_of_float32() -> None:
    plain = jax.jit(CompactNet(nn.Dense(5)).init)(KEY, X)
    rules = PolicyRules([("*norm*", "float32")], default="bfloat16")
    params = jax.jit(ruled(CompactNet(nn.Dense(5)), rules).init)(KEY, X)
    expected = jax.tree_util.tree_map_with_path(
        lambda path, x: x if "norm" in str(path) else x.astype(jnp.bfloat16), jax.device_get(plain)
    )
    assert tree_bits(params) == tree_bits(expected)


def test_rules_do_not_leak_into_children() -> None:
    # The block hands its dtype down, but each layer in it has a policy of its own.
    rules = PolicyRules([("blocks_1", "float32")], default="mixed_bfloat16")
    model = ruled(SetupNet(), rules)
    variables = abstract(model)
    assert count_dots(model.apply, variables, X) == {"bfloat16": 3 * IN_A_BLOCK + 1}
    whole = ruled(SetupNet(), PolicyRules([("blocks_1/**", "float32")], default="mixed_bfloat16"))
    assert count_dots(whole.apply, variables, X) == {
        "bfloat16": 2 * IN_A_BLOCK + 1,
        "float32": IN_A_BLOCK,
    }


def test_layers_inside_a_layer_of_flax_follow_it() -> None:
    rules = PolicyRules([(nn.MultiHeadDotProductAttention, "float32")], default="mixed_bfloat16")
    model = ruled(SetupNet(), rules)
    variables = abstract(model)
    assert count_dots(model.apply, variables, X) == {"bfloat16": 4, "float32": 18}
    inner = PolicyRules(
        [("attention/query", "mixed_bfloat16"), ("attention", "float32")], default="mixed_bfloat16"
    )
    assert count_dots(ruled(SetupNet(), inner).apply, variables, X) == {
        "bfloat16": 7,
        "float32": 15,
    }


def test_none_leaves_a_module_alone() -> None:
    rules = PolicyRules([("head", None)], default="mixed_bfloat16")
    model = ruled(SetupNet(), rules)
    variables = abstract(model)
    # The head takes what its input and its float32 kernel promote to, as it was written.
    assert count_dots(model.apply, variables, X)["float32"] == 1
    only_head = ruled(SetupNet(), PolicyRules([("head", "mixed_bfloat16")]))
    assert count_dots(only_head.apply, variables, X) == {"bfloat16": 1, "float32": 21}


def test_a_named_module_without_dtype_has_its_inputs_and_output_cast() -> None:
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, scale: float, ids: jax.Array) -> Any:
            return {"dtype": x * scale, "ids": ids}

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            ids = jnp.arange(3)
            return Inner(name="named")(x, 2.0, ids), Inner(name="other")(x, 2.0, ids)

    rules = PolicyRules([("named", "p=f32,c=bf16,o=f16")], default=None)
    named, other = ruled(Net(), rules).apply({}, X)
    assert named["dtype"].dtype == jnp.float16
    assert other["dtype"].dtype == jnp.float32
    assert named["ids"].dtype == jnp.int32
    inside = ruled(Inner(), PolicyRules([("/", "p=f32,c=bf16,o=bf16")]))
    jaxpr = str(jax.make_jaxpr(lambda: inside.apply({}, X, 2.0, jnp.arange(3)))())
    assert "bf16[2,4,16] = mul" in jaxpr


@jaxmp.linen.with_policy("mixed_bfloat16")
class Encoder(nn.Module):
    """Two layers, under a policy wherever they are."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(nn.Dense(8)(x))


class Outer(nn.Module):
    """Modules under policies, inside of one that is under none."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.remat(Encoder)(name="remat")(Encoder(name="first")(x))
        assert x.dtype == jnp.float32
        x = jaxmp.linen.with_policy("mixed_float16")(nn.Dense)(3)(x)
        return nn.Dense(2)(x)


def test_decorated_classes() -> None:
    outer = Outer()
    variables = abstract(outer)
    assert sorted(variables["params"]) == ["Dense_0", "Dense_1", "first", "remat"]
    assert count_dots(outer.apply, variables, X) == {"bfloat16": 4, "float16": 1, "float32": 1}
    # Within a model under other rules, a class keeps its own.
    inside = jaxmp.linen.apply_policy(outer, "float32")
    assert count_dots(inside.apply, variables, X) == {"bfloat16": 4, "float16": 1, "float32": 1}
    # But a module that is put under rules itself has the last ones.
    encoder = jaxmp.linen.apply_policy(Encoder(), "float16")
    assert count_dots(encoder.apply, abstract(encoder), X) == {"float16": 2}
    assert type(jaxmp.linen.remove_policy(encoder)) is Encoder
    assert Encoder.__name__ == "Encoder"


def test_a_module_under_rules_as_a_part_of_another() -> None:
    class Pair(nn.Module):
        first: nn.Module

        def setup(self) -> None:
            self.second = jaxmp.linen.apply_policy(nn.Dense(2), "mixed_float16")

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(nn.relu(self.first(x)))

    pair = Pair(ruled(SetupNet()))
    variables = abstract(pair)
    assert sorted(variables["params"]) == ["first", "second"]
    assert count_dots(pair.apply, variables, X) == {"bfloat16": 21, "float32": 1, "float16": 1}


def test_the_last_policy_wins_and_can_be_removed() -> None:
    plain = SetupNet()
    variables = abstract(plain)
    model = ruled(ruled(plain, "float16"), RULES)
    assert model == ruled(plain, RULES)
    assert model != ruled(plain, "float16")
    assert model != plain
    assert count_dots(model.apply, variables, X) == {"bfloat16": 21, "float32": 1}
    removed = jaxmp.linen.remove_policy(model)
    assert removed == plain
    assert type(removed) is SetupNet
    assert jaxmp.linen.remove_policy(plain) == plain


def test_one_jitted_function_of_many_models() -> None:
    plain = SetupNet("jit")
    variables = abstract(plain)
    forward = jax.jit(lambda model, v: model.apply(v, X), static_argnums=0)
    models = (plain, ruled(plain, "bfloat16"), plain)
    dtypes = [jax.eval_shape(functools.partial(forward, m), variables).dtype for m in models]
    assert dtypes == [jnp.float32, jnp.bfloat16, jnp.float32]


def test_modules_that_share_a_trace_must_share_their_policies() -> None:
    rules = PolicyRules([("blocks_0/mlp", "float32")], default="mixed_bfloat16")
    with pytest.raises(ValueError, match="'blocks_1' was traced as one with 'blocks_0'"):
        abstract(ruled(SetupNet("jit"), rules))
    model = ruled(SetupNet("remat"), rules)
    assert count_dots(model.apply, abstract(model), X) == {"bfloat16": 21, "float32": 1}
    alike = PolicyRules([("blocks_*/mlp", "float32")], default="mixed_bfloat16")
    model = ruled(SetupNet("jit"), alike)
    assert count_dots(model.apply, abstract(model), X) == {"bfloat16": 19, "float32": 3}


def test_rules_that_match_nothing() -> None:
    rules = PolicyRules([("haed", "float32"), ("*norm*", "float32")], default="mixed_bfloat16")
    text = r"rules that match nothing in this model: 'haed'\. Its modules are 'blocks_0',"
    with pytest.warns(UserWarning, match=text):
        abstract(jaxmp.linen.apply_policy(SetupNet(), rules))
    with pytest.raises(ValueError, match=text):
        abstract(ruled(SetupNet(), rules))
    decorated = jaxmp.linen.with_policy(rules)(SetupNet)
    with pytest.warns(UserWarning, match="'haed'"):
        abstract(nn.Sequential([decorated()]))
    # A part of the model proves nothing: no warning.
    model = ruled(SetupNet(), PolicyRules([("head", "float32")], default="mixed_bfloat16"))
    dtype_of(model, abstract(model), method="encode")


def test_summary() -> None:
    model = ruled(SetupNet())
    summary = jaxmp.linen.summary(model, KEY, jax.ShapeDtypeStruct((2, 4, 16), jnp.float32))
    rows = {row.path: row for row in summary.rows}
    assert next(iter(rows)) == ""
    assert rows["head"].compute == rows["blocks_2/norm"].output == "float32"
    assert rows["blocks_0/attention/query"].output == "bfloat16"
    assert rows["blocks_0/mlp"].params == 16 * 16 + 16
    assert summary.params == sum(x.size for x in jax.tree.leaves(abstract(SetupNet())))
    assert "blocks_1/attention/out" in str(summary)
    assert jaxmp.linen.summary(SetupNet(), KEY, X).rows[-1].compute == "from inputs"


class Holder(nn.Module):
    """A class that pickle can find by its name."""

    width: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.width)(x)


class WiderEncoder(Encoder):
    """A subclass of a decorated class."""

    width: int = 3


def test_copies_and_pickles_are_under_the_same_rules() -> None:
    for module in (ruled(Holder(3), "bfloat16"), Encoder(), WiderEncoder()):
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.clone()):
            assert type(twin) is type(module)
            assert twin == module


def test_local_subclasses_of_a_decorated_class_are_copied_as_they_are() -> None:
    class Local(Encoder):
        """No name finds it."""

    for module in (Local(), nn.remat(Encoder)()):
        assert type(copy.deepcopy(module)) is type(module)
    with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        pickle.dumps(Local())


def test_classes_keep_their_names() -> None:
    class Local(nn.Module):
        """Errors and summaries name it."""

    under = type(ruled(Local(), "bfloat16"))
    assert (under.__qualname__, under.__module__) == (Local.__qualname__, __name__)
    assert under.__doc__ == Local.__doc__


def test_bound_modules() -> None:
    model = ruled(SetupNet())
    variables = abstract(model)
    assert count_dots(lambda v: model.bind(v)(X), variables) == {"bfloat16": 21, "float32": 1}
    assert count_dots(lambda v: model.bind(v).encode(X), variables) == {"bfloat16": 21}
