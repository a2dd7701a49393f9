"""A GPT of 1.1 billion params on pods: memory of each device, collectives of each layer.

Nothing runs: a whole step of AdamW is compiled from shapes alone, for TPUs v5e or H100s that are
not present. On any number of devices, each group of devices that shares a sequence has one of 1,024
tokens. So layers should send the same on all of them, and params and state should take 12 bytes for
each param, divided by the devices that they are split over.

    python benchmarks/bench_pods.py
"""

import argparse
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from lab.compilers import compiler_options
from measurement import RESULTS, Column, Report, Row
from sharded_lm import ShardedLM, place_on, pod_mesh

import jaxmp
from jaxmp._tools.planning.absent_devices import absent_pod
from jaxmp.sharding import FSDP

MODEL = ShardedLM(layers=20, width=2048, heads=16, vocab=32768, context=1024, remat=True)
# On TPUs: topology and slices; on GPUs hosts of eight.
PODS = {
    **{"8 TPUs": ("v5e:2x4", 1), "64 TPUs": ("v5e:8x8", 1), "128 TPUs": ("v5e:8x16", 1)},
    **{"256 TPUs": ("v5e:16x16", 1), "2 x 16 TPUs": ("v5e:4x4", 2), "3 x 8 TPUs": ("v5e:2x4", 3)},
    **{"4 x 8 TPUs": ("v5e:2x4", 4), "8 H100": ("1x1x8", 1), "64 H100": ("1x8x8", 1)},
}
MODES = {"fsdp": 1, "fsdp+tp": 4}  # how many devices share a sequence
_COLUMNS = (
    Column("pod", "devices"),
    Column("mode", "mode"),
    Column("state", "params and state, MB", ".1f"),
    Column("planned", "12 bytes a param, MB", ".1f"),
    Column("temp", "temporary MB", ".0f"),
    Column("temp_planned", "planned MB", ".0f"),
    Column("gathers", "layer gathers, M", ".2f"),
    Column("sums", "layer sums, M", ".2f"),
    Column("between", "between slices, M", ".2f"),
    Column("seconds", "compiled in s", ".0f"),
)
_ASSUMPTIONS = (
    "Compiled, not run, by the hardware above; TPUs at the least effort of their compiler.",
    "A step of AdamW with float32 params and moments, donated; bfloat16 compute, a checkpoint "
    "around each layer; one sequence of 1,024 tokens for each device, or for each 4 in fsdp+tp.",
    "State is what a device holds; planned are 12 bytes for each param, divided by the devices "
    "that it is split over.",
    "Temporary memory is planned as the float32 gradients of a device's params, the activations "
    "between layers, the float32 logits and their gradient, and both tables whole, in bfloat16, "
    "with the float32 gradient of the larger one.",
    "Layer gathers and sums: millions of elements of params and of float32 gradients that one "
    "layer gathers (forward and backward) and sums within a slice; between slices, what it sums "
    "there.",
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description="A GPT on pods of TPUs and GPUs.")
    parser.add_argument("--pods", nargs="+", choices=PODS, default=list(PODS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--no-write", action="store_true", help="print only, write no files")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    args = parser.parse_args(argv)
    rows = []
    for pod in args.pods:
        for mode in args.modes:
            rows.append(compiled_step(pod, mode))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = Report(
        name="pods",
        title="A GPT of 1.1 billion params on pods",
        command=" ".join(["python benchmarks/bench_pods.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=_ASSUMPTIONS,
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def compiled_step(pod: str, mode: str) -> Row:
    """Compiles a step for a pod; returns what it costs each device."""
    topology, slices = PODS[pod]
    devices = absent_pod(topology, slices)
    is_tpu = devices[0].platform == "tpu"
    start = time.perf_counter()
    lowered, placement = _lowered(pod_mesh(devices, slices, MODES[mode]), mode)
    # Only what the compilers send and reserve is read: how kernels multiply comes after that.
    quick = {"xla_gpu_enable_triton_gemm": False, "xla_llvm_disable_expensive_passes": True}
    compiled = lowered.compile(compiler_options("tpu", "least") if is_tpu else quick)
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    report = jaxmp.sharding.collectives(compiled, mesh=placement.mesh)
    layer = [row for row in report if row.runs == MODEL.layers and row.elements > 10**4]
    gradients = [row for row in layer if row.sums and "model" not in (row.axes or ())]
    return {
        "pod": pod,
        "mode": mode,
        "state": memory.argument_size_in_bytes / 1e6,
        "planned": 12 * _held(placement) / 1e6,
        "temp": memory.temp_size_in_bytes / 1e6,
        "temp_planned": _planned_temporaries(placement) / 1e6,
        "gathers": _millions(row for row in layer if row.kind == "all-gather"),
        "gathers_float32": _millions(
            row for row in layer if row.kind == "all-gather" and row.dtype == "float32"
        ),
        "sums": _millions(row for row in gradients if not row.between_slices),
        "sums_bfloat16": _millions(row for row in gradients if row.dtype == "bfloat16"),
        "between": _millions(row for row in layer if row.between_slices),
        "seconds": seconds,
    }


def _millions(rows: Any) -> float:
    return sum(row.elements for row in rows) / 1e6


def _held(placement: Any) -> int:
    """How many numbers of params a device holds."""
    shapes, stored = MODEL.params(), placement.stored
    parts = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), shapes, stored)
    return sum(jax.tree.leaves(parts))


def _planned_temporaries(placement: Any) -> int:
    """The bytes that a step needs beside params and state, as `_ASSUMPTIONS` says."""
    between_layers = 2 * MODEL.layers * MODEL.context * MODEL.width
    table, model = MODEL.vocab * MODEL.width, placement.mesh.shape["model"]
    logits = 2 * 4 * MODEL.context * MODEL.vocab // model
    tables = 2 * (table + table // model) + 4 * table
    return 4 * _held(placement) + between_layers + logits + tables


def _lowered(mesh: Any, mode: str) -> tuple[Any, Any]:
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
    state = jax.tree.map(_abstract, (shapes, opt_state), shardings)
    sequences = mesh.size // mesh.shape["model"]
    tokens = jax.ShapeDtypeStruct((sequences, MODEL.context), jnp.int32, sharding=placement.batch)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return jitted.lower(state, (tokens, tokens)), placement


def _abstract(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


if __name__ == "__main__":
    main()
