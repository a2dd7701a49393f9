"""A rule that names a module is followed, or somebody says so; and so are params out of reach."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jaxmp
from jaxmp import PolicyRules

pytestmark = pytest.mark.usefixtures("unchecked", "standard_promotion")

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
KEY = jax.random.key(0)
ones = nn.initializers.ones
# What an author calls dtypes, who writes a table of them.
TABLE = {"bf16": jnp.bfloat16, "bfloat16": jnp.bfloat16, "float32": jnp.float32}


def product(how: str, dtype: Any, x: Any, w: Any) -> Any:
    """A product as the authors of modules write it, from right to wrong."""
    if how == "follows":
        dtype = x.dtype if dtype is None else dtype
        # A scalar that is summed in float32, as the auxiliary loss of a router, is no fault.
        return x.astype(dtype) @ w.astype(dtype), jnp.mean(x.astype(jnp.float32))
    if how == "hard-coded":
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    if how == "alias":
        return x.astype(TABLE[dtype]) @ w.astype(TABLE[dtype])
    return x @ w  # ignores


class LinenLayer(nn.Module):
    """A layer that has a dtype; what it does with it is another matter."""

    how: str
    dtype: Any = None
    router: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.router:
            x = x * nn.softmax(nn.Dense(8, name="router")(x))
        return product(self.how, self.dtype, x, self.param("w", ones, (8, 4)))


class LinenBare(nn.Module):
    """A layer with params and no dtype."""

    router: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.router:
            x = x * nn.softmax(nn.Dense(8, name="router")(x))
        return x @ self.param("w", ones, (8, 4))


class LinenNet(nn.Module):
    """Layers of Flax's around another one; the author writes a cast at the end."""

    layer: nn.Module

    @nn.compact
    def __call__(self, x: Any) -> Any:
        out = self.layer(nn.Dense(8, name="before")(x))
        return nn.Dense(2, name="head")(jax.tree.leaves(out)[0]).astype(jnp.float32)


class NnxLayer(nnx.Module):
    """The same layer in nnx; its params may lie in a list."""

    def __init__(self, how: str, dtype: Any = None, router: bool = False, lists: bool = False):
        self.how, self.dtype = how, dtype
        self.router = nnx.Linear(8, 8, rngs=nnx.Rngs(0)) if router else None
        w = nnx.Param(jnp.ones((8, 4)))
        self.w = nnx.List([w]) if lists else w

    def __call__(self, x: Any) -> Any:
        if self.router is not None:
            x = x * nnx.softmax(self.router(x))
        w = self.w[0] if isinstance(self.w, nnx.List) else self.w
        return product(self.how, getattr(self, "dtype", None), x, w[...])


def nnx_bare(router: bool = False, lists: bool = False) -> NnxLayer:
    layer = NnxLayer("ignores", router=router, lists=lists)
    del layer.dtype
    return layer


class NnxNet(nnx.Module):
    def __init__(self, layer: Any):
        self.before = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.layer = layer
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(2))

    def __call__(self, x: Any) -> Any:
        out = self.layer(self.before(x))
        return self.head(jax.tree.leaves(out)[0]).astype(jnp.float32)


def traced(fun: Any, *args: Any) -> Any:
    """Returns the types of the results; what is checked is checked in the trace."""
    return jax.eval_shape(lambda *args: fun(*args), *args)


def run_linen(layer: nn.Module, rules: Any, strict: bool = True) -> Any:
    model = jaxmp.linen.apply_policy(LinenNet(layer), rules, strict=strict)
    return traced(model.apply, traced(model.init, KEY, X), X)


def run_nnx(layer: Any, rules: Any, strict: bool = True) -> Any:
    return traced(jaxmp.nnx.apply_policy(NnxNet(layer), rules, strict=strict), X)


FLAX = {"linen": (LinenLayer, run_linen), "nnx": (NnxLayer, run_nnx)}
BARE = {"linen": (LinenBare, run_linen), "nnx": (nnx_bare, run_nnx)}
on_both = pytest.mark.parametrize("flax", ["linen", "nnx"])


