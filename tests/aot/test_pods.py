"""A GPT of 1.1 billion params on pods: it fits as planned, and each layer sends as on eight."""

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from jaxtyping import PyTree

import jaxmp
from benchmarks.lab.compilers import compiler_options
from benchmarks.sharded_lm import ShardedLM, place_on
from jaxmp._tools.planning.absent_devices import absent_pod
from jaxmp.sharding import FSDP
from tests.aot.conftest import Compiler

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

# Devices of a slice, and slices.
TPUS = {
    **{"8 TPUs": (8, 1), "64 TPUs": (64, 1), "128 TPUs": (128, 1), "256 TPUs": (256, 1)},
    **{"2 x 16 TPUs": (16, 2), "3 x 8 TPUs": (8, 3), "4 x 8 TPUs": (8, 4)},
}
GPUS = {"8 H100": (8, 1), "64 H100": (64, 1)}
# Their topologies; on GPUs hosts of eight.
TOPOLOGIES = {
    **{"8 TPUs": "v5e:2x4", "64 TPUs": "v5e:8x8", "128 TPUs": "v5e:8x16", "256 TPUs": "v5e:16x16"},
    **{"2 x 16 TPUs": "v5e:4x4", "3 x 8 TPUs": "v5e:2x4", "4 x 8 TPUs": "v5e:2x4"},
    **{"8 H100": "1x1x8", "64 H100": "1x8x8"},
}
MODES = {"fsdp": 1, "fsdp+tp": 4}  # how many devices share a sequence
MODEL = ShardedLM(layers=20, width=2048, heads=16, vocab=32768, context=1024, remat=True)
# Attention has 4 d * d weights, the hidden layer 8 d * d, in millions.
LAYER = 12 * MODEL.width**2 / 1e6
HBM = 16_000


def compiled_step(pod: str, slices: int, mode: str) -> dict[str, Any]:
    """Compiles a step for a pod; returns what it costs each device."""
    devices = absent_pod(TOPOLOGIES[pod], slices)
    is_tpu = devices[0].platform == "tpu"
    lowered, placement = lowered_step(pod_mesh(devices, slices, MODES[mode]), mode)
    # Only what the compilers send and reserve is read: how kernels multiply comes after that.
    quick = {"xla_gpu_enable_triton_gemm": False, "xla_llvm_disable_expensive_passes": True}
    compiled = lowered.compile(compiler_options("tpu", "least") if is_tpu else quick)
    memory: Any = compiled.memory_analysis()
    report = jaxmp.sharding.collectives(compiled, mesh=placement.mesh)
    layer = [row for row in report if row.runs == MODEL.layers and row.elements > 10**4]
    gradients = [row for row in layer if row.sums and "model" not in (row.axes or ())]
    return {
        "state": memory.argument_size_in_bytes / 1e6,
        "planned": 12 * held(placement) / 1e6,
        "temp": memory.temp_size_in_bytes / 1e6,
        "temp_planned": planned_temporaries(placement) / 1e6,
        "gathers": millions(row for row in layer if row.kind == "all-gather"),
        "gathers_float32": millions(
            row for row in layer if row.kind == "all-gather" and row.dtype == "float32"
        ),
        "sums": millions(row for row in gradients if not row.between_slices),
        "sums_bfloat16": millions(row for row in gradients if row.dtype == "bfloat16"),
        "between": millions(row for row in layer if row.between_slices),
    }


def pod_mesh(devices: Any, slices: int, model: int) -> Mesh:
    """The mesh of a pod; params are replicated over its slices.

    Args:
      devices: all devices.
      slices: how many slices they are in.
      model: how many devices share a sequence.
    """
    names = ("replica", "data", "model")
    within = (1, len(devices) // slices // model, model)
    types = (AxisType.Auto,) * 3
    if slices == 1:
        return jax.make_mesh(within, names, types, devices=devices)
    placed = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices=devices)
    return Mesh(placed, names, axis_types=types)


