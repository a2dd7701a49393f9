"""The cost of autocast: before a step runs, while it runs, and outside of jit.

JAX's tracers trace, plan and rerun the program, and the result has more operations than the float32
program. Annotating by hand adds operations too. Tracing and lowering are therefore compared with
the float32 program and with a hand-annotated one, for linen and nnx, with the layers one by one and
in a scan, and for plain JAX. Then a step and a small function run. The baseline takes part twice,
which shows how exact the ratios are.

    python benchmarks/bench_autocast.py    # five minutes on two CPU cores
"""

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax_gpt import LinenGPT, NnxGPT, cross_entropy
from gpt import GPT
from lab.timing import Measurement, spread
from lab.tracing import alternating, python_calls, timed
from measurement import Column, Report, Row, add_repeats, parse
from stacked_models import Sizes

import jaxmp
import jaxmp.nnx

Author = Literal["nobody: float32", "nobody, again", "by hand", "autocast"]
Way = Callable[[], Any]

_POLICY = "mixed_bfloat16"
_AUTHORS: tuple[Author, ...] = ("nobody: float32", "nobody, again", "by hand", "autocast")
_REDUCED = "params=float32,compute=bfloat16,output=float32,reduce=bfloat16"
_CALLS = 100
_COLUMNS = (
    Column("case", "model"),
    Column("author", "precision set by"),
    Column("total", "trace and lower ms", ".0f"),
    Column("total_ratio", "over float32"),
    Column("by_hand_ratio", "over by hand"),
    Column("calls_ratio", "calls over float32", ".2f"),
    Column("run", "run ms", ".3g"),
    Column("run_ratio", "over by hand in jit"),
)


def _lowering(library: str, stack: str, layers: int, author: Author) -> Way:
    """What traces loss and gradients as nobody has before, and lowers them."""
    tokens = jax.ShapeDtypeStruct((2, 33), jnp.int32)
    if library == "plain JAX":
        gpt = GPT(layers, width=64, heads=4, vocab=256, context=32)
        plain = _with_precision(gpt.loss, author)
        return _new(jax.value_and_grad(plain), jax.eval_shape(gpt.init), tokens)
    low = jnp.bfloat16 if author == "by hand" else None
    given = Sizes(layers, 64, 2, 32, heads=4, classes=256), stack == "scan", low, low
    if library == "linen":
        linen = LinenGPT(*given)
        inputs = jax.ShapeDtypeStruct((2, 32), jnp.int32)
        params = jax.eval_shape(linen.init, jax.random.key(0), inputs)
        loss: Callable[..., Any] = functools.partial(_loss, linen.apply)
        loss = jaxmp.autocast(loss, _POLICY) if author == "autocast" else loss
        return _new(jax.value_and_grad(loss), params, tokens)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: NnxGPT(*given)))
    of_model = jaxmp.nnx.autocast(_loss, _POLICY) if author == "autocast" else _loss

    def gradient(state: Any, tokens: Any) -> Any:
        return nnx.value_and_grad(of_model)(nnx.merge(graphdef, state), tokens)

    return _new(gradient, state, tokens)


def _new(function: Callable[..., Any], *arguments: Any) -> Way:
    return lambda: jax.jit(lambda *args: function(*args)).trace(*arguments).lower()


def _loss(*model_and_tokens: Any) -> jax.Array:
    *model, tokens = model_and_tokens
    return cross_entropy(model[0](*model[1:], tokens[:, :-1]), tokens)


def _with_precision(loss: Callable[..., Any], author: str) -> Callable[..., Any]:
    """A loss of plain JAX in the precision that somebody decided on."""
    if author.startswith("autocast"):
        return jaxmp.autocast(loss, _POLICY)
    if author.startswith("by hand"):
        return lambda params, batch: loss(_in_bfloat16(params), batch)
    return loss


def _in_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    parser = argparse.ArgumentParser(description="What autocast costs.")
    libraries, stacks = ["linen", "nnx", "plain JAX"], ["one by one", "scan"]
    parser.add_argument("--libraries", nargs="+", choices=libraries, default=libraries)
    parser.add_argument("--stacks", nargs="+", choices=stacks, default=stacks)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--width", type=int, default=256, help="of the step that is run")
    add_repeats(parser, repeats=4, steps=2)
    args = parse(parser, argv)
    rows: list[Row] = []
    # The first trace of all takes longer.
    for library, stack, author in itertools.product(args.libraries, args.stacks, _AUTHORS):
        _lowering(library, stack, 2, author)()
    for library, stack, layers in itertools.product(args.libraries, args.stacks, args.layers):
        if library != "plain JAX" or stack == "scan":  # of which there is one
            rows += _tracing_rows(library, stack, layers, args)
    rows += _running_rows("a step of plain JAX", _steps(args), args, args.steps)
    rows += _running_rows("a call of a small function", _small_calls(), args, _CALLS)
    report = Report("bench_autocast", "A GPT under autocast", _COLUMNS, _assumptions(args), rows)
    return report.publish(args)


def _assumptions(args: argparse.Namespace) -> list[str]:
    return [
        "All times are CPU time of the process, which other work on the machine disturbs less.",
        f"{args.repeats} rounds in which every way takes one turn, in alternating order; fewer, "
        f"but 2, for more than {min(args.layers)} layers, and twice as many of runs. Times are "
        "medians; ratios are taken within rounds: median (least to greatest).",
        "Trace and lower: jax.jit(value_and_grad of a new function).trace(...).lower(), in a warm "
        "process. The sizes do not matter.",
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
    ]


def _tracing_rows(library: str, stack: str, layers: int, args: argparse.Namespace) -> list[Row]:
    """Traces and lowers each program in each round."""
    ways = [_lowering(library, stack, layers, author) for author in _AUTHORS]
    found = {author: Measurement() for author in _AUTHORS}
    for turn in range(max(2, args.repeats * min(args.layers) // layers)):
        for i in alternating(len(ways), turn):
            found[_AUTHORS[i]].seconds.append(timed(ways[i]))
    calls = [python_calls(way) for way in ways] if layers == min(args.layers) else []
    rows: list[Row] = []
    for i, (author, mine) in enumerate(found.items()):
        row: Row = {"case": f"{library}, {layers} layers, {stack}", "author": author}
        row |= {"total": statistics.median(mine.seconds) * 1e3, "total_seconds": mine.seconds}
        row["total_ratio"] = spread(mine.ratios(found[_AUTHORS[0]])) if i else None
        if author == "autocast":
            row["by_hand_ratio"] = spread(mine.ratios(found["by hand"]))
        rows.append(row | ({"calls_ratio": calls[i] / calls[0]} if calls else {}))
    return rows


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
