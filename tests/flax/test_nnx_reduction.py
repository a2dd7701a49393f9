"""Models of Flax, linen and nnx, by hand and under rules: gradients are summed in float32."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._mesh.fsdp import FSDP, fully_sharded
from tests.support.bits import tree_bits
from tests.support.reduction_checks import (
    MESH,
    compiled,
    gathers,
    narrow_sums,
    relative_error,
    representable,
    reshards,
    split_over,
)

pytestmark = [
    pytest.mark.jax,
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:the policy does not reach 2% of the params"),  # Net.scale
]

F32, BF16 = jnp.float32, jnp.bfloat16
RULES = jaxmp.PolicyRules(default="mixed_bfloat16")
WIDTH = 16


def tokens() -> Any:
    return jnp.asarray(np.random.default_rng(0).integers(0, 24, (16, 8)))


def images() -> Any:
    x = np.random.default_rng(0).standard_normal((16, 8, 8, 3))
    return jnp.asarray(x.astype(BF16).astype(F32))


def mean_square(y: Any) -> Any:
    return jnp.mean(jnp.sin(y.astype(F32)) ** 2)


class LinenBlock(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, _: None = None) -> Any:
        h = nn.RMSNorm(dtype=self.dtype)(x)
        h = nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(h, h)
        h = nn.Dense(WIDTH, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x + h))
        return x + nn.gelu(h), None


class LinenGpt(nn.Module):
    """Tied embeddings and a scan over layers that are computed again."""

    dtype: Any = None

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embed = nn.Embed(24, WIDTH, dtype=self.dtype)
        position = self.param("position", nn.initializers.normal(0.1), (16, WIDTH))
        x = embed(ids)
        x = x + position[:8].astype(x.dtype)
        layers = nn.scan(
            nn.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return embed.attend(layers(self.dtype)(x)[0])


class LinenConv(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(8, (3, 3), dtype=self.dtype)(x)
        x = nn.relu(nn.GroupNorm(2, dtype=self.dtype)(x))
        x = nn.Conv(8, (3, 3), feature_group_count=8, dtype=self.dtype)(x)
        x = nn.ConvTranspose(4, (2, 2), (2, 2), dtype=self.dtype)(x)
        return nn.DenseGeneral((2, 3), dtype=self.dtype)(jnp.mean(x, (1, 2)))


class LinenRecurrent(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(24, WIDTH, dtype=self.dtype)(ids)
        x = nn.RNN(nn.OptimizedLSTMCell(WIDTH, dtype=self.dtype))(x)
        x = nn.RNN(nn.GRUCell(WIDTH, dtype=self.dtype))(x)
        return nn.WeightNorm(nn.Dense(8, dtype=self.dtype))(x)


class LinenGated(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(24, WIDTH, dtype=self.dtype)(ids)
        x = nn.PReLU()(nn.Einsum((2, WIDTH, 8), "...ld,hdk->...lhk", dtype=self.dtype)(x))
        x = x.reshape(*x.shape[:2], -1)
        return nn.InstanceNorm(dtype=self.dtype)(nn.ConvLocal(4, (3,), dtype=self.dtype)(x))


LINEN: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "gpt": (LinenGpt, tokens),
    "conv": (LinenConv, images),
    "recurrent": (LinenRecurrent, tokens),
    "gated": (LinenGated, tokens),
}


def linen_case(name: str, author: str) -> tuple[Any, Any, Any, Any]:
    """A loss, the same in float32, params and a batch."""
    kind, inputs = LINEN[name]
    params = jax.jit(kind().init)(jax.random.key(1), inputs())
    model = kind(dtype=BF16) if author == "by hand" else kind()
    if author == "under rules":
        model = jaxmp.linen.apply_policy(model, RULES)

    def loss_fn(params: Any, batch: Any, model: Any = model) -> Any:
        return mean_square(model.apply(params, batch))

    exact = functools.partial(loss_fn, model=kind())
    loss = jaxmp.autocast(loss_fn, "mixed_bfloat16") if author == "autocast" else loss_fn
    return loss, exact, params, inputs()


def some_quick(names: Any, author: str, quick: set[tuple[str, str]]) -> Any:
    """All models of one author, and what is quick of the others."""
    slow = [pytest.mark.slow, pytest.mark.exhaustive]
    cases = sorted(quick | {(name, author) for name in names})
    params = [pytest.param(*case, marks=[] if case in quick else slow) for case in cases]
    return pytest.mark.parametrize(("name", "author"), params)


def check_gradients(ours: Any, plain: Any, exact: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    assert relative_error(ours, exact) <= 1.1 * relative_error(plain, exact)
    for path, grad in jax.tree_util.tree_leaves_with_path(ours):
        assert grad.dtype == F32
        if grad.size > 8 and np.asarray(grad).any():
            assert representable(grad, BF16) < 0.6, jax.tree_util.keystr(path)


@some_quick(LINEN, "under rules", {("conv", "under rules")})
def test_linen(name: str, author: str) -> None:
    loss_fn, exact_loss, params, batch = linen_case(name, author)
    ours = jaxmp.value_and_grad(loss_fn, reduce_dtype="float32")
    loss, grads = compiled(ours)(params, batch)
    plain_loss, plain = compiled(jax.value_and_grad(loss_fn))(params, batch)
    np.testing.assert_array_equal(tree_bits(loss), tree_bits(plain_loss))
    check_gradients(grads, plain, compiled(jax.grad(exact_loss))(params, batch))


def check_over_devices(
    author: str, programs: Any, whole: Any, split: Any, batch: Any, shardings: Any
) -> None:
    """Sums are float32, by a plain gradient they are not; split params are gathered in 16 bits.

    The programs are the plain one, that with sums in float32, and that of split params. They return
    loss and gradients, and a state.
    """
    plain, ours, fsdp = programs
    alike, report = (
        jaxmp.sharding.collectives(ours, whole, batch),
        jaxmp.sharding.collectives(fsdp, split, batch),
    )
    assert narrow_sums(alike) == 0, alike
    assert narrow_sums(report) == 0, report
    if author != "autocast":
        assert narrow_sums(jaxmp.sharding.collectives(plain, whole, batch)) > 0  # positive control
    assert reshards(report) <= reshards(alike), report
    assert gathers(report, "bfloat16") > 0
    if author == "by hand":
        assert gathers(report, "float32") <= gathers(alike, "float32"), report
    (loss, grads), _ = compiled(fsdp)(split, batch)
    (wanted_loss, wanted), _ = compiled(ours)(whole, batch)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    assert relative_error(grads, wanted) < 1e-5
    for grad, laid in zip(*map(jax.tree.leaves, (grads, shardings)), strict=True):
        assert grad.sharding.is_equivalent_to(laid, grad.ndim)


@pytest.mark.slow
@some_quick(LINEN, "autocast", {("conv", "by hand")})
def test_linen_over_devices(name: str, author: str) -> None:
    loss_fn, _, params, batch = linen_case(name, author)
    shardings = fully_sharded(params, MESH, min_size=64)
    # Flax puts the kernels of a cell together in float32, then casts.
    dtype = BF16 if name == "recurrent" else None
    gradients = (
        jax.value_and_grad(loss_fn),
        jaxmp.value_and_grad(loss_fn, reduce_dtype="float32"),
        jaxmp.value_and_grad(loss_fn, fsdp=FSDP(shardings=shardings, gather_dtype=dtype)),
    )
    programs = [lambda params, batch, g=g: (g(params, batch), None) for g in gradients]
    placed = split_over(params), jax.device_put(params, shardings), split_over(batch, "data")
    check_over_devices(author, programs, *placed, shardings)


class Block(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.inside = nnx.Linear(WIDTH, 2 * WIDTH, dtype=dtype, rngs=rngs)
        self.outside = nnx.Linear(2 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.outside(nnx.gelu(self.inside(self.norm(x))))


class Gpt(nnx.Module):
    """Tied embeddings, and a scan over layers."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(dtype, rngs)

        self.embed = nnx.Embed(24, WIDTH, dtype=dtype, rngs=rngs)
        self.layers = make(rngs)

    def __call__(self, ids: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def step(layer: Block, x: Any) -> Any:
            return layer(x)

        return self.embed.attend(step(self.layers, self.embed(ids)))


class Net(nnx.Module):
    """State that changes: batch statistics, dropout; and a layer that is used twice."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 8, (3, 3), dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.twice = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)
        self.again = self.twice
        self.scale = nnx.Param(jnp.ones((1, 8)))

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.norm(self.conv(x)))
        x = self.drop(x).mean((1, 2))
        return self.again(jnp.tanh(self.twice(x))) * self.scale[...].astype(x.dtype)


NNX: dict[str, tuple[type[nnx.Module], Callable[[], Any]]] = {
    "gpt": (Gpt, tokens),
    "net": (Net, images),
}


def nnx_model(name: str, author: str) -> Any:
    dtype = BF16 if author == "by hand" else None
    model = nnx.jit(lambda: NNX[name][0](dtype, nnx.Rngs(0)))()
    return jaxmp.nnx.apply_policy(model, RULES) if author == "under rules" else model


def nnx_loss(model: Any, batch: Any) -> Any:
    return mean_square(model(batch))


def nnx_case(name: str, author: str) -> tuple[Any, Any]:
    loss_fn = nnx_loss
    if author == "autocast":
        loss_fn = jaxmp.nnx.autocast(nnx_loss, "mixed_bfloat16")
    return loss_fn, NNX[name][1]()


def of_state(graphdef: Any, grad: Any) -> Callable[[Any, Any], Any]:
    """A function of arrays: what the gradient function returns, and the state afterwards."""

    def call(state: Any, batch: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return grad(model, batch), nnx.state(model)

    return call


@pytest.mark.slow
@some_quick(NNX, "autocast", {("net", "by hand")})
def test_nnx(name: str, author: str) -> None:
    loss_fn, batch = nnx_case(name, author)
    graphdef, state = nnx.split(nnx_model(name, author))
    ours = jaxmp.nnx.value_and_grad(loss_fn, reduce_dtype="float32")
    (loss, grads), after = compiled(of_state(graphdef, ours))(state, batch)
    plain = compiled(of_state(graphdef, nnx.value_and_grad(loss_fn)))(state, batch)
    np.testing.assert_array_equal(tree_bits(loss), tree_bits(plain[0][0]))
    assert tree_bits(after) == tree_bits(plain[1])
    assert name == "gpt" or tree_bits(after) != tree_bits(state)
    float32 = nnx.split(NNX[name][0](None, nnx.Rngs(0)))
    (_, exact), _ = of_state(float32[0], nnx.value_and_grad(nnx_loss))(float32[1], batch)
    check_gradients(nnx.to_pure_dict(grads), *map(nnx.to_pure_dict, (plain[0][1], exact)))


@pytest.mark.slow
@some_quick(NNX, "under rules", {("net", "by hand")})
def test_nnx_over_devices(name: str, author: str) -> None:
    loss_fn, batch = nnx_case(name, author)
    graphdef, params, rest = nnx.split(nnx_model(name, author), nnx.Param, ...)
    shardings = fully_sharded(params, MESH, min_size=64)
    gradients = (
        nnx.value_and_grad(loss_fn),
        jaxmp.nnx.value_and_grad(loss_fn, reduce_dtype="float32"),
        jaxmp.nnx.value_and_grad(loss_fn, fsdp=FSDP(shardings=shardings)),
    )
    programs = [of_state(graphdef, gradient) for gradient in gradients]
    placed = split_over(params), jax.device_put(params, shardings)
    states = (nnx.merge_state(each, split_over(rest)) for each in placed)
    check_over_devices(author, programs, *states, split_over(batch, "data"), shardings)


@pytest.mark.slow
def test_nnx_outside_of_jit_changes_the_model() -> None:
    ours, plain = (nnx_model("net", "by hand") for _ in range(2))
    loss, grads = jaxmp.nnx.value_and_grad(nnx_loss, reduce_dtype="float32")(ours, images())
    wanted_loss, wanted = nnx.value_and_grad(nnx_loss)(plain, images())
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    assert tree_bits(nnx.state(ours, nnx.RngState)) == tree_bits(nnx.state(plain, nnx.RngState))
    assert relative_error(nnx.to_pure_dict(grads), nnx.to_pure_dict(wanted)) < 2e-2
    before = nnx_model("net", "by hand")
    means = [np.asarray(model.norm.mean[...]) for model in (ours, plain, before)]
    np.testing.assert_allclose(means[0], means[1], rtol=1e-6)
    assert np.any(means[0] != means[2])


def test_nnx_takes_filters() -> None:
    """Gradients by some variables; the others are not params, and not gathered."""
    wrt = nnx.DiffState(0, nnx.PathContains("again"))  # the first of its names
    ours = jaxmp.nnx.value_and_grad(nnx_loss, wrt, reduce_dtype="float32")
    _, grads = nnx.jit(ours)(nnx_model("net", "by hand"), images())
    model = nnx_model("net", "by hand")
    plain = nnx.jit(nnx.grad(nnx_loss, argnums=wrt))(model, images())
    assert jax.tree.structure(grads) == jax.tree.structure(plain)
    assert relative_error(nnx.to_pure_dict(grads), nnx.to_pure_dict(plain)) < 2e-2
    assert representable(jax.tree.leaves(grads)[1], BF16) < 0.6


def test_nnx_says_what_fsdp_cannot_do() -> None:
    params = nnx.state(nnx_model("net", "by hand"), nnx.Param)
    fsdp = FSDP(shardings=fully_sharded(params, MESH, min_size=64))
    with pytest.raises(ValueError, match="one module: give argnums as one number"):
        jaxmp.nnx.value_and_grad(nnx_loss, argnums=(0, 1), fsdp=fsdp)
    with pytest.raises(ValueError, match="with fsdp gradients are reduced in float32"):
        jaxmp.nnx.value_and_grad(nnx_loss, reduce_dtype="bfloat16", fsdp=fsdp)
    fun = jaxmp.nnx.value_and_grad(nnx_loss, fsdp=fsdp)
    with pytest.raises(ValueError, match="must have the structure of the params"):
        fun(nnx_model("gpt", "by hand"), tokens())
    graphdef, state = nnx.split(nnx_model("net", "by hand"))
    local = {"mesh": MESH, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": True}
    mapped = jax.shard_map(lambda state, x: fun(nnx.merge(graphdef, state), x)[0], **local)
    with pytest.raises(ValueError, match=r"over data.* jax\.shard_map .*gather_params"):
        mapped(state, images())


def test_the_gradients_of_a_model_without_rounding_are_what_they_were() -> None:
    """In float32 there is nothing to do: the same gradients to the last bits but few."""
    model = nnx_model("gpt", "plain")
    ours = nnx.jit(jaxmp.nnx.value_and_grad(nnx_loss, reduce_dtype="float32"))(model, tokens())
    plain = nnx.jit(nnx.value_and_grad(nnx_loss))(model, tokens())
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-6)
    assert relative_error(nnx.to_pure_dict(ours[1]), nnx.to_pure_dict(plain[1])) < 1e-5
