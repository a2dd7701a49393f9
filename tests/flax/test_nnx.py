"""Policies on nnx modules: what is set, what is left alone, and how it is undone."""

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

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
RULES = PolicyRules([("*norm*", "float32"), ("head", "float32")], default="mixed_bfloat16")


class Block(nnx.Module):
    """Four projections, two products of activations, one linear layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm(x)
        return x + self.dropout(self.mlp(h + self.attention(h)))


class Net(nnx.Module):
    """Modules in attributes, lists, dictionaries and plain containers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.extra = nnx.Dict(side=nnx.Linear(16, 16, rngs=rngs))
        self.pair = nnx.data((nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)))
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        x = self.extra["side"](x)
        for layer in self.pair:
            x = layer(x)
        return self.head(self.norm(x))


DOTS = 2 * 7 + 3 + 1


net = nnx.jit(lambda: Net(nnx.Rngs(0)))


def ruled(model: Any, rules: Any = RULES) -> Any:
    return jaxmp.nnx.apply_policy(model, rules, strict=True)


def traced(trace: Any, model: Any, *args: Any) -> Any:
    graphdef, state = nnx.split(model)
    return trace(lambda state, *args: nnx.merge(graphdef, state)(*args), state, *args or (X,))


dots_of = functools.partial(traced, count_dots)
out_of = functools.partial(traced, jax.eval_shape)


def test_params_are_cast_and_nothing_else_is() -> None:
    model = ruled(net(), jaxmp.rules.keep_norms_float32("float16"))
    params = nnx.state(model, nnx.Param)
    flat = {"/".join(map(str, path)): leaf.dtype.name for path, leaf in nnx.to_flat_state(params)}
    assert {dtype for name, dtype in flat.items() if "norm" in name} == {"float32"}
    assert {dtype for name, dtype in flat.items() if "norm" not in name} == {"float16"}
    stats = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    assert {x.dtype.name for x in stats} == {"float32"}
    rngs = jax.tree.leaves(nnx.state(model, nnx.RngState))
    assert {str(x.dtype) for x in rngs} == {"uint32", "key<fry>"}
    assert out_of(model).dtype == jnp.float16


def test_the_last_policy_wins_and_can_be_removed() -> None:
    model = net()
    plain, state = nnx.split(model)
    ruled(model, "float16")
    ruled(model, RULES)
    fresh = ruled(net(), RULES)
    assert nnx.graphdef(model) == nnx.graphdef(fresh)
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float32"}
    assert jaxmp.nnx.remove_policy(model) is model
    assert nnx.graphdef(model) == plain
    assert type(model) is Net
    params = jax.device_get(nnx.as_pure(nnx.state(model, nnx.Param)))
    rounded = jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), params)
    assert tree_bits(params) == tree_bits(rounded)
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(state)


def test_nothing_is_changed_where_the_rules_are_wrong() -> None:
    model = net()
    before = nnx.graphdef(model)
    rules = PolicyRules([("haed", "float32")], default="bfloat16")
    text = r"rules that match nothing in this model: 'haed'\. Its modules are 'blocks', 'blocks/0',"
    with pytest.raises(ValueError, match=text):
        jaxmp.nnx.apply_policy(model, rules, strict=True)
    assert nnx.graphdef(model) == before
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float32"}
    with pytest.warns(UserWarning, match=text):
        jaxmp.nnx.apply_policy(model, rules)


def test_rules_do_not_leak_into_children() -> None:
    model = ruled(net(), PolicyRules([("blocks/1", "float32")], default="mixed_bfloat16"))
    assert dots_of(model) == {"bfloat16": DOTS}
    whole = PolicyRules([("blocks/1/**", "float32")], default="mixed_bfloat16")
    assert dots_of(ruled(model, whole)) == {"bfloat16": DOTS - 7, "float32": 7}


def test_layers_inside_a_layer_of_flax_follow_it() -> None:
    rules = PolicyRules([(nnx.MultiHeadAttention, "float32")], default="mixed_bfloat16")
    assert dots_of(ruled(net(), rules)) == {"bfloat16": DOTS - 12, "float32": 12}
    inner = PolicyRules(
        [("attention/query", "mixed_bfloat16"), ("attention", "float32")], default="mixed_bfloat16"
    )
    assert dots_of(ruled(net(), inner)) == {"bfloat16": DOTS - 10, "float32": 10}


