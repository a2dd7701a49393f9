"""Trains the language model on several devices, and shows which dtypes they send each other.

    python examples/fsdp_lm.py --mode fsdp

With bfloat16 compute, plain JAX sums the gradients of the devices in bfloat16. This script sums
them in float32, for every way to spread the model, and prints a table from the compiled train step
that proves it. `--plain` shows the same step in plain JAX.

If there are only CPUs, eight devices are simulated. As a job of two processes:

    python examples/fsdp_lm.py --coordinator localhost:9876 --processes 2 --process-id 0 &
    python examples/fsdp_lm.py --coordinator localhost:9876 --processes 2 --process-id 1

With `--checkpoints runs/fsdp` the state is saved every few steps. `--resume` continues a run that
was killed. With the same number of processes it gives the same bits. It also works with other
numbers of devices or in another mode, where sums have another order.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from language_model import GPT, Corpus, Size, make_loss, precision_rules
from lm_checkpoints import Checkpoints
from lm_sharding import MODES, Placement, place

import jaxmp
from jaxmp.sharding import per_shard, state_shardings

History = dict[str, list[float]]
POLICIES = ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Settings from the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default="fsdp", help="how the model is spread")
    add("--policy", choices=POLICIES, default="mixed_bfloat16", help="what runs in which dtype")
    add("--plain", action="store_true", help="add up gradients as plain JAX does")
    add("--comm-dtype", help="per-shard: send gradients in this dtype, add them up in float32")
    add("--microbatches", type=int, default=1, help="parts of a batch, one after the other")
    add("--check", action="store_true", help="fail if gradients are not added up in float32")
    add("--steps", type=int, default=100, help="batches to train on")
    add("--batch-size", type=int, default=64, help="sequences in a batch, on all devices together")
    add("--context", type=int, default=64, help="characters in a sequence")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--width", type=int, default=256, help="size of the residual stream")
    add("--heads", type=int, default=8, help="attention heads")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--checkpoints", metavar="FOLDER", type=Path, help="write checkpoints there")
    add("--checkpoint-every", type=int, default=20, help="steps between two checkpoints")
    add("--resume", action="store_true", help="go on from the latest checkpoint, if there is one")
    add("--coordinator", help="address of process 0, in a job of several processes")
    add("--processes", type=int, default=1, help="how many processes the job has")
    add("--process-id", type=int, default=0, help="which of them this is")
    settings = parser.parse_args(argv)
    if settings.comm_dtype and settings.mode != "per-shard":
        parser.error("--comm-dtype needs --mode per-shard")
    if settings.plain and settings.mode == "per-shard":
        parser.error("--mode per-shard is not plain JAX")
    if settings.resume and not settings.checkpoints:
        parser.error("--resume needs --checkpoints")
    if settings.checkpoint_every < 1:
        parser.error("--checkpoint-every must be at least 1")
    if settings.processes > 1 and not settings.coordinator:
        parser.error("--processes needs --coordinator")
    return settings


def start(settings: argparse.Namespace) -> None:
    """Joins the job, if there is one. On CPUs the whole job gets eight devices."""
    jax.config.update("jax_num_cpu_devices", 8 // settings.processes)
    if settings.coordinator:
        jax.distributed.initialize(settings.coordinator, settings.processes, settings.process_id)


def make_model(settings: argparse.Namespace, vocab: int) -> tuple[Any, Any]:
    """A new model as a graph and its params: the same numbers for every mode."""
    size = Size(
        vocab=vocab,
        context=settings.context,
        layers=settings.layers,
        width=settings.width,
        heads=settings.heads,
    )
    rules = precision_rules(jaxmp.get_policy(settings.policy))
    model = jaxmp.nnx.apply_policy(GPT(size, nnx.Rngs(0)), rules)
    graphdef, params = nnx.split(model, nnx.Param)
    return graphdef, nnx.as_pure(params)


def make_step(
    settings: argparse.Namespace, loss_fn: Callable[..., Array], placed: Placement, shardings: Any
) -> jax.stages.Wrapped:
    """A train step that keeps the shardings of the state."""
    if settings.mode == "per-shard":
        value_and_grad: Any = functools.partial(
            per_shard, mesh=placed.mesh, comm_dtype=settings.comm_dtype
        )
    elif settings.plain:
        value_and_grad = jaxmp.value_and_grad
    else:
        value_and_grad = functools.partial(
            jaxmp.value_and_grad, reduce_dtype=jnp.float32, fsdp=placed.fsdp
        )

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def step(state: jaxmp.TrainState, tokens: Array) -> tuple[jaxmp.TrainState, dict[str, Array]]:
        loss, grads = value_and_grad(
            loss_fn, loss_scale=state.loss_scale, microbatches=settings.microbatches
        )(state.params, tokens)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return state.apply_gradients(grads), metrics

    return step


def open_checkpoints(settings: argparse.Namespace, corpus: Corpus) -> Checkpoints | None:
    """The checkpoints of this run, or None if it writes none."""
    if not settings.checkpoints:
        return None
    decisive = ["policy", "batch_size", "context", "layers", "width", "heads", "lr"]
    decisive += ["plain", "comm_dtype", "microbatches"]  # the ways to sum
    recipe = {name: getattr(settings, name) for name in decisive} | {"corpus": corpus.digest}
    checkpoints = Checkpoints(settings.checkpoints, recipe)
    if checkpoints.latest is not None and not settings.resume:
        raise SystemExit(
            f"{settings.checkpoints} has a checkpoint of {checkpoints.latest} steps: go on from it "
            "with --resume, or choose another folder"
        )
    return checkpoints


def start_state(
    create: Callable[[], jaxmp.TrainState], shardings: Any, checkpoints: Checkpoints | None
) -> tuple[jaxmp.TrainState, History]:
    """A new state, or that of the latest checkpoint, with the losses and norms so far.

    Each device makes or reads its own part: no device holds a large model as a whole.
    """
    if checkpoints is None or checkpoints.latest is None:
        return jax.jit(create, out_shardings=shardings)(), {"loss": [], "grad_norm": []}
    like = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(create),
        shardings,
    )
    return checkpoints.restore(like)


def train(
    step: Callable[..., Any],
    state: jaxmp.TrainState,
    batch: Callable[[int], Array],
    history: History,
    checkpoints: Checkpoints | None,
    settings: argparse.Namespace,
    show: Callable[..., None],
) -> None:
    """Takes the remaining steps, and adds their results to the history."""
    pending: list[dict[str, Array]] = []
    for i in range(len(history["loss"]), settings.steps):
        state, metrics = step(state, batch(i))
        pending.append(metrics)
        last = i == settings.steps - 1
        if i % 10 == 0 or last:
            show(f"step {i:4}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.4f}")
        if last or (checkpoints and (i + 1) % settings.checkpoint_every == 0):
            for name, values in history.items():  # here the host waits for the devices
                values += [float(one[name]) for one in pending]
            pending.clear()
            if checkpoints:
                checkpoints.save(i + 1, state, history)


class Result(NamedTuple):
    """The results of `main`.

    Attributes:
      collectives: what the collectives of a train step carry.
      bytes_on_device: the bytes of params that each device holds, ...
      bytes_in_all: ... and their total.
      loss: the loss of each step.
      grad_norm: the norm of the gradients of each step.
    """

    collectives: Any
    bytes_on_device: int
    bytes_in_all: int
    loss: list[float]
    grad_norm: list[float]


def main(argv: Sequence[str] | None = None) -> Result:
    """Prints how the model is sharded and what a step sends, then trains."""
    settings = parse_args(argv)
    start(settings)
    show = print if jax.process_index() == 0 else lambda *_: None
    corpus = Corpus.load()
    tx = jaxmp.mixed_precision(optax.adamw(settings.lr), settings.policy)

    def create() -> jaxmp.TrainState:
        _, params = make_model(settings, corpus.vocab_size)
        return jaxmp.TrainState.create(params=params, tx=tx)

    graphdef, shapes = jax.eval_shape(lambda: make_model(settings, corpus.vocab_size))
    placed = place(settings.mode, shapes)
    shardings = state_shardings(jax.eval_shape(create), shapes, placed.params)
    checkpoints = open_checkpoints(settings, corpus)
    state, history = start_state(create, shardings, checkpoints)
    step = make_step(settings, make_loss(graphdef), placed, shardings)

    def batch(i: int) -> Array:
        tokens = corpus.batch(0, i, size=settings.batch_size, context=settings.context)
        return jax.make_array_from_callback(tokens.shape, placed.batch, lambda part: tokens[part])

    params = jax.tree.leaves(state.params)
    in_all = sum(x.nbytes for x in params)
    on_device = sum(x.addressable_shards[0].data.nbytes for x in params)
    mesh = " x ".join(f"{size} {axis}" for axis, size in placed.mesh.shape.items())
    show(f"{settings.mode} with {settings.policy} on {mesh}")
    show(f"params: {on_device:,} of {in_all:,} bytes on each device")
    collectives = jaxmp.sharding.collectives(step, state, batch(0))
    show(collectives)
    if settings.check and placed.batch_axes:
        jaxmp.assert_reduced_in(step, "float32", state, batch(0), axis=placed.batch_axes)

    if done := len(history["loss"]):
        show(f"goes on after step {done - 1} of {settings.checkpoints}")
        if done >= settings.steps:
            show(f"nothing to do: it has {done} steps behind it, of {settings.steps}")
    train(step, state, batch, history, checkpoints, settings, show)
    return Result(collectives, on_device, in_all, history["loss"], history["grad_norm"])


if __name__ == "__main__":
    main()
