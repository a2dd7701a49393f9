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
import cProfile
import dataclasses
import functools
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from lab.timing import Measurement, spread
from measurement import Column, Report, Row, add_common_arguments

import jaxmp
import jaxmp.linen
import jaxmp.nnx

Flax = Literal["linen", "nnx"]
Stack = Literal["one by one", "scan"]
Author = Literal["by hand", "by hand, again", "rules", "autocast"]

_WIDTH, _HEADS, _VOCAB, _CONTEXT = 64, 4, 256, 32
_RULES = jaxmp.PolicyRules([("*norm*", "float32"), ("head", "float32")], "mixed_bfloat16")
_BY_HAND: dict[str, Any] = {
    "dtype": jnp.bfloat16,
    "norm_dtype": jnp.float32,
    "head_dtype": jnp.float32,
}
_COLUMNS = (
    Column("case", "model"),
    Column("author", "precision set by"),
    Column("trace", "trace ms", ".1f"),
    Column("trace_ratio", "over by hand"),
    Column("trace_calls_ratio", "calls over by hand", ".3f"),
    Column("anywhere_ratio", "time at any stack depth", ".2f"),
    Column("first", "first trace ms", ".0f"),
    Column("first_ratio", "over by hand"),
    Column("init", "init ms", ".1f"),
    Column("init_ratio", "over by hand"),
    Column("init_calls_ratio", "calls over by hand", ".3f"),
    Column("call", "nnx.jit call µs", ".0f"),
    Column("call_ratio", "over by hand"),
)


