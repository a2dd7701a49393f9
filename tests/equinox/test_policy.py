"""Policies on Equinox modules: numbers, dtypes, structure, and what they refuse."""

import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from tests.equinox.models import X, mean_square, net, norm_net, plain_net, plain_params, with_state
from tests.support.bits import tree_bits
from tests.support.dots import count_dots, equations, precisions

pytestmark = [pytest.mark.jax, pytest.mark.annotations]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_gradients_are_those_of_plain_jax_to_the_bit(policy: str) -> None:
    model = jaxmp.equinox.apply_policy(net(), policy)
    differentiated = jaxmp.equinox.filter_value_and_grad(mean_square, loss_scale=2.0**10)
    loss, grads = eqx.filter_jit(differentiated)(model, X)

    def plain_loss(params: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("net"):
            y = jax.vmap(plain_net, in_axes=(None, 0))(params, x)
        return jnp.mean(y**2)

    rules = jaxmp.PolicyRules({"net": policy})
    plain_loss = jaxmp.autocast(plain_loss, rules)
    of_plain = jax.jit(jaxmp.value_and_grad(plain_loss, loss_scale=2.0**10))
    plain, plain_grads = of_plain(plain_params(net()), X)
    assert float(loss) == float(plain)
    assert tree_bits(plain_params(grads)) == tree_bits(plain_grads)


@pytest.mark.parametrize(
    "pattern",
    ["head", "/head", "re:he.*", lambda path, _: path == "head"],
    ids=["glob", "anchored", "expression", "predicate"],
)
def test_rules_pick_modules(pattern: Any) -> None:
    rules = jaxmp.PolicyRules([(pattern, "float32")], default="mixed_bfloat16")
    model = jaxmp.equinox.apply_policy(net(), rules)
    assert count_dots(model, X[0]) == {"bfloat16": 1, "float32": 1}
    asked = precisions(model, X[0])
    assert sorted(asked) == [("bfloat16", "none"), ("float32", "highest")]


def test_rules_about_types_and_no_rule() -> None:
    rules = jaxmp.PolicyRules([("type:Linear", None)], default="mixed_bfloat16")
    model = jaxmp.equinox.apply_policy(net(), rules)
    assert precisions(model, X[0]) == [("float32", "none")] * 2  # as their author made them


def test_layers_inside_a_layer_of_equinox_follow_it() -> None:
    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self) -> None:
            keys = jax.random.split(jax.random.key(0))
            self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[0])
            self.mlp = eqx.nn.MLP(8, 8, 8, 1, key=keys[1])

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.vmap(self.mlp)(x + self.attention(x, x, x))

    rules = jaxmp.PolicyRules(
        [("attention", "float32"), ("attention/output_proj", "bfloat16")], default="mixed_float16"
    )
    with jax.numpy_rank_promotion("allow"):
        found = count_dots(jaxmp.equinox.apply_policy(Block(), rules), X)
    # Three projections, two products of the scores; its output; two layers of the MLP.
    assert found == {"float32": 5, "bfloat16": 1, "float16": 2}


class Deep(eqx.Module):
    """Layers that the model stacks when it is called, and layers that were made as a stack."""

    layers: list[eqx.nn.Linear]
    stacked: eqx.nn.Linear

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        self.layers = [eqx.nn.Linear(8, 8, key=key) for key in keys]
        self.stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(keys)

    def __call__(self, x: jax.Array) -> jax.Array:
        stack = jax.tree.map(lambda *xs: jnp.stack(xs), *self.layers)
        for layers in (stack, self.stacked):
            arrays, rest = eqx.partition(layers, eqx.is_array)

            def layer(x: jax.Array, arrays: Any, rest: Any = rest) -> tuple[jax.Array, None]:
                return jnp.tanh(eqx.filter_checkpoint(eqx.combine(arrays, rest))(x)), None

            x, _ = jax.lax.scan(layer, x, arrays)
        return x


def test_layers_in_scans_and_checkpoints() -> None:
    rules = jaxmp.PolicyRules({"stacked": "float32"}, default="mixed_bfloat16")
    deep = eqx.filter_jit(lambda: Deep())()
    model = jaxmp.equinox.apply_policy(deep, rules)
    assert count_dots(model, X[0]) == {"bfloat16": 1, "float32": 1}
    exact = jaxmp.equinox.apply_policy(deep, "float32")
    np.testing.assert_array_equal(exact(X[0]), deep(X[0]))


