"""`codes=` on models of Flax and Equinox, with their scans and checkpoints, on float8, and FSDP."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmp
from tests.recompute.test_codes import STACKS, scanned
from tests.support.autocast_checks import error, rows
from tests.support.recompute_checks import gradient, in_bytes, kept_bytes, scalar

pytestmark = pytest.mark.jax

X = rows(64, 128)
LAYERS = 3


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        hidden = nn.gelu(nn.Dense(256)(nn.LayerNorm()(x)))
        return x + nn.Dense(128)(hidden), None


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(128, rngs=rngs)
        self.up, self.down = nnx.Linear(128, 256, rngs=rngs), nnx.Linear(256, 128, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: Any) -> None:
        self.norm = eqx.nn.LayerNorm(128)
        self.mlp = eqx.nn.MLP(128, 128, 256, 1, jax.nn.gelu, key=key)

    def __call__(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


Model = tuple[Callable[..., Any], Any]


def linen_model(is_remat: bool) -> Model:
    block: Any = nn.remat(LinenBlock, prevent_cse=False) if is_remat else LinenBlock
    model = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=LAYERS)()
    params = model.init(jax.random.key(0), X, None)
    return lambda params, x: model.apply(params, x, None)[0], params


def nnx_model(is_remat: bool) -> Model:
    @nnx.vmap(in_axes=(nnx.StateAxes({...: 0}),), out_axes=0)
    def make(rngs: nnx.Rngs) -> NnxBlock:
        return NnxBlock(rngs)

    call = nnx.remat(NnxBlock.__call__) if is_remat else NnxBlock.__call__
    layers = nnx.scan(lambda x, block: call(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    graph, state = nnx.split(make(nnx.Rngs(0).split(LAYERS)))
    return lambda state, x: layers(x, nnx.merge(graph, state)), state


def equinox_model(is_remat: bool) -> Model:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    arrays, static = eqx.partition(eqx.filter_vmap(EquinoxBlock)(keys), eqx.is_array)

    def fun(arrays: Any, x: Any) -> Any:
        def layer(x: Any, arrays: Any) -> Any:
            return jax.vmap(eqx.combine(arrays, static))(x), None

        body = eqx.filter_checkpoint(layer) if is_remat else layer
        return jax.lax.scan(body, x, arrays)[0]

    return fun, arrays


MODELS = {"linen": linen_model, "nnx": nnx_model, "equinox": equinox_model}


def check(
    fun: Callable[..., Any], params: Any, x: Any, *, exact: Callable[..., Any], most: float
) -> None:
    """Values to the bit, gradients as near to the exact ones, and at most this share of bytes."""
    plain, coded = jaxmp.recompute(fun), jaxmp.recompute(fun, codes="int8")
    np.testing.assert_array_equal(jax.jit(coded)(params, x), jax.jit(plain)(params, x))
    got, want = (jax.jit(gradient(f))(params, x) for f in (coded, plain))
    gradients = jax.jit(gradient(exact))(params, x)
    assert error(got, gradients) < 1.1 * error(want, gradients) + 0.02
    assert in_bytes(coded, params, x)["int8"] >= LAYERS * x.size
    assert kept_bytes(coded, params, x) < most * kept_bytes(plain, params, x)


@pytest.mark.slow
@pytest.mark.parametrize("is_remat", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", MODELS)
def test_in_scans_and_checkpoints_of_a_framework(name: str, is_remat: bool) -> None:
    fun, params = MODELS[name](is_remat)
    check(fun, params, X, exact=fun, most=0.5)


@pytest.mark.slow
def test_codes_of_float8_products_stay() -> None:
    """A product keeps its operands in one byte already: nothing is rounded a second time."""

    def exact(stacks: Any, x: Any) -> Any:
        return scanned(x, *stacks)

    fun = jaxmp.autocast(exact, "mixed_float8")
    check(fun, STACKS, X, exact=exact, most=1)
    plain, coded = (in_bytes(jaxmp.recompute(fun, codes=k), STACKS, X) for k in (None, "int8"))
    assert coded["float8_e4m3fn"] == plain["float8_e4m3fn"] > 0


def test_of_sharded_params_over_eight_devices() -> None:
    """FSDP: codes lie with their values, and nothing else is sent."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x = jax.device_put(rows(512, 128), NamedSharding(mesh, P("data")))
    stacks = jax.device_put(STACKS, NamedSharding(mesh, P(None, "data")))

    def by_stacks(kept: Any) -> Any:
        lean = jaxmp.recompute(lambda stacks, x: scanned(x, *stacks), codes=kept)
        return jax.jit(jax.grad(scalar(lean)))

    plain, coded = by_stacks(None), by_stacks("int8")
    assert error(coded(stacks, x), plain(stacks, x)) < 0.02
    sent = [jaxmp.sharding.collectives(f, stacks, x).bytes() for f in (plain, coded)]
    assert sent[0] == sent[1] > 0
