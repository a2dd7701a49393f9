"""The cost of float32 sums of gradients on eight devices: operations, memory, bytes on the wire.

Nothing runs: the compilers of libtpu and of the CUDA plugin (the extra `aot`) compile for devices
that are not present. The baseline is plain JAX: params cast to bfloat16 in the loss, as in jmp.
Where params are split for memory, constraints pin them so that one layer at a time is gathered, in
bfloat16. jaxmp gets the same loss without these constraints.

Wire bytes are what a device sends if collectives go around rings of n devices: (n - 1) / n of the
whole array for a reduce-scatter, an all-gather or an all-to-all, twice that for an all-reduce.

    python benchmarks/bench_distributed.py
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree
from lab.compilers import EFFORTS, PLATFORMS, compiler_options, eight_devices
from lab.operations import hlo_product_flops
from measurement import Column, Report, Row, parse
from sharded_lm import MODES, ShardedLM, place

import jaxmp
from jaxmp.sharding import FSDP, gather_params, per_shard

Evaluate = Callable[[PyTree, Any], tuple[Array, PyTree]]

BF16, F32 = jnp.bfloat16, jnp.float32
_QUICK: dict[str, Any] = {
    **{"layers": 2, "width": 64, "heads": 4, "vocab": 128, "context": 16, "batch": 8},
    **{"min_size": 2048, "modes": ["fsdp"]},
}
_NAMES = {"gpu": "H100", "tpu": "TPU v5e"}
_ASSUMPTIONS = (
    "Compiled, not run; the hardware above only did the compiling.",
    "Plain JAX: jax.value_and_grad of a loss that casts its params to bfloat16. Where params are "
    "split for memory they are pinned by hand, so that each layer is gathered in its turn.",
    "Temporary memory is without arguments and results; float32 gradients are results of "
    "`gradient`, and temporary in `step`, which is one of AdamW with donated params and state.",
    "MB on the wire: what a device sends where collectives go around rings of n devices, (n - 1) / "
    "n of the whole array, twice that for an all-reduce.",
    "Sums are of weight gradients, also those in parts: all-to-all and all-gather, where gradients "
    "are sent in bfloat16. Others are all other collectives: activations, mostly.",
    "FLOPs: for TPUs the compiler's count, each loop body once; for GPUs those of products.",
)
_COLUMNS = (
    Column("program", "program"),
    Column("mode", "mode"),
    Column("remat", "remat"),
    Column("by", "gradients by"),
    Column("flops_ratio", "FLOPs x", ".3f"),
    Column("temp_plain", "temporary MB, plain", ".1f"),
    Column("temp", "temporary MB", ".1f"),
    Column("temp_ratio", "x", ".2f"),
    Column("sums_plain", "sums MB, plain", ".1f"),
    Column("sums_bfloat16", "sums MB, bf16", ".1f"),
    Column("sums_float32", "sums MB, f32", ".1f"),
    Column("sums_ratio", "x", ".2f"),
    Column("gathers_plain", "gathers MB, plain", ".1f"),
    Column("gathers_bfloat16", "gathers MB, bf16", ".1f"),
    Column("gathers_float32", "gathers MB, f32", ".1f"),
    Column("others_plain", "others MB, plain", ".1f"),
    Column("others", "others MB", ".1f"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    args = _parse(argv)
    rows = []
    for platform in args.platforms:
        report = Report(
            "bench_distributed",
            f"Float32 sums of gradients over eight devices, compiled for {_NAMES[platform]}",
            _COLUMNS,
            [*_ASSUMPTIONS, f"Effort of a TPU's compiler: {args.effort}."],
            _rows(platform, args),
            name=f"distributed-{platform}",
        )
        rows += report.publish(args)
    return rows


def _rows(platform: Any, args: argparse.Namespace) -> list[Row]:
    devices = eight_devices(platform)
    rows = []
    for remat in (True, False):
        for mode in args.modes:
            case = _Case(args, mode, remat, devices)
            for program in args.programs:
                rows += [{"platform": platform, **row} for row in case.rows(program)]
    return rows


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of float32 sums of gradients.")
    add = parser.add_argument
    add("--platforms", nargs="+", choices=PLATFORMS, default=PLATFORMS)
    add("--modes", nargs="+", choices=MODES, default=MODES)
    add("--programs", nargs="+", choices=["gradient", "step"], default=["gradient"])
    add("--layers", type=int, default=4)
    add("--width", type=int, default=1024)
    add("--heads", type=int, default=16)
    add("--vocab", type=int, default=8192)
    add("--context", type=int, default=512)
    add("--batch", type=int, default=32, help="sequences, on all devices together")
    add("--min-size", type=int, default=2**16, help="params with fewer elements are not split")
    add("--effort", choices=EFFORTS, default="default", help="of a TPU's compiler")
    add("--quick", action="store_true", help="a tiny model, whose memory says nothing")
    if "--quick" in (sys.argv if argv is None else argv):
        parser.set_defaults(**_QUICK)
    return parse(parser, argv)


def _compared(cost: Row, plain: Row) -> Row:
    row = {"temp": cost["temp"], "temp_plain": plain["temp"]}
    row |= {f"{name}_ratio": cost[name] / plain[name] for name in ("flops", "temp")}
    for kind in ("sums", "gathers", "others"):
        row[f"{kind}_plain"] = sum(plain[kind].values())
        row[kind] = sum(cost[kind].values())
        row |= {f"{kind}_{dtype}": cost[kind].get(dtype, 0.0) for dtype in ("bfloat16", "float32")}
    return {**row, "sums_ratio": row["sums"] / row["sums_plain"], "plain": plain, "cost": cost}


class _Case:
    """A model on a mesh, and the programs that make its gradients."""

    def __init__(self, args: argparse.Namespace, mode: Any, remat: bool, devices: Any) -> None:
        sizes = args.layers, args.width, args.heads, args.vocab, args.context
        self.model = ShardedLM(*sizes, remat=remat)
        self.mode = mode
        self.options = compiler_options(devices[0].platform, args.effort)
        self.shapes = self.model.params()
        self.placement = place(mode, self.shapes, devices, args.min_size)
        shape = (args.batch, args.context)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.placement.batch)
        self.batch = tokens, tokens

    def rows(self, program: str) -> list[Row]:
        """One row for each way to make gradients but the baseline."""
        plain = self.cost(program, _plain(self))
        rows = []
        for by, evaluate in _ways(self).items():
            row = {"program": program, "mode": self.mode, "remat": self.model.remat, "by": by}
            row |= _compared(self.cost(program, evaluate), plain)
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
        return rows

    def cost(self, program: str, evaluate: Evaluate) -> Row:
        """Compiles a program with these gradients: FLOPs, temporary MB, MB on the wire by dtype."""
        compiled = self.lower(program, evaluate).compile(self.options)
        memory: Any = compiled.memory_analysis()
        counted: Any = compiled.cost_analysis()  # none on GPUs
        products = hlo_product_flops(str(compiled.as_text())).values()
        flops = counted["flops"] if counted else math.fsum(products)
        cost: Row = {"flops": flops, "temp": memory.temp_size_in_bytes / 1e6}
        cost |= {"sums": {}, "gathers": {}, "others": {}}
        for row in jaxmp.sharding.collectives(compiled, mesh=self.placement.mesh):
            into = cost[self._is_of(row)]
            into[row.dtype] = into.get(row.dtype, 0) + _wire(row) / 1e6
        return cost

    def _is_of(self, row: Any) -> str:
        """Where a collective belongs."""
        if not {"data", "replica"}.intersection(row.axes) or "float" not in row.dtype:
            return "others"
        if row.kind in ("all-reduce", "reduce-scatter"):
            return "sums" if row.sums else "others"
        if row.kind == "all-gather":  # of sums, where params are whole
            return "gathers" if self.placement.gathers else "sums"
        return "sums" if row.kind == "all-to-all" else "others"

    def lower(self, program: str, evaluate: Evaluate) -> jax.stages.Lowered:
        stored = self.placement.stored
        params = jax.tree.map(_abstract, self.shapes, stored)
        if program == "gradient":
            return jax.jit(evaluate, out_shardings=(None, stored)).lower(params, self.batch)
        tx = optax.adamw(1e-3)

        def step(state: PyTree, batch: Any) -> tuple[PyTree, Array]:
            params, opt_state = state
            loss, grads = evaluate(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        opt_state = jax.eval_shape(tx.init, self.shapes)
        shardings = jaxmp.sharding.state_shardings(opt_state, self.shapes, stored)
        state = params, jax.tree.map(_abstract, opt_state, shardings)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=((stored, shardings), None))
        return jitted.lower(state, self.batch)


def _abstract(x: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _wire(row: Any) -> float:
    """What a device sends."""
    rounds = 2 if row.kind == "all-reduce" else 1
    return rounds * row.bytes * (row.group_size - 1) / row.group_size


def _ways(case: _Case) -> dict[str, Evaluate]:
    """The ways to have float32 sums, by name."""
    ways: dict[str, Evaluate] = {"jaxmp": _jaxmp(case)}
    if case.mode in ("dp", "fsdp") and case.model.remat:
        for comm, name in ((None, ""), (BF16, ", comm bf16")):
            ways[f"per_shard{name}"] = per_shard(
                functools.partial(case.model.loss, dtype=BF16),
                mesh=case.placement.mesh,
                specs=case.placement.specs,
                dtype=BF16,
                comm_dtype=comm,
            )
            ways[f"shard_map{name}"] = _shard_map(case, comm)
    return ways


def _pin(case: _Case) -> Callable[[Array], Array]:
    return lambda x: jax.lax.with_sharding_constraint(x, case.placement.batch)


def _plain(case: _Case) -> Evaluate:
    placement = case.placement

    def use(name: str, weights: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(weights, placement.used[name])

    def loss(params: PyTree, batch: Any) -> Array:
        narrow = jax.tree.map(lambda w: w.astype(BF16), params)
        # On both sides of the gather, or the compiler may gather first and cast then.
        narrow = jax.lax.with_sharding_constraint(narrow, placement.stored)
        return case.model.loss(narrow, batch, use=use, pin=_pin(case))

    return jax.value_and_grad(loss)


def _jaxmp(case: _Case) -> Evaluate:
    placement = case.placement
    fsdp = FSDP(shardings=placement.stored, axis="data") if placement.gathers else None
    loss = functools.partial(case.model.loss, dtype=BF16, pin=_pin(case))
    return jaxmp.value_and_grad(loss, reduce_dtype=F32, fsdp=fsdp)


def _shard_map(case: _Case, comm_dtype: Any) -> Evaluate:
    specs = case.placement.specs

    def use(name: str, weights: PyTree) -> PyTree:
        spec = specs[name]
        if name == "layers":
            spec = {key: jax.P(*each[1:]) for key, each in spec.items()}
        return gather_params(weights, spec, "data", dtype=BF16, comm_dtype=comm_dtype)

    def evaluate(params: PyTree, batch: Any) -> tuple[Array, PyTree]:
        loss, grads = jax.value_and_grad(functools.partial(case.model.loss, use=use))(params, batch)
        return jax.lax.pmean(loss, "data"), grads

    return jax.shard_map(
        evaluate,
        mesh=case.placement.mesh,
        in_specs=(specs, jax.P("data")),
        out_specs=(jax.P(), specs),
    )


if __name__ == "__main__":
    main()