def test_a_vmapped_ensemble() -> None:
    keys = np.arange(3, dtype=np.float32)
    ensemble = eqx.filter_vmap(
        lambda key: eqx.tree_at(lambda m: m.head.bias, net(), replace_fn=lambda bias: bias + key)
    )
    models = jaxmp.equinox.apply_policy(eqx.filter_jit(ensemble)(keys), "mixed_bfloat16")
    together = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
    alone = jaxmp.equinox.apply_policy(net(), "mixed_bfloat16")
    found = eqx.filter_jit(together)(models, X[0])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.asarray(alone(X[0])) + keys[:, None], atol=2e-2)


def test_a_transform_in_a_field() -> None:
    model = jaxmp.equinox.apply_policy(eqx.filter_vmap(net()), "mixed_bfloat16")
    assert count_dots(model, X) == {"bfloat16": 2}
    assert jaxmp.equinox.summary(model).rows[-1].path == "_fun/head"
    np.testing.assert_allclose(model(X), jax.jit(jax.vmap(net()))(X), atol=2e-2)


def test_the_structure_is_that_of_the_model() -> None:
    plain = net()
    model = jaxmp.equinox.apply_policy(plain, "mixed_float16")
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(plain)[0]]
    assert [path for path, _ in jax.tree_util.tree_flatten_with_path(model)[0]] == paths
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(plain), strict=True))
    assert isinstance(model, type(plain))
    assert repr(model) == repr(plain)
    assert bool(eqx.tree_equal(jaxmp.equinox.remove_policy(model), plain))
    assert jax.tree.structure(jaxmp.equinox.remove_policy(model)) == jax.tree.structure(plain)


def test_pickle() -> None:
    model = jaxmp.equinox.apply_policy(eqx.nn.Linear(8, 2, key=jax.random.key(0)), "bfloat16")
    restored = pickle.loads(pickle.dumps(model))
    assert jax.tree.structure(restored) == jax.tree.structure(model)
    np.testing.assert_array_equal(restored(X[0]), model(X[0]))


def test_params_have_the_param_dtype() -> None:
    rules = jaxmp.PolicyRules({"norm": "float32"}, default="bfloat16")
    model = jaxmp.equinox.apply_policy(net(), rules)
    dtypes = {name: x.dtype.name for name, x in plain_params(model).items()}
    high = {name for name, dtype in dtypes.items() if dtype == "float32"}
    assert high == {"norm_weight", "norm_bias"}
    assert model(X[0]).dtype == jnp.bfloat16
    back = jaxmp.equinox.remove_policy(eqx.filter(model, eqx.is_inexact_array))
    assert {x.dtype.name for x in plain_params(back).values()} == {"float32"}


def test_param_dtypes_come_back_whatever_the_tree_has_become() -> None:
    model = jaxmp.equinox.apply_policy(net(), "bfloat16")
    without_bias = eqx.tree_at(lambda m: m.inner.bias, model, replace=None)
    part = eqx.tree_at(
        lambda m: m.head, net(), replace_fn=lambda m: jaxmp.equinox.apply_policy(m, "bfloat16")
    )
    for changed in (without_bias, part):
        arrays = jax.tree.leaves(eqx.filter(jaxmp.equinox.remove_policy(changed), eqx.is_array))
        assert {x.dtype.name for x in arrays} == {"float32"}


def test_again_replaces_and_a_part_has_its_own() -> None:
    model = jaxmp.equinox.apply_policy(net(), "float32")
    model = jaxmp.equinox.apply_policy(model, "mixed_bfloat16")
    assert count_dots(model, X[0]) == {"bfloat16": 2}
    part = eqx.tree_at(
        lambda m: m.head, net(), replace_fn=lambda m: jaxmp.equinox.apply_policy(m, "mixed_float16")
    )
    assert count_dots(part, X[0]) == {"float32": 1, "float16": 1}
    rows = {row.path: row.compute for row in jaxmp.equinox.summary(part).rows}
    assert rows == {"": "", "inner": "", "norm": "", "head": "float16"}
    assert bool(eqx.tree_equal(jaxmp.equinox.remove_policy(part), net()))


def test_casts_are_the_same_under_autocast_as_in_filter_grad() -> None:
    """One more autocast around a model decides nothing about what is in the model."""
    model = jaxmp.equinox.apply_policy(net(), "mixed_bfloat16")
    around = jaxmp.autocast(mean_square, jaxmp.PolicyRules())
    alone, together = (
        tree_bits(eqx.filter_jit(jaxmp.equinox.filter_value_and_grad(loss_fn))(model, X))
        for loss_fn in (mean_square, around)
    )
    assert together == alone
    # Called on its own, the model does not see the batch: its activations are wider, not narrower.
    kept = [jaxmp.audit(loss_fn, model, X).residuals for loss_fn in (mean_square, around)]
    sizes = [sum(row.bytes for row in rows) for rows in kept]
    assert sizes[0] > 1.2 * sizes[1]


