"""Params that are split, and not gathered: the partitioner chooses what moves."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp.sharding import FSDP, fully_sharded
from tests.support.reduction_checks import (
    MESH,
    compiled,
    gathers,
    narrow_sums,
    relative_error,
    representable,
    split_over,
)
from tests.support.reduction_models import end

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F32 = jnp.bfloat16, jnp.float32
EXPERTS = 8


def made(*shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(len(shape)).normal(size=shape) / 8)


def params() -> dict[str, Any]:
    experts = {"up": made(EXPERTS, 64, 128), "down": made(EXPERTS, 128, 64)}
    return {"router": made(64, EXPERTS), "layer": {"experts": experts}, "head": made(64, 64)}


def loss_fn(params: Any, x: Any) -> Any:
    """Each expert sees its tokens, of the whole batch; then a layer sees all of them."""
    cast = jax.tree.map(lambda w: w.astype(BF16), params)
    experts, x = cast["layer"]["experts"], x.astype(BF16)
    gates = jax.nn.softmax((x @ cast["router"]).astype(F32))
    sent = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS, dtype=BF16)
    place = jnp.cumsum(sent.astype(int), axis=0) - 1
    sent = sent[..., None] * jax.nn.one_hot(place, 8, dtype=BF16)  # (T, E, C)
    h = jnp.einsum("tec,td->ecd", sent, x)
    h = jnp.tanh(jnp.einsum("ecd,edf->ecf", h, experts["up"]))
    h = jnp.einsum("tec,ecd->td", sent, jnp.einsum("ecf,efd->ecd", h, experts["down"]))
    top = jnp.max(gates, -1, keepdims=True).astype(BF16)
    return end((x + top * h) @ cast["head"])


def flops(fun: Any, *args: Any) -> float:
    """Of one device."""
    return jax.jit(fun).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.slow
def test_experts_that_are_not_gathered_are_computed_once() -> None:
    """Gathered, each device computes all experts on the tokens of all; the gradients agree."""
    shardings = fully_sharded(params(), MESH, min_size=1024)
    args = jax.device_put(params(), shardings), split_over(made(64, 64), "data")
    whole = jaxmp.value_and_grad(loss_fn, fsdp=FSDP(shardings=shardings))
    fsdp = FSDP(shardings=shardings, gather={"experts": False})
    apart = jaxmp.value_and_grad(loss_fn, fsdp=fsdp)
    size = sum(x.size for x in jax.tree.leaves(params()["layer"]))
    gathered = {
        name: jaxmp.sharding.collectives(fun, *args) for name, fun in (("w", whole), ("a", apart))
    }
    assert gathers(gathered["w"], "bfloat16") > 2 * size  # positive control
    assert gathers(gathered["a"], "bfloat16") < size / 4
    assert flops(apart, *args) < flops(whole, *args) / 2

    (loss, grads), (wanted_loss, wanted) = compiled(apart)(*args), compiled(whole)(*args)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-3)
    assert relative_error(grads, wanted) < 0.01
    for grad, sharding in zip(jax.tree.leaves(grads), jax.tree.leaves(shardings), strict=True):
        assert grad.sharding.is_equivalent_to(sharding, grad.ndim)
        assert grad.dtype == F32
    assert all(representable(x, BF16) < 0.6 for x in jax.tree.leaves(grads["layer"]))


def test_gradients_of_params_that_are_not_gathered_are_summed_in_float32() -> None:
    """Where the batch is large, and every device has a part of the sum."""
    w = {"up": made(64, 128), "down": made(128, 64)}
    shardings = fully_sharded(w, MESH, min_size=16)
    args = jax.device_put(w, shardings), split_over(made(4096, 64), "data")

    def loss_fn(w: Any, x: Any) -> Any:
        h = jnp.tanh(x.astype(BF16) @ w["up"].astype(BF16))
        return end(h @ w["down"].astype(BF16))

    fsdp = FSDP(shardings=shardings, gather={"**": False})
    apart = jaxmp.value_and_grad(loss_fn, fsdp=fsdp)
    assert narrow_sums(jaxmp.sharding.collectives(apart, *args)) == 0
    assert (
        narrow_sums(jaxmp.sharding.collectives(jax.value_and_grad(loss_fn), *args)) > 0
    )  # control
    wanted = compiled(jaxmp.value_and_grad(loss_fn, fsdp=FSDP(shardings=shardings)))(*args)
    assert relative_error(compiled(apart)(*args), wanted) < 1e-5


NAMES = ["head", "layer/experts/down", "layer/experts/up", "router"]


def left(gather: Any, tree: Any = None, names: list[str] = NAMES) -> list[str]:
    """The names of the params that are not gathered."""
    tree = params() if tree is None else tree
    shardings = jax.tree.map(lambda x: NamedSharding(MESH, P("data")), tree)
    found = FSDP(shardings=shardings, gather=gather).layouts(tree)
    return [name for name, layout in zip(names, found, strict=True) if layout is None]


@pytest.mark.parametrize(
    ("gather", "expected"),
    [
        ({}, []),
        ({"experts": False}, NAMES[1:3]),
        ({"experts/*": False}, NAMES[1:3]),
        ({"layer": False}, NAMES[1:3]),
        ({"up": False, "head": True}, NAMES[2:3]),
        ([("up", True), ("experts", False)], NAMES[1:2]),
        (iter([("experts", False)]), NAMES[1:3]),
        ({"/experts": False}, "decide nothing: '/experts'"),
        ({"re:.*/(up|down)": False}, NAMES[1:3]),
        ({re.compile("r.*"): False}, NAMES[3:]),
        ({"**": False}, NAMES),
        ({"experts": True, "up": False}, "decide nothing: 'up'. The params are 'head', 'layer/"),
        ({"expert": False}, "nothing: 'expert'. .* remove it; of several .* the first decides"),
    ],
)
def test_which_params_are_gathered(gather: Any, expected: Any) -> None:
    """Patterns as in rules; one that matches what a param is in decides about the param."""
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            left(gather)
    else:
        assert left(gather) == expected


def test_paths_of_modules() -> None:
    """The state of an nnx module has a level more than its params have names."""
    model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(1)))
    names = ["0/bias", "0/kernel", "1/bias", "1/kernel"]
    state = nnx.state(model, nnx.Param)
    assert left({"layers/1": False}, state, names) == names[2:]
    assert left({"kernel": False}, state, names) == ["0/kernel", "1/kernel"]


@pytest.mark.parametrize(
    ("gather", "says"),
    [
        (5, r"gather must say by path .* or \[\('experts', False\)\], got 5"),
        (None, r"gather must say by path .*, got None"),
        (False, r"gather must say by path .* \{'experts': False\} .*, got False"),
        ("experts", "got 'experts'"),
        (["experts"], r"got \['experts'\]"),
        ({"experts": "no"}, r"got \{'experts': 'no'\}"),
        ({"type:Dense": False}, "patterns of paths, .* got 'type:Dense'"),
        ({dict: False}, "patterns of paths, .* got 'dict'"),
        ({3: False}, "a pattern must be a glob"),
    ],
)
def test_says_what_gather_takes(gather: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        left(gather)
    with pytest.raises(ValueError, match="'a//b' is no valid glob"):
        left({"a//b": False})
