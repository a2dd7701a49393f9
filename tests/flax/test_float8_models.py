"""Models under policies with float8: their authors' own products, state, transforms, training."""

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax

import jaxmp
from jaxmp import PolicyRules
from tests.support.bits import tree_bits
from tests.support.dots import count_dots

pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
FLOAT8, BOTH8 = "float8_e4m3fn", "float8_e5m2,float8_e4m3fn"
X = jnp.asarray(np.random.default_rng(1).standard_normal((32, 16), np.float32))
NOT_IN_FLOAT8 = "layers keep products of their own, which are not in 8 bits"


def own_product(*args: Any, **kwargs: Any) -> Any:
    """What an author may have written, such as products in int8."""
    return lax.dot_general(*args, **kwargs)


def own_promotion(*arrays: Any, dtype: Any) -> Any:
    """Casts as Flax does, for linen and nnx."""
    arrays = arrays[0] if isinstance(arrays[0], tuple) else arrays
    return tuple(None if x is None else jnp.asarray(x, dtype) for x in arrays)


class OwnLinen(nn.Dense):
    """A subclass that multiplies by itself: a kernel that was not cast would make it float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        x, kernel, _ = self.promote_dtype(x, kernel, None, dtype=self.dtype)
        return x @ kernel


class OwnNnx(nnx.Linear):
    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        x, kernel, _ = self.promote_dtype((x, self.kernel[...], None), dtype=self.dtype)
        return x @ kernel


RNGS = nnx.Rngs(0)
OWN: dict[str, Any] = {
    "linen dot_general": lambda: nn.Dense(48, dot_general=own_product),
    "linen dot_general_cls": lambda: nn.Dense(48, dot_general_cls=lambda: own_product),
    "linen promote_dtype": lambda: nn.DenseGeneral(48, promote_dtype=own_promotion),
    "linen __call__": lambda: OwnLinen(48),
    "linen einsum": lambda: nn.Einsum((16, 48), "ab,bc->ac"),
    "nnx dot_general": lambda: nnx.Linear(16, 48, dot_general=own_product, rngs=RNGS),
    "nnx dot_general_cls": lambda: nnx.LinearGeneral(
        16, 48, dot_general_cls=lambda: own_product, rngs=RNGS
    ),
    "nnx promote_dtype": lambda: nnx.Linear(16, 48, promote_dtype=own_promotion, rngs=RNGS),
    "nnx __call__": lambda: OwnNnx(16, 48, rngs=RNGS),
    "nnx einsum": lambda: nnx.Einsum("ab,bc->ac", (16, 48), rngs=RNGS),
}


class Around(nn.Module):
    """A model around a layer."""

    layer: nn.Module

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


class NnxAround(nnx.Module):
    def __init__(self, layer: nnx.Module) -> None:
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def products_under(rules: Any, layer: Any, *, strict: bool = False) -> dict[str, int]:
    """The products of a model of one layer under rules."""
    if isinstance(layer, nn.Module):
        model = jaxmp.linen.apply_policy(Around(layer), rules, strict=strict)
        return count_dots(model.apply, jax.eval_shape(model.init, KEY, X), X)
    return count_dots(jaxmp.nnx.apply_policy(NnxAround(layer), rules, strict=strict), X)


@pytest.mark.parametrize("case", OWN)
def test_what_authors_wrote_stays_and_is_reported(case: str) -> None:
    what = case.split()[1]
    with pytest.warns(UserWarning, match=rf"{NOT_IN_FLOAT8}: 'layer' \({what}\)"):
        assert products_under("mixed_float8", OWN[case]()) == {"bfloat16": 1}
    named = PolicyRules({"layer": "mixed_float8"})
    with pytest.raises(ValueError, match=rf"'layer' cannot follow its rule .* its own {what}"):
        products_under(named, OWN[case](), strict=True)
    # A rule that leaves the layer out silences the warning.
    rules = PolicyRules({"layer": "mixed_bfloat16"}, default="mixed_float8")
    assert products_under(rules, OWN[case]()) == {"bfloat16": 1}


class Extended(nn.Dense):
    """A subclass that calls its base class is a layer like that."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + 1


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Extended(48),
        lambda: nn.Dense(48, dot_general=jaxmp.float8.dot_general),
        lambda: nn.Dense(
            48, dot_general=functools.partial(jaxmp.float8.dot_general, recipe="rowwise")
        ),
        lambda: nn.remat(nn.Dense)(48),
        lambda: nnx.LoRALinear(16, 48, lora_rank=16, rngs=RNGS),
        lambda: nn.WeightNorm(nn.Dense(48)),
    ],
    ids=["subclass", "float8", "partial", "remat", "lora", "weight norm"],
)
def test_layers_made_of_layers_are_in_float8_without_a_warning(layer: Any) -> None:
    made = layer()
    found = products_under("mixed_float8", made)
    assert found[FLOAT8] == 1
    # The two products of LoRA have no dot_general.
    assert found.get("bfloat16", 0) == (2 if isinstance(made, nnx.LoRALinear) else 0)


