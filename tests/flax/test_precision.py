"""What a policy on a Flax model calls float32 asks for it: by the layer's field, or around it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax

import jaxmp
from tests.support.dots import precisions

pytestmark = [
    pytest.mark.annotations,
    pytest.mark.jax,
    pytest.mark.usefixtures("standard_promotion"),
]
EXACT, PLAIN, LOW = ("float32", "highest"), ("float32", "none"), ("bfloat16", "none")
HEAD = jaxmp.PolicyRules({"head": "float32"}, default="mixed_bfloat16")
X = jnp.ones((4, 8))


class LinenModel(nn.Module):
    head: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.head(nn.Dense(8, name="body", dtype=jnp.float32)(x))


class LinenOwn(nn.Module):
    """Without a dtype: a rule casts its inputs, and it multiplies itself."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x @ self.param("kernel", nn.initializers.ones, (8, 8))


class LinenOwnDtype(nn.Module):
    """With a dtype, and without a precision."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.ones, (8, 8))
        return x.astype(self.dtype) @ kernel.astype(self.dtype)


class NNXModel(nnx.Module):
    def __init__(self, head: Any) -> None:
        self.body = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.head = head

    def __call__(self, x: Any) -> Any:
        return self.head(self.body(x))


class NNXOwn(nnx.Module):
    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel[...]


class NNXOwnDtype(NNXOwn):
    dtype: Any

    def __init__(self) -> None:
        super().__init__()
        self.dtype = None

    def __call__(self, x: Any) -> Any:
        return x.astype(self.dtype) @ self.kernel[...].astype(self.dtype)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        table = nn.Embed(16, 8, name="head")
        return table.attend(nn.Dense(8, name="body")(x))


def linen_heads() -> dict[str, Any]:
    return {
        "linen dense": LinenModel(nn.Dense(8)),
        "linen own": LinenModel(LinenOwn()),
        "linen own dtype": LinenModel(LinenOwnDtype()),
        "linen attention": LinenModel(nn.MultiHeadDotProductAttention(2)),
        "linen embedding": Tied(),
        "linen checkpoint": LinenModel(nn.remat(nn.Dense)(8)),
    }


NNX_HEADS: dict[str, Callable[[nnx.Rngs], Any]] = {
    "nnx linear": lambda rngs: nnx.Linear(8, 8, rngs=rngs),
    "nnx own": lambda _: NNXOwn(),
    "nnx own dtype": lambda _: NNXOwnDtype(),
    "nnx attention": lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
}


def nnx_model(name: str) -> NNXModel:
    return nnx.jit(lambda: NNXModel(NNX_HEADS[name](nnx.Rngs(0))))()


def gradient_of(name: str, rules: Any) -> tuple[Callable[..., Any], Any]:
    """The gradient of a model under rules by its params and its input, and the params."""
    if name.startswith("linen"):
        model = linen_heads()[name]
        model = model if rules is None else jaxmp.linen.apply_policy(model, rules)
        params = jax.eval_shape(model.init, jax.random.key(0), X)
        loss = lambda params, x: jnp.sum(model.apply(params, x).astype(jnp.float32))  # noqa: E731
        return jax.grad(loss, (0, 1)), params
    model = nnx_model(name)
    model = model if rules is None else jaxmp.nnx.apply_policy(model, rules)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def nnx_loss(params: Any, x: Any) -> Any:
        return jnp.sum(nnx.merge(graphdef, params, rest)(x).astype(jnp.float32))

    return jax.grad(nnx_loss, (0, 1)), params


@pytest.mark.parametrize("name", [*linen_heads(), *NNX_HEADS])
def test_a_head_by_rule(name: str) -> None:
    """All products of the head ask, forward and backward; those of the rest do not."""
    gradient, params = gradient_of(name, HEAD)
    found = precisions(gradient, params, X)
    assert {each for each in found if each[0] == "float32"} == {EXACT}
    assert found.count(LOW) == 3
    assert found.count(EXACT) >= 3
    if "own dtype" not in name:
        plain, params = gradient_of(name, None)  # control
        assert set(precisions(plain, params, X)) == {PLAIN}


@pytest.mark.parametrize("name", [*linen_heads(), *NNX_HEADS])
def test_every_module_under_float32_as_the_default(name: str) -> None:
    """Those without a `dtype` too, which multiply params of their own, and no rule names."""
    gradient, params = gradient_of(name, "float32")
    assert set(precisions(gradient, params, X)) == {EXACT}
    if "own dtype" not in name:
        plain, params = gradient_of(name, None)  # control
        assert set(precisions(plain, params, X)) == {PLAIN}


class LinenRouted(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.ones, (1, 8, 8))
        groups = jnp.array([len(x)])
        return lax.ragged_dot(x.astype(self.dtype), kernel.astype(self.dtype), groups)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return LinenRouted(name="routed")(x) @ self.param("own", nn.initializers.ones, (8, 8))


class LinenNested(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return LinenBlock(name="block")(x)


class NNXRouted(nnx.Module):
    dtype: Any

    def __init__(self) -> None:
        self.dtype = None
        self.kernel = nnx.Param(jnp.ones((1, 8, 8)))

    def __call__(self, x: Any) -> Any:
        kernel, groups = self.kernel[...].astype(self.dtype), jnp.array([len(x)])
        return lax.ragged_dot(x.astype(self.dtype), kernel, groups)


class NNXBlock(nnx.Module):
    def __init__(self) -> None:
        self.routed = NNXRouted()
        self.own = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x: Any) -> Any:
        return self.routed(x) @ self.own[...]


class NNXNested(nnx.Module):
    def __init__(self) -> None:
        self.block = NNXBlock()

    def __call__(self, x: Any) -> Any:
        return self.block(x)


def products_under(model: Any, rules: Any, x: Any) -> list[tuple[str, str]]:
    """The products of a model under rules, for params that are not made."""
    if isinstance(model, nnx.Module):
        graphdef, state = nnx.split(jaxmp.nnx.apply_policy(model, rules))
        return precisions(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
    model = jaxmp.linen.apply_policy(model, rules)
    return precisions(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)


@pytest.mark.parametrize("make", [LinenNested, NNXNested])
def test_16_bits_below_float32_ask_for_nothing(make: Callable[[], Any]) -> None:
    """A TPU refuses HIGHEST for a 16-bit `ragged_dot`; the option of the user holds there."""
    low = {"block/routed": "mixed_bfloat16"}
    rules = jaxmp.PolicyRules({**low, "block": "float32"}, default="mixed_bfloat16")
    assert products_under(make(), rules, X) == [LOW, EXACT]
    assert products_under(make(), jaxmp.PolicyRules(low, default="float32"), X) == [LOW, EXACT]
    with jax.default_matmul_precision("high"):
        found = products_under(make(), rules, X)
    assert found == [("bfloat16", "high"), ("float32", "high")]


RNNS: dict[str, Callable[[], Any]] = {
    "linen": lambda: nn.RNN(nn.LSTMCell(8, name="cell")),
    "linen optimized": lambda: nn.RNN(nn.OptimizedLSTMCell(8, name="cell")),
    "nnx": nnx.jit(lambda: nnx.RNN(nnx.LSTMCell(8, 8, rngs=nnx.Rngs(0)))),
    "nnx gru": nnx.jit(lambda: nnx.RNN(nnx.GRUCell(8, 8, rngs=nnx.Rngs(0)))),
}


@pytest.mark.parametrize("name", RNNS)
@pytest.mark.parametrize("cell", ["float32", "mixed_bfloat16"])
def test_cells_ask_by_their_own_policy(name: str, cell: str) -> None:
    """Both in a loop in float32: by the rule of the loop, and by a rule of their own."""
    x = np.ones((2, 4, 8), np.float32)
    assert set(products_under(RNNS[name](), "float32", x)) == {EXACT}
    rules = jaxmp.PolicyRules({"cell": cell}, default="float32")
    found = products_under(RNNS[name](), rules, x)
    assert set(found) == ({EXACT} if cell == "float32" else {LOW})


@pytest.mark.parametrize("name", ["linen dense", "nnx linear", "linen attention", "nnx attention"])
@pytest.mark.parametrize(
    "policy", ["float32", "high", "tensorfloat32", "BF16_BF16_F32_X3", "default"]
)
def test_a_whole_model(name: str, policy: str) -> None:
    """With the precision of the policy. Flax's nnx attention hands no algorithm to its own two."""
    asked = {"float32": "highest", "tensorfloat32": "high"}.get(policy, policy.lower())
    gradient, params = gradient_of(name, policy if policy == "float32" else f"precision={policy}")
    own = {EXACT} if (name, policy) == ("nnx attention", "BF16_BF16_F32_X3") else set()
    assert set(precisions(gradient, params, X)) == {("float32", asked)} | own


