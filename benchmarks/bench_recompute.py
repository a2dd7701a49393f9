"""The savings of `recompute` on an H100 and a TPU v5e, as their compilers plan them.

Nothing runs there: the compilers of libtpu and of the CUDA plugin (the extra `aot`) compile loss
and gradients of six models for devices that are not present, with the layers in a scan and one by
one. The baseline is the model with hand-written casts. It is compared with the usual way to save
memory (`jax.checkpoint` around each block) and with autocast. A product that is computed twice
shows in the count of products, and on TPUs in the time that the compiler expects.

    python benchmarks/bench_recompute.py --platform gpu    # or tpu, which takes an hour
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import flax_gpt
import jax
from lab.compilers import EFFORTS, PLATFORMS, compiler_options, eight_devices
from lab.kernels import estimated_cycles
from lab.operations import hlo_product_flops
from measurement import Column, Report, Row, parse
from stacked_models import MODELS, Sizes

import jaxmp
from jaxmp._recompute.api import Mode

Author = Literal["by hand", "autocast", "linen", "nnx"]
Loop = Literal["scan", "unrolled"]

_NAMES = {"gpu": "H100", "tpu": "TPU v5e"}
_SIZES = {
    "gpt": Sizes(4, 1024, 8, 1024, heads=8, classes=8192),
    "gemma": Sizes(4, 1024, 4, 1024, heads=8, classes=8192),
    "vit": Sizes(4, 768, 32, 256, heads=12),
    "resnet": Sizes(4, 128, 128, 28),
    "lstm": Sizes(2, 512, 64, 256),
    "moe": Sizes(4, 512, 8, 512, heads=8, classes=2048),
}
_QUICK = Sizes(4, 64, 2, 64, heads=4, classes=64)  # of two, what is around the loop weighs most
_STEPS_UNROLLED = 16  # of the recurrent model, whose loop is that over time
_RATIOS = ("temp", "products", "cycles", "turns", "accessed")


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to write a model.

    Attributes:
      author: who decided about its precision.
      mode: that of `recompute`.
      checkpoint: the policy of a checkpoint around each block; None for no checkpoint.
    """

    author: Author
    mode: Mode = "never"
    checkpoint: str | None = None

    @property
    def name(self) -> str:
        """What the table calls it."""
        more = self.checkpoint or (None if self.mode == "never" else self.mode)
        return f"{self.author} + {more}" if more else self.author


_AUTHORS: tuple[Author, ...] = ("by hand", "autocast", "linen", "nnx")
_POLICIES: dict[str, Callable[..., Any]] = {
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "whole blocks": jax.checkpoint_policies.nothing_saveable,
}
_MODES: dict[Loop, tuple[Mode, ...]] = {
    "scan": ("never", "auto", "loops"),
    "unrolled": ("never", "auto", "always"),
}
_CONTENDERS: dict[Loop, tuple[Contender, ...]] = {
    loop: (
        *(Contender("by hand", mode) for mode in modes),
        *(Contender("by hand", checkpoint=name) for name in _POLICIES if loop == "scan"),
        *(Contender(author, mode) for author in _AUTHORS[1:] for mode in modes),
    )
    for loop, modes in _MODES.items()
}
_ALL = list(dict.fromkeys(each.name for way in _CONTENDERS.values() for each in way))