def test_rules_without_a_default_see_the_batch() -> None:
    """The model itself is in no rule, and autocast is around the loss all the same."""

    class Outer(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.mlp(x)

    model = Outer(eqx.nn.MLP(8, 8, 16, 3, key=jax.random.key(0)))

    def results(rules: Any) -> list[str]:
        params, static = eqx.partition(
            jaxmp.equinox.apply_policy(model, rules), eqx.is_inexact_array
        )
        grads = jaxmp.equinox.filter_grad(mean_square)
        program = jax.make_jaxpr(lambda params: grads(eqx.combine(params, static), X))(params)
        dots = [each for each in equations(program) if each.primitive.name == "dot_general"]
        return [str(each.outvars[0].aval.dtype) for each in dots]

    found = results(jaxmp.PolicyRules({"mlp": "mixed_bfloat16"}))
    assert sorted(found) == sorted(results("mixed_bfloat16"))


def test_one_trace_for_each_policy() -> None:
    traces = []

    @eqx.filter_jit
    def run(model: Any, x: jax.Array) -> jax.Array:
        traces.append(None)
        return model(x)

    low = jaxmp.equinox.apply_policy(net(), "mixed_bfloat16")
    for model in (low, low, jaxmp.equinox.apply_policy(net(), "mixed_bfloat16")):
        run(model, X[0])
    assert len(traces) == 1
    jaxmp.autocast(run, "mixed_float16")(low, X[0])  # what is known of a call is another thing here
    assert len(traces) == 2
    run(jaxmp.equinox.apply_policy(net(), "mixed_float16"), X[0])
    assert len(traces) == 3


def test_a_call_outside_of_jit_is_compiled_once(compilations: Callable[[], int]) -> None:
    model = jaxmp.equinox.apply_policy(net(), "mixed_bfloat16")
    model(X[0])
    before = compilations()
    model(X[1])
    assert compilations() == before


def test_a_module_that_returns_a_part_of_itself() -> None:
    class Cell(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x: jax.Array) -> tuple[jax.Array, eqx.nn.Linear]:
            return self.linear(x), self.linear

    cell = Cell(eqx.nn.Linear(8, 2, key=jax.random.key(0)))
    cell = jaxmp.equinox.apply_policy(cell, "mixed_bfloat16")
    assert jax.tree.structure(cell(X[0])[1]) == jax.tree.structure(cell.linear)


def test_inference_mode_keeps_the_policy() -> None:
    model, state = norm_net()
    model = eqx.nn.inference_mode(jaxmp.equinox.apply_policy(model, "mixed_bfloat16"))
    state = eqx.filter_jit(with_state)(eqx.nn.inference_mode(model, value=False), state, X)[1]
    assert count_dots(lambda x: model(x, state)[0], X[0]) == {"bfloat16": 2}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "float32"])
def test_states_keep_their_dtypes(policy: str) -> None:
    """The first one too, if it is made of a model under a policy, and those of 16 bits."""

    class Memory(eqx.Module):
        index: eqx.nn.StateIndex
        norm: eqx.nn.BatchNorm
        linear: eqx.nn.Linear

        def __init__(self) -> None:
            self.index = eqx.nn.StateIndex(jnp.zeros(8, jnp.bfloat16))
            self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
            self.linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))

        def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
            y, state = self.norm(self.linear(x), state)
            mean = jax.lax.pmean(y, "batch")
            return y, state.set(self.index, mean.astype(jnp.bfloat16))

    def dtypes(state: eqx.nn.State) -> list[Any]:
        return [x.dtype for x in jax.tree.leaves(state)]

    _, plain = eqx.nn.make_with_state(Memory)()
    model, state = eqx.nn.make_with_state(lambda: jaxmp.equinox.apply_policy(Memory(), policy))()
    axes = {"in_axes": (0, None), "out_axes": (0, None)}
    after = eqx.filter_jit(eqx.filter_vmap(model, axis_name="batch", **axes))(X, state)[1]
    assert dtypes(state) == dtypes(after) == dtypes(plain)


def test_heads_are_left_out_of_float8() -> None:
    class Model(eqx.Module):
        body: eqx.nn.Linear
        lm_head: eqx.nn.Linear

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.vmap(lambda x: self.lm_head(self.body(x)))(x)

    keys = jax.random.split(jax.random.key(0))
    model = Model(*(eqx.nn.Linear(64, 64, key=key) for key in keys))
    model = jaxmp.equinox.apply_policy(model, "mixed_float8")
    report = jaxmp.audit(model, jnp.ones((64, 64)))
    assert [(row.path, row.reason) for row in report.left_out] == [
        ("lm_head/eqx.nn.Linear", "heads")
    ]


