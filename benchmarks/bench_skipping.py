"""The memory cost of skipping a step on TPUs and GPUs, as their compilers plan it.

Nothing runs: the compilers of libtpu and of the CUDA plugin (the extra `aot`) compile for devices
that are not present. Each row is one donated program on one device, or on eight with params and
optimizer state sharded over them:

    bytes per param = (argument + output + temp - alias) / params of one device

"step" is the optimizer step alone, given float32 gradients as arguments that are not donated: 12
bytes of float32 params and moments, or 14 with masters, and 4 of gradients. "train step" is
`make_train_step` of a scanned model with checkpoints, whose gradients are temporaries.

The skip "lax.cond" is the usual hand-written one: a branch around a step that does not skip, and in
the train step no loss scale, so nothing is unscaled there.

A device holds 1.06e9 params. That is deliberately too many for a TPU: its compiler saves memory
only where there is too little, and then reports the minimum that it needs.

    python benchmarks/bench_skipping.py --platforms gpu tpu
"""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree
from lab.compilers import PLATFORMS, eight_devices
from measurement import Column, Report, Row, parse

import jaxmp

_CONTENDERS = ("none", "select", "cond", "auto", "lax.cond")
_SIZES = {1: (96, 3328), 8: (128, 8192)}  # layers and width by number of devices

_COLUMNS = (
    Column("platform", "compiled for"),
    Column("devices", "devices", "d"),
    Column("policy", "policy"),
    Column("path", "path"),
    Column("skip", "skip"),
    Column("peak", "B/param", ".2f"),
    Column("temp", "of them temporary", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Runs the benchmark with these arguments; returns the rows of its table."""
    args = _parse(argv)
    rows = []
    for platform in args.platforms:
        devices = eight_devices(platform)
        for path in args.paths:
            for policy in args.policies:
                for count in args.devices:
                    size = args.layers or _SIZES[count][0], args.width or _SIZES[count][1]
                    case = _Case(path, policy, *size, devices[:count])
                    for skip in args.skips:
                        rows.append({"platform": platform, **case.row(skip)})
    report = Report(
        "bench_skipping",
        "Memory of taken or skipped steps, compiled for TPU v5e and H100",
        _COLUMNS,
        [
            "Compiled, not run; the hardware above only did the compiling. AdamW.",
            "Params and optimizer state are donated, and on 8 devices sharded over them.",
            "Where a TPU has too little memory its compiler tells the total only.",
        ],
        rows,
    )
    return report.publish(args)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory of taken or skipped steps.")
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=PLATFORMS)
    parser.add_argument("--devices", nargs="+", type=int, choices=[1, 8], default=[1, 8])
    parser.add_argument("--policies", nargs="+", default=["mixed_bfloat16", "bfloat16"])
    parser.add_argument("--paths", nargs="+", choices=[*_PATHS], default=[*_PATHS])
    parser.add_argument("--skips", nargs="+", choices=_CONTENDERS, default=_CONTENDERS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    return parse(parser, argv)


class _Case:
    """One program, whatever skips in it."""

    def __init__(self, path: str, policy: str, layers: int, width: int, devices: Any) -> None:
        types = (jax.sharding.AxisType.Auto,)
        self.mesh = jax.make_mesh((len(devices),), ("data",), types, devices=devices)
        self.path, self.policy, self.width = path, policy, width
        self.params = {
            "w": jax.ShapeDtypeStruct((layers, width, width), jnp.float32),
            "b": jax.ShapeDtypeStruct((layers, width), jnp.float32),
        }
        self.per_device = layers * width**2 / len(devices)

    def row(self, skip: Any) -> Row:
        """Bytes per param, with this way to skip."""
        tx = jaxmp.mixed_precision(
            optax.adamw(1e-3), self.policy, skip="none" if skip == "lax.cond" else skip
        )
        row = {"devices": self.mesh.size, "policy": self.policy, "path": self.path, "skip": skip}
        try:
            compiled = _PATHS[self.path](self, tx, skip).compile()
        except jax.errors.JaxRuntimeError as error:
            needed = re.search(r"required.*?\(([\d.]+)G\) exceeds", str(error))
            if needed is None:
                raise
            return row | {"peak": float(needed[1]) * 2**30 / self.per_device}
        memory: Any = compiled.memory_analysis()
        kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
        total = memory.argument_size_in_bytes + kept + memory.temp_size_in_bytes
        return row | {
            "peak": total / self.per_device,
            "temp": memory.temp_size_in_bytes / self.per_device,
        }

    def sharded(self, tree: PyTree) -> PyTree:
        """Matrices over the devices, the rest on each of them."""

        def place(x: Any) -> Any:
            spec = [None, "data"] if x.ndim >= 2 else []
            sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(place, tree)


def _step(case: _Case, tx: jaxmp.MixedPrecision, skip: str) -> jax.stages.Lowered:
    def step(params: PyTree, state: PyTree, grads: PyTree) -> PyTree:
        if skip != "lax.cond":
            return tx.apply_gradients(grads, state, params)
        return jax.lax.cond(
            jaxmp.numbers.all_finite(grads),
            lambda: tx.apply_gradients(grads, state, params),
            lambda: (params, state),
        )

    params = jaxmp.get_policy(case.policy).cast_to_param(case.params)
    args = params, jax.eval_shape(tx.init, params), case.params
    return jax.jit(step, donate_argnums=(0, 1)).lower(*map(case.sharded, args))


def _train_step(case: _Case, tx: jaxmp.MixedPrecision, skip: str) -> jax.stages.Lowered:
    def layer(x: Array, params: PyTree) -> tuple[Array, None]:
        return x + jnp.tanh(x @ params["w"] + params["b"]), None

    def loss_fn(params: PyTree, batch: Array) -> Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer), batch.astype(params["w"].dtype), params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    train_step: Any = jaxmp.make_train_step(loss_fn, case.policy)
    if skip == "lax.cond":
        train_step = _by_hand(loss_fn, tx)
    state = jax.eval_shape(lambda p: jaxmp.TrainState.create(params=p, tx=tx), case.params)
    sharding = jax.sharding.NamedSharding(case.mesh, jax.sharding.PartitionSpec("data"))
    batch = jax.ShapeDtypeStruct((512, case.width), jnp.float32, sharding=sharding)
    return train_step.lower(case.sharded(state), batch)


def _by_hand(loss_fn: Callable[..., Array], tx: jaxmp.MixedPrecision) -> jax.stages.Wrapped:
    def train_step(state: jaxmp.TrainState, batch: Array) -> tuple[jaxmp.TrainState, Array]:
        def low_precision(params: PyTree) -> Array:
            return loss_fn(tx.policy.cast_to_compute(params), tx.policy.cast_to_compute(batch))

        evaluate = jaxmp.value_and_grad(low_precision, reduce_dtype=tx.policy.reduce_dtype)
        loss, grads = evaluate(state.params)
        finite = jaxmp.numbers.all_finite((loss, grads))
        return jax.lax.cond(finite, lambda: state.apply_gradients(grads), lambda: state), loss

    return jax.jit(train_step, donate_argnums=0)


_PATHS = {"step": _step, "train step": _train_step}


if __name__ == "__main__":
    main()
