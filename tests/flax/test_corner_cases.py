"""Models in which policies once went wrong, or could: one test for each way."""

import contextlib
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import jaxmp
from jaxmp import PolicyRules
from tests.support.dots import count_dots

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("standard_promotion")]

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(1).standard_normal((4, 8), np.float32))


def ruled(module: Any, rules: Any) -> Any:
    adapter = jaxmp.linen if isinstance(module, nn.Module) else jaxmp.nnx
    return adapter.apply_policy(module, rules, strict=True)


def shapes_of(model: nn.Module) -> Any:
    return jax.eval_shape(model.init, KEY, X)


def dots_of(model: Any) -> dict[str, int]:
    if isinstance(model, nn.Module):
        return count_dots(model.apply, shapes_of(model), X)
    graphdef, state = nnx.split(model)
    return count_dots(lambda state, x: nnx.merge(graphdef, state)(x), state, X)


def dtypes(tree: Any) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(tree)}


# --- linen ----------------------------------------------------------------------------------------


class Teacher(nn.Module):
    """A model of its own, called inside of another."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2, name="head")(nn.Dense(8)(x))


class Student(nn.Module):
    """Applies a teacher, which is no part of it."""

    teacher: Any
    variables_of_teacher: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return nn.Dense(2)(x), self.teacher.apply(self.variables_of_teacher, x)


def test_a_model_applied_inside_of_another_is_not_under_its_rules() -> None:
    teacher = Teacher()
    variables = teacher.init(KEY, X)
    wrapped = ruled(Student(Applied(teacher), variables), "bfloat16")
    assert dots_of(wrapped) == {"bfloat16": 1, "float32": 2}
    assert jaxmp.linen.summary(wrapped, KEY, X).params == 8 * 2 + 2
    with pytest.raises(ValueError, match="'head'"):
        shapes_of(ruled(wrapped, PolicyRules({"head": "float32"}, default="bfloat16")))
    # Under the same rules it is still a model of its own, with an output of its own.
    same = Applied(ruled(teacher, "mixed_bfloat16"))
    wrapped = ruled(Student(same, variables), "mixed_bfloat16")
    out = jax.eval_shape(wrapped.apply, shapes_of(wrapped), X)
    assert dtypes(out) == {"float32"}


class Applied:
    """Hides a module from linen, which would make a field that is one a submodule."""

    def __init__(self, module: nn.Module) -> None:
        self.apply = module.apply


class ScannedBlock(nn.Module):
    """A block whose carry is that of a scan."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return x + nn.Dense(8)(x), None


