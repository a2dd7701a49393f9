"""Digests of about seventy programs that jaxmp makes, to show what a change leaves unchanged.

For each program, a gradient or a whole train step, a digest has the hash of its text, the number of
equations and casts, the FLOPs of its products by dtype, the bytes that its backward pass keeps, and
what its collectives carry over eight devices. For the program that XLA compiles for CPUs, it has
FLOPs, bytes accessed and temporary memory. Nothing runs.

The first six are the same on every machine that has this jax, and a test compares them. XLA's
counts may depend on the CPU. Tracing time, in units of the same model without jaxmp, depends on
everything, and has its own file.

    python benchmarks/digests.py                        # writes benchmarks/results
    python benchmarks/digests.py --compare              # says what differs from these results
    python benchmarks/digests.py --texts texts --only gpt-scan-autocast-bfloat16
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

# The package beside this script, and not one that is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from digest_functions import FUNCTIONS
from digest_modules import MODULES
from digest_program import Program
from digest_text import count_casts, equations_of, product_flops_by_dtype, sha_of, text_of
from digest_training import TRAINING

import jaxmp

RESULTS = pathlib.Path(__file__).parent / "results"
PROGRAMS = {**FUNCTIONS, **MODULES, **TRAINING}
Digest = dict[str, Any]

_SIXTEEN_BITS = {"bfloat16", "float16"}
# What does not depend on the machine, and what does.
TRACED = ("sha", "equations", "casts", "product_flops", "share_16_bit", "kept_bytes")
PARTITIONED = ("collectives",)
COMPILED = ("flops", "bytes_accessed", "temp_bytes")


def results_file(folder: pathlib.Path = RESULTS) -> pathlib.Path:
    """Where the digests of this jax are."""
    return folder / f"digests_jax{jax.__version__}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs with these arguments; returns how many programs differ, of those compared."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    names = args.only or sorted(PROGRAMS)
    if unknown := sorted(set(names) - set(PROGRAMS)):
        sys.exit(f"no such program: {', '.join(unknown)}. There are {', '.join(sorted(PROGRAMS))}")
    on_eight_cpus()
    path, now = results_file(args.results), {}
    writes = not (args.compare or args.no_write)
    for name in names:
        now[name] = digest(PROGRAMS[name](), _into(args.texts, name))
        print(json.dumps({name: now[name]}), flush=True)
        if writes:
            write(path, read(path) | {name: now[name]})
    if args.compare:
        return report(read(path), now, complete=not args.only)
    if writes and not args.only:
        write(path, now)  # without programs that are gone
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What jaxmp makes of many programs.")
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="these programs; the results keep the others")
    add("--texts", type=pathlib.Path, metavar="FOLDER", help="write the text of each program there")
    add("--compare", action="store_true", help="print what differs from the results; write none")
    add("--no-write", action="store_true", help="print only, write no results")
    add("--results", type=pathlib.Path, default=RESULTS, help="where the results are")
    return parser.parse_args(argv)


def on_eight_cpus() -> None:
    """Makes JAX see eight CPU devices, whatever else this machine has."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def _into(folder: pathlib.Path | None, name: str) -> pathlib.Path | None:
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.txt"


def digest(program: Program, into: pathlib.Path | None = None) -> Digest:
    """All that is compared of a program; its text goes into the file."""
    return traced(program, into) | partitioned(program) | compiled(program)


def traced(program: Program, into: pathlib.Path | None = None) -> Digest:
    """What the trace of a program says."""
    closed = jax.make_jaxpr(program.run)(*program.args)
    text = text_of(closed)
    if into is not None:
        into.write_text(text)
    flops = product_flops_by_dtype(closed)
    narrow = sum(n for dtypes, n in flops.items() if {*dtypes.split("+")} <= _SIXTEEN_BITS)
    kept = None
    if program.loss is not None:
        kept = jaxmp.audit(program.loss, *(program.loss_args or program.args)).residual_bytes
    return {
        "sha": sha_of(text),
        "equations": sum(1 for _ in equations_of(closed)),
        "casts": count_casts(closed),
        "product_flops": dict(sorted(flops.items())),
        "share_16_bit": round(narrow / (sum(flops.values()) or 1), 4),
        "kept_bytes": kept,
    }


def partitioned(program: Program) -> Digest:
    """The bytes that the collectives of a program carry, by kind and dtype."""
    if not program.is_sharded:
        return {"collectives": {}}
    carried: dict[str, int] = {}
    for row in jaxmp.sharding.collectives(program.run, *program.args):
        key = " ".join(filter(None, (row.kind, row.reducer, row.dtype)))
        carried[key] = carried.get(key, 0) + row.bytes
    return {"collectives": dict(sorted(carried.items()))}


def compiled(program: Program) -> Digest:
    """What XLA says of the program that it compiles for CPUs."""
    run: Any = program.run
    result = (run if hasattr(run, "lower") else jax.jit(run)).lower(*program.args).compile()
    cost: Any = result.cost_analysis()
    memory: Any = result.memory_analysis()
    return {
        "flops": round(cost["flops"]),
        "bytes_accessed": round(cost["bytes accessed"]),
        "temp_bytes": memory.temp_size_in_bytes,
    }


# --------------------------------------------------------------------------------------- results


def read(path: pathlib.Path) -> dict[str, Digest]:
    """The digests in a file, by the names of the programs; none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: pathlib.Path, digests: Mapping[str, Any]) -> None:
    """Writes a file of one line for each program, by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(name)}: {json.dumps(digests[name])}" for name in sorted(digests))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(before: Digest, now: Digest, fields: Iterable[str]) -> list[str]:
    """A line for each of these fields in which two digests differ."""
    return [
        f"{field}: {before.get(field)} -> {now.get(field)}"
        for field in fields
        if before.get(field) != now.get(field)
    ]


def report(before: Mapping[str, Digest], now: Mapping[str, Digest], *, complete: bool) -> int:
    """Prints what differs between the results and now; returns the number of programs that do.

    Args:
      before: the results.
      now: the digests of this run.
      complete: whether a program of the results that is not in this run is gone.
    """
    fields, count = (*TRACED, *PARTITIONED, *COMPILED), 0
    for name in sorted({*before, *now} if complete else now):
        if name not in before or name not in now:
            lines = ["is new" if name in now else "is gone"]
        else:
            lines = differences(before[name], now[name], fields)
        count += bool(lines)
        for line in lines:
            print(f"{name}: {line}")
    print(f"{count} of {len(now)} programs differ")
    return count


if __name__ == "__main__":
    sys.exit(bool(main()))