def test_the_option_of_the_user_holds() -> None:
    for name in ("linen dense", "linen own", "nnx linear", "nnx own"):
        with jax.default_matmul_precision("high"):
            gradient, params = gradient_of(name, HEAD)
            found = precisions(gradient, params, X)
        assert {each for each in found if each[0] == "float32"} == {("float32", "high")}


def test_a_precision_of_the_layer_is_kept() -> None:
    linen = jaxmp.linen.apply_policy(nn.Dense(4, precision=lax.Precision.HIGH), "float32")
    params = jax.eval_shape(linen.init, jax.random.key(0), X)
    assert precisions(linen.apply, params, X) == [("float32", "high")]
    layer = nnx.Linear(8, 4, precision=lax.Precision.HIGH, rngs=nnx.Rngs(0))
    assert jaxmp.nnx.apply_policy(layer, "float32").precision is lax.Precision.HIGH


def test_convolutions_take_no_algorithm() -> None:
    rules, images = "precision=BF16_BF16_F32_X3", np.ones((1, 8, 8, 3), np.float32)
    linen = jaxmp.linen.apply_policy(nn.Conv(4, (3, 3)), rules)
    params = jax.eval_shape(linen.init, jax.random.key(0), images)
    assert precisions(linen.apply, params, images) == [EXACT]
    conv = nnx.jit(lambda: nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)))()
    assert precisions(jaxmp.nnx.apply_policy(conv, rules), images) == [EXACT]