class _LinenBlock(nn.Module):
    dtype: Any = None
    norm_dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        h = nn.LayerNorm(dtype=self.norm_dtype, name="norm_attention")(x)
        shape = (3, _HEADS, _WIDTH // _HEADS)
        mixed = _attend(nn.DenseGeneral(shape, dtype=self.dtype, name="qkv")(h))
        x = x + nn.DenseGeneral(_WIDTH, axis=(-2, -1), dtype=self.dtype, name="out")(mixed)
        h = nn.LayerNorm(dtype=self.norm_dtype, name="norm_mlp")(x)
        h = nn.gelu(nn.Dense(4 * _WIDTH, dtype=self.dtype, name="up")(h))
        return x + nn.Dense(_WIDTH, dtype=self.dtype, name="down")(h), None


class _LinenGPT(nn.Module):
    layers: int
    stack: Stack
    dtype: Any = None
    norm_dtype: Any = None
    head_dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(_VOCAB, _WIDTH, dtype=self.dtype, name="tokens")(tokens)
        positions = jnp.arange(tokens.shape[1])[None]
        x = x + nn.Embed(_CONTEXT, _WIDTH, dtype=self.dtype, name="positions")(positions)
        if self.stack == "scan":
            axes: dict[Any, Any] = {"params": 0}
            rngs: dict[Any, bool] = {"params": True}
            Blocks = nn.scan(_LinenBlock, variable_axes=axes, split_rngs=rngs, length=self.layers)
            x, _ = Blocks(self.dtype, self.norm_dtype, name="blocks")(x, None)
        else:
            for i in range(self.layers):
                x, _ = _LinenBlock(self.dtype, self.norm_dtype, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.norm_dtype, name="norm_out")(x)
        return nn.Dense(_VOCAB, dtype=self.head_dtype, name="head")(x)


class _NnxBlock(nnx.Module):
    def __init__(self, dtype: Any, norm_dtype: Any, rngs: nnx.Rngs) -> None:
        shape = (3, _HEADS, _WIDTH // _HEADS)
        self.norm_attention = nnx.LayerNorm(_WIDTH, dtype=norm_dtype, rngs=rngs)
        self.qkv = nnx.LinearGeneral(_WIDTH, shape, dtype=dtype, rngs=rngs)
        self.out = nnx.LinearGeneral(shape[1:], _WIDTH, axis=(-2, -1), dtype=dtype, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(_WIDTH, dtype=norm_dtype, rngs=rngs)
        self.up = nnx.Linear(_WIDTH, 4 * _WIDTH, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * _WIDTH, _WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(_attend(self.qkv(self.norm_attention(x))))
        return x + self.down(nnx.gelu(self.up(self.norm_mlp(x))))


class _NnxGPT(nnx.Module):
    def __init__(
        self,
        layers: int,
        stack: Stack,
        dtype: Any = None,
        norm_dtype: Any = None,
        head_dtype: Any = None,
    ) -> None:
        rngs, self.stack = nnx.Rngs(0), stack
        make = functools.partial(_NnxBlock, dtype, norm_dtype)
        self.tokens = nnx.Embed(_VOCAB, _WIDTH, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(_CONTEXT, _WIDTH, dtype=dtype, rngs=rngs)
        self.blocks: Any = (
            nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs)
            if stack == "scan"
            else nnx.List([make(rngs) for _ in range(layers)])
        )
        self.norm_out = nnx.LayerNorm(_WIDTH, dtype=norm_dtype, rngs=rngs)
        self.head = nnx.Linear(_WIDTH, _VOCAB, dtype=head_dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])[None])
        if self.stack == "scan":
            step: Any = lambda block, x: block(x)  # noqa: E731
            x = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm_out(x))


def _attend(qkv: jax.Array) -> jax.Array:
    q, k, v = jnp.moveaxis(qkv, -3, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -1e4)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    targets = jnp.roll(tokens, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


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
        if self.flax == "linen":
            module = _LinenGPT(self.layers, self.stack, **dtypes)
            return jaxmp.linen.apply_policy(module, _RULES) if self.author == "rules" else module
        model = nnx.eval_shape(lambda: _NnxGPT(self.layers, self.stack, **dtypes))
        return jaxmp.nnx.apply_policy(model, _RULES) if self.author == "rules" else model

    def init(self) -> Any:
        """The abstract params of a new model."""
        model = self.make()
        if self.flax == "nnx":
            return nnx.state(model)
        return jax.eval_shape(model.init, jax.random.key(0), _tokens())["params"]

    def trace(self, model: Any, params: Any) -> None:
        """Traces loss and gradients as nobody has before: the function is a new one."""
        graphdef: Any = nnx.graphdef(model) if self.flax == "nnx" else None
        low = self.author == "autocast"

        def step(params: Any, tokens: jax.Array) -> Any:
            if self.flax == "nnx":

                def loss_of(model: Any) -> jax.Array:
                    call = jaxmp.nnx.autocast(model, _RULES) if low else model
                    return _loss(call(tokens), tokens)

                return nnx.value_and_grad(loss_of)(nnx.merge(graphdef, params))
            apply = jaxmp.autocast(model.apply, _RULES) if low else model.apply
            return jax.value_and_grad(
                lambda params: _loss(apply({"params": params}, tokens), tokens)
            )(params)

        jax.jit(step).trace(params, _tokens())

    def calls(self) -> Callable[[], None]:
        """Calls a compiled function with an nnx model, which nnx takes apart each time."""
        graphdef, state = nnx.split(self.make())
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        model = nnx.merge(graphdef, zeros)
        function = nnx.jit(lambda model: model.head.bias[...])
        function(model)

        def call() -> None:
            for _ in range(_CALLS):
                function(model)

        return call


_AUTHORS: tuple[Author, ...] = ("by hand", "by hand, again", "rules", "autocast")
_CALLS = 20
_DEPTHS = range(0, 136, 4)  # so many frames fill 16 KiB
_MEASURED = ("trace", "first", "init", "call", "anywhere")


def _tokens() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, _CONTEXT), jnp.int32)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    if args.first is not None:
        print(json.dumps(_first_trace(_Case(**json.loads(args.first)))))
        return []
    rows = [
        row
        for flax, stack in itertools.product(args.flax, args.stacks)
        for row in _rows([_Case(flax, stack, author, args.layers) for author in _AUTHORS], args)
    ]
    report = Report(
        name="rules",
        title="A GPT under rules, before it trains",
        command=" ".join(["python benchmarks/bench_rules.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=_assumptions(args),
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What rules cost before training starts.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--flax", nargs="+", choices=["linen", "nnx"], default=["linen", "nnx"])
    stacks = ["one by one", "scan"]
    parser.add_argument("--stacks", nargs="+", choices=stacks, default=stacks)
    parser.add_argument("--processes", type=int, default=15, help="fresh ones for first traces")
    # A process of its own for one case, given as JSON.
    parser.add_argument("--first", help=argparse.SUPPRESS)
    add_common_arguments(parser, repeats=21, steps=1)
    return parser.parse_args(argv)


def _assumptions(args: argparse.Namespace) -> list[str]:
    return [
        f"GPT of {args.layers} layers: 6 matrix products and 2 norms in each, and a head; the "
        "sizes do not matter, since nothing is computed.",
        f"{args.repeats} rounds in which every way takes one turn, in alternating order, and "
        f"{args.processes} rounds of fresh processes. Times are medians; ratios are taken within "
        "rounds: median (least to greatest).",
        "All times are CPU time of the process, which other work on the machine disturbs less, and "
        "are taken on a stack with room for all frames.",
        f"Time at any stack depth: the sum of traces below {_DEPTHS[0]} to {_DEPTHS[-1]} frames on "
        "the usual stack. CPython asks for 16 KiB of it at a time; where a busy function stands at "
        "the border, tracing takes up to twice as long, wherever the precision comes from.",
        "Calls are those of Python functions, which cProfile counts: nearly the same on every run.",
        "Trace: jax.jit(step).trace of loss and gradients, with a new function each time.",
        "First trace: init and trace in a fresh process, imports not counted.",
        "Init: making the model (and apply_policy), and its abstract init.",
        "nnx.jit call: a call of a compiled function that reads one param of the model.",
    ]


def _rows(cases: Sequence[_Case], args: argparse.Namespace) -> list[Row]:
    ways = [_ways(case) for case in cases]
    found = {what: [Measurement() for _ in cases] for what in _MEASURED}
    # The first round is not counted: it fills JAX's and Flax's caches.
    for turn in range(args.repeats + 1):
        for i in _alternating(len(cases), turn):
            for what, way in ways[i].items():
                seconds = _timed(way)
                if turn:
                    found[what][i].seconds.append(seconds)
    for turn in range(args.processes):
        for i in _alternating(len(cases), turn):
            found["first"][i].seconds.append(_first_trace_elsewhere(cases[i]))
    for turn, frames in enumerate(_DEPTHS):
        for i in _alternating(len(cases), turn):
            found["anywhere"][i].seconds.append(_timed(ways[i]["trace"], frames))
    rows = [_row(case, i, found) for i, case in enumerate(cases)]
    for what in ("trace", "init"):
        counts = [_python_calls(way[what]) for way in ways]
        for row, count in zip(rows, counts, strict=True):
            row[f"{what}_calls"] = count
            row[f"{what}_calls_ratio"] = count / counts[0]
    return rows


def _ways(case: _Case) -> dict[str, Callable[[], Any]]:
    """What is timed in this process."""
    ways: dict[str, Callable[[], Any]] = {
        "trace": functools.partial(case.trace, case.make(), case.init()),
        "init": case.init,
    }
    return ways if case.flax == "linen" else {**ways, "call": case.calls()}


def _python_calls(fun: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.runcall(fun)
    return sum(entry.callcount for entry in profile.getstats())


def _alternating(count: int, turn: int) -> list[int]:
    """The order of a round: every other one backwards, so that no place in it is better."""
    return list(range(count)) if turn % 2 else list(reversed(range(count)))


def _timed(fun: Callable[[], Any], frames: int | None = None) -> float:
    """Seconds of CPU time; on a roomy stack, or on the usual one below so many frames."""
    gc.collect()
    gc.disable()  # or somebody pays for the garbage of all
    begin = time.process_time()
    if frames is None:
        _on_a_roomy_stack(fun)
    else:
        _below(frames, fun)
    seconds = time.process_time() - begin
    gc.enable()
    return seconds


def _below(frames: int, fun: Callable[[], Any]) -> None:
    if frames:
        _below(frames - 1, fun)
    else:
        fun()


def _on_a_roomy_stack(fun: Callable[[], Any]) -> None:
    """Calls a function from a frame so large that CPython makes room for all frames in it at once.

    CPython's stack grows by 16 KiB, and asks the system for them anew each time that a call crosses
    the border: where a busy function happens to stand there, tracing takes up to twice as long, by
    hand and under rules, but not from the same callers.
    """
    _roomy_frame()(fun)


@functools.cache
def _roomy_frame() -> Callable[[Callable[[], Any]], None]:
    names = " = ".join(f"x{i}" for i in range(66_000))  # over half a MiB, hence a whole one
    scope: dict[str, Any] = {}
    exec(f"def call(fun):\n    if fun is None:\n        {names} = 0\n    fun()", scope)
    return scope["call"]


def _first_trace(case: _Case) -> float:
    _roomy_frame()
    return _timed(lambda: case.trace(case.make(), case.init()))


def _first_trace_elsewhere(case: _Case) -> float:
    given = json.dumps(dataclasses.asdict(case))
    command = [sys.executable, __file__, "--first", given]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _row(case: _Case, index: int, found: dict[str, list[Measurement]]) -> Row:
    row: Row = {"case": f"{case.flax}, {case.stack}", "author": case.author}
    for what in _MEASURED:
        mine, by_hand = found[what][index], found[what][0]
        if mine.seconds:
            row[what] = statistics.median(mine.seconds) * (1e6 / _CALLS if what == "call" else 1e3)
            row[f"{what}_ratio"] = spread(mine.ratios(by_hand)) if index else None
            row[f"{what}_seconds"] = mine.seconds
    anywhere = found["anywhere"]
    row["anywhere_ratio"] = sum(anywhere[index].seconds) / sum(anywhere[0].seconds)
    return row


if __name__ == "__main__":
    main()