def test_authors_of_attention_keep_their_projections() -> None:
    layer = nn.MultiHeadDotProductAttention(1, qkv_features=16, qkv_dot_general=own_product)
    model = jaxmp.linen.apply_policy(layer, "mixed_float8")
    with pytest.warns(UserWarning, match=NOT_IN_FLOAT8):
        variables = jax.eval_shape(model.init, KEY, X[None])
    with pytest.warns(UserWarning, match="'query' .*'key' .*'value'"):
        jax.eval_shape(jaxmp.linen.apply_policy(layer.clone(), "mixed_float8").init, KEY, X[None])
    found = count_dots(lambda v, x: model.apply(v, x, x), variables, X[None])
    assert found == {FLOAT8: 1, "bfloat16": 5}


def test_nnx_models_compare_by_their_recipe_and_are_as_before_without() -> None:
    def made(rules: Any) -> Any:
        return jaxmp.nnx.apply_policy(nnx.Linear(16, 48, rngs=nnx.Rngs(0)), rules)

    plain = nnx.graphdef(nnx.Linear(16, 48, rngs=nnx.Rngs(0)))
    model = made("mixed_float8")
    assert nnx.graphdef(model) == nnx.graphdef(made("mixed_float8"))
    assert hash(nnx.graphdef(model)) == hash(nnx.graphdef(made("mixed_float8")))
    rowwise = jaxmp.get_policy("mixed_float8").with_products("rowwise")
    assert nnx.graphdef(model) != nnx.graphdef(made(rowwise))
    # Applying again replaces, and removing restores.
    again = jaxmp.nnx.apply_policy(made(rowwise), "mixed_float8")
    assert nnx.graphdef(again) == nnx.graphdef(model)
    assert nnx.graphdef(jaxmp.nnx.apply_policy(again, "mixed_bfloat16")) == nnx.graphdef(
        made("mixed_bfloat16")
    )
    assert nnx.graphdef(jaxmp.nnx.remove_policy(model)) == plain
    assert nnx.graphdef(nnx.merge(*nnx.split(made("mixed_float8")))) == nnx.graphdef(
        made("mixed_float8")
    )


def test_pickled_models_stay_in_float8() -> None:
    model = jaxmp.nnx.apply_policy(nnx.Linear(16, 48, rngs=nnx.Rngs(0)), "mixed_float8")
    copy = pickle.loads(pickle.dumps(model))
    assert tree_bits(copy(X)) == tree_bits(model(X))
    assert count_dots(copy, X) == {FLOAT8: 1}
    ones = nn.initializers.ones  # Flax's default cannot be pickled
    linen = jaxmp.linen.apply_policy(nn.Dense(48, kernel_init=ones), "mixed_float8")
    variables = jax.jit(linen.init)(KEY, X)
    copy = pickle.loads(pickle.dumps(linen))
    assert count_dots(copy.apply, variables, X) == {FLOAT8: 1}
    plain = jaxmp.linen.remove_policy(copy)
    assert type(plain) is nn.Dense
    assert count_dots(plain.apply, variables, X) == {"float32": 1}
    assert tree_bits(variables) == tree_bits(jax.jit(plain.init)(KEY, X))


