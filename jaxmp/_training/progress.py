"""A check that training makes progress, from the device's counts of skipped steps."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from jaxmp._numerics.dtypes import is_inexact
from jaxmp._numerics.loss_scale import DynamicLossScale
from jaxmp._numerics.tree import leaf_names
from jaxmp._numerics.user_warnings import first_few, warn
from jaxmp._training.optimizer_step import MixedPrecisionState


class TrainingStalled(RuntimeError):
    """Too many skipped optimizer steps in a row, which no loss scale will cure."""


def check_progress(
    state: Any, loss: Any = None, *, nonfinite: PyTree | None = None, limit: int = 50
) -> None:
    """Raises if training stands still, or its params are lost.

    A loss scale backs off from its ceiling of 2**24 to 1 in 24 skips. Overflows after that do not
    come from the scale, and steps would be skipped silently for ever. An optimizer that turns
    finite gradients into NaN destroys the params for good. Call this every few hundred steps: it
    waits for the device.

    Args:
      state: a `TrainState`, or anything that holds the state of `mixed_precision`: that state
        itself, Flax's `TrainState`, an `nnx.Optimizer`. Params are checked if it has any.
      loss: the last loss, if at hand: it tells a broken forward pass from overflowing gradients.
      nonfinite: `metrics["nonfinite"]` of the last step, from `make_train_step(...,
        count_overflows=True)`: the message names the params whose gradients overflow most.
      limit: how many consecutive skips are too many, or first steps with zero gradients.

    Raises:
      TrainingStalled: after `limit` skips in a row; after `limit` steps, if every number of every
        gradient was zero so far, under a dynamic loss scale; for params that hold NaN; and for a
        loss that is not finite in a step that was taken. The message names likely causes and
        remedies.
      TypeError: if `state` holds no optimizer state of jaxmp, or `nonfinite` is not counts.

    Warns:
      UserWarning: if the loss scale is lower than the optimizer of the state can have made it.
    """
    opt_states = _find_states(state)
    if not opt_states:
        raise TypeError(
            f"no state of jaxmp.mixed_precision in this {type(state).__name__}; pass the "
            "TrainState or the optimizer state"
        )
    counts = jax.tree.leaves(nonfinite)
    if not all(jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in counts):
        raise TypeError(
            'nonfinite takes the counts in metrics["nonfinite"], which a step has that was made '
            "with make_train_step(..., count_overflows=True)"
        )
    params = [getattr(state, "params", None), *(opt_state.master for opt_state in opt_states)]
    if leaves := _bad_leaves(params, 0):
        raise TrainingStalled(
            f"params are lost: {leaves} NaN, which no step repairs. Gradients are tested before "
            "they are used. So the optimizer made the NaN, for example by its schedule, or "
            "somebody set it, or it was there from the start. Continue from a checkpoint"
        )
    warn_of_foreign_scale(state)
    for opt_state in opt_states:
        skips = int(np.max(opt_state.consecutive_skips))  # the worst member of an ensemble
        finite = None if loss is None else bool(np.all(np.isfinite(loss)))
        if finite is False and skips == 0:
            raise TrainingStalled(
                "the loss is not finite, and the step was taken all the same: its gradients were "
                "finite, or skip='none' does not look at them. Check the loss function, and "
                "whether the params still are finite"
            )
        if skips >= limit:
            worst = _worst(nonfinite)
            raise TrainingStalled(_stall_message(opt_state, skips, finite, params, worst))
        if (steps := int(np.max(opt_state.zero_gradients))) >= limit:
            raise TrainingStalled(
                f"in all of {steps} steps every number of the gradients was zero: nothing moved. "
                "jax.grad does not scale the loss, and float16 makes zero of what is smaller than "
                "6e-8: take jaxmp.value_and_grad(loss_fn, loss_scale=opt_state.loss_scale). If it "
                "has the scale, the loss does not depend on the params"
            )


def _worst(nonfinite: PyTree | None) -> str:
    """Names the gradients with the most numbers that are not finite."""
    counts = [int(x) for x in jax.tree.leaves(nonfinite)]
    counted = [
        (count, name) for count, name in zip(counts, leaf_names(nonfinite), strict=True) if count
    ]
    counted.sort(key=lambda pair: -pair[0])
    names = first_few([f"{name!r} ({count:,})" for count, name in counted])
    return f"Numbers that are not finite in gradients: {names}. " if counted else ""


def _stall_message(
    opt_state: MixedPrecisionState,
    skips: int,
    finite: bool | None,
    params: list[PyTree],
    worst: str,
) -> str:
    scale = float(np.min(opt_state.loss_scale.scale))
    first = {
        True: "The loss is finite: the backward pass overflows or divides by zero",
        False: "The loss itself is not finite: the forward pass overflows or divides by zero",
        None: "If the loss itself is infinite or NaN, the forward pass is broken",
    }[finite]
    infinite = _bad_leaves(params, 1).rpartition(" ")[0]
    details = (f"Params are not finite: {infinite}. " if infinite else "") + worst
    return (
        f"{skips} optimizer steps in a row were skipped, because their gradients (or loss, or "
        f"batch statistics) were not finite; the loss scale is {scale:g}. No loss scale cures "
        f"this. {details}{first}; look for "
        "inputs and activations beyond 65504 in float16 (cast='all' rounds the whole batch, labels "
        "too), log or sqrt of zero, statistics that overflow, and bad input data. A model "
        "pretrained in bfloat16 often overflows float16: use 'mixed_bfloat16'. Otherwise lower the "
        "learning rate, or warm it up for longer. jaxmp.diagnostics.find_overflow(loss_fn, params, "
        "batch, ...) names the first operation that overflows"
    )


def warn_of_foreign_scale(state: Any) -> None:
    """Warns if a dynamic loss scale is lower than its skipped steps explain."""
    # A state that was made or saved under a policy without a loss scale has scale 1. In float16
    # gradients then vanish for thousands of steps, until the scale has grown.
    config = getattr(getattr(state, "tx", None), "loss_scale", None)
    if not isinstance(config, DynamicLossScale):
        return
    for opt_state in _find_states(state):
        scale, skipped = float(np.min(opt_state.loss_scale.scale)), int(np.max(opt_state.skipped))
        lowest = config.init_scale * config.backoff_factor**skipped
        if scale < 0.99 * max(lowest, config.min_scale):  # the scale is rounded
            warn(
                f"the loss scale of this state is {scale:g}, but its optimizer begins with "
                f"{config.init_scale:g} and has skipped {skipped} steps: the state was made with "
                "another optimizer, and small float16 gradients are lost until the scale has "
                "grown. Begin anew: state.replace(opt_state=state.opt_state._replace("
                "loss_scale=tx.loss_scale.init()))"
            )


def _bad_leaves(trees: list[PyTree], kind: Literal[0, 1]) -> str:
    """Names the leaves with NaN (kind 0) or non-finite values (kind 1) in the first such tree."""
    for tree in trees:
        leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
        floats = {name: x for name, x in leaves if is_inexact(x)}
        flags = np.asarray(_nan_and_infinite(list(floats.values())))[kind] if floats else []
        names = [repr(name) for name, flag in zip(floats, flags, strict=True) if flag]
        if names:
            return f"{first_few(names)} {'is' if len(names) == 1 else 'are'}"
    return ""


@jax.jit
def _nan_and_infinite(floats: list[Any]) -> Bool[Array, "2 leaves"]:
    bad = [jnp.stack([jnp.any(jnp.isnan(x)), ~jnp.all(jnp.isfinite(x))]) for x in floats]
    return jnp.stack(bad, axis=1)


def _find_states(tree: Any) -> list[MixedPrecisionState]:
    def is_state(x: Any) -> bool:
        return isinstance(x, MixedPrecisionState)

    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]