def test_audit_names_modules_and_residuals() -> None:
    model = jaxmp.equinox.apply_policy(net(), "mixed_bfloat16")
    report = jaxmp.audit(mean_square, model, X)
    assert {row.path.split("/")[0] for row in report.product_lines} == {"inner", "head"}
    assert report.no_residuals == ""


def test_summary() -> None:
    rules = jaxmp.PolicyRules({"norm": "float32", "head": None}, default="mixed_bfloat16")
    rows = jaxmp.equinox.summary(jaxmp.equinox.apply_policy(net(), rules)).rows
    assert [(row.path, row.type, row.compute, row.output, row.params) for row in rows] == [
        ("", "Net", "bfloat16", "float32", 0),
        ("inner", "Linear", "bfloat16", "", 144),
        ("norm", "LayerNorm", "float32", "", 32),
        ("head", "Linear", "", "", 68),
    ]
    assert {row.compute for row in jaxmp.equinox.summary(net()).rows} == {""}
    # The parts of a norm's state have neither a policy nor params.
    norm, _ = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    assert [row.type for row in jaxmp.equinox.summary(norm).rows] == ["BatchNorm"]


def test_rules_that_match_nothing() -> None:
    rules = jaxmp.PolicyRules({"haed": "float32"}, default="mixed_bfloat16")
    with pytest.warns(UserWarning, match=r"match nothing in this model: 'haed'.*'inner', 'norm'"):
        jaxmp.equinox.apply_policy(net(), rules)
    with pytest.raises(ValueError, match="'haed'"):
        jaxmp.equinox.apply_policy(net(), rules, strict=True)


class Methods(eqx.Module):
    """A model whose loss calls another method, which its own call uses too."""

    hidden: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0))
        self.hidden = eqx.nn.Linear(8, 16, key=keys[0])
        self.head = eqx.nn.Linear(16, 4, key=keys[1])

    def activations(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.hidden(x))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.activations(x))

    def twice(self, x: jax.Array) -> jax.Array:
        return 2 * self(x)


def of_activations(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(lambda x: model.head(model.activations(x)))(x) ** 2)


def test_modules_are_under_the_policy_wherever_they_are_called_in_autocast() -> None:
    model = jaxmp.equinox.apply_policy(Methods(), "mixed_bfloat16")
    params, static = eqx.partition(model, eqx.is_inexact_array)
    of_model = jaxmp.equinox.filter_grad(of_activations)

    def gradients(params: Any) -> Any:
        return jax.tree.leaves(of_model(eqx.combine(params, static), X))

    assert set(count_dots(gradients, params)) == {"bfloat16"}


def test_a_module_that_is_traced_outside_of_autocast_warns_once() -> None:
    model = jaxmp.equinox.apply_policy(Methods(), "mixed_bfloat16")
    model.activations(X[0])  # nothing is traced
    jax.jit(lambda x: model.twice(x))(X[0])  # a call of the model brings autocast
    plain = jaxmp.equinox.with_scopes(Methods())
    jax.jit(lambda x: plain.activations(x))(X[0])  # no policy, no warning
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = jax.grad(lambda params: of_activations(eqx.combine(params, static), X))
    text = "a Linear of a model under a policy is called outside of autocast, where no policy"
    with pytest.warns(UserWarning, match=text) as warned:
        jax.eval_shape(lambda params: (loss(params), loss(params)), params)
    assert len(warned) == 1


class Uncalled(eqx.Module):
    """A module with another method."""

    x: jax.Array

    def run(self) -> jax.Array:
        return self.x


@pytest.mark.parametrize(
    ("model", "rules", "error", "text"),
    [
        (Deep, "float32", TypeError, "got the class Deep. Make a module of it first"),
        (jnp.ones(2), "float32", TypeError, "works on Equinox modules, got ArrayImpl$"),
        (plain_net, "float32", TypeError, "got function. For a function use jaxmp.autocast"),
        (Uncalled(X), "float32", TypeError, "Uncalled has none. Put the modules inside"),
        (net(), "O1", ValueError, r"use jaxmp.autocast\(loss_fn, 'O1'\)"),
        (net(), "p=f32,c=e4m3fn", ValueError, "no layer can compute in float8"),
        (net(), "mixed_float61", ValueError, "mixed_float16"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_errors(model: Any, rules: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        jaxmp.equinox.apply_policy(model, rules)


@pytest.mark.parametrize("name", ["remove_policy", "summary"])
def test_flax_modules_are_pointed_to_their_own(name: str) -> None:
    nn = pytest.importorskip("flax.linen")
    with pytest.raises(TypeError, match=r"got Dense. For modules of Flax use jaxmp.linen or"):
        getattr(jaxmp.equinox, name)(nn.Dense(2))