def millions(rows: Any) -> float:
    return sum(row.elements for row in rows) / 1e6


def held(placement: Any) -> int:
    """How many numbers of params a device holds."""
    shapes, stored = MODEL.params(), placement.stored
    parts = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), shapes, stored)
    return sum(jax.tree.leaves(parts))


def planned_temporaries(placement: Any) -> int:
    """The bytes that a step needs beside params and state.

    float32 gradients of a device's params, activations between layers, float32 logits with their
    gradient, and both tables whole, in bfloat16, with the float32 gradient of the larger one.
    """
    between_layers = 2 * MODEL.layers * MODEL.context * MODEL.width
    table, model = MODEL.vocab * MODEL.width, placement.mesh.shape["model"]
    logits = 2 * 4 * MODEL.context * MODEL.vocab // model
    tables = 2 * (table + table // model) + 4 * table
    return 4 * held(placement) + between_layers + logits + tables


def lowered_step(mesh: Any, mode: str) -> tuple[Any, Any]:
    shapes = MODEL.params()
    placement = place_on(mesh, mode, shapes, min_size=2**16)
    stored = placement.stored
    loss = functools.partial(
        MODEL.loss,
        dtype=jnp.bfloat16,
        pin=lambda x: jax.lax.with_sharding_constraint(x, placement.batch),
    )
    fsdp = FSDP(shardings=stored, axis="data")
    gradient = jaxmp.value_and_grad(loss, reduce_dtype="float32", fsdp=fsdp)
    tx = optax.adamw(1e-3)

    def step(state: PyTree, batch: Any) -> Any:
        params, opt_state = state
        value, grads = gradient(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    opt_state = jax.eval_shape(tx.init, shapes)
    shardings = stored, jaxmp.sharding.state_shardings(opt_state, shapes, stored)
    state = jax.tree.map(abstract, (shapes, opt_state), shardings)
    sequences = mesh.size // mesh.shape["model"]
    tokens = jax.ShapeDtypeStruct((sequences, MODEL.context), jnp.int32, sharding=placement.batch)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return jitted.lower(state, (tokens, tokens)), placement


def abstract(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def verify(pod: str, mode: str, devices: int, slices: int) -> None:
    row = compiled_step(pod, slices, mode)
    tensor = MODES[mode]
    # Each layer is gathered twice in bfloat16 and summed once in float32, on any number of devices.
    # (The scales of its norms are whole, and summed along with the rest.)
    assert row["gathers"] == pytest.approx(2 * LAYER / tensor, rel=1e-3)
    assert row["sums"] == pytest.approx(LAYER / tensor, rel=1e-3)
    assert row["gathers_float32"] == row["sums_bfloat16"] == 0
    # Between slices goes what a device of a slice holds.
    assert row["between"] == pytest.approx(LAYER / devices if slices > 1 else 0, rel=1e-3)
    assert row["state"] == pytest.approx(row["planned"], rel=0.005)
    assert row["temp"] < 1.25 * row["temp_planned"]
    assert row["state"] + row["temp"] < HBM


# Before each change lands, one of each kind; the others take turns.
LANDING = {("64 TPUs", "fsdp"), ("2 x 16 TPUs", "fsdp+tp"), ("64 H100", "fsdp")}


def cases(pods: Iterable[str]) -> list[Any]:
    keys = itertools.product(pods, ("fsdp", "fsdp+tp"))
    return [pytest.param(*k, marks=[] if k in LANDING else pytest.mark.exhaustive) for k in keys]


@pytest.mark.parametrize(("pod", "mode"), cases(TPUS))
def test_tpus(tpu: Compiler, pod: str, mode: str) -> None:
    verify(pod, mode, *TPUS[pod])


@pytest.mark.parametrize(("pod", "mode"), cases(GPUS))
def test_gpus(gpu: Compiler, pod: str, mode: str) -> None:
    verify(pod, mode, *GPUS[pod])
