"""The cost of autocast: before a step runs, while it runs, and outside of jit.

JAX's tracers trace, plan and rerun the program, and the result has more operations than the float32
program. Annotating by hand adds operations too. Tracing and lowering are therefore compared with
the float32 program and with a hand-annotated one, for linen and nnx, with the layers one by one and
in a scan, and for plain JAX. Then a step and a small function run. The baseline takes part twice,
which shows how exact the ratios are.

    python benchmarks/bench_autocast.py    # five minutes on two CPU cores

`peers_autocast.py` measures the cost of other libraries, in an environment where they run.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
from bench_rules import (
    _alternating as alternating,
    _LinenGPT as LinenGPT,
    _loss as cross_entropy,
    _NnxGPT as NnxGPT,
    _python_calls as python_calls,
    _timed as timed,
)
from flax import nnx
from gpt import GPT
from lab.timing import Measurement, spread
from measurement import Column, Report, Row, add_common_arguments

import jaxmp
import jaxmp.nnx
from jaxmp._autocast import api
from jaxmp._program import tracing

Library = Literal["linen", "nnx", "plain JAX"]
Stack = Literal["one by one", "scan"]
Author = Literal["nobody: float32", "nobody, again", "by hand", "autocast"]
Way = Callable[[], Any]

_POLICY = "mixed_bfloat16"
_AUTHORS: tuple[Author, ...] = ("nobody: float32", "nobody, again", "by hand", "autocast")
_BY_HAND: dict[str, Any] = dict.fromkeys(("dtype", "norm_dtype", "head_dtype"), jnp.bfloat16)
_REDUCED = "params=float32,compute=bfloat16,output=float32,reduce=bfloat16"
_CALLS = 100
_ABOUT_PEERS = (
    "Rows with versions in brackets are from peers_autocast.py, run before in an environment of "
    "their own; an error stands where a library cannot trace the model."
)
_COLUMNS = (
    Column("case", "model"),
    Column("author", "precision set by"),
    Column("total", "trace and lower ms", ".0f"),
    Column("total_ratio", "over float32"),
    Column("by_hand_ratio", "over by hand"),
    Column("calls_ratio", "calls over float32", ".2f"),
    Column("trace", "tracing the function ms", ".0f"),
    Column("plan", "planning ms", ".0f"),
    Column("again", "running it again ms", ".0f"),
    Column("rest", "differentiating and lowering ms", ".0f"),
    Column("run", "run ms", ".3g"),
    Column("run_ratio", "over by hand in jit"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and who decided about its precision."""

    library: Library
    stack: Stack
    layers: int
    author: Author

    def functions(self) -> "Functions":
        """What there is to trace, with abstract params."""
        dtypes = _BY_HAND if self.author == "by hand" else {}
        tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
        if self.library == "plain JAX":
            gpt = GPT(self.layers, width=64, heads=4, vocab=256, context=31)
            loss: Callable[..., Any] = _with_precision(gpt.loss, self.author)
            return Functions(loss, jax.value_and_grad(loss), (jax.eval_shape(gpt.init), tokens))
        if self.library == "linen":
            linen = LinenGPT(self.layers, self.stack, **dtypes)
            params = jax.eval_shape(linen.init, jax.random.key(0), tokens)
            loss = functools.partial(_loss, linen.apply)
            loss = jaxmp.autocast(loss, _POLICY) if self.author == "autocast" else loss
            return Functions(loss, jax.value_and_grad(loss), (params, tokens))
        abstract = nnx.eval_shape(lambda: NnxGPT(self.layers, self.stack, **dtypes))
        graphdef, state = nnx.split(abstract)
        of_model = jaxmp.nnx.autocast(_loss, _POLICY) if self.author == "autocast" else _loss
        return Functions(
            lambda state, tokens: of_model(nnx.merge(graphdef, state), tokens),
            lambda state, tokens: nnx.value_and_grad(of_model)(nnx.merge(graphdef, state), tokens),
            (state, tokens),
        )


@dataclasses.dataclass(frozen=True)
class Functions:
    """A loss, its derivative, and what to trace both with."""

    loss: Callable[..., Any]
    value_and_grad: Callable[..., Any]
    arguments: tuple[Any, ...]

    def lower(self) -> None:
        """Traces loss and gradients as nobody has before, and lowers them."""
        jax.jit(lambda *args: self.value_and_grad(*args)).trace(*self.arguments).lower()

    def forward(self) -> None:
        """Traces the loss alone."""
        jax.make_jaxpr(lambda *args: self.loss(*args))(*self.arguments)