class LinenBlock(nn.Module):
    """A block as scans repeat it."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        y = nn.Dense(16, name="down")(nn.relu(nn.Dense(48, name="up")(x)))
        return x + y.astype(x.dtype), None


class LinenStack(nn.Module):
    """Three blocks in a scan, with or without nn.remat, or one after the other."""

    scan: bool
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(LinenBlock) if self.remat else LinenBlock
        if self.scan:
            made = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return made(name="blocks")(x, None)[0]
        for i in range(3):
            x, _ = block(name=f"block_{i}")(x)
        return x


def linen_loss(model: nn.Module) -> Any:
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))


@pytest.mark.slow
def test_linen_scans_and_remat_keep_float8() -> None:
    def gradient(scan: bool, remat: bool) -> tuple[dict[str, int], Any]:
        model = jaxmp.linen.apply_policy(LinenStack(scan, remat), "mixed_float8")
        variables = jax.jit(model.init)(KEY, X)
        call = jax.jit(jax.grad(linen_loss(model)))
        return count_dots(call, variables, X), call(variables, X)

    times = {"scan": 1, "loop": 3}
    found = {}
    for kind, n in times.items():
        dots, found[kind] = gradient(kind == "scan", False)
        # The input of the first block of the loop has no gradient.
        assert dots == {FLOAT8: 2 * n, BOTH8: 4 * n - (kind == "loop")}
        dots, again = gradient(kind == "scan", True)
        assert dots[BOTH8] == 4 * n - (kind == "loop")
        assert dots[FLOAT8] > 2 * n  # remat multiplies again
        assert {x.dtype.name for x in jax.tree.leaves(again)} == {"float32"}
        assert tree_bits(again) == tree_bits(found[kind])


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(16, 48, rngs=rngs), nnx.Linear(48, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(x))).astype(x.dtype)


class NnxStack(nnx.Module):
    """Three blocks in `nnx.scan`, with or without `nnx.remat`."""

    def __init__(self, remat: bool, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> NnxBlock:
            return NnxBlock(rngs)

        self.blocks, self.remat = make(rngs), remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, block: NnxBlock) -> jax.Array:
            return block(x)

        body = nnx.remat(body) if self.remat else body
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def test_nnx_scans_and_remat_keep_float8() -> None:
    def gradients(remat: bool) -> tuple[dict[str, int], Any]:
        made = nnx.jit(lambda: NnxStack(remat, nnx.Rngs(0)))()
        model = jaxmp.nnx.apply_policy(made, "mixed_float8")

        def loss_fn(model: NnxStack, x: jax.Array) -> jax.Array:
            return jnp.mean(jnp.square(model(x)))

        graphdef, params = nnx.split(model)

        def call(params: Any, x: jax.Array) -> Any:
            return jaxmp.nnx.value_and_grad(loss_fn)(nnx.merge(graphdef, params), x)[1]

        return count_dots(call, params, X), jax.jit(call)(params, X)

    dots, plain = gradients(False)
    assert dots == {FLOAT8: 2, BOTH8: 4}
    dots, again = gradients(True)
    assert (dots[BOTH8], dots[FLOAT8] > 2) == (4, True)
    assert {x.dtype.name for x in jax.tree.leaves(plain)} == {"float32"}
    assert tree_bits(nnx.to_pure_dict(again)) == tree_bits(nnx.to_pure_dict(plain))


class WithHead(nn.Module):
    """A model whose head would fit."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(64, name="head")(nn.relu(nn.Dense(48, name="up")(x)))


def test_a_train_step_under_the_same_policy_changes_nothing() -> None:
    model = jaxmp.linen.apply_policy(WithHead(), "mixed_float8")
    params = jax.jit(model.init)(KEY, X)["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(model.apply({"params": params}, batch)))

    tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float8")
    state = jaxmp.TrainState.create(params=params, tx=tx)
    outside = jaxmp.make_train_step(loss_fn, "mixed_float8", donate=False)
    inside = jaxmp.make_train_step(loss_fn, "none", donate=False)
    # The products of the head are in bfloat16, and their gradients are not multiplied again.
    expected = {FLOAT8: 1, BOTH8: 1, "bfloat16": 3}
    assert count_dots(inside, state, X) == count_dots(outside, state, X) == expected
    made, plain = outside(state, X)[0].params, inside(state, X)[0].params
    assert {x.dtype.name for x in jax.tree.leaves(made)} == {"float32"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4), made, plain)


