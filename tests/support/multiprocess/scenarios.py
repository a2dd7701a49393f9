"""What a job runs, in each of its processes or on a mesh of one process: same calls, same code.

Every function takes the mesh first, then keyword arguments that JSON can hold, and returns what
JSON can hold.
"""

import functools
import hashlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxmp
from tests.support.bits import tree_bits
from tests.support.multiprocess.models import (
    BATCH,
    RECIPES,
    hinge,
    hinge_batch,
    hinge_params,
    shardings,
)

STEPS = 8


def make_mesh(devices: int) -> Mesh:
    """A mesh of the first devices of the job, in the order of its processes."""
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


class Trainer:
    """One recipe on one mesh."""

    def __init__(self, recipe: str, mesh: Mesh) -> None:
        self.recipe, self.mesh = RECIPES[recipe], mesh
        self.tx = jaxmp.mixed_precision(
            self.recipe.optimizer(),
            self.recipe.policy,
            master=self.recipe.master,
            loss_scale=self.recipe.loss_scale,
        )
        self.step = jaxmp.make_train_step(hinge, self.recipe.policy)

    def create(self, params: Any) -> jaxmp.TrainState:
        """The state at step 0."""
        return jaxmp.TrainState.create(params=params, tx=self.tx)

    def layout(self) -> Any:
        """Shape, dtype and sharding of every leaf of the state."""
        shapes = jax.eval_shape(self.create, hinge_params())
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            shardings(self.mesh, shapes),
        )

    def start(self) -> jaxmp.TrainState:
        """The state at step 0, made where it belongs: no process ever holds all of it."""
        out = jax.tree.map(lambda x: x.sharding, self.layout())
        # The params are an argument, as constants are folded in the compiler.
        return jax.jit(self.create, out_shardings=out)(hinge_params())

    def global_params(self) -> Any:
        """The params as arrays that span all processes."""
        host = hinge_params()
        return jax.tree.map(
            lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index]),
            host,
            shardings(self.mesh, host),
        )

    def batch(self, index: int, poison: float | None) -> tuple[Any, bool]:
        """A global batch, made of what each process has of it, and whether that part is clean.

        The poison is one number of the last example, which the last process has.
        """
        everything = hinge_batch(np.random.default_rng(index))
        if poison is not None:
            everything["x"][-1, 3] = poison
        rows = BATCH // jax.process_count()
        mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
        local = jax.tree.map(lambda x: x[mine], everything)
        sharding = NamedSharding(self.mesh, P("data"))
        put = functools.partial(jax.make_array_from_process_local_data, sharding)
        clean = all(np.all(np.abs(x) < 1e3) for x in jax.tree.leaves(local))
        return jax.tree.map(put, local), clean


@functools.cache
def trainer(recipe: str, mesh: Mesh) -> Trainer:
    """Compiles each step once for all calls of a job."""
    return Trainer(recipe, mesh)


# ------------------------------------------------------------------------------------- hashing


def kept(state: jaxmp.TrainState) -> Any:
    """What a skipped step must keep."""
    return state.step, state.params, state.opt_state.master, state.opt_state.inner


