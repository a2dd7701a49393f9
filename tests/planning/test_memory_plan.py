"""The memory planner: what lives between steps is exact; without a compiler the rest is missing.

What compilers say of the peak is in tests/aot.
"""

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp._tools.planning.memory_rows import MemoryPlan
from jaxmp.diagnostics import memory_plan
from jaxmp.sharding import FSDP, fully_sharded, state_shardings
from tests.support.surroundings import without_compilers  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion", "without_compilers")]


MASTERS = ("float32", "remainder", "remainder8", "kahan", "stochastic", "none")
MOMENTS = ("float32", "bfloat16", "int8")
STORAGES = [(master, moments) for master in MASTERS for moments in MOMENTS]
# Before each change lands, one of each kind; the others are like them.
LANDING = {("float32", "float32"), ("stochastic", "float32"), ("kahan", "bfloat16")}
GB = 10**9


def wrapped(optimizer: Any = None, policy: str = "bfloat16", **storage: Any) -> Any:
    return jaxmp.mixed_precision(optimizer or optax.adamw(1e-3), policy, **storage)


def params() -> dict[str, Any]:
    return {
        "embedding": jnp.ones((512, 256)),
        "layers": {"up": jnp.ones((2, 256, 1024)), "norm": jnp.ones((2, 256))},
        "bias": jnp.ones(7),
    }


def shapes(tree: Any) -> Any:
    return jax.eval_shape(lambda: tree)


def held(state: Any, device: jax.Device) -> int:
    """Bytes of the parts of real arrays that lie on a device."""
    parts = (part for x in jax.tree.leaves(state) for part in x.addressable_shards)
    return sum(part.data.nbytes for part in parts if part.device == device)


@pytest.mark.parametrize(
    ("master", "moments"),
    [
        pytest.param(*each, marks=() if each in LANDING else pytest.mark.exhaustive)
        for each in STORAGES
    ],
)
def test_what_lives_between_steps_is_what_a_real_state_takes(master: Any, moments: Any) -> None:
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "bfloat16", master=master, moments=moments)
    state = jax.jit(functools.partial(jaxmp.TrainState.create, tx=tx))(params=params())
    plan = memory_plan(shapes(params()), tx)
    assert plan.persistent == sum(x.nbytes for x in jax.tree.leaves(state))
    assert plan.bytes_of("params") == sum(x.nbytes for x in jax.tree.leaves(state.params))
    kept = sum(x.nbytes for x in jax.tree.leaves(state.opt_state.master))
    assert plan.bytes_of("masters") == kept