_COLUMNS = (
    Column("model", "model"),
    Column("loop", "layers"),
    Column("contender", "contender"),
    Column("temp", "temp MB", ".1f"),
    Column("temp_ratio", "x by hand", ".3f"),
    Column("temp_own", "x own", ".3f"),
    Column("products", "GFLOP", ".1f"),
    Column("products_ratio", "x by hand", ".3f"),
    Column("products_own", "x own", ".3f"),
    Column("cycles", "Mcycles, bodies once", ".2f"),
    Column("cycles_ratio", "x by hand", ".3f"),
    Column("turns", "Mcycles, all turns", ".2f"),
    Column("turns_ratio", "x by hand", ".3f"),
    Column("turns_own", "x own", ".3f"),
    Column("accessed", "GB accessed", ".2f"),
    Column("accessed_ratio", "x by hand", ".3f"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    args = _parse(argv)
    rows = list(_rows(args))
    rows += _means(rows)
    report = Report(
        "bench_recompute",
        f"Memory of models under recompute, compiled for {_NAMES[args.platform]}",
        [each for each in _COLUMNS if any(each.key in row for row in rows)],
        _assumptions(args),
        rows,
        name=f"recompute-{args.platform}",
    )
    return report.publish(args)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description="What recompute saves and costs.")
    add = parser.add_argument
    add("--platform", choices=PLATFORMS, default="gpu")
    add("--models", type=listed, default=list(MODELS), help="with commas between them")
    add("--loops", type=listed, default=["scan", "unrolled"])
    add("--contenders", type=listed, default=_ALL, help=", ".join(_ALL))
    add("--effort", choices=EFFORTS, default="default", help="of a TPU's compiler")
    add("--quick", action="store_true", help="tiny models, whose memory says nothing")
    args = parse(parser, argv)
    for given, known in ((args.models, MODELS), (args.loops, _MODES), (args.contenders, _ALL)):
        if unknown := set(given) - set(known):
            parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return args


def _assumptions(args: argparse.Namespace) -> list[str]:
    models = (f"{name}: {_sizes(args, name, 'scan')}" for name in args.models)
    return [
        "Compiled, not run; the hardware above only did the compiling. Loss and gradients, without "
        "an optimizer; params and gradients are arguments and results, and no temporaries.",
        "By hand: casts to bfloat16 written out, nothing recomputed. Own: the same author, without "
        "recompute or checkpoint.",
        "GFLOP of products: two for each multiply-add of matrix products and convolutions, times "
        "the turns of their loops.",
        "Cycles are what a TPU's compiler expects. Bytes accessed are its count, with each body of "
        "a loop once; the compiler for GPUs has none.",
        "Geometric means are those of the models above them that have all of a ratio.",
        f"The loop of lstm is that over time; unrolled it has {_STEPS_UNROLLED} steps.",
        *models,
        f"The least effort of a TPU's compiler: {args.effort == 'least'}.",
    ]


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    device = eight_devices(args.platform)[0]
    for name, loop in itertools.product(args.models, args.loops):
        found: dict[str, Row] = {}
        for contender in _CONTENDERS[loop]:
            if contender.name not in args.contenders:
                continue
            if contender.author in ("linen", "nnx") and name != "gpt":
                continue
            program = _program(contender, name, _sizes(args, name, loop), loop == "scan")
            row = {"model": name, "loop": loop, "contender": contender.name}
            row |= {"author": contender.author, "mode": contender.mode}
            row |= _cost(*program, device, args.effort)
            found[contender.name] = row
            row |= _ratios(row, found.get("by hand"), "ratio")
            row |= _ratios(row, found.get(contender.author), "own")
            # Each program takes its time, and what is known so far may be enough.
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row


def _sizes(args: argparse.Namespace, name: str, loop: str) -> Sizes:
    if args.quick:
        return dataclasses.replace(_QUICK, length=8) if name in ("lstm", "resnet") else _QUICK
    if name == "lstm" and loop == "unrolled":
        return dataclasses.replace(_SIZES[name], length=_STEPS_UNROLLED)
    return _SIZES[name]


def _program(contender: Contender, name: str, sizes: Sizes, scan: bool) -> tuple[Any, Any]:
    """The loss, and its abstract arguments."""
    if contender.author in ("linen", "nnx"):
        loss, params = flax_gpt.PROGRAMS[contender.author](sizes, scan)
        batch = jax.eval_shape(MODELS[name](sizes).batch)
        return jaxmp.recompute(loss, contender.mode), (params, batch)
    checkpoint = _POLICIES[contender.checkpoint] if contender.checkpoint else None
    model = MODELS[name](sizes, scan, contender.author == "by hand", checkpoint)
    by_hand = contender.author == "by hand"
    loss = model.loss if by_hand else jaxmp.autocast(model.loss, "mixed_bfloat16")
    arguments = jax.eval_shape(model.params), jax.eval_shape(model.batch)
    return jaxmp.recompute(loss, contender.mode), arguments


def _cost(loss: Callable[..., Any], arguments: Any, device: Any, effort: str) -> Row:
    """What the gradients of a loss need on a device."""
    place = functools.partial(_placed, jax.sharding.SingleDeviceSharding(device))
    lowered = jax.jit(jax.value_and_grad(loss)).lower(*jax.tree.map(place, arguments))
    is_tpu = device.platform == "tpu"
    begin = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options(device.platform, effort))
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"[Uu]sed ([\d.]+)G of [\d.]+G|required.*?\(([\d.]+)G\)", str(error))
        if needed is None:
            raise
        return {"too_large": f"needs {needed[1] or needed[2]} GB"}
    seconds = time.perf_counter() - begin
    memory: Any = compiled.memory_analysis()
    text = str(compiled.as_text())
    row: Row = {"temp": memory.temp_size_in_bytes / 1e6, "seconds": seconds}
    row["products"] = sum(hlo_product_flops(text).values()) / 1e9
    if is_tpu:
        row["cycles"], row["turns"] = (cycles / 1e6 for cycles in estimated_cycles(text))
    if cost := compiled.cost_analysis():
        row |= {"accessed": cost["bytes accessed"] / 1e9, "flops": cost["flops"]}
    return row


def _placed(sharding: Any, x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _ratios(row: Row, base: Row | None, name: str) -> Row:
    """Over another row; of what both have, and that is not nothing."""
    if base is None or (base is row and name == "own"):
        return {}
    return {f"{key}_{name}": row[key] / base[key] for key in _RATIOS if row.get(key) and base[key]}


def _means(rows: Sequence[Row]) -> list[Row]:
    """Of each contender over the models that have it."""
    means = []
    keys = [f"{key}_{name}" for key in _RATIOS for name in ("ratio", "own")]
    for loop, contender in dict.fromkeys((row["loop"], row["contender"]) for row in rows):
        same = [row for row in rows if (row["loop"], row["contender"]) == (loop, contender)]
        if len(same) > 1:
            mean: Row = {"model": "geometric mean", "loop": loop, "contender": contender}
            for key in keys:
                if all(key in row for row in same):
                    mean[key] = math.prod(row[key] for row in same) ** (1 / len(same))
            means.append(mean)
    return means


if __name__ == "__main__":
    main()