class NnxWithHead(nnx.Module):
    def __init__(self) -> None:
        self.up, self.head = nnx.Linear(16, 48, rngs=RNGS), nnx.Linear(48, 64, rngs=RNGS)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.up(x)))


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(
    ("rules", "inside", "left_out"),
    [
        ("mixed_float8", 1, ["heads"]),
        (PolicyRules({"up": "mixed_bfloat16"}, default="mixed_float8"), 0, ["heads"]),
        (PolicyRules({"head": "mixed_float8"}, default="mixed_bfloat16"), 1, []),
        (PolicyRules({"head": "mixed_float8"}, default="mixed_float8"), 2, []),
    ],
    ids=["name", "none", "head", "both"],
)
@pytest.mark.filterwarnings("ignore:a policy asks for products in 8 bits")
def test_nnx_autocast_leaves_heads_out_too(
    rules: Any, inside: int, left_out: list[str], applied: bool
) -> None:
    model = NnxWithHead()
    if applied:
        model = jaxmp.nnx.apply_policy(model, rules)
    graphdef, params = nnx.split(model)

    def call(params: Any, x: jax.Array) -> Any:
        return jaxmp.nnx.autocast(lambda model, x: model(x), rules)(nnx.merge(graphdef, params), x)

    found = count_dots(call, params, X)
    assert (found.get(FLOAT8, 0), found.get("bfloat16", 0)) == (inside, 2 - inside)
    assert [row.reason for row in jaxmp.audit(call, params, X).left_out] == left_out


JittedDense = nn.jit(nn.Dense)


class Jitted(nn.Module):
    """Calls one jitted class as a head and as something else."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The two have inputs of one dtype: else JAX would trace them apart.
        x = x.astype(jnp.bfloat16)
        return JittedDense(16, name="head")(JittedDense(16, name="up")(x))


def test_nn_jit_may_not_share_a_trace_between_a_head_and_another_layer() -> None:
    model = jaxmp.linen.apply_policy(Jitted(), "mixed_float8")
    with pytest.raises(ValueError, match=r"'head' was traced as one with 'up'.*out of 8 bits"):
        jax.eval_shape(model.init, KEY, X)
    rules = PolicyRules({"type:Dense": "mixed_float8"})  # names both
    model = jaxmp.linen.apply_policy(Jitted(), rules)
    assert count_dots(model.apply, jax.eval_shape(model.init, KEY, X), X) == {FLOAT8: 2}


class Tied(nn.Module):
    """A model whose embedding is its head, too, and which multiplies by hand in a router."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        embed = nn.Embed(32, 16)
        h = nn.Dense(16)(embed(jnp.zeros(x.shape[:1], int)) + x)
        return embed.attend(Router()(h))


class Router(nn.Module):
    """A hand-written product."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.param("w", nn.initializers.ones, (16, 16)).astype(x.dtype)


class NnxTied(nnx.Module):
    """The router in nnx."""

    def __init__(self) -> None:
        self.dense, self.router = nnx.Linear(16, 16, rngs=RNGS), NnxRouter()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.router(self.dense(x))


class NnxRouter(nnx.Module):
    """A hand-written product."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((16, 16)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w.get_value().astype(x.dtype)


