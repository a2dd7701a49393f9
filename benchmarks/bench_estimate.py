"""Whether an estimate ranks two programs as the compiler does, on ten pairs for a TPU v5e.

Nothing runs: libtpu (the extra `aot`) compiles both programs of each pair for a TPU that is not
here, and gives its own estimate in cycles. The roofline of `jaxmp.diagnostics.estimate` reads the
same programs, and knows nothing of cycles: only what a data sheet says.

    python benchmarks/bench_estimate.py
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from measurement import RESULTS, Column, Report, Row

import jaxmp
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
_ASSUMPTIONS = (
    "Compiled, not run; the hardware above only did the compiling. Cycles are the compiler's own "
    "estimates, with all turns of loops; copies of which it gives none are left out.",
    "The roofline has the rates of the data sheet: 197 TFLOP/s in bfloat16, 819 GB/s. The rate of "
    "vector units, which no sheet has, was fitted to cycles of this compiler, of a language model "
    "and of some of these programs. When it was left out, the order was the same in all pairs, but "
    "heads of attention came out alike (1.00).",
)

Program = tuple[str, Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two programs that one may have to choose between: `(name, function, abstract arguments)`."""

    name: str
    first: Program
    second: Program


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
    agree = sum(row["agree"] == "yes" for row in rows)
    report = Report(
        name="estimate",
        title=f"Which of two programs is faster on a {args.device}: {agree} of {len(rows)} pairs",
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
        "agree": "yes" if (cycles > 1) == (seconds > 1) else "no",
    }


def pairs(small: bool = False) -> list[Pair]:
    """The ten pairs."""
    part = 4 if small else 1
    return [
        _dtypes(part),
        _recomputation(part),
        _fusion(part),
        _microbatches(part),
        _loops(part),
        _attention(part),
        _optimizer_state(part),
        _convolutions(part),
        _heads(part),
        _lookup(part),
    ]


def abstract(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An array of which only shape and dtype count."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _layers(part: int, dtype: Any = jnp.bfloat16, count: int = 1) -> tuple[Any, Any]:
    """Feed-forward layers of a transformer: their params and their input."""
    width = 1024 // part
    weights = {
        "scale": abstract(width, dtype=dtype),
        "up": abstract(width, 4 * width, dtype=dtype),
        "down": abstract(4 * width, width, dtype=dtype),
    }
    return [weights] * count, abstract(4096, width, dtype=dtype)


def _layer(x: Any, weights: Any) -> Any:
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    hidden = jax.nn.gelu((normal * weights["scale"]).astype(x.dtype) @ weights["up"])
    return x + hidden @ weights["down"]


def _loss(layer: Callable[..., Any] = _layer) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        for weights in params:
            x = layer(x, weights)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def _dtypes(part: int) -> Pair:
    gradients = jax.grad(_loss(), (0, 1))
    return Pair(
        "dtype of a layer and its gradients",
        ("bfloat16", gradients, _layers(part)),
        ("float32", gradients, _layers(part, jnp.float32)),
    )


def _recomputation(part: int) -> Pair:
    args = _layers(part, count=2)
    return Pair(
        "checkpoints around layers",
        ("without", jax.grad(_loss()), args),
        ("with", jax.grad(_loss(jax.checkpoint(_layer))), args),
    )


def _fusion(part: int) -> Pair:
    """The same operations; a barrier after each keeps the compiler from fusing them."""

    def mlp(barrier: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, up: Any, down: Any) -> Any:
            wide = barrier(x.astype(jnp.float32))
            mean = barrier(jnp.mean(wide**2, axis=-1, keepdims=True))
            normal = barrier((wide * lax.rsqrt(mean + 1e-6)).astype(x.dtype))
            hidden = barrier(normal @ up)
            active = barrier(jax.nn.gelu(hidden))
            return barrier(x + barrier(active @ down))

        return run

    width = 2048 // part
    args = (abstract(8192, width), abstract(width, 4 * width), abstract(4 * width, width))
    return Pair(
        "a block of a transformer",
        ("fused", mlp(lambda x: x), args),
        ("a kernel for each operation", mlp(lax.optimization_barrier), args),
    )


def _microbatches(part: int) -> Pair:
    params, x = _layers(part, jnp.float32)
    tx = jaxmp.mixed_precision(optax.sgd(1e-3, momentum=0.9), "mixed_bfloat16")
    state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=tx), params)
    whole, split = (
        jaxmp.make_train_step(_loss(), "mixed_bfloat16", microbatches=n) for n in (1, 8)
    )
    return Pair("parts of a batch", ("one", whole, (state, x)), ("eight", split, (state, x)))