def local_digest(tree: Any) -> str:
    """A hash of the bits that this process holds."""
    parts = [
        [(str(shard.index), tree_bits(shard.data)) for shard in x.addressable_shards]
        for x in jax.tree.leaves(tree)
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def digests(tree: Any) -> dict[str, str]:
    """A hash of all the bits of each leaf, however it is sharded."""
    mesh = jax.tree.leaves(tree)[0].sharding.mesh
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(tree)
    return {
        path: hashlib.sha256(repr(bits).encode()).hexdigest()[:16]
        for path, bits in tree_bits(gathered).items()
    }


# ------------------------------------------------------------------------------------ training


def train(
    mesh: Mesh,
    *,
    recipe: str,
    poison: Mapping[str, float] | None = None,
    folder: str | None = None,
    save_at: list[int] = [],  # noqa: B006
    dies: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains from the start, or from the latest checkpoint in a folder, to the end.

    By iteration, `poison` is a number that is put into the batch. The process that `dies` is killed
    in an `iteration`, `at` its `"step"` or while it saves.
    """
    this, poison = trainer(recipe, mesh), poison or {}
    state, first = this.start(), 0
    manager = _manager(folder) if folder else None
    if manager and (latest := manager.latest_step()) is not None:
        first = latest
        state = manager.restore(latest, args=ocp.args.StandardRestore(this.layout()))
    out: dict[str, Any] = {"first": first, "start": digests(state), "history": [], "saved": {}}
    for i in range(first, STEPS):
        batch, clean = this.batch(i, poison.get(str(i)))
        state, metrics = this.step(state, batch)
        if dies == {"process": jax.process_index(), "iteration": i, "at": "step"}:
            # The step was dispatched, and nobody waited for it yet.
            os.kill(os.getpid(), signal.SIGKILL)
        jaxmp.check_progress(state, metrics["loss"])
        out["history"].append(_record(state, metrics) | {"clean": clean})
        if manager and i + 1 in save_at:
            if dies == {"process": jax.process_index(), "iteration": i, "at": "save"}:
                _die_when_there_is(Path(folder), f"{i + 1}.orbax-checkpoint-tmp*")
            manager.save(i + 1, args=ocp.args.StandardSave(state))
            out["saved"][str(i + 1)] = digests(state)
    out["compilations"] = this.step._cache_size()
    out["local_shapes"] = {
        name: list(x.addressable_data(0).shape) for name, x in state.params.items()
    }
    return out | {"end": digests(state)}


def _record(state: jaxmp.TrainState, metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        # As people print them, in every process.
        "loss": float(np.max(metrics["loss"])).hex(),
        "metrics": f"{metrics}",
        "grad_norm": float(metrics["grad_norm"]),
        "grads_finite": bool(metrics["grads_finite"]),
        "loss_scale": float(metrics["loss_scale"]),
        "next_loss_scale": float(state.loss_scale.scale),
        "growth_count": int(state.loss_scale.growth_count),
        "skipped": int(metrics["skipped"]),
        "consecutive_skips": int(metrics["consecutive_skips"]),
        "step": int(state.step),
        "kept": local_digest(kept(state)),
    }


def _manager(folder: str) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(Path(folder).resolve(), options=options)


def _die_when_there_is(folder: Path, pattern: str) -> None:
    def watch() -> None:
        while not any(folder.glob(pattern)):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


# --------------------------------------------------------------------------------- other calls


def create_outside_jit(mesh: Mesh, *, recipe: str) -> dict[str, Any]:
    """`TrainState.create` on params that span processes, operation by operation."""
    this = trainer(recipe, mesh)
    params = this.global_params()
    state = this.create(params)
    own = jax.tree.map(lambda x, y: x is not y, state.params, params)
    place = jax.jit(lambda x: x, out_shardings=shardings(mesh, state))
    with_average = jaxmp.TrainState.create(params=params, tx=state.tx, average=params)
    return {
        "digests": digests(place(state)),
        "converted": digests(place(jaxmp.storage.convert_state(state, state.tx))),
        "has_own_params": all(jax.tree.leaves(own)),
        "has_average": bool(jaxmp.numbers.all_finite(with_average.average)),
        "sharded": [str(x.sharding.spec) for x in jax.tree.leaves(state) if x.ndim > 1],
        "finite": bool(jaxmp.numbers.all_finite(state)),
    }


def stall(mesh: Mesh, *, recipe: str, limit: int) -> str:
    """What `check_progress` says after so many poisoned batches."""
    this = trainer(recipe, mesh)
    state = this.start()
    for i in range(limit):
        jaxmp.check_progress(state, limit=limit)
        state, metrics = this.step(state, this.batch(i, jnp.inf)[0])
    try:
        jaxmp.check_progress(state, metrics["loss"], limit=limit)
    except jaxmp.TrainingStalled as error:
        return str(error)
    return "moves"
