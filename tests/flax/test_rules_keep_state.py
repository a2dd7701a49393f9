"""Models under rules keep what Flax keeps: shardings, boxes, copies and checkpoints."""

import copy
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxmp
from tests.support import rule_models
from tests.support.bits import tree_bits
from tests.support.reduction_checks import GRID
from tests.support.rule_models import Kind, Stack, quick_jit

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Params in bfloat16, but for norms and head.
LOW_PARAMS = jaxmp.PolicyRules(
    {"*norm*": "float32", "type:BatchNorm": "float32", "head": "float32"}, "bfloat16"
)


def spread(tree: Any) -> Any:
    """Arrays spread over a mesh: the last axis over `model`, the first over `data`."""

    def put(x: Any) -> jax.Array:
        names: list[str | None] = [None] * x.ndim
        if x.ndim and x.shape[-1] % 2 == 0:
            names[-1] = "model"
        if x.ndim > 1 and x.shape[0] % 4 == 0:
            names[0] = "data"
        return jax.device_put(x, NamedSharding(GRID, PartitionSpec(*names)))

    return jax.tree.map(put, tree)


def spread_batch(kind: Kind) -> Any:
    return jax.device_put(rule_models.batch(kind), NamedSharding(GRID, PartitionSpec("data")))


def assert_close(parts: Any, whole: Any) -> None:
    """Sums over devices are rounded in another order: to bfloat16 where products are."""
    assert float(parts[0]) == pytest.approx(float(whole[0]), rel=2e-3)
    got, want = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(r[1])]) for r in (parts, whole)
    )
    assert np.linalg.norm(got - want) <= 2e-2 * np.linalg.norm(want)


def shardings(model: Any) -> list[Any]:
    return [x.sharding for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stack"), [("gpt", "scan"), ("resnet", "loop")])
def test_nnx_with_sharded_params(kind: Kind, stack: Stack) -> None:
    model = rule_models.real(rule_models.make("nnx", kind, "plain", stack=stack))
    whole = nnx.state(model, nnx.Param)
    nnx.update(model, spread(whole))
    before = shardings(model)
    assert any(not x.is_fully_replicated for x in before)
    jaxmp.nnx.apply_policy(model, rule_models.RULES[kind])
    assert shardings(model) == before

    @quick_jit
    def step(params: Any, batch: Any) -> Any:
        copied = nnx.clone(model)
        nnx.update(copied, params)
        return nnx.value_and_grad(rule_models.loss)(copied, batch)

    parts = step(nnx.state(model, nnx.Param), spread_batch(kind))
    assert_close(parts, step(whole, rule_models.batch(kind)))
    jaxmp.nnx.apply_policy(model, "bfloat16")
    assert shardings(model) == before
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"bfloat16"}


def boxed(width: int, name: str) -> nn.Module:
    """A linen layer whose params say on which axes of a mesh they lie."""
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
    bias_init = nn.with_partitioning(nn.initializers.normal(), ("model",))
    return nn.Dense(width, kernel_init=kernel_init, bias_init=bias_init, name=name)


class BoxedBlock(nn.Module):
    """Two such layers, with the signature that `nn.scan` wants."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        return x + boxed(8, "down")(nn.relu(boxed(16, "up")(x))), None


class Boxed(nn.Module):
    """Such layers alone, in a scan, and in a remat."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(
            BoxedBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = blocks(name="blocks")(boxed(8, "first")(x), None)
        x, _ = nn.remat(BoxedBlock)(name="last")(x)
        return boxed(8, "head")(x)


def initialised(module: nn.Module, x: jax.Array) -> Any:
    """Variables that init made under jit, each on the devices where its box says."""
    abstract = jax.eval_shape(module.init, jax.random.key(0), x)
    out = nn.get_sharding(abstract, GRID)
    return jax.jit(module.init, out_shardings=out)(jax.random.key(0), x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rules that match nothing")
def test_linen_init_keeps_boxes_and_shardings() -> None:
    x, plain = jnp.ones((8, 8)), Boxed()
    want = initialised(plain, x)
    module = jaxmp.linen.apply_policy(plain, LOW_PARAMS)
    got = initialised(module, x)
    boxes = jax.tree.leaves(got, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    assert all(isinstance(x, nn.Partitioned) for x in boxes)
    assert jax.tree.structure(got) == jax.tree.structure(want)  # with the names in the boxes
    for (path, value), old in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        is_head = "'head'" in jax.tree_util.keystr(path)
        assert value.dtype == (jnp.float32 if is_head else jnp.bfloat16)
        assert tree_bits(value) == tree_bits(old.astype(value.dtype))
        assert value.sharding == old.sharding
        assert not value.sharding.is_fully_replicated
    with_boxes, without = jax.eval_shape(module.apply, got, x), nn.meta.unbox(got)
    assert with_boxes == jax.eval_shape(module.apply, without, x)


@pytest.mark.parametrize("where", ["eagerly", "under nnx.jit"])
def test_nnx_creation_keeps_sharding_metadata(where: str) -> None:
    def create(rules: Any) -> Any:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        model = nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0))
        return model if rules is None else jaxmp.nnx.apply_policy(model, rules)

    make = create if where == "eagerly" else nnx.jit(create, static_argnums=0)
    with jax.set_mesh(GRID):
        plain, ruled = make(None), make(jaxmp.PolicyRules(default="bfloat16"))
    assert ruled.kernel.get_metadata() == plain.kernel.get_metadata()
    assert plain.kernel.get_metadata()["out_sharding"] == ("data", "model")
    value, old = ruled.kernel.get_value(), plain.kernel.get_value()
    assert value.sharding == old.sharding == NamedSharding(GRID, PartitionSpec("data", "model"))
    assert tree_bits(value) == tree_bits(old.astype(jnp.bfloat16))