def test_what_leaves_a_region_is_cast() -> None:
    class Pair(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> Any:
            y = self.first(x)
            return y, self.second(y)

    rules = PolicyRules([("first", "p=f32,c=bf16,o=f16")], default="p=f32,c=f32,o=f32")
    seen: list[Any] = []

    class Spy(Pair):
        def __call__(self, x: jax.Array) -> Any:
            seen.append(self.first(x).dtype)
            return super().__call__(x)

    first, second = out_of(ruled(Spy(), rules))
    assert seen == [jnp.float16]
    assert first.dtype == second.dtype == jnp.float32


def test_a_named_module_without_dtype_has_its_inputs_and_output_cast() -> None:
    class Inner(nnx.Module):
        def __call__(self, x: jax.Array, other: nnx.Module) -> Any:
            return {"x": x * 2, "dtype": x.dtype, "same": other}

    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.named, self.other = Inner(), Inner()

        def __call__(self, x: jax.Array) -> Any:
            return self.named(x, self.other), self.other(x, self.other)

    model = ruled(Outer(), PolicyRules([("named", "p=f32,c=bf16,o=f16")]))
    named, other = model(X)
    assert (named["dtype"], named["x"].dtype) == (jnp.bfloat16, jnp.float16)
    assert (other["dtype"], other["x"].dtype) == (jnp.float32, jnp.float32)
    assert named["same"] is model.other  # a module that passes through is no tree of arrays


def test_split_merge_copies_and_pickles_are_under_the_same_rules() -> None:
    model = ruled(net())
    expected = nnx.graphdef(model)
    for twin in (nnx.merge(*nnx.split(model)), nnx.clone(model), copy.deepcopy(model)):
        assert nnx.graphdef(twin) == expected
        assert dots_of(twin) == {"bfloat16": DOTS - 1, "float32": 1}
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    named = jaxmp.nnx.with_scopes(nnx.clone(layer))
    for module in (ruled(layer, "mixed_bfloat16"), named):
        twin = pickle.loads(pickle.dumps(module))
        assert type(twin) is type(module)
        assert nnx.graphdef(twin) == nnx.graphdef(module)


def test_a_bound_method_outlives_the_policy() -> None:
    model = ruled(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    call, cls = model.__call__, type(model)
    jaxmp.nnx.remove_policy(model)
    x = np.ones((1, 2), np.float32)
    assert call(x).dtype == cls.__call__(model, x).dtype == jnp.float32


class Remade(nnx.Module):
    """A class with a pickle of its own: no lambda has one."""

    def __init__(self) -> None:
        self.double = lambda x: 2 * x

    def __call__(self, x: Any) -> Any:
        return self.double(x)

    def __reduce__(self) -> Any:
        return Remade, ()


def test_a_class_with_a_pickle_of_its_own_keeps_it() -> None:
    twin = pickle.loads(pickle.dumps(jaxmp.nnx.with_scopes(Remade())))
    assert twin(2) == 4


class Encoding(nnx.Module):
    """A module whose users call a method."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(2, 2, rngs=rngs)

    def encode(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.dense(x))


def test_public_methods_run_in_scopes() -> None:
    model = jaxmp.nnx.with_scopes(nnx.List([Encoding(nnx.Rngs(0))]))
    program = jax.make_jaxpr(lambda x: model[0].encode(x))(np.ones((1, 2), np.float32))
    assert str(program.eqns[-1].source_info.name_stack) == "0"


@pytest.mark.slow
def test_one_jitted_function_of_many_models() -> None:
    traces = []

    @nnx.jit
    def forward(model: Net) -> jax.Array:
        traces.append(1)
        return model(X)

    model = net()
    assert forward(model).dtype == jnp.float32
    assert forward(ruled(model, "bfloat16")).dtype == jnp.bfloat16
    assert forward(ruled(model, RULES)).dtype == jnp.float32
    forward(ruled(model, RULES))
    assert len(traces) == 3


def test_shared_modules() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
            self.second = self.first

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(self.first(x))

    assert dots_of(ruled(Tied(), "mixed_bfloat16")) == {"bfloat16": 2}
    rules = PolicyRules([("second", "float32")], default="mixed_bfloat16")
    with pytest.raises(ValueError, match="one module at two places, 'first' and 'second'"):
        ruled(Tied(), rules)
    either = PolicyRules([("first", "float32"), ("second", "float32")], default="mixed_bfloat16")
    assert dots_of(jaxmp.nnx.apply_policy(Tied(), either)) == {"float32": 2}


def test_shared_params() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(16, 16, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))
            self.head.kernel = self.embed.embedding

        def __call__(self, ids: jax.Array) -> jax.Array:
            return self.head(self.embed(ids))

    ids = np.zeros((2, 3), np.int32)
    rules = PolicyRules([("head", "float32")], default="mixed_bfloat16")
    assert dots_of(ruled(Tied(), rules), ids) == {"float32": 1}
    model = Tied()
    with pytest.raises(ValueError, match="'embed' and 'head' share a param"):
        ruled(model, PolicyRules([("head", "float32")], default="bfloat16"))
    assert model.embed.embedding.dtype == jnp.float32


def test_cycles_and_modules_inside_other_objects() -> None:
    class Child(nnx.Module):
        def __init__(self, parent: nnx.Module) -> None:
            self.parent = parent
            self.layer = nnx.Linear(16, 2, rngs=nnx.Rngs(0))

    class Parent(nnx.Module):
        def __init__(self) -> None:
            self.child = Child(self)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.child.layer(x)

    model = ruled(Parent(), PolicyRules([("child/layer", "float16")]))
    assert dots_of(model) == {"float16": 1}


def test_modules_that_are_no_pytrees() -> None:
    class Odd(nnx.Module, pytree=False):
        def __init__(self) -> None:
            self.layer = nnx.Linear(16, 2, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x)

    model = ruled(Odd(), "mixed_bfloat16")
    assert jax.tree_util.all_leaves([model])
    assert out_of(model).dtype == jnp.float32


def test_other_dtypes_are_left_alone() -> None:
    dtypes = {"dtype": jnp.complex64, "param_dtype": jnp.complex64}
    layer = nnx.jit(lambda: nnx.Linear(16, 2, **dtypes, rngs=nnx.Rngs(0)))()
    ruled(layer, "bfloat16")
    assert layer.dtype == layer.param_dtype == jnp.complex64
    assert layer.kernel.dtype == jnp.complex64


def test_summary() -> None:
    model = ruled(net())
    rows = {row.path: row for row in jaxmp.nnx.summary(model).rows}
    assert rows[""].output == rows["norm"].compute == rows["head"].output == "float32"
    assert rows["blocks/0/mlp"].compute == rows["blocks/0/mlp"].output == "bfloat16"
    assert rows["pair/1"].params == 16 * 16 + 16
    assert jaxmp.nnx.summary(model).params == sum(
        x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))
    )
    assert "blocks/1/attention/out" in str(jaxmp.nnx.summary(model))
    assert jaxmp.nnx.summary(nnx.Linear(2, 2, rngs=nnx.Rngs(0))).rows[0].compute == "from inputs"


def test_a_linen_module_in_a_bridge_is_left_to_linen() -> None:
    class Net(nnx.Module):
        def __init__(self, inner: Any) -> None:
            self.first = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
            self.bridge = nnx.bridge.ToNNX(inner, rngs=nnx.Rngs(0)).lazy_init(X)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.bridge(self.first(x))

    plain = nn.Dense(3)
    model = ruled(nnx.jit(lambda: Net(plain))(), "bfloat16")
    assert dots_of(model) == {"bfloat16": 1, "float32": 1}
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model.bridge, nnx.Param))} == {
        "float32"
    }
    inner = jaxmp.linen.apply_policy(plain, "mixed_float16")
    model = ruled(nnx.jit(lambda: Net(inner))(), "bfloat16")
    assert dots_of(model) == {"bfloat16": 1, "float16": 1}
    with pytest.raises(ValueError, match=r"'bridge' holds a linen module\. Put that under a pol"):
        ruled(Net(plain), PolicyRules([("bridge", "bfloat16")]))