@pytest.mark.filterwarnings("ignore:the policy does not reach")
def test_the_audit_has_rows_of_products_that_no_layer_makes() -> None:
    model = jaxmp.linen.apply_policy(Tied(), "mixed_float8")
    params = jax.eval_shape(model.init, KEY, X)
    found = jaxmp.audit(jax.grad(lambda params, x: model.apply(params, x).sum()), params, X)
    assert {(row.reason, row.count) for row in found.left_out} == {
        *(("embeddings", 3), ("routers", 3))
    }
    assert {row.path.split("/")[-1].split(".")[0] for row in found.left_out} == {
        *("Embed_0", "Router_0")
    }
    assert found.share("float8") == 3 * 16 / (3 * 16 + 3 * 16 + 3 * 32)

    model = jaxmp.nnx.apply_policy(NnxTied(), "mixed_float8")
    (row,) = jaxmp.audit(model, X).left_out
    assert (row.reason, row.count) == ("routers", 1)


NONE_FOUND = "a policy asks for products in 8 bits, and no layer of"


def test_a_policy_that_puts_nothing_in_float8_says_so() -> None:
    """On both kinds of models, with the reasons; not where rules leave everything out."""
    layers = [nn.Dense(10), nn.Dense(16)]
    model = jaxmp.linen.apply_policy(nn.Sequential(layers), "mixed_float8")
    why = r"'layers_0' \(N = 10 is no multiple of 16\), 'layers_1' \(K = 10"
    with pytest.warns(UserWarning, match=f"{NONE_FOUND} Sequential is in 8 bits: {why}"):
        params = jax.eval_shape(model.init, KEY, X)
    jax.eval_shape(model.apply, params, X)  # once for each class
    one = nnx.Sequential(nnx.Linear(16, 10, rngs=RNGS), nnx.Conv(10, 16, (3,), rngs=RNGS))
    with pytest.warns(UserWarning, match=rf"{NONE_FOUND} Sequential .*: 'layers/0' \(N = 10"):
        jaxmp.nnx.apply_policy(one, "mixed_float8")
    with pytest.warns(UserWarning, match=f"{NONE_FOUND} Conv .*: it has no Dense or Linear layer"):
        jaxmp.nnx.apply_policy(nnx.Conv(3, 3, (3,), rngs=RNGS), "mixed_float8")
    jaxmp.nnx.apply_policy(one, PolicyRules({"layers/0": "bfloat16"}, default="mixed_float8"))


class Encoder(nn.Module):
    """A model with a method that calls no layer, and a layer that nn.jit traces once."""

    def setup(self) -> None:
        self.embed, self.mlp = nn.Embed(32, 16), nn.jit(nn.Dense)(16)
        self.head = nn.Dense(16)

    def __call__(self, x: jax.Array, deep: bool = True) -> jax.Array:
        return self.head(self.mlp(self.lookup(x) + x) if deep else x)

    def lookup(self, x: jax.Array) -> jax.Array:
        return self.embed(jnp.zeros(x.shape[:1], int))


def test_parts_of_a_model_and_cached_traces_are_no_reason_to_warn() -> None:
    model = jaxmp.linen.apply_policy(Encoder(), "mixed_float8")
    params = jax.jit(model.init)(KEY, X)
    for _ in range(2):
        model.apply(params, X)
    model.apply(params, X, method="lookup")
    model.apply(params, X, deep=False)  # the head alone
    norm = jaxmp.linen.apply_policy(nn.LayerNorm(), "mixed_float8")  # nothing to multiply
    jax.eval_shape(norm.init, KEY, X)


class Attending(nn.Module):
    """Two layers around an attention, whose scores are products of 16-bit activations."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(64)(x)
        return nn.Dense(48)(h + nn.MultiHeadDotProductAttention(4)(h, h))


def test_autocast_sees_that_layers_are_in_float8_already() -> None:
    """By the policy of the model, or by their author: no warning that it finds none itself."""
    model = jaxmp.linen.apply_policy(Attending(), "mixed_float8")
    params = jax.jit(model.init)(KEY, X[None])
    jaxmp.autocast(model.apply, "mixed_float8")(params, X[None])

    def by_hand(params: Any, x: jax.Array) -> jax.Array:
        return jaxmp.float8.dot_general(x, params, (((1,), (0,)), ((), ())))

    low = [np.asarray(x).astype(jnp.bfloat16) for x in (np.ones((16, 32)), X)]
    jaxmp.autocast(by_hand, "mixed_float8")(*low)