class Scanned(nn.Module):
    """Blocks repeated by nn.scan, after a layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scan = nn.scan(
            ScannedBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return scan(name="layers")(nn.Dense(8)(x), None)[0]


@pytest.mark.parametrize("named", ["float32", "bfloat16", "mixed_float16", "mixed_bfloat16"])
def test_a_rule_that_names_a_scanned_block(named: str) -> None:
    rules = PolicyRules({"layers/**": named}, default="mixed_bfloat16")
    compute = jaxmp.get_policy(named).compute_dtype.name
    expected = {"bfloat16": 2} if compute == "bfloat16" else {"bfloat16": 1, compute: 1}
    assert dots_of(ruled(Scanned(), rules)) == expected


def test_a_rule_with_the_policy_of_its_surroundings_changes_nothing() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow("intermediates", "seen", nn.Dense(8, name="inner")(x))
            return x

    model = ruled(Net(), PolicyRules({"inner": "mixed_bfloat16"}, default="mixed_bfloat16"))
    state = jax.eval_shape(lambda v: model.apply(v, X, mutable="intermediates"), shapes_of(model))
    assert dtypes(state[1]) == {"bfloat16"}


def test_a_subclass_of_a_decorated_class() -> None:
    @jaxmp.linen.with_policy("bfloat16")
    class Base(nn.Module):
        def helper(self, x: jax.Array) -> jax.Array:
            return x * 2

    class Derived(Base):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(2)(x)

    class Holder(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Derived()(x)

    text = "Derived is a subclass of Base, .* and overrides __call__.* Decorate Derived too"
    with pytest.warns(UserWarning, match=text) as caught:
        assert dtypes(shapes_of(Derived())) == dtypes(shapes_of(Holder())) == {"float32"}
    assert len(caught) == 1


def test_no_hint_where_nothing_is_lost() -> None:
    @jaxmp.linen.with_policy("bfloat16")
    class Base(nn.Module):
        width: int = 2

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(self.width)(x)

    class Wider(Base):
        width: int = 4

        def other(self, x: jax.Array) -> jax.Array:
            return x

    @jaxmp.linen.with_policy("bfloat16")
    class Decorated(Base):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(3)(x)

    made = nn.remat(Base)(), nn.jit(nn.remat(Wider))(), nn.remat(Decorated)()
    for model in (Base(), Wider(), Decorated(), ruled(Wider(), "bfloat16"), *made):
        assert dtypes(shapes_of(model)) == {"bfloat16"}


def test_registries_of_subclasses() -> None:
    registry: dict[str, Any] = {}

    class Registered(nn.Module):
        def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            assert tag not in registry
            registry[tag] = cls

    class Net(Registered, tag="net"):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(2)(x)

    assert dtypes(shapes_of(ruled(Net(), "bfloat16"))) == {"bfloat16"}
    assert registry == {"net": Net}


def test_params_that_are_dictionaries() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            def init(key: jax.Array) -> Any:
                return {"kernel": jnp.ones((8, 2)), "bias": jnp.zeros(2)}

            w = self.param("w", init)
            return nn.Dense(2, name="d")(x @ w["kernel"].astype(x.dtype))

    assert dtypes(shapes_of(ruled(Net(), "bfloat16"))) == {"bfloat16"}


def test_params_made_by_apply() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(2, name="new")(nn.Dense(8, name="old")(x))

    model = ruled(Net(), "bfloat16")
    old = {"params": {"old": shapes_of(Net())["params"]["old"]}}
    apply = functools.partial(model.apply, mutable=["params"], rngs={"params": KEY})
    _, made = jax.eval_shape(apply, old, X)
    assert dtypes(made["params"]["new"]) == {"bfloat16"}
    assert dtypes(made["params"]["old"]) == {"float32"}  # what was given is the caller's


def test_shared_scopes_and_getattr() -> None:
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(2, name="dense")(x)

    class Outer(nn.Module):
        inner: nn.Module

        def setup(self) -> None:
            nn.share_scope(self, self.inner)

        def __getattr__(self, name: str) -> Any:
            if name == "alias":
                return self.inner
            return super().__getattr__(name)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.alias(x)

    rules = PolicyRules({"type:Inner": "mixed_float16", "dense": "mixed_bfloat16"})
    assert dots_of(ruled(Outer(Inner()), rules)) == {"bfloat16": 1}


def test_a_decorated_class_is_no_twin_of_a_jitted_one() -> None:
    """Rules about it from outside do not hold, so that they tell no two traces apart."""

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(8, name="d")(x)

    Decorated = jaxmp.linen.with_policy("float32")(type("Decorated", (Plain,), {}))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Decorated(name="a")(nn.jit(Plain)(name="plain")(x))

    rules = PolicyRules({"a/**": "mixed_float16"}, default="mixed_bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rule decides nothing
        assert dots_of(jaxmp.linen.apply_policy(Net(), rules)) == {"bfloat16": 1, "float32": 1}


def test_twins_are_told_when_only_apply_is_called() -> None:
    jitted = nn.jit(ScannedBlock)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return jitted(name="b")(jitted(name="a")(x, None)[0], None)[0]

    model = ruled(Net(), PolicyRules({"a/**": "float32"}, default="bfloat16"))
    with pytest.raises(ValueError, match="'b' was traced as one with 'a'"):
        jax.eval_shape(model.apply, shapes_of(Net()), X)


def test_summary_of_a_model_with_options() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return nn.Dense(2)(x) if train else x

    assert jaxmp.linen.summary(Net(), KEY, X, True).params == 18


def test_dtypes_keep_their_form() -> None:
    class Layer(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            seen.append(self.dtype)
            return x

    seen: list[Any] = []
    for form in ("float32", np.dtype("float32"), jnp.float32):
        ruled(Layer(form), "bfloat16").apply({}, X)
    assert seen == ["bfloat16", np.dtype("bfloat16"), jnp.bfloat16]
    assert isinstance(seen[1], np.dtype)


# --- nnx ------------------------------------------------------------------------------------------


class Doubled(nnx.Param):
    """A param that is read as twice what it holds."""

    def get_value(self, **options: Any) -> Any:
        return super().get_value(**options) * 2


class Scaled(nnx.Module):
    """A layer with such a param."""

    def __init__(self) -> None:
        self.weight = Doubled(jnp.ones(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight


def test_hooks_of_variables_are_not_applied_twice() -> None:
    model = Scaled()
    jaxmp.nnx.apply_policy(model, PolicyRules(default="float32"))
    jaxmp.nnx.value_and_grad(lambda m, x: m(x).mean())(model, X)
    jaxmp.nnx.remove_policy(jaxmp.nnx.apply_policy(model, PolicyRules(default="bfloat16")))
    assert (model.weight.get_raw_value() == 1).all()


class Statistics(nnx.Module):
    """State in new variables, and in a plain array."""

    def __init__(self) -> None:
        self.dense = nnx.Linear(8, 2, use_bias=False, rngs=nnx.Rngs(0))
        self.mean = nnx.BatchStat(jnp.zeros(8))
        self.raw = nnx.data(jnp.zeros(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean = nnx.BatchStat(x.mean(0))
        self.raw = x.max(0)
        return self.dense(x)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_state_of_every_kind_survives_an_overflow(microbatches: int) -> None:
    model = nnx.jit(Statistics)()
    step = jaxmp.nnx.value_and_grad(lambda m, x: m(x).mean(), microbatches=microbatches)
    step(model, X)
    before = (model.mean[...], model.raw)
    assert all(np.asarray(x).any() for x in before)
    _, grads = step(model, jnp.asarray(np.asarray(X) * np.float32(np.inf)))
    assert not jaxmp.numbers.all_finite(grads)
    for old, new in zip(before, (model.mean[...], model.raw), strict=True):
        np.testing.assert_array_equal(old, new)


class Tied(nnx.Module):
    """Two layers with one kernel."""

    def __init__(self) -> None:
        self.a = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.b.kernel = self.a.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(self.a(x))


def test_tied_params_come_back() -> None:
    model = Tied()
    ruled(ruled(model, "bfloat16"), "float16")
    assert dtypes(nnx.state(model)) == {"float16"}
    jaxmp.nnx.remove_policy(model)
    assert dtypes(nnx.state(model)) == {"float32"}


def test_rules_look_at_the_model_without_its_old_policy() -> None:
    exact = PolicyRules([(lambda _, m: type(m) is nnx.Linear, "float16")], default="bfloat16")
    model = nnx.Sequential(nnx.Linear(8, 2, rngs=nnx.Rngs(0)))
    first = nnx.graphdef(ruled(model, exact))
    assert nnx.graphdef(ruled(model, exact)) == first


def test_params_that_hold_trees_or_numbers() -> None:
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
            self.tree = nnx.Param({"w": jnp.ones(2), "n": jnp.arange(2)})
            self.number = nnx.Param(1.0)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dense(x)

    model = ruled(Odd(), "bfloat16")
    tree = model.tree.get_raw_value()
    assert (tree["w"].dtype, tree["n"].dtype) == (jnp.bfloat16, jnp.int32)
    assert jaxmp.nnx.remove_policy(model).tree.get_raw_value()["w"].dtype == jnp.float32


def test_new_instances_of_a_class_under_a_policy() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(8, 2, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dense(x)

        def twin(self) -> "Net":
            return type(self)()

    twin = ruled(Net(), "mixed_bfloat16").twin()
    assert dots_of(twin) == {"float32": 1}
    jaxmp.nnx.remove_policy(ruled(twin, "mixed_bfloat16"))
    assert type(twin) is Net


def test_a_module_called_from_several_regions() -> None:
    class Net(nnx.Module):
        def __init__(self, flip: bool) -> None:
            shared = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            for name in ("b", "a") if flip else ("a", "b"):
                setattr(self, name, nnx.Sequential(shared))

        def __call__(self, x: jax.Array) -> Any:
            return {"dtype": self.b.layers[0](x)}

    rules = PolicyRules({"b": "float32"}, default="p=f32,c=bf16,o=bf16")
    outs = [nnx.eval_shape(lambda f=f: ruled(Net(f), rules).b.layers[0](X)).dtype for f in (0, 1)]
    assert outs == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize("places", [("a",), ("a", "z"), ("Z", "a")])
def test_a_rule_about_one_place_of_a_shared_module_holds(places: tuple[str, ...]) -> None:
    """Whichever place comes first, and with its path in the error."""

    class Deaf(nnx.Module):
        def __init__(self) -> None:
            self.dtype, self.w = jnp.float32, nnx.Param(jnp.ones((2, 2)))

        def __call__(self, x: Any) -> Any:
            return x.astype(jnp.float32) @ self.w[...].astype(jnp.float32)

    class Model(nnx.Module):
        def __init__(self) -> None:
            deaf = Deaf()
            for name in places:
                setattr(self, name, deaf)

        def __call__(self, x: Any) -> Any:
            return self.a(x)

    rules = jaxmp.PolicyRules({"a": "mixed_bfloat16"}, default="mixed_bfloat16")
    model = jaxmp.nnx.apply_policy(Model(), rules, strict=True)
    with pytest.raises(ValueError, match="Deaf at 'a' returns float32"):
        model(jnp.ones((1, 2)))


def test_a_shared_layer_that_one_place_leaves_out_of_float8_is_reported() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.lm_head = self.tokens = nnx.Linear(32, 32, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.tokens(x)

    rules = PolicyRules({"tokens": "mixed_float8"}, default="mixed_float8")
    with pytest.warns(UserWarning, match=r"no layer of Tied is in 8 bits: 'tokens' \(heads\)"):
        jaxmp.nnx.apply_policy(Tied(), rules)


def test_a_carry_under_another_name_is_not_cast() -> None:
    class Cell(nnx.RNNCellBase):
        def __call__(self, h: Any, x: Any) -> Any:
            return h + x, x

    cell = jaxmp.nnx.apply_policy(Cell(), PolicyRules({"/": "mixed_bfloat16"}))
    assert cell(h=jnp.ones(2), x=jnp.ones(2))[0].dtype == jnp.float32


@pytest.mark.parametrize("by_name", [False, True])
def test_the_inputs_of_a_cell_that_a_rule_names_are_cast(by_name: bool) -> None:
    """Its carry is not: a scan asks for a carry that keeps its dtype."""
    seen: list[Any] = []

    class Cell(nnx.RNNCellBase):
        def __call__(self, carry: Any, x: Any) -> Any:
            seen.append((carry.dtype, x.dtype))
            return carry + x, x

    class LinenCell(nn.RNNCellBase):
        num_feature_axes = 1

        def __call__(self, carry: Any, x: Any) -> Any:
            seen.append((carry.dtype, x.dtype))
            return carry + x, x

    class LinenModel(nn.Module):
        @nn.compact
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return LinenCell(name="cell")(*args, **kwargs)

    rules = (
        jaxmp.PolicyRules({"/": "mixed_bfloat16"}),
        jaxmp.PolicyRules({"cell": "mixed_bfloat16"}),
    )
    carry, x = jnp.ones(2), jnp.ones(2)
    for model in (
        jaxmp.nnx.apply_policy(Cell(), rules[0]),
        functools.partial(jaxmp.linen.apply_policy(LinenModel(), rules[1]).apply, {}),
    ):
        out, y = model(carry=carry, x=x) if by_name else model(carry, x)
        assert seen.pop() == (jnp.float32, jnp.bfloat16)
        assert (out.dtype, y.dtype) == (jnp.float32, jnp.float32)


def test_keyword_modules_shared_variables_and_batches_of_any_kind() -> None:
    def loss_fn(a: nnx.Module, b: nnx.Module, x: Any, *, teacher: nnx.Module) -> jax.Array:
        return jnp.mean((a(x) + b(x) - teacher(x)) ** 2)

    made = nnx.jit(lambda rngs: nnx.Linear(8, 4, rngs=rngs))
    # As many biases as the batch has examples.
    shared, teacher = made(nnx.Rngs(0)), made(nnx.Rngs(1))
    results = [
        nnx.jit(jaxmp.nnx.value_and_grad(loss_fn, argnums=(0, 1), microbatches=count))(
            nnx.Sequential(shared), nnx.Sequential(shared), X, teacher=teacher
        )
        for count in (1, 4)
    ]
    for one, four in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, four, rtol=1e-5, atol=1e-6)

    @nnx.dataclass
    class Batch(nnx.Pytree):
        x: jax.Array

    loss = jaxmp.nnx.value_and_grad(lambda m, batch: m(batch.x).mean(), microbatches=2)
    assert jnp.isfinite(loss(shared, Batch(x=X))[0])


def test_tree_mode() -> None:
    set_mode: Any = getattr(nnx, "set_graph_mode", None)
    context = set_mode(False) if set_mode else contextlib.nullcontext()
    model = nnx.jit(lambda: nnx.Linear(8, 2, use_bias=False, rngs=nnx.Rngs(0)))()
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "float32")
    optimizer = jaxmp.nnx.Optimizer(model, tx)
    with context:
        _, grads = jaxmp.nnx.value_and_grad(lambda m, x: m(x).mean())(model, X)
        assert optimizer.update(model, grads)