def test_removed_with_the_policy() -> None:
    """The layers are as they were: other rules, no rules, and after a policy that is refused."""
    model = nnx_model("nnx linear")
    jaxmp.nnx.apply_policy(model, HEAD)
    assert (model.body.precision, model.head.precision) == (None, lax.Precision.HIGHEST)
    with pytest.raises(ValueError, match="match nothing"):
        jaxmp.nnx.apply_policy(model, jaxmp.PolicyRules({"haed": "float32"}), strict=True)
    assert (model.body.precision, model.head.precision) == (None, lax.Precision.HIGHEST)
    jaxmp.nnx.apply_policy(model, "precision=high")
    assert (model.body.precision, model.head.precision) == (lax.Precision.HIGH,) * 2
    jaxmp.nnx.remove_policy(model)
    assert (model.body.precision, model.head.precision) == (None, None)
    linen = jaxmp.linen.apply_policy(nn.Dense(4), "float32")
    removed = jaxmp.linen.remove_policy(linen)
    assert removed == nn.Dense(4)
    params = jax.eval_shape(removed.init, jax.random.key(0), X)
    assert precisions(removed.apply, params, X) == [PLAIN]


def test_nnx_autocast_asks_by_rules() -> None:
    model = nnx_model("nnx linear")
    named = jaxmp.PolicyRules({"head": "precision=high"}, default="mixed_bfloat16")
    graphdef, state = nnx.split(model)
    for rules, asked in ((HEAD, "highest"), (named, "high")):
        fast = jaxmp.nnx.autocast(lambda model, x: jnp.sum(model(x)), rules)
        found = precisions(lambda state, x, f=fast: f(nnx.merge(graphdef, state), x), state, X)
        assert found == [LOW, ("float32", asked)]


def test_the_bits_on_a_cpu_are_the_same() -> None:
    for name in ("linen dense", "nnx linear"):
        plain, params = gradient_of(name, None)
        ours, _ = gradient_of(name, "float32")
        params = jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, 1 / 3, np.float32)), params)
        results = (jax.tree.leaves(jax.jit(grad)(params, X)) for grad in (ours, plain))
        for got, want in zip(*results, strict=True):
            np.testing.assert_array_equal(got, want)
