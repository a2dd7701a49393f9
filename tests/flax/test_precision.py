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


def nnx_heads() -> dict[str, Any]:
    rngs = nnx.Rngs(0)
    return {
        "nnx linear": NNXModel(nnx.Linear(8, 8, rngs=rngs)),
        "nnx own": NNXModel(NNXOwn()),
        "nnx own dtype": NNXModel(NNXOwnDtype()),
        "nnx attention": NNXModel(nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)),
    }


def gradient_of(name: str, rules: Any) -> tuple[Callable[..., Any], Any]:
    """The gradient of a model under rules by its params and its input, and the params."""
    if name.startswith("linen"):
        model = linen_heads()[name]
        model = model if rules is None else jaxmp.linen.apply_policy(model, rules)
        params = jax.eval_shape(model.init, jax.random.key(0), X)
        loss = lambda params, x: jnp.sum(model.apply(params, x).astype(jnp.float32))  # noqa: E731
        return jax.grad(loss, (0, 1)), params
    model = nnx_heads()[name]
    model = model if rules is None else jaxmp.nnx.apply_policy(model, rules)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def nnx_loss(params: Any, x: Any) -> Any:
        return jnp.sum(nnx.merge(graphdef, params, rest)(x).astype(jnp.float32))

    return jax.grad(nnx_loss, (0, 1)), params


@pytest.mark.parametrize("name", [*linen_heads(), *nnx_heads()])
def test_a_head_by_rule(name: str) -> None:
    """All products of the head ask, forward and backward; those of the rest do not."""
    if "own" in name and not name.endswith("dtype"):
        rules = jaxmp.PolicyRules({"head": "float32"}, default="mixed_bfloat16")
    else:
        rules = HEAD
    gradient, params = gradient_of(name, rules)
    found = precisions(gradient, params, X)
    assert {each for each in found if each[0] == "float32"} == {EXACT}
    assert found.count(LOW) == 3
    assert found.count(EXACT) >= 3
    plain, params = gradient_of(name, None) if "own dtype" not in name else (None, None)
    if plain is not None:  # control
        assert set(precisions(plain, params, X)) == {PLAIN}


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
    params = linen.init(jax.random.key(0), X)
    assert precisions(linen.apply, params, X) == [("float32", "high")]
    layer = nnx.Linear(8, 4, precision=lax.Precision.HIGH, rngs=nnx.Rngs(0))
    assert jaxmp.nnx.apply_policy(layer, "float32").precision is lax.Precision.HIGH


def test_convolutions_take_no_algorithm() -> None:
    rules, images = "precision=BF16_BF16_F32_X3", jnp.ones((1, 8, 8, 3))
    linen = jaxmp.linen.apply_policy(nn.Conv(4, (3, 3)), rules)
    params = linen.init(jax.random.key(0), images)
    assert precisions(linen.apply, params, images) == [EXACT]
    layer = jaxmp.nnx.apply_policy(nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)), rules)
    assert precisions(layer, images) == [EXACT]


def test_removed_with_the_policy() -> None:
    """The layers are as they were: other rules, no rules, and after a policy that is refused."""
    model = NNXModel(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
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
    params = removed.init(jax.random.key(0), X)
    assert precisions(removed.apply, params, X) == [PLAIN]


def test_nnx_autocast_asks_by_rules() -> None:
    model = NNXModel(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
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
        params = jax.tree.map(lambda x: jnp.full(x.shape, 1 / 3), params)
        leaves = zip(
            jax.tree.leaves(ours(params, X)), jax.tree.leaves(plain(params, X)), strict=True
        )
        for got, want in leaves:
            np.testing.assert_array_equal(got, want)
