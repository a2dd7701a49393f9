"""The cost of rules before training starts: a GPT under rules, and one annotated by hand.

The rules are applied to the modules, or given to autocast of the model, which finds the same
modules by their scopes. Autocast traces the model and then rewrites its program, at each trace.

Rules change nothing in the compiled program, as the tests show. They can cost Python time: when a
model is made or initialized, when a step is traced, and, in nnx, when a jitted function is called
with a model. The benchmark measures all of these for linen and nnx, with the layers one by one and
in a scan. The hand-annotated model takes part twice, which shows how exact the ratios are.

Most users trace once, in a fresh process, where everything takes longer than in a warm one:
`first trace` is measured in a new process each time.

    python benchmarks/bench_rules.py    # a quarter of an hour on two CPU cores
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax_gpt import LinenGPT, NnxGPT, cross_entropy
from lab.timing import Measurement, spread
from lab.tracing import alternating, make_room, python_calls, timed
from measurement import Column, Report, Row, add_repeats, parse
from stacked_models import Sizes

import jaxmp
import jaxmp.linen
import jaxmp.nnx

Flax = Literal["linen", "nnx"]
Stack = Literal["one by one", "scan"]
Author = Literal["by hand", "by hand, again", "rules", "autocast"]

_RULES = {
    "linen": jaxmp.PolicyRules({"LayerNorm_*": "float32"}, "mixed_bfloat16"),
    "nnx": jaxmp.PolicyRules({"norm*": "float32"}, "mixed_bfloat16"),
}
_BY_HAND: dict[str, Any] = {"dtype": jnp.bfloat16, "norm_dtype": jnp.float32}
_AUTHORS: tuple[Author, ...] = ("by hand", "by hand, again", "rules", "autocast")
_TOKENS = jax.ShapeDtypeStruct((2, 33), jnp.int32)
_CALLS = 20
_MEASURED = ("trace", "first", "init", "call")
_COLUMNS = (
    Column("case", "model"),
    Column("author", "precision set by"),
    Column("trace", "trace ms", ".1f"),
    Column("trace_ratio", "over by hand"),
    Column("trace_calls_ratio", "calls over by hand", ".3f"),
    Column("first", "first trace ms", ".0f"),
    Column("first_ratio", "over by hand"),
    Column("init", "init ms", ".1f"),
    Column("init_ratio", "over by hand"),
    Column("init_calls_ratio", "calls over by hand", ".3f"),
    Column("call", "nnx.jit call µs", ".0f"),
    Column("call_ratio", "over by hand"),
)


@dataclasses.dataclass(frozen=True)
class _Case:
    """A model, and who decided about its precision."""

    flax: Flax
    stack: Stack
    author: Author
    layers: int

    def make(self) -> Any:
        """The model; one of nnx is abstract, and takes as long as a real one to put under rules."""
        dtypes = {} if self.author in ("rules", "autocast") else _BY_HAND
        given = Sizes(self.layers, 64, 2, 32, heads=4, classes=256), self.stack == "scan"
        if self.flax == "linen":
            module = LinenGPT(*given, **dtypes)
            under = functools.partial(jaxmp.linen.apply_policy, module, _RULES["linen"])
            return under() if self.author == "rules" else module
        model = nnx.eval_shape(lambda: NnxGPT(*given, **dtypes))
        return jaxmp.nnx.apply_policy(model, _RULES["nnx"]) if self.author == "rules" else model

    def init(self) -> Any:
        """The abstract params of a new model."""
        model = self.make()
        if self.flax == "nnx":
            return nnx.state(model)
        inputs = jax.ShapeDtypeStruct((2, 32), jnp.int32)
        return jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]

    def trace(self, model: Any, params: Any) -> None:
        """Traces loss and gradients as nobody has before: the function is a new one."""
        graphdef: Any = nnx.graphdef(model) if self.flax == "nnx" else None
        low, rules = self.author == "autocast", _RULES[self.flax]

        def step(params: Any, tokens: jax.Array) -> Any:
            if self.flax == "nnx":

                def loss_of(model: Any) -> jax.Array:
                    call = jaxmp.nnx.autocast(model, rules) if low else model
                    return cross_entropy(call(tokens[:, :-1]), tokens)

                return nnx.value_and_grad(loss_of)(nnx.merge(graphdef, params))
            apply = jaxmp.autocast(model.apply, rules) if low else model.apply
            return jax.value_and_grad(
                lambda params: cross_entropy(apply({"params": params}, tokens[:, :-1]), tokens)
            )(params)

        jax.jit(step).trace(params, _TOKENS)

    def calls(self) -> Callable[[], None]:
        """Calls a compiled function with an nnx model, which nnx takes apart each time."""
        graphdef, state = nnx.split(self.make())
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        model = nnx.merge(graphdef, zeros)
        function = nnx.jit(lambda model: model.norm.scale[...])
        function(model)

        def call() -> None:
            for _ in range(_CALLS):
                function(model)

        return call

    def ways(self) -> dict[str, Callable[[], Any]]:
        """What is timed in this process."""
        ways: dict[str, Callable[[], Any]] = {
            "trace": functools.partial(self.trace, self.make(), self.init()),
            "init": self.init,
        }
        return ways if self.flax == "linen" else {**ways, "call": self.calls()}

    def first_trace(self) -> float:
        """The seconds of all of it, in a process that has done nothing else."""
        make_room()
        return timed(lambda: self.trace(self.make(), self.init()))


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    parser = argparse.ArgumentParser(description="What rules cost before training starts.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--flax", nargs="+", choices=["linen", "nnx"], default=["linen", "nnx"])
    stacks = ["one by one", "scan"]
    parser.add_argument("--stacks", nargs="+", choices=stacks, default=stacks)
    parser.add_argument("--processes", type=int, default=15, help="fresh ones for first traces")
    # A process of its own for one case, given as JSON.
    parser.add_argument("--first", help=argparse.SUPPRESS)
    add_repeats(parser, repeats=21, steps=1)
    args = parse(parser, argv)
    if args.first is not None:
        print(json.dumps(_Case(**json.loads(args.first)).first_trace()))
        return []
    rows = [
        row
        for flax, stack in itertools.product(args.flax, args.stacks)
        for row in _rows([_Case(flax, stack, author, args.layers) for author in _AUTHORS], args)
    ]
    assumptions = [
        f"GPT of {args.layers} layers: 4 matrix products and 2 norms in each; the sizes do not "
        "matter, since nothing is computed.",
        f"{args.repeats} rounds in which every way takes one turn, in alternating order, and "
        f"{args.processes} rounds of fresh processes. Times are medians; ratios are taken within "
        "rounds: median (least to greatest).",
        "All times are CPU time of the process, which other work on the machine disturbs less, and "
        "are taken on a stack with room for all frames.",
        "Calls are those of Python functions, which cProfile counts: nearly the same on every run.",
        "Trace: jax.jit(step).trace of loss and gradients, with a new function each time.",
        "First trace: init and trace in a fresh process, imports not counted.",
        "Init: making the model (and apply_policy), and its abstract init.",
        "nnx.jit call: a call of a compiled function that reads one param of the model.",
    ]
    title = "A GPT under rules, before it trains"
    return Report("bench_rules", title, _COLUMNS, assumptions, rows).publish(args)


def _rows(cases: Sequence[_Case], args: argparse.Namespace) -> list[Row]:
    ways = [case.ways() for case in cases]
    found = {what: [Measurement() for _ in cases] for what in _MEASURED}
    # The first round is not counted: it fills JAX's and Flax's caches.
    for turn in range(args.repeats + 1):
        for i in alternating(len(cases), turn):
            for what, way in ways[i].items():
                seconds = timed(way)
                if turn:
                    found[what][i].seconds.append(seconds)
    for turn in range(args.processes):
        for i in alternating(len(cases), turn):
            found["first"][i].seconds.append(_first_trace_elsewhere(cases[i]))
    rows = [_row(case, i, found) for i, case in enumerate(cases)]
    for what in ("trace", "init"):
        counts = [python_calls(way[what]) for way in ways]
        for row, count in zip(rows, counts, strict=True):
            row |= {f"{what}_calls": count, f"{what}_calls_ratio": count / counts[0]}
    return rows


def _first_trace_elsewhere(case: _Case) -> float:
    command = [sys.executable, __file__, "--first", json.dumps(dataclasses.asdict(case))]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _row(case: _Case, index: int, found: dict[str, list[Measurement]]) -> Row:
    row: Row = {"case": f"{case.flax}, {case.stack}", "author": case.author}
    for what in _MEASURED:
        mine, by_hand = found[what][index], found[what][0]
        if mine.seconds:
            row[what] = statistics.median(mine.seconds) * (1e6 / _CALLS if what == "call" else 1e3)
            row[f"{what}_ratio"] = spread(mine.ratios(by_hand)) if index else None
            row[f"{what}_seconds"] = mine.seconds
    return row


if __name__ == "__main__":
    main()