@pytest.mark.parametrize(
    ("master", "moments"),
    [
        ("remainder", "int8"),
        pytest.param("float32", "float32", marks=pytest.mark.exhaustive),
        pytest.param("stochastic", "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_what_lives_on_each_of_eight_devices(master: Any, moments: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    placed = fully_sharded(params(), mesh)
    tx = jaxmp.mixed_precision(optax.adamw(1e-3), "bfloat16", master=master, moments=moments)
    create = functools.partial(jaxmp.TrainState.create, tx=tx)
    all_placed = state_shardings(jax.eval_shape(create, params=params()), params(), placed)
    state = jax.jit(create, out_shardings=all_placed)(params=params())

    by_shardings = memory_plan(shapes(params()), tx, shardings=placed)
    by_number = memory_plan(shapes(params()), tx, devices=8)
    by_arrays = memory_plan(jax.device_put(params(), placed), tx)
    for plan in (by_shardings, by_number, by_arrays):
        assert plan.devices == 8
        assert plan.persistent == held(state, jax.devices()[0])
    assert memory_plan(shapes(params()), tx).persistent > 7 * plan.persistent


@pytest.mark.parametrize(
    ("tx", "each"),
    [
        ("mixed_bfloat16", 8),
        (jaxmp.get_policy("float32"), 8),
        (wrapped(optax.sgd(0.1)), 0),
        (wrapped(optax.lion(1e-4)), 4),
        (wrapped(optax.sgd(0.1, momentum=0.9)), 4),
        (wrapped(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))), 8),
        (wrapped(optax.MultiSteps(optax.adamw(1e-3), 4)), 12),
        (wrapped(policy="float32", moments="bfloat16"), 4),
    ],
)
def test_any_optimizer_is_asked_for_its_own_state(tx: Any, each: int) -> None:
    plan = memory_plan({"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}, tx)
    assert plan.bytes_of("moments") == each * 256**2


def gigabytes(plan: MemoryPlan, *names: str) -> float:
    return sum(plan.bytes_of(name) for name in names) / GB


def test_published_tables() -> None:
    """Params and states of the tutorials' tables, whose activations are measured."""
    wide, mixed = memory_plan("7B", "float32"), memory_plan("7B", "bfloat16")
    assert wide.bytes_of("gradients") == wide.peak - wide.persistent
    assert wide.device == "h100"  # where there is a CPU
    with pytest.raises(ValueError, match="rows are called params, masters"):
        wide.bytes_of("weights")
    assert gigabytes(wide, "params") == gigabytes(wide, "gradients") == 28
    assert gigabytes(wide, "moments") == gigabytes(mixed, "moments") == 56
    assert gigabytes(mixed, "params", "masters") == 14 + 28
    # Eight devices: 2 GB of params, but another 4 of masters, which the published 32 leave out.
    shared = memory_plan("8B", "bfloat16", devices=8)
    assert gigabytes(shared, "params", "moments") == 2 + 8
    assert gigabytes(shared, "masters") == 4
    large = memory_plan("70B", "bfloat16", devices=64)
    assert gigabytes(large, "params", "masters", "moments") == 70 * 14 / 64


@pytest.mark.parametrize(
    ("params", "count"),
    [(7_000_000_000, 7 * GB), (7e9, 7 * GB), ("7B", 7 * GB), ("0.35m", 350_000), (" 1,000 ", 1000)],
)
def test_a_number_of_params(params: Any, count: int) -> None:
    plan = memory_plan(params, wrapped(optax.sgd(0.1), "float32"))
    assert plan.params == count
    assert plan.bytes_of("params") == 4 * count
    assert not plan.is_complete


def test_a_number_that_devices_do_not_divide_is_rounded_up() -> None:
    plan = memory_plan(1_000_001, "float32", devices=8)
    assert plan.bytes_of("params") == 4 * math.ceil(1_000_001 / 8)


def mlp(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in params:
        x = jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def abstract_mlp(rows: int = 4096, layers: int = 4, width: int = 64) -> dict[str, Any]:
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    layer = {"up": array((width, 4 * width)), "down": array((4 * width, width))}
    batch = {"x": array((rows, width)), "y": array((rows, width))}
    return {"params": [layer] * layers, "loss_fn": mlp, "batch": batch}


def test_a_step_without_a_compiler() -> None:
    plan = memory_plan(**abstract_mlp())
    sizes = {row.name: row.bytes for row in plan.rows}
    assert plan.peak == sum(sizes.values()) == plan.persistent + sizes["batch"] + 4 * plan.params
    assert sizes["batch"] == 2 * 4 * 4096 * 64
    assert not plan.is_complete
    for device in ("h100", "v5e", "mi300x"):
        plan = memory_plan(**abstract_mlp(), device=device)
        (limit,) = plan.limits
        assert limit.startswith("Not counted: activations and temporaries, as ")
        said = " ".join(str(plan).split())
        assert limit in said
        assert "at least" in said
        has_none = device == "mi300x"
        assert ("no compiler for mi300x" if has_none else "pip install 'jaxmp[aot]'") in limit


def test_what_is_kept_for_the_backward_pass() -> None:
    """Of each layer, in bfloat16: input, and of the hidden one five or six arrays for a gelu."""
    arguments = abstract_mlp()
    kept = memory_plan(**arguments).residual_bytes
    assert 2 * 4096 * 4 * (64 + 5 * 256) <= kept <= 2 * 4096 * 4 * (64 + 6.5 * 256)
    assert f"backward pass, as traced: {kept / 1e6:,.3f} MB." in str(memory_plan(**arguments))
    parts = memory_plan(**arguments, microbatches=4).residual_bytes
    assert parts == pytest.approx(kept / 4, rel=0.05)
    wide = memory_plan(**arguments, tx="float32").residual_bytes
    assert (
        wide
        == memory_plan(**arguments, policy="none").residual_bytes
        == pytest.approx(2 * kept, rel=0.25)
    )
    lean = memory_plan(**arguments, recompute="auto").residual_bytes
    assert lean < 0.6 * kept
    assert memory_plan(**arguments, devices=8).residual_bytes == kept
    assert memory_plan(**arguments, cast="all").residual_bytes is None
    assert memory_plan(arguments["params"]).residual_bytes is None


def test_eight_devices_hold_an_eighth() -> None:
    arguments = abstract_mlp(width=128)
    one, eight = memory_plan(**arguments), memory_plan(**arguments, devices=8)
    assert eight.persistent < one.persistent / 7
    assert eight.bytes_of("batch") == one.bytes_of("batch") // 8
    assert "on all devices together" in str(eight)


def test_a_mesh_with_two_axes_and_real_devices() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    arguments = abstract_mlp(width=128)
    base = [{"up": P(None, "model"), "down": P("model")}] * 4
    placed = fully_sharded(arguments["params"], mesh, "data", base=base)
    fsdp = FSDP(shardings=placed, axis="data")
    plan = memory_plan(**arguments, fsdp=fsdp)
    assert plan.devices == 8
    assert plan.bytes_of("params") == 4 * plan.params // 8
    alone = memory_plan(arguments["params"], fsdp=fsdp)  # without a loss it says how they are split
    assert (alone.devices, alone.persistent) == (8, plan.persistent)


def test_collections_and_aux() -> None:
    def loss_fn(params: Any, x: Any, *, stats: Any, key: Any) -> Any:
        y = x @ params + jax.random.normal(key, (8,))
        return jnp.mean(y**2), {"stats": {"mean": jnp.mean(y, 0)}}, y

    plan = memory_plan(
        jnp.ones((16, 8)),
        loss_fn=loss_fn,
        batch=jnp.ones((4, 16)),
        collections={"stats": {"mean": jnp.zeros(8)}, "key": jax.random.key(0)},
        has_aux=True,
    )
    assert plan.bytes_of("collections") == 8 * 4 + 2 * 4
    assert plan.residual_bytes is not None


def test_odd_trees() -> None:
    assert memory_plan({}).params == 0
    frozen = {"w": jnp.ones((4, 4)), "table": jnp.arange(8)}
    labels = {"w": "train", "table": "freeze"}
    inner = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}
    plan = memory_plan(frozen, wrapped(optax.multi_transform(inner, labels)))
    assert plan.bytes_of("params") == 2 * 16 + 4 * 8
    assert plan.bytes_of("masters") == 4 * 16
    assert "GB" in str(plan) or "MB" in str(plan)


def test_a_plan_is_json_and_a_table() -> None:
    plan = memory_plan("8B", wrapped(master="remainder"), devices=4, device="v5e")
    read = json.loads(json.dumps(plan.as_dict()))
    assert (
        read["persistent"]
        == plan.persistent
        == sum(row["bytes"] for row in read["rows"] if row["is_persistent"])
    )
    assert (read["devices"], read["fits"], read["is_complete"]) == (4, False, False)
    assert "It does not fit" in str(plan)
    assert plan.fits("h100")
    step = memory_plan(**abstract_mlp())
    assert json.loads(json.dumps(step.as_dict()))["residual_bytes"] == step.residual_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": "8 bananas"}, "a number such as '8B' or '350M'"),
        ({"params": -1}, "must be positive"),
        ({"params": 8e9, "device": "h9000"}, "no data of a device 'h9000'"),
        ({"params": 8e9, "devices": 0}, "devices must be a positive number"),
        ({"params": 8e9, "loss_fn": mlp, "batch": 0}, "a number of them is none"),
        ({"params": {}, "loss_fn": mlp}, "loss_fn and batch go together"),
        ({"params": 8e9, "recompute": "auto", "has_aux": True}, "has_aux and recompute would be"),
        ({"params": {}, "microbatches": 2}, "there is none without a loss. Give loss_fn and"),
        ({**abstract_mlp(), "microbatches": 0}, "microbatches must be a whole number"),
        ({**abstract_mlp(), "cast": "some"}, "cast must be"),
        ({**abstract_mlp(rows=12), "devices": 8}, "12 examples, which the 8 devices"),
        ({"params": "1b", "tx": optax.sgd(0.1)}, r"Write jaxmp.mixed_precision\(optimizer, policy"),
    ],
)
def test_what_is_asked_wrongly(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        memory_plan(**arguments)


def test_a_param_without_a_sharding_is_whole_on_each_device() -> None:
    mesh = AbstractMesh((8,), ("model",), axis_types=(AxisType.Auto,))
    over = NamedSharding(mesh, P("model"))
    a, b = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
    said = memory_plan({"a": a, "b": b}, shardings={"a": over, "b": None})
    placed = jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=over)
    found = memory_plan({"a": placed, "b": b})
    one = 4 * 64 * 64
    assert said.bytes_of("params") == found.bytes_of("params") == one // 8 + one
    assert said.devices == found.devices == 8
    for wrong in (P("model"), {"a": None, "b": None}):
        with pytest.raises(ValueError, match="must be a NamedSharding for each param"):
            memory_plan({"a": a, "b": b}, shardings=wrong)


def test_shardings_that_leave_no_axis_for_the_batch() -> None:
    mesh = AbstractMesh((8,), ("model",), axis_types=(AxisType.Auto,))
    over = NamedSharding(mesh, P("model"))
    w, x = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
    with pytest.raises(ValueError, match="none is left for the batch"):
        memory_plan(w, loss_fn=lambda w, x: jnp.sum(x @ w), batch=x, shardings=over)
    with pytest.raises(ValueError, match="leave out devices=8"):
        memory_plan(w, shardings=over, devices=8)
    placed = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
    plan = memory_plan(w, loss_fn=lambda w, x: jnp.sum(x @ w), batch=placed, shardings=over)
    assert plan.bytes_of("params") == 4 * 64 * 64 // 8
