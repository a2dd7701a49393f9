"""Plans of memory beside what the compilers for an H100 and a TPU v5e say of the same step.

Each set-up is planned by `jaxmp.diagnostics.memory_plan` and compiled for devices that are not
here; nothing runs. The planner was designed while looking at four models, and not at the others.
`--options` takes, in place of the models, one MLP with other storages and options, on one device.

    state = params, masters, moments and counters of one device: planned, and as compiled
    peak = the most that one device holds in a step: planned, and by the compiler

Compiling all takes an hour. What an earlier result says of the compilers is read again by

    python benchmarks/bench_memory_plan.py --compiled benchmarks/results/memory-plan_....json
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from measurement import RESULTS, Column, Report, Row
from plan_setups import DESIGNED_ON, OPTIONS, SETUPS, SPREADS, mesh_of, shardings_of

import jaxmp
from jaxmp._planning.absent_devices import PLATFORMS, Platform, eight_devices
from jaxmp._planning.memory_rows import MemoryPlan
from jaxmp.sharding import FSDP

_DEVICES = {"gpu": "h100", "tpu": "v5e"}
_COLUMNS = (
    Column("model", "model"),
    Column("seen", "designed on it"),
    Column("spread", "spread"),
    Column("device", "device"),
    Column("state", "state, MB", ".1f"),
    Column("state_off", "planned, off by bytes", ".0f"),
    Column("peak", "peak, MB", ".0f"),
    Column("planned", "planned, MB", ".0f"),
    Column("error", "error, %", "+.1f"),
    Column("allocated", "allocated, MB", ".0f"),
    Column("error_allocated", "error, %", "+.1f"),
)
_ASSUMPTIONS = (
    "A step of AdamW with float32 params under mixed_bfloat16, donated, unless the row says else; "
    "compiled, not run, by the hardware above.",
    "Peak is `peak_memory_in_bytes` of the compiler's memory analysis: the most that lives at one "
    "time. Allocated is arguments, results that replace none, and temporaries, with the gaps "
    "between them.",
    "State is what the compiled step takes as arguments, without the batch.",
    "fsdp: 8 devices; fsdp+tp: 4 x 2, heads, hidden units and channels split over the 2.",
)
# What the compiler says of a step.
_SAID = ("arguments", "peak", "allocated", "compile_seconds")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    # Where jax looks for a GPU and finds none, it no longer compiles for one.
    jax.config.update("jax_platforms", "cpu")
    earlier = _earlier(args.compiled)
    models = args.models or list(OPTIONS if args.options else SETUPS)
    spreads = args.spreads or (["single"] if args.options else list(SPREADS))
    rows = []
    for platform in args.platforms:
        for model in models:
            for spread in spreads:
                key = model, spread, _DEVICES[platform]
                if args.compiled and key not in earlier:
                    continue
                rows.append(compared(model, spread, platform, earlier.get(key)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = Report(
        name="memory-plan-options" if args.options else "memory-plan",
        title="Memory as planned, and as compiled",
        command=" ".join(["python benchmarks/bench_memory_plan.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=_ASSUMPTIONS,
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory as planned, and as compiled.")
    add = parser.add_argument
    add("--platforms", nargs="+", choices=PLATFORMS, default=list(PLATFORMS))
    add("--models", nargs="+", choices=[*SETUPS, *OPTIONS])
    add("--spreads", nargs="+", choices=SPREADS)
    add("--options", action="store_true", help="storages and options, in place of models")
    add("--compiled", type=pathlib.Path, help="an earlier result to read the compilers' part from")
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    return parser.parse_args(argv)


def _earlier(path: pathlib.Path | None) -> dict[tuple[str, str, str], Row]:
    """What compilers said in an earlier result, by model, spread and device."""
    rows = [] if path is None else json.loads(path.read_text())["rows"]
    return {
        (row["model"], row["spread"], row["device"]): {name: row[name] for name in _SAID}
        for row in rows
    }


def compared(model: str, spread: str, platform: Platform, said: Row | None = None) -> Row:
    """One row: a plan, and what the compiler says, now or earlier."""
    plan = planned(model, spread, platform)
    said = compiled(plan) if said is None else said
    state = said["arguments"] - plan.bytes_of("batch")
    return {
        "model": model,
        "seen": "yes" if model in DESIGNED_ON else "no",
        "spread": spread,
        "device": plan.device,
        **said,
        "peak": said["peak"],
        "state": state / 1e6,
        "state_off": plan.persistent - state,
        "planned": plan.peak / 1e6,
        "error": 100 * (plan.peak / said["peak"] / 1e6 - 1),
        "error_allocated": 100 * (plan.peak / said["allocated"] / 1e6 - 1),
        "rows": {row.name: row.bytes for row in plan.rows},
    }


def planned(model: str, spread: str, platform: Platform) -> MemoryPlan:
    """The plan of a set-up on devices that are not here."""
    setup = {**SETUPS, **OPTIONS}[model]()
    mesh = mesh_of(spread, eight_devices(platform))
    placed = shardings_of(setup.params, mesh)
    over = NamedSharding(mesh, P("data"))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over),
        setup.batch(mesh.shape["data"]),
    )
    return jaxmp.diagnostics.memory_plan(
        setup.params,
        loss_fn=setup.loss,
        batch=batch,
        shardings=placed,
        fsdp=FSDP(shardings=placed, axis="data") if mesh.shape["data"] > 1 else None,
        device=_DEVICES[platform],
        **setup.options,
    )


def compiled(plan: MemoryPlan) -> Row:
    """What the compiler says of the step of a plan, in bytes and MB."""
    start = time.perf_counter()
    memory: Any = plan.program.lower().compile().memory_analysis()
    replaced = memory.output_size_in_bytes - memory.alias_size_in_bytes
    allocated = memory.argument_size_in_bytes + replaced + memory.temp_size_in_bytes
    return {
        "arguments": memory.argument_size_in_bytes,
        "peak": memory.peak_memory_in_bytes / 1e6,
        "allocated": allocated / 1e6,
        "compile_seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    main()