def save_and_restore(tree: Any, like: Any, folder: pathlib.Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "saved", like)


def abstract(kind: Kind, stack: Stack, rules: Any = LOW_PARAMS) -> Any:
    model = rule_models.make("nnx", kind, "plain", stack=stack)
    return jaxmp.nnx.apply_policy(model, rules)


def updated(model: Any, kind: Kind, stack: Stack, _: pathlib.Path) -> Any:
    fresh = rule_models.real(abstract(kind, stack))
    nnx.update(fresh, nnx.state(model))
    return fresh


def restored(model: Any, kind: Kind, stack: Stack, folder: pathlib.Path) -> Any:
    graphdef, like = nnx.split(abstract(kind, stack))
    return nnx.merge(graphdef, save_and_restore(nnx.state(model), like, folder))


ROUND_TRIPS: dict[str, Callable[..., Any]] = {
    "split and merge": lambda model, *_: nnx.merge(*nnx.split(model), copy=True),
    "clone": lambda model, *_: nnx.clone(model),
    "deepcopy": lambda model, *_: copy.deepcopy(model),
    "pickle": lambda model, *_: pickle.loads(pickle.dumps(model)),
    "state and update": updated,
    "orbax": restored,
}


@pytest.mark.parametrize(("kind", "stack"), [("gpt", "scan"), ("resnet", "loop")])
@pytest.mark.filterwarnings("ignore:rules that match nothing")
def test_nnx_round_trips(kind: Kind, stack: Stack, tmp_path: pathlib.Path) -> None:
    """A copy does as the model does: the same bits, from the very same compiled program."""
    traces = []

    @nnx.jit
    def call(model: Any, inputs: Any) -> Any:
        traces.append(1)
        return model(inputs)

    model, inputs = rule_models.real(abstract(kind, stack)), rule_models.batch(kind)[0]
    rows = jaxmp.nnx.summary(model)
    copies = {name: trip(model, kind, stack, tmp_path) for name, trip in ROUND_TRIPS.items()}
    plain = jaxmp.nnx.remove_policy(nnx.clone(model))
    before = tree_bits(nnx.state(model))
    want = tree_bits((call(model, inputs), nnx.state(model)))
    assert (tree_bits(nnx.state(model)) != before) == (kind == "resnet")  # its statistics moved
    for name, got in copies.items():
        assert tree_bits(nnx.state(got)) == before, name
        assert jaxmp.nnx.summary(got) == rows, name
        assert tree_bits((call(got, inputs), nnx.state(got))) == want, name
    assert len(traces) == 1
    assert tree_bits((call(plain, inputs), nnx.state(plain))) != want  # positive control
    assert len(traces) == 2


@pytest.mark.parametrize("rules", [rule_models.RULES["gpt"], LOW_PARAMS], ids=["mixed", "low"])
@pytest.mark.filterwarnings("ignore:rules that match nothing")
def test_a_plain_nnx_checkpoint_is_loaded_under_rules(rules: Any, tmp_path: pathlib.Path) -> None:
    plain = rule_models.real(rule_models.make("nnx", "gpt", "plain", stack="scan"))
    graphdef, like = nnx.split(abstract("gpt", "scan", rules))
    state = nnx.state(plain)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    got = nnx.merge(graphdef, save_and_restore(state, like, tmp_path))
    want = jaxmp.nnx.apply_policy(plain, rules)
    assert tree_bits(nnx.state(got)) == tree_bits(nnx.state(want))
    assert jaxmp.nnx.summary(got) == jaxmp.nnx.summary(want)
