"""A language model in 8 bits as compiled: cycles, memory, and bytes kept for the backward pass.

Nothing runs: libtpu or the CUDA plugin (the extra `aot`) compiles loss and gradients of a GPT, its
layers in a scan, with checkpoints and without, for a device that is not present. A TPU 7x
multiplies float8 twice as fast as bfloat16, and so does an H100; TPUs v5e and v6e do so with int8.

    python benchmarks/bench_float8_compiled.py --device tpu7x
    python benchmarks/bench_float8_compiled.py --device h100 --layers 12 --batches 1 2 8
    python benchmarks/bench_float8_compiled.py --device v5e --products none int8
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from gpt import GPT
from lab.kernels import estimated_cycles
from measurement import Column, Report, Row, parse

import jaxmp
from jaxmp.diagnostics import absent_devices, find_device

_FLOAT8 = ("none", "tensorwise", "rowwise_hp", "rowwise")
_RECIPES = (*_FLOAT8, "int8", "int8:weight_gradient=int8", "mxfp8")
# Products of a GPU are calls of cuBLAS, as in the tests: their names say what they multiply.
_GPU_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
_COMPARED = ("cycles", "temp", "peak", "residuals")
_COLUMNS = (
    Column("width", "width", "d"),
    Column("layers", "layers", "d"),
    Column("tokens", "tokens", "d"),
    Column("remat", "checkpoints"),
    Column("products", "products"),
    Column("cycles", "million cycles", ".2f"),
    Column("cycles_ratio", "over bfloat16", ".2f"),
    Column("temp", "temporary MB", ".0f"),
    Column("temp_ratio", "over bfloat16", ".2f"),
    Column("peak", "in all MB", ".0f"),
    Column("peak_ratio", "over bfloat16", ".2f"),
    Column("residuals", "kept for the backward pass, MB", ".1f"),
    Column("residuals_ratio", "over bfloat16", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    args = _parse(argv)
    rows: list[Row] = []
    for width, batch, remat in itertools.product(args.widths, args.batches, args.checkpoints):
        model = GPT(
            layers=args.layers,
            width=width,
            heads=width // args.head,
            vocab=args.vocab,
            context=args.context,
            remat=remat == "yes",
        )
        found: list[Row] = []
        for products in args.products:
            found.append(_row(model, batch, products, args.device))
            for name in _COMPARED:
                first, this = found[0][name], found[-1][name]
                found[-1][f"{name}_ratio"] = this / first if first and this is not None else None
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        rows += found
    report = Report(
        "bench_float8_compiled",
        f"A language model in 8 bits, compiled for {args.device}",
        _COLUMNS,
        [
            "Compiled, not run; the hardware above only did the compiling. Cycles are a TPU's "
            "compiler's own estimates, with all turns of a scan; copies of which it gives none are "
            "left out.",
            "In all: arguments (float32 params), results (float32 gradients) and temporaries. Kept "
            "for the backward pass: the residuals that `jaxmp.audit` counts.",
            f"Heads of {args.head}, a vocabulary of {args.vocab}, sequences of {args.context}, "
            "plain attention.",
        ],
        rows,
        name=f"float8-{args.device}",
    )
    return report.publish(args)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A language model in 8 bits on an absent device.")
    add = parser.add_argument
    add("--device", default="tpu7x", help="such as h100; see jaxmp.diagnostics.DEVICES")
    add("--products", nargs="+", choices=_RECIPES, default=_FLOAT8)
    add("--widths", nargs="+", type=int, default=(1024, 2048, 4096), help="multiples of --head")
    add("--batches", nargs="+", type=int, default=(8,), help="sequences")
    add("--checkpoints", nargs="+", choices=("yes", "no"), default=("yes",))
    add("--layers", type=int, default=2)
    add("--context", type=int, default=1024, help="tokens of a sequence")
    add("--head", type=int, default=128, help="width of an attention head")
    add("--vocab", type=int, default=512)
    return parse(parser, argv)


def _row(model: GPT, batch: int, products: str, device: str) -> Row:
    is_tpu = find_device(device).platform == "tpu"
    on_one = jax.sharding.SingleDeviceSharding(absent_devices(device, 1)[0])
    tokens = jax.ShapeDtypeStruct((batch, model.context + 1), jnp.int32)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_one),
        (jax.eval_shape(model.init), tokens),
    )
    policy = "mixed_bfloat16" if products == "none" else f"mixed_float8,products={products}"
    loss = jaxmp.autocast(model.loss, policy)
    gradient = jax.jit(jaxmp.value_and_grad(loss, reduce_dtype="float32"))
    # Products of blocks are kernels of Triton.
    options = {} if is_tpu or products == "mxfp8" else _GPU_OPTIONS
    compiled = gradient.lower(*args).compile(options)
    memory: Any = compiled.memory_analysis()
    sizes = [memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes]
    kept = jaxmp.audit(loss, *args).residuals or ()
    return {
        "width": model.width,
        "layers": model.layers,
        "tokens": batch * model.context,
        "remat": "yes" if model.remat else "no",
        "products": "bfloat16" if products == "none" else products,
        "cycles": estimated_cycles(compiled.as_text() or "")[1] / 1e6 if is_tpu else None,
        "temp": sizes[-1] / 1e6,
        "peak": sum(sizes) / 1e6,
        "residuals": sum(row.bytes for row in kept) / 1e6,
    }


if __name__ == "__main__":
    main()