def _loops(part: int) -> Pair:
    """Layers that are small beside what a loop copies for each of them."""
    width, layers = 512 // part, 8

    def block(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = weights
        return x + jnp.tanh(x @ up) @ down, None

    def scanned(x: Any, *stacked: Any) -> Any:
        return jnp.sum(lax.scan(block, x, stacked)[0], dtype=jnp.float32)

    def unrolled(x: Any, *stacked: Any) -> Any:
        return jnp.sum(lax.scan(block, x, stacked, unroll=True)[0], dtype=jnp.float32)

    args = (
        abstract(8192, width),
        abstract(layers, width, 2 * width),
        abstract(layers, 2 * width, width),
    )
    return Pair(
        "layers and their gradients",
        ("unrolled", jax.grad(unrolled, (0, 1, 2)), args),
        ("in a scan", jax.grad(scanned, (0, 1, 2)), args),
    )


def _attention(part: int) -> Pair:
    """Causal attention: all scores at once, or those of a window of neighbouring blocks."""
    length, block, heads, size = 4096 // part, 512 // part, 8, 128

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k).astype(jnp.float32) * size**-0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(q.dtype)
        return jnp.einsum("...hqk,...khd->...qhd", weights, v)

    def whole(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, jnp.tril(jnp.ones((length, length), bool)))

    def window(q: Any, k: Any, v: Any) -> Any:
        blocked = [x.reshape(x.shape[0], -1, block, heads, size) for x in (q, k, v)]
        k, v = (
            jnp.concatenate([jnp.roll(x, shift, 1) for shift in (3, 2, 1, 0)], 2)
            for x in blocked[1:]
        )
        mask = jnp.tril(jnp.ones((block, 4 * block), bool), 3 * block)
        return attend(blocked[0], k, v, mask).reshape(q.shape)

    args = (abstract(1, length, heads, size),) * 3
    return Pair("attention", ("in a window", window, args), ("of all", whole, args))


def _optimizer_state(part: int) -> Pair:
    params = {"w": abstract(8192 // part, 4096, dtype=jnp.float32)}

    def update(**options: Any) -> Program:
        tx = jaxmp.mixed_precision(optax.adamw(1e-3), "float32", **options)

        def step(grads: Any, state: Any, params: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return "", step, (params, jax.eval_shape(tx.init, params), params)

    return Pair(
        "moments of AdamW",
        ("bfloat16", *update(moments="bfloat16")[1:]),
        ("float32", *update()[1:]),
    )


def _convolutions(part: int) -> Pair:
    """Two layers of 3 x 3 see as far as one of 5 x 5 (Simonyan and Zisserman, "VGG", 2014)."""
    channels = 256 // part

    def stack(x: Any, kernels: Any) -> Any:
        for kernel in kernels:
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            wide = y.astype(jnp.float32)
            scale = lax.rsqrt(jnp.mean(wide**2, (1, 2), keepdims=True) + 1e-5)
            x = jax.nn.relu(wide * scale).astype(x.dtype)
        return x

    def program(name: str, size: int, count: int) -> Program:
        kernels = [abstract(size, size, channels, channels)] * count
        return name, stack, (abstract(32, 32, 32, channels), kernels)

    return Pair(
        "layers of convolutions", program("two of 3 x 3", 3, 2), program("one of 5 x 5", 5, 1)
    )


def _heads(part: int) -> Pair:
    """As many operations in fewer or more heads; scores are more in the second."""
    length, width = 2048 // part, 1024 // part

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def program(heads: int) -> Program:
        args = (abstract(1, length, heads, width // heads),) * 3
        return str(heads), attend, args

    return Pair("heads of attention", program(8 // part), program(16 // part))


def _lookup(part: int) -> Pair:
    """Rows of a table, taken or multiplied out with ones and zeros."""
    rows, width, tokens = 2048 // part, 1024, 8192

    def taken(table: Any, ids: Any) -> Any:
        return jnp.take(table, ids, axis=0)

    def multiplied(table: Any, ids: Any) -> Any:
        return jax.nn.one_hot(ids, rows, dtype=table.dtype) @ table

    args = (abstract(rows, width), abstract(tokens, dtype=jnp.int32))
    return Pair("an embedding", ("gathered", taken, args), ("multiplied", multiplied, args))


if __name__ == "__main__":
    main()