@on_both
@pytest.mark.parametrize("low", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
@pytest.mark.parametrize("pattern", ["layer", "**", "type:*Layer", "re:layer"])
@pytest.mark.parametrize("router", [False, True])
def test_a_layer_that_follows_its_dtype_is_no_error(
    flax: str, low: str, pattern: str, router: bool
) -> None:
    make, run = FLAX[flax]
    out = run(make("follows", router=router), PolicyRules([(pattern, low)], default=low))
    assert out.dtype == jaxmp.get_policy(low).output_dtype


@on_both
@pytest.mark.parametrize("low", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("pattern", ["layer", "**"])
@pytest.mark.parametrize("router", [False, True])
def test_a_layer_that_ignores_its_dtype_is_an_error(
    flax: str, low: str, pattern: str, router: bool
) -> None:
    make, run = FLAX[flax]
    compute = jaxmp.get_policy(low).compute_dtype
    with pytest.raises(ValueError, match=f"Layer at 'layer' returns float32.* in {compute}"):
        run(make("ignores", router=router), PolicyRules([(pattern, low)], default=low))


@on_both
def test_without_strict_it_is_a_warning_once(flax: str) -> None:
    make, run = FLAX[flax]
    rules = PolicyRules([("layer", "params=float32,compute=float16,output=bfloat16")])
    with pytest.warns(UserWarning, match="Layer at 'layer' returns float32") as caught:
        run(make("ignores"), rules, strict=False)
    assert len(caught) == 1
    run(make("ignores"), rules, strict=False)  # any warning here would be an error


@on_both
def test_a_dtype_written_into_the_code_is_an_error(flax: str) -> None:
    make, run = FLAX[flax]
    with pytest.raises(ValueError, match=r"Layer at 'layer' returns bfloat16.* in float32"):
        run(make("hard-coded"), PolicyRules([("layer", "float32")]))
    run(make("hard-coded"), PolicyRules([("layer", "mixed_bfloat16")]))  # that is what it does


@on_both
def test_a_dtype_that_only_its_author_knows_is_an_error(flax: str) -> None:
    make, run = FLAX[flax]
    text = "its dtype, 'bf16', is no float dtype of JAX's, and stays as it is"
    with pytest.raises(ValueError, match=text):
        run(make("alias", "bf16"), PolicyRules([("layer", "float32")]))
    run(make("alias", "bfloat16"), PolicyRules([("layer", "float32")]))
    with pytest.raises(ValueError, match="params, and a 'dtype' that is no float dtype"):
        run(make("alias", "bf16"), PolicyRules([("layer", "mixed_bfloat16")]))


@on_both
def test_a_layer_that_is_the_model_is_named(flax: str) -> None:
    if flax == "linen":
        linen = jaxmp.linen.apply_policy(LinenLayer("ignores"), "mixed_bfloat16", strict=True)
        run: Any = functools.partial(linen.init, KEY)
    else:
        run = jaxmp.nnx.apply_policy(NnxLayer("ignores"), "mixed_bfloat16", strict=True)
    with pytest.raises(ValueError, match=r"Layer at '\(root\)' returns float32"):
        run(X)
    if flax == "linen":  # not only when it is initialised
        with pytest.raises(ValueError, match=r"Layer at '\(root\)' returns float32"):
            traced(linen.apply, traced(LinenLayer("ignores").init, KEY, X), X)


@on_both
@pytest.mark.parametrize("router", [False, True])
def test_a_named_layer_without_a_dtype_is_an_error(flax: str, router: bool) -> None:
    make, run = BARE[flax]
    rules = PolicyRules([("layer", "mixed_bfloat16")], default="mixed_bfloat16")
    with pytest.raises(ValueError, match="at 'layer' cannot compute in bfloat16"):
        run(make(router=router), rules)
    # With a module in it, which follows: the rule does something, and no strict rule asks for all.
    if router:
        with pytest.warns(UserWarning, match="does not reach .* own params of 'layer'"):
            run(make(router=router), rules, strict=False)


@on_both
def test_the_result_of_a_part_in_another_region_may_come_out(flax: str) -> None:
    """The model has params of its own, goes by its dtype, and ends with a float32 head."""

    class LinenModel(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x.astype(self.dtype) + self.param("position", ones, (8,)).astype(self.dtype)
            return nn.Dense(2, name="head")(x)[..., 0]

    class NnxModel(nnx.Module):
        def __init__(self) -> None:
            self.dtype: Any = None
            self.position = nnx.Param(jnp.ones(8))
            self.head = nnx.Linear(8, 2, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            x = x.astype(self.dtype) + self.position[...].astype(self.dtype)
            return self.head(x)[..., 0]

    rules = PolicyRules([("head", "float32"), ("**", "mixed_bfloat16")])
    if flax == "linen":
        model = jaxmp.linen.apply_policy(LinenModel(), rules, strict=True)
        out = traced(model.apply, traced(model.init, KEY, X), X)
    else:
        out = traced(jaxmp.nnx.apply_policy(NnxModel(), rules, strict=True), X)
    assert out.dtype == jnp.float32


def test_inside_jit_scan_and_remat_of_linen() -> None:
    rules = PolicyRules([("**", "mixed_bfloat16")])
    for transform in (nn.jit, nn.remat):
        layer = transform(LinenLayer)("ignores")
        with pytest.raises(ValueError, match="at 'layer' returns float32"):
            run_linen(layer, rules)
        run_linen(transform(LinenLayer)("follows"), rules)


def test_a_decorated_class_of_linen() -> None:
    decorate = jaxmp.linen.with_policy(PolicyRules([("/", "mixed_bfloat16")]), strict=True)
    with pytest.raises(ValueError, match=r"at '\(root\)' returns float32"):
        traced(LinenNet(decorate(LinenLayer)("ignores")).init, KEY, X)
    traced(LinenNet(decorate(LinenLayer)("follows")).init, KEY, X)


def test_what_goes_through_is_not_what_a_module_returns() -> None:
    class Through(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x, nn.Dense(8, dtype=self.dtype)(x).astype(jnp.int32)

    run_linen(Through(), PolicyRules([("layer", "mixed_bfloat16")], default="float32"))


# The experts are a param of the module itself: 4 * 8 * 16 of all the numbers.
class LinenExperts(nn.Module):
    """Most params of the model, in a module without a dtype."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        gates = nn.softmax(nn.Dense(4, name="router")(x))
        return jnp.einsum("bi,eio,be->bo", x, self.param("experts", ones, (4, 8, 4)), gates)


class NnxExperts(nnx.Module):
    def __init__(self, lists: bool = False) -> None:
        self.router = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        experts = [nnx.Param(jnp.ones((8, 4))) for _ in range(4)]
        self.experts = nnx.List(experts) if lists else nnx.Param(jnp.ones((4, 8, 4)))

    def __call__(self, x: Any) -> Any:
        experts = self.experts
        stacked = jnp.stack([e[...] for e in experts]) if isinstance(experts, nnx.List) else experts
        return jnp.einsum("bi,eio,be->bo", x, stacked, nnx.softmax(self.router(x)))


# before: 8 * 8 + 8; router: 8 * 4 + 4; experts: 4 * 8 * 4; head: 4 * 2 + 2.
COUNTS = r"does not reach 52% of the params \(128 of 246\).* own params of 'layer' \(128\)"


@pytest.mark.parametrize("low", ["mixed_bfloat16", "mixed_float16"])
def test_apply_policy_of_nnx_says_what_share_it_cannot_reach(low: str) -> None:
    for lists in (False, True):
        with pytest.warns(UserWarning, match=COUNTS):
            model = jaxmp.nnx.apply_policy(NnxNet(NnxExperts(lists)), low)
        table = jaxmp.nnx.summary(model)
        assert table.unreached == 128
        assert "246 params, of which no policy reaches 128 (52%)" in str(table)
        jaxmp.nnx.remove_policy(model)
        assert jaxmp.nnx.summary(model).unreached == 0


def test_linen_says_so_when_the_model_is_initialised_and_once_when_it_is_applied() -> None:
    model = jaxmp.linen.apply_policy(LinenNet(LinenExperts()), "mixed_float16")
    variables = traced(LinenNet(LinenExperts()).init, KEY, X)
    with pytest.warns(UserWarning, match=COUNTS):
        traced(model.apply, variables, X)
    traced(model.apply, variables, X)
    with pytest.warns(UserWarning, match=COUNTS):
        traced(model.init, KEY, X)
    with pytest.warns(UserWarning, match=COUNTS):
        table = jaxmp.linen.summary(model, KEY, X)
    assert table.unreached == 128
    assert "(as its params)" in str(table)


def test_params_of_scanned_layers_are_counted_whole() -> None:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: None) -> Any:
            return jnp.tanh(nn.Dense(8)(x) @ self.param("w", ones, (8, 8))).astype(x.dtype), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            axes: Any = {"params": 0}
            layers = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=3)
            return layers(name="layers")(x, None)[0]

    with pytest.warns(UserWarning, match=r"\(192 of 408\).* of 'layers' \(192\)"):
        traced(jaxmp.linen.apply_policy(Stack(), "mixed_bfloat16").init, KEY, X)


@pytest.mark.slow
def test_what_is_reached_or_left_alone_is_not_said() -> None:
    # Stored in the compute dtype, in float32 by rule, left alone, or with a dtype.
    for rules in (
        PolicyRules(default="bfloat16"),
        PolicyRules([("layer", "float32")], default="mixed_bfloat16"),
        PolicyRules([("layer", None)], default="mixed_bfloat16"),
    ):
        jaxmp.nnx.apply_policy(NnxNet(NnxExperts()), rules)
        traced(jaxmp.linen.apply_policy(LinenNet(LinenExperts()), rules).init, KEY, X)
    jaxmp.nnx.apply_policy(NnxNet(NnxLayer("follows", lists=True)), "mixed_bfloat16")


def test_less_than_a_hundredth_is_not_said() -> None:
    class Wide(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
            self.scale = nnx.Param(jnp.ones(32))

    jaxmp.nnx.apply_policy(Wide(), "mixed_bfloat16")


class Sinusoid(nn.Module):
    """Positions, of integers: no floating input is there to be cast."""

    @nn.compact
    def __call__(self, count: int) -> Any:
        return jnp.sin(jnp.arange(count, dtype=jnp.float32)[:, None] * jnp.ones((1, 8)))


class Positioned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8)(x + Sinusoid()(2).astype(x.dtype))


def test_a_module_without_inputs_to_cast_is_told_nothing() -> None:
    rules = jaxmp.PolicyRules([("*", "mixed_bfloat16")])
    model = jaxmp.linen.apply_policy(Positioned(), rules, strict=True)
    assert traced(model.apply, traced(model.init, KEY, X), X).dtype == jnp.float32


class OwnProduct(nnx.Module):
    def __init__(self) -> None:
        self.w, self.dtype = nnx.Param(jnp.ones((4, 4))), None

    def __call__(self, x: Any) -> Any:
        dtype = self.dtype or x.dtype
        return x.astype(dtype) @ self.w[...].astype(dtype)


def test_equal_modules_at_two_places_are_equal() -> None:
    """What a module promises is no part of what `nnx.jit` tells modules apart by."""
    model = nnx.Dict(a=OwnProduct(), b=OwnProduct())
    rules = jaxmp.PolicyRules([("a", "mixed_bfloat16"), ("b", "mixed_bfloat16")])
    model = jaxmp.nnx.apply_policy(model, rules)
    assert nnx.split(model["a"])[0] == nnx.split(model["b"])[0]
