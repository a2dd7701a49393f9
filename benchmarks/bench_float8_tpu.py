"""What a TPU's compiler expects of a language model in float8: cycles and memory.

Nothing runs: libtpu (the extra `aot`) compiles loss and gradients of a GPT, its layers in a scan
with checkpoints, for a TPU 7x that is not here. A 7x multiplies float8 twice as fast as bfloat16.

    python benchmarks/bench_float8_tpu.py
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from gpt import GPT
from measurement import RESULTS, Column, Report, Row

import jaxmp
from jaxmp._hlo.kernels import estimated_cycles
from jaxmp._planning.absent_devices import absent_pod

_RECIPES = ("none", "tensorwise", "rowwise_hp", "rowwise")
_WIDTHS = (1024, 2048, 4096)
_COLUMNS = (
    Column("width", "width", "d"),
    Column("tokens", "tokens", "d"),
    Column("products", "products"),
    Column("cycles", "million cycles", ".2f"),
    Column("ratio", "over bfloat16", ".2f"),
    Column("temp", "temporary MB", ".0f"),
    Column("temp_ratio", "over bfloat16", ".2f"),
)
_ASSUMPTIONS = (
    "Compiled, not run; the hardware above only did the compiling. Cycles are the compiler's own "
    "estimates, with the body of a scan once; copies of which it gives none are left out.",
    "Two layers, heads of 128, a vocabulary of 512, 8 sequences, float32 params.",
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    rows: list[Row] = []
    for width in args.widths:
        model = GPT(
            layers=2, width=width, heads=width // 128, vocab=512, context=args.context, remat=True
        )
        found: list[Row] = []
        for products in _RECIPES:
            found.append(_row(model, products, args.topology))
            first = found[0]
            found[-1]["ratio"] = found[-1]["cycles"] / first["cycles"]
            found[-1]["temp_ratio"] = found[-1]["temp"] / first["temp"] if first["temp"] else None
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        rows += found
    report = Report(
        name="float8-tpu",
        title=f"A language model in float8, compiled for {args.topology}",
        command=" ".join(["python benchmarks/bench_float8_tpu.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=list(_ASSUMPTIONS),
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A language model in float8 on an absent TPU.")
    add = parser.add_argument
    add("--widths", nargs="+", type=int, default=_WIDTHS, help="multiples of 128")
    add("--context", type=int, default=1024, help="tokens of a sequence")
    add("--topology", default="tpu7x:2x2x1", help="of the TPUs to compile for")
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    return parser.parse_args(argv)


def _row(model: GPT, products: str, topology: str) -> Row:
    on_one = jax.sharding.SingleDeviceSharding(absent_pod(topology)[0])
    tokens = jax.ShapeDtypeStruct((8, model.context + 1), jnp.int32)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_one),
        (jax.eval_shape(model.init), tokens),
    )
    policy = "mixed_bfloat16" if products == "none" else f"mixed_float8,products={products}"
    loss = jaxmp.autocast(model.loss, policy)
    gradient = jax.jit(jaxmp.value_and_grad(loss, reduce_dtype="float32"))
    compiled = gradient.lower(*args).compile()
    memory: Any = compiled.memory_analysis()
    return {
        "width": model.width,
        "tokens": 8 * model.context,
        "products": "bfloat16" if products == "none" else products,
        "cycles": estimated_cycles(compiled.as_text() or "")[0] / 1e6,
        "temp": memory.temp_size_in_bytes / 1e6,
    }


if __name__ == "__main__":
    main()