def _loss(*model_and_tokens: Any) -> jax.Array:
    *model, tokens = model_and_tokens
    logits = model[0](*model[1:], tokens)
    return cross_entropy(logits.astype(jnp.float32), tokens)


def _with_precision(loss: Callable[..., Any], author: str) -> Callable[..., Any]:
    """A loss of plain JAX in the precision that somebody decided on."""
    if author.startswith("autocast"):
        return jaxmp.autocast(loss, _POLICY)
    if author.startswith("by hand"):
        return lambda params, batch: loss(_in_bfloat16(params), batch)
    return loss


def _in_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


@contextlib.contextmanager
def _phases(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the CPU time that the parts of autocast take."""

    def timing(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            out = part(*args, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - begin
            return out

        return call

    parts = [
        (tracing, "trace_call", "trace"),
        (api, "plan", "plan"),
    ]
    with contextlib.ExitStack() as stack:
        for module, part, name in parts:
            replaced = timing(name, getattr(module, part))
            stack.enter_context(mock.patch.object(module, part, replaced))
        yield


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    rows: list[Row] = []
    _fill_caches(args)
    for library, stack, layers in itertools.product(args.libraries, args.stacks, args.layers):
        if library != "plain JAX" or stack == "scan":  # of which there is one
            rows += _tracing_rows(library, stack, layers, args)
    rows += _running_rows("a step of plain JAX", _steps(args), args, args.steps)
    rows += _running_rows("a call of a small function", _small_calls(), args, _CALLS)
    if args.peers is not None:
        rows += json.loads(args.peers.read_text())
    report = Report(
        name="autocast",
        title="A GPT under autocast",
        command=" ".join(["python benchmarks/bench_autocast.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=_assumptions(args),
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What autocast costs.")
    libraries, stacks = ["linen", "nnx", "plain JAX"], ["one by one", "scan"]
    parser.add_argument("--libraries", nargs="+", choices=libraries, default=libraries)
    parser.add_argument("--stacks", nargs="+", choices=stacks, default=stacks)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--width", type=int, default=256, help="of the step that is run")
    parser.add_argument("--peers", type=pathlib.Path, help="what peers_autocast.py has written")
    add_common_arguments(parser, repeats=4, steps=2)
    return parser.parse_args(argv)


def _assumptions(args: argparse.Namespace) -> list[str]:
    return [
        "All times are CPU time of the process, which other work on the machine disturbs less.",
        f"{args.repeats} rounds in which every way takes one turn, in alternating order; fewer, "
        f"but 2, for more than {min(args.layers)} layers, and twice as many of runs. Times are "
        "medians; ratios are taken within rounds: median (least to greatest).",
        "Trace and lower: jax.jit(value_and_grad of a new function).trace(...).lower(), in a warm "
        "process. Differentiating and lowering is what this takes longer than tracing the loss "
        "alone. The sizes do not matter.",
        "Calls are those of Python functions, which cProfile counts: nearly the same on every run.",
        "By hand: the dtypes of linen's and nnx's layers are bfloat16; in plain JAX the params are "
        "cast, and norms, softmax and loss are float32.",
        f"A step: loss and gradients of {_gpt(args)}, batch 4, {args.steps} in each turn.",
        "A CPU has no bfloat16 units: steps compare programs here, and say nothing about "
        "accelerators.",
        "By hand, gradients of params are rounded to bfloat16; under autocast they leave their "
        "products in float32, unless the policy says reduce=bfloat16.",
        f"A call: two dense layers of 4 numbers, so that most of it is dispatch; {_CALLS} calls in "
        "each turn.",
        *([_ABOUT_PEERS] if args.peers else []),
    ]


def _tracing_rows(
    library: Library, stack: Stack, layers: int, args: argparse.Namespace
) -> list[Row]:
    cases = [Case(library, stack, layers, author).functions() for author in _AUTHORS]
    rounds = max(2, args.repeats * min(args.layers) // layers)
    rows = tracing_rows(dict(zip(_AUTHORS, cases, strict=True)), rounds)
    if layers == min(args.layers):
        counts = [python_calls(case.lower) for case in cases]
        for row, count in zip(rows, counts, strict=True):
            row["calls_ratio"] = count / counts[0]
    case = f"{library}, {layers} layers, {stack}"
    return [{"case": case, **row} for row in rows]


def tracing_rows(cases: dict[Any, "Functions"], rounds: int) -> list[Row]:
    """Traces and lowers each function in each round; the first one is what others are over."""
    names = list(cases)
    total = {name: Measurement() for name in names}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for i in alternating(len(names), turn):
            case = cases[names[i]]
            seconds, forward = timed(case.lower), _timed_forward(case)
            total[names[i]].seconds.append(seconds)
            parts[names[i]].append({**forward, "rest": seconds - sum(forward.values())})
    rows: list[Row] = []
    for name, mine in total.items():
        row: Row = {"author": name, "total": statistics.median(mine.seconds) * 1e3}
        row["total_ratio"] = spread(mine.ratios(total[names[0]])) if rows else None
        if name == "autocast":
            row["by_hand_ratio"] = spread(mine.ratios(total["by hand"]))
        for part in parts[name][0]:
            row[part] = statistics.median(each[part] for each in parts[name]) * 1e3
        rows.append({**row, "total_seconds": mine.seconds, "parts_seconds": parts[name]})
    return rows


def _fill_caches(args: argparse.Namespace) -> None:
    """Traces what is to be measured in a smaller size: the first trace of all takes longer."""
    for library, stack, author in itertools.product(args.libraries, args.stacks, _AUTHORS):
        case = Case(library, stack, 2, author).functions()
        case.lower()
        case.forward()


def _timed_forward(case: Functions) -> dict[str, float]:
    """Seconds to trace the loss; under autocast, in the parts that make it up."""
    found: dict[str, float] = {}
    with _phases(found):
        seconds = timed(case.forward)
    return {**found, "again": seconds - sum(found.values())} if found else {"trace": seconds}


def _gpt(args: argparse.Namespace) -> GPT:
    return GPT(min(4, *args.layers), args.width, heads=4, vocab=1024, context=128)


def _steps(args: argparse.Namespace) -> dict[str, Way]:
    """Compiled steps."""
    gpt = _gpt(args)
    params = gpt.init()
    tokens = jax.random.randint(jax.random.key(1), (4, gpt.context + 1), 0, gpt.vocab)
    authors = ("by hand", "by hand, again", "nobody: float32", "autocast")
    losses = {author: _with_precision(gpt.loss, author) for author in authors}
    losses["autocast, reduce=bfloat16"] = jaxmp.autocast(gpt.loss, _REDUCED)
    ways: dict[str, Way] = {}
    for author, loss in losses.items():
        compiled = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
        ways[author] = functools.partial(compiled, params, tokens)
    return ways


def _small_calls() -> dict[str, Way]:
    """Calls from outside of jit."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (4, 4)),
        "bias": jnp.zeros(4),
        "out": jax.random.normal(keys[1], (4, 4)),
    }
    x = jax.random.normal(keys[2], (4, 4))

    def small(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(x.astype(params["in"].dtype) @ params["in"] + params["bias"])
        return jnp.mean((hidden @ params["out"]).astype(jnp.float32) ** 2)

    functions: dict[str, Callable[..., Any]] = {
        "by hand, in jax.jit": jax.jit(_with_precision(small, "by hand")),
        "by hand, in jax.jit, again": jax.jit(_with_precision(small, "by hand")),
        "nobody: float32, op by op": small,
        "autocast, not in jax.jit": _with_precision(small, "autocast"),
        "autocast, in jax.jit": jax.jit(_with_precision(small, "autocast")),
    }
    return {name: functools.partial(fun, params, x) for name, fun in functions.items()}


def _running_rows(
    what: str, ways: dict[str, Way], args: argparse.Namespace, times: int
) -> list[Row]:
    found = {name: Measurement() for name in ways}
    names, losses = list(ways), {}
    for turn in range(2 * args.repeats + 1):  # short ones
        for i in alternating(len(names), turn):
            way, into = ways[names[i]], found[names[i]]
            losses[names[i]] = float(jax.tree.leaves(way())[0])
            seconds = timed(functools.partial(_run, way, times)) / times
            if turn:
                into.seconds.append(seconds)
    first = found[names[0]]
    return [
        {
            "case": what,
            "author": name,
            "run": statistics.median(mine.seconds) * 1e3,
            "run_ratio": spread(mine.ratios(first)) if mine is not first else None,
            "run_seconds": mine.seconds,
            "loss": losses[name],
        }
        for name, mine in found.items()
    ]


def _run(way: Way, times: int) -> None:
    for _ in range(times):
        out = way()
    jax.block_until_ready(out)


if __name__ == "__main__":
    main()
