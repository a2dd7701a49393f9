"""The cost of gathering weights that few examples meet: operations, and bytes between devices.

Nothing runs: the compilers of libtpu and of the CUDA plugin (the extra `aot`) compile gradients for
eight devices that are not present. The models are experts, to which tokens are sent with a
capacity, and layers with LoRA, whose weights are merged before use. The comparison covers plain
JAX, where the partitioner chooses what moves, FSDP that gathers all weights, and FSDP with
`gather=` for the weights in question.

    python benchmarks/bench_gather.py
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compiled_flops import compiled_flops
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, PyTree
from lab.compilers import PLATFORMS, eight_devices
from measurement import RESULTS, Column, Report, Row

import jaxmp
from jaxmp.sharding import FSDP, fully_sharded

BF16, F32 = jnp.bfloat16, jnp.float32
_TOKENS = (256, 2048, 16384)
_COLUMNS = (
    Column("platform", "compiled for"),
    Column("model", "model"),
    Column("tokens", "tokens", "d"),
    Column("by", "gradients by"),
    Column("gflop", "GFLOP", ".1f"),
    Column("flops_ratio", "x plain", ".2f"),
    Column("gathers", "gathers MB", ".1f"),
    Column("sums", "sums MB", ".1f"),
    Column("others", "others MB", ".1f"),
    Column("temp", "temporary MB", ".1f"),
)
_ASSUMPTIONS = (
    "Compiled, not run; the hardware above only did the compiling. Loss and gradients on eight "
    "devices, over which batch and params are split.",
    "Operations are those of one device: for TPUs the compiler's count, for GPUs those of "
    "products. Bytes are of the whole arrays that collectives carry. Temporary memory is without "
    "arguments and results.",
    "Experts: two for each token, with room for twice its share of the tokens. Grouped: tokens are "
    "sent out among those of one device.",
    "LoRA: two layers, with adapters of rank 64, `w + a @ b`.",
)


class Model(NamedTuple):
    """A loss of params and tokens.

    Attributes:
      loss: the loss; it casts its params.
      params: their shapes.
      width: that of a token.
      gather: which params few examples meet.
    """

    loss: Callable[[PyTree, Float[Array, "tokens width"]], Float[Array, ""]]
    params: PyTree
    width: int
    gather: dict[str, bool]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    rows = []
    for platform in args.platforms:
        mesh = Mesh(np.array(eight_devices(platform)[:8]), ("data",), axis_types=(AxisType.Auto,))
        for name, model in _models(args.width, args.experts).items():
            for tokens in args.tokens:
                for row in _rows(model, mesh, tokens):
                    rows.append({"platform": platform, "model": name, "tokens": tokens, **row})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = Report(
        name="gather",
        title="Weights that few examples meet, gathered and not, compiled for TPU v5e and H100",
        command=" ".join(["python benchmarks/bench_gather.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=[
            *_ASSUMPTIONS,
            f"Of {args.experts} experts each has {args.width} x {4 * args.width} and back, and a "
            f"layer with LoRA {4 * args.width} x {4 * args.width}.",
        ],
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of weights that few examples meet.")
    add = parser.add_argument
    add("--platforms", nargs="+", choices=PLATFORMS, default=PLATFORMS)
    add("--tokens", nargs="+", type=int, default=_TOKENS, help="of a batch, on all devices")
    add("--width", type=int, default=1024, help="of a token")
    add("--experts", type=int, default=16)
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    return parser.parse_args(argv)


def _models(width: int, experts: int) -> dict[str, Model]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, F32)

    moe = {
        "router": array(width, experts),
        "experts": {
            "up": array(experts, width, 4 * width),
            "down": array(experts, 4 * width, width),
        },
    }
    wide = 4 * width
    layer = {
        "kernel": array(wide, wide),
        "lora_a": array(wide, 64),
        "lora_b": array(64, wide),
    }
    few = {"experts": False}
    return {
        "experts": Model(lambda p, x: _experts(p, x[None]), moe, width, few),
        "experts, grouped": Model(
            lambda p, x: _experts(p, x.reshape(8, -1, width)), moe, width, few
        ),
        "LoRA": Model(_lora, {"0": layer, "1": layer}, wide, {"lora_*": False}),
    }


def _experts(params: PyTree, x: Float[Array, "groups tokens width"]) -> Float[Array, ""]:
    """Two experts for each token, among those of its group, in the way of GShard."""
    up, down = (params["experts"][name].astype(BF16) for name in ("up", "down"))
    scores = jax.nn.softmax((x @ params["router"].astype(BF16)).astype(F32))
    weights, chosen = jax.lax.top_k(scores, 2)  # (G, T, K)
    one_of = jax.nn.one_hot(chosen, len(up), dtype=int)  # (G, T, K, E)
    before = jnp.cumsum(one_of.reshape(len(x), -1, len(up)), axis=1).reshape(one_of.shape)
    place = jnp.max(before * one_of, axis=-1) - 1
    room = 4 * x.shape[1] // len(up)
    sent = one_of[..., None] * jax.nn.one_hot(place, room)[..., None, :]  # (G, T, K, E, C)
    back = jnp.sum(sent * weights[..., None, None], axis=2).astype(BF16)
    h = jnp.einsum("gtec,gtd->gecd", jnp.sum(sent, axis=2).astype(BF16), x)
    h = jax.nn.gelu(jnp.einsum("gecd,edf->gecf", h, up))
    h = jnp.einsum("gecf,efd->gecd", h, down)
    return _end(x + jnp.einsum("gtec,gecd->gtd", back, h))


def _lora(params: PyTree, x: Float[Array, "tokens width"]) -> Float[Array, ""]:
    for layer in params.values():
        kernel, a, b = (layer[name].astype(BF16) for name in ("kernel", "lora_a", "lora_b"))
        x = jnp.tanh(x @ (kernel + a @ b))
    return _end(x)


def _end(y: Array) -> Float[Array, ""]:
    return jnp.mean(jnp.square(y.astype(F32)))


def _rows(model: Model, mesh: Mesh, tokens: int) -> list[Row]:
    """One row for plain JAX, one where all is gathered, one where `gather` says what is not."""
    stored = fully_sharded(model.params, mesh, min_size=2**12)
    gathered = FSDP(shardings=stored)
    chosen = FSDP(shardings=stored, gather=model.gather)
    ways = {
        "plain JAX": jax.value_and_grad(model.loss),
        "gather all": jaxmp.value_and_grad(model.loss, fsdp=gathered),
        f"gather={model.gather}": jaxmp.value_and_grad(model.loss, fsdp=chosen),
    }
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.params, stored
    )
    sharding = NamedSharding(mesh, P("data"))
    batch = jax.ShapeDtypeStruct((tokens, model.width), BF16, sharding=sharding)
    rows: list[Row] = []
    for name, evaluate in ways.items():
        compiled = jax.jit(evaluate, out_shardings=(None, stored)).lower(params, batch).compile()
        rows.append({"by": name, **_cost(compiled, mesh)})
        rows[-1]["flops_ratio"] = rows[-1]["gflop"] / rows[0]["gflop"]
    return rows


def _cost(compiled: Any, mesh: Mesh) -> Row:
    report = jaxmp.sharding.collectives(compiled, mesh=mesh)
    gathers, sums = report.bytes(kind="all-gather"), report.bytes(reducer="add")
    return {
        "gflop": compiled_flops(compiled) / 1e9,
        "gathers": gathers / 1e6,
        "sums": sums / 1e6,
        "sums_16_bits": report.bytes(reducer="add", dtype=("bfloat16", "float16")) / 1e6,
        "others": (report.bytes() - gathers - sums) / 1e6,
        "temp": compiled.memory_analysis().temp_size_in_bytes / 1e6,
    }


if __name__ == "__main__":
    main()
