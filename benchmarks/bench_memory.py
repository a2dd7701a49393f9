"""The memory of parameters and optimizer state, for every storage, in live arrays and as compiled.

AdamW with bfloat16 gradients, params and state donated. On a CPU the arrays of a state are counted.
For an H100 and a TPU v5e (the extra `aot`) the step is compiled for one device, and for eight with
all arrays sharded over them:

    state = what lives between steps, in bytes per parameter, without gradients
    over the least = what the compiled step reads and writes in device memory, over what it must:
                     everything once, and gradients once more, to see whether they are finite

    python benchmarks/bench_memory.py --platforms cpu gpu tpu
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from lab.compilers import PLATFORMS, eight_devices
from lab.traffic import traffic
from measurement import RESULTS, Column, Report, Row

import jaxmp


class Recipe(NamedTuple):
    """How params and state are stored."""

    policy: str
    master: Any
    moments: Any

    @property
    def formula(self) -> float:
        """Bytes of param, master and two moments, by arithmetic."""
        masters = {"float32": 4, "remainder": 2, "remainder8": 1, "kahan": 2, "stochastic": 0}
        params = 4 if self.policy == "mixed_bfloat16" else 2 + masters[self.master]
        return params + 2 * {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 1024}[self.moments]


RECIPES = (
    Recipe("mixed_bfloat16", "float32", "float32"),
    Recipe("bfloat16", "float32", "float32"),
    Recipe("bfloat16", "remainder", "float32"),
    Recipe("bfloat16", "kahan", "float32"),
    Recipe("bfloat16", "remainder8", "float32"),
    Recipe("bfloat16", "stochastic", "float32"),
    Recipe("bfloat16", "float32", "bfloat16"),
    Recipe("bfloat16", "remainder", "bfloat16"),
    Recipe("bfloat16", "stochastic", "bfloat16"),
    Recipe("bfloat16", "float32", "int8"),
    Recipe("bfloat16", "remainder", "int8"),
    Recipe("bfloat16", "remainder8", "int8"),
    Recipe("bfloat16", "stochastic", "int8"),
)
_GRADIENT = 2  # bytes of a bfloat16 gradient

_COLUMNS = (
    Column("platform", "compiled for"),
    Column("devices", "devices", "d"),
    Column("policy", "policy"),
    Column("master", "master"),
    Column("moments", "moments"),
    Column("formula", "by formula", ".2f"),
    Column("state", "state, B/param", ".2f"),
    Column("peak", "with gradients, at the peak", ".2f"),
    Column("temp", "temporaries", ".2f"),
    Column("traffic", "read and written", ".1f"),
    Column("traffic_ratio", "over the least", ".2f"),
    Column("accessed", "as the compiler counts", ".1f"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    # Where jax looks for a GPU and finds none, it no longer compiles for one.
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for platform in args.platforms:
        counts = [1] if platform == "cpu" else args.devices
        for count in counts:
            for recipe in RECIPES:
                rows.append(_row(platform, count, recipe, args))
                print(rows[-1], file=sys.stderr, flush=True)
    report = Report(
        name="memory",
        title="Memory of params and optimizer state, by storage",
        command=" ".join(["python benchmarks/bench_memory.py", *argv]),
        columns=_COLUMNS,
        rows=rows,
        assumptions=[
            "AdamW, bfloat16 gradients, one donated step.",
            "cpu: live arrays are counted. gpu (H100) and tpu (v5e): compiled, not run; the "
            "hardware above only did the compiling.",
            f"{args.leaves} arrays of {args.width} x {args.width} for each device.",
            "Read and written: operands and results of all kernels that lie in device memory. The "
            "compiler's own count for TPUs has copies inside of kernels and in vector memory too.",
        ],
    )
    report.show()
    if not args.no_write:
        print(f"wrote {report.write(args.results)}")
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory of params and optimizer state.")
    add = parser.add_argument
    add("--platforms", nargs="+", choices=["cpu", *PLATFORMS], default=["cpu", *PLATFORMS])
    add("--devices", nargs="+", type=int, choices=[1, 8], default=[1, 8])
    add("--leaves", type=int, default=16, help="arrays of params")
    add("--width", type=int, default=4096, help="rows and columns of each")
    add("--no-write", action="store_true", help="print only, write no files")
    add("--results", type=pathlib.Path, default=RESULTS, help="where to write")
    return parser.parse_args(argv)


def _row(platform: Any, count: int, recipe: Recipe, args: argparse.Namespace) -> Row:
    row = {"platform": platform, "devices": count, "formula": recipe.formula, **recipe._asdict()}
    tx = jaxmp.mixed_precision(
        optax.adamw(1e-3), recipe.policy, master=recipe.master, moments=recipe.moments
    )
    if platform == "cpu":
        return row | {"state": _live(tx)}
    shapes = {
        f"w{i}": jax.ShapeDtypeStruct((count * args.width, args.width), jnp.float32)
        for i in range(args.leaves)
    }
    memory, moved, accessed = _compiled(tx, shapes, eight_devices(platform)[:count])
    size = args.leaves * args.width**2
    row["state"] = memory.argument_size_in_bytes / size - _GRADIENT
    row["temp"] = memory.temp_size_in_bytes / size
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    row["peak"] = row["state"] + _GRADIENT + row["temp"] + kept / size
    row["traffic"] = moved / size
    row["traffic_ratio"] = row["traffic"] / (2 * recipe.formula + 2 * _GRADIENT)
    if accessed:
        row["accessed"] = accessed / size
    return row


def _live(tx: jaxmp.MixedPrecision) -> float:
    """Bytes per parameter of the arrays of a real state, after a real step."""
    params = {"w": jnp.ones((1024, 1024)), "b": jnp.ones(1024)}
    state = jaxmp.TrainState.create(params=params, tx=tx)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads), donate_argnums=0)
    state = step(state, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    arrays = jax.tree.leaves((state.params, state.opt_state))
    return sum(x.nbytes for x in arrays) / sum(x.size for x in params.values())


def _compiled(tx: jaxmp.MixedPrecision, shapes: PyTree, devices: Any) -> tuple[Any, float, Any]:
    """What the compiler says of memory; bytes that are read and written, by us and by it."""
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("data",), types, devices=devices)
    over = jax.sharding.NamedSharding(mesh, jax.P("data"))
    params = jaxmp.get_policy(tx.policy).cast_to_param(shapes)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    shardings = jax.tree.map(lambda _: over, params)
    state = jax.eval_shape(tx.init, params)
    placed = jaxmp.sharding.state_shardings(state, params, shardings)

    def place(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def step(params: PyTree, state: PyTree, grads: PyTree) -> PyTree:
        return tx.apply_gradients(grads, state, params)

    arguments = (
        jax.tree.map(place, params, shardings),
        jax.tree.map(place, state, placed),
        jax.tree.map(place, grads, shardings),
    )
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    cost: Any = compiled.cost_analysis() or {}
    return compiled.memory_analysis(), traffic(str(compiled.as_text())), cost.get("bytes accessed")


if __name__ == "__main__":
    main()
