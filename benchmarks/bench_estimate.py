"""Whether an estimate ranks two programs as the compiler does, on pairs for a TPU v5e.

Nothing runs: libtpu (the extra `aot`) compiles both programs of each pair for a TPU that is not
here, and gives its own estimate in cycles. The roofline of `jaxmp.diagnostics.estimate` reads the
same programs, and knows nothing of cycles: only what a data sheet says.

    python benchmarks/bench_estimate.py
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from estimate_pairs import Pair, pairs
from measurement import RESULTS, Column, Report, Row

from jaxmp.diagnostics import estimate

_COLUMNS = (
    Column("pair", "pair"),
    Column("first", "first"),
    Column("second", "second"),
    Column("cycles", "million cycles of the first", ".3f"),
    Column("seconds", "its ms by roofline", ".3f"),
    Column("cycles_ratio", "second over first, cycles", ".2f"),
    Column("seconds_ratio", "by roofline", ".2f"),
    Column("agree", "same order"),
)
_ALIKE = 1.1  # an estimate tells no smaller difference
_ASSUMPTIONS = (
    "Compiled, not run; the hardware above only did the compiling. Cycles are the compiler's own "
    "estimates, with all turns of loops; copies of which it gives none are left out.",
    "The roofline has the rates of the data sheet: 197 TFLOP/s in bfloat16, 819 GB/s. Nothing in "
    "it is fitted to cycles.",
    "Pairs whose cycles differ by less than 10 % are alike: neither program is the faster one, and "
    "they do not count.",
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    rows = []
    for pair in pairs(small=args.quick):
        if args.pairs and pair.name not in args.pairs:
            continue
        rows.append(compared(pair, args.device))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    clear = [row["agree"] for row in rows if row["agree"] != "alike"]
    agree = f"{clear.count('yes')} of {len(clear)} pairs"
    report = Report(
        name="estimate",
        title=f"Which of two programs is faster on a {args.device}: {agree}",
        command=" ".join(["python benchmarks/bench_estimate.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=list(_ASSUMPTIONS),
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Estimates against the compiler's cycles.")
    add = parser.add_argument
    add("--device", default="v5e", help="a TPU of jaxmp.diagnostics.DEVICES")
    add("--pairs", nargs="+", help="names of the pairs; all by default")
    add("--quick", action="store_true", help="small programs, which say less")
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    return parser.parse_args(argv)


def compared(pair: Pair, device: str) -> Row:
    """Estimates both programs of a pair; ratios are of the second over the first."""
    (first, one, args), (second, two, others) = pair.first, pair.second
    a, b = estimate(one, *args, device=device), estimate(two, *others, device=device)
    if not a.cycles or not b.cycles:
        raise ValueError(f"only compilers for TPUs give cycles, got {device}")
    cycles, seconds = b.cycles / a.cycles, b.seconds / a.seconds
    return {
        "pair": pair.name,
        "first": first,
        "second": second,
        "cycles": a.cycles / 1e6,
        "seconds": 1e3 * a.seconds,
        "cycles_ratio": cycles,
        "seconds_ratio": seconds,
        "agree": _same_order(cycles, seconds),
    }


def _same_order(cycles: float, seconds: float) -> str:
    if 1 / _ALIKE < cycles < _ALIKE:
        return "alike"
    return "yes" if (cycles > 1) == (seconds > 1) else "no"


if __name__ == "__main__":
    main()
