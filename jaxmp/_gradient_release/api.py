"""`release_gradients`: the update of a layer where its gradient is computed."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from jax.extend import source_info_util

from jaxmp._gradient_release.events import Coupled
from jaxmp._gradient_release.passes import run_released
from jaxmp._gradient_release.plan import ReleasePlan, plan_of
from jaxmp._gradient_release.values import LayerGradient, WholeStep, in_the_open, nbytes, step_of
from jaxmp._program.explicit_axes import with_own_axes
from jaxmp._program.program import Op
from jaxmp._program.tracing import Static, Traced, combine, partition, rewriting


def release_gradients(step: Callable[..., Any]) -> Callable[..., Any]:
    """Updates each layer where its gradient is computed, so that no gradients are kept.

    The gradients of a `lax.scan` over layers are one stack: all of them are there before the
    optimizer reads the first, 4 bytes a param in float32. Here the backward scan carries params,
    masters and the state of the optimizer, and each turn updates its layer. The numbers are those
    of the step; only sums over layers, such as a global norm, may differ in the last bit.

    What needs all gradients before the first update, such as `optax.clip_by_global_norm` or a step
    that is skipped if a gradient is infinite, costs a second backward pass: the first one computes
    the norm, the second one updates. `mixed_precision(..., skip="none")` without a clip needs one.

    Params outside of the scan are updated as before. Layers that are not in a scan need nothing:
    XLA updates each where its gradient is computed.

    Args:
      step: a whole train step of one batch, from the gradients of a loss with a `lax.scan` over
        layers to the new params and state. It is traced. Put `jax.jit` around the result, and
        donate params and state.

    Returns:
      The same function, with the updates inside of the backward pass.

    Raises:
      TypeError: if `step` is not a function.
      ValueError: at the call, if the step has no scan over layers, or its optimizer needs the
        gradients of all layers at once. Up to a sixteenth of the gradients may stay whole, and 8
        KiB of those of a small model.

    >>> import jax, jax.numpy as jnp, optax
    >>> def loss(params, x):
    ...     return jax.lax.scan(lambda x, w: (jnp.tanh(w @ x), None), x, params)[0].sum()
    >>> tx = optax.sgd(1e-3, momentum=0.9)
    >>> def step(params, state, x):
    ...     updates, state = tx.update(jax.grad(loss)(params, x), state, params)
    ...     return optax.apply_updates(params, updates), state
    >>> params = jnp.full((8, 16, 16), 0.1)
    >>> args = params, tx.init(params), jnp.ones(16)
    >>> new, _ = jax.jit(release_gradients(step), donate_argnums=(0, 1))(*args)
    >>> new.shape
    (8, 16, 16)
    """
    if not callable(step):
        raise TypeError(f"step must be a function, got {type(step).__name__}")

    def rewrite(traced: Traced, static: Static, arrays: list[Any]) -> list[Any]:
        return run_released(*_planned(traced.closed), arrays)

    advice = "Put it around the whole step"
    call = rewriting(with_own_axes(step), rewrite, "release_gradients", advice, as_jit=True)

    @functools.wraps(step, updated=())
    def released_step(*args: Any, **kwargs: Any) -> Any:
        returned = call(*partition((args, kwargs)))
        return combine(returned.static, returned.arrays)

    return released_step


def _planned(closed: Any) -> tuple[WholeStep, ReleasePlan]:
    """Returns a step and its plan, in which only small gradients are whole."""
    closed = in_the_open(closed)
    step, obstacle = step_of(closed, ()), None
    most, few = step.small_bytes(), step.small_bytes(0.0)
    # A loop is not run again for small stacks, such as the statistics of a forward pass.
    statistics: dict[tuple[int, int], int] = {}
    for loop in step.loops:
        small = statistics | _places(loop.gradients)
        statistics = small if sum(small.values()) <= few else statistics
    step = step_of(closed, statistics) if statistics else step
    kept: dict[tuple[int, int], int] = {}
    while step.loops:
        plan = plan_of(step)
        if not plan.coupled:
            return step, plan
        obstacle = obstacle or plan.coupled[0]
        kept |= _places(x for coupled in plan.coupled for x in coupled.gradients)
        if sum(kept.values()) > most:
            break
        step = step_of(closed, statistics | kept)
    raise ValueError(_NO_LAYERS if obstacle is None else _message(obstacle))


def _places(gradients: Iterable[LayerGradient]) -> dict[tuple[int, int], int]:
    """Returns the bytes of gradients by their places in the program."""
    return {(x.loop.op.number, x.number): nbytes(x) for x in gradients}


_NO_LAYERS = (
    "release_gradients finds no scan over layers whose gradients have the shape of params. Put it "
    "around a whole step of one batch, from jax.value_and_grad of a loss with a lax.scan over "
    "params that are stacked along their first axis, to the new params. jax.jit goes around that, "
    "not inside. The backward pass may have no callbacks but prints. Gradients may not be summed "
    "after the scan, over microbatches or by per_shard. Layers that are not in a scan need nothing"
)


def _message(obstacle: Coupled) -> str:
    reader, why = obstacle.reader, obstacle.why
    if isinstance(reader, LayerGradient):
        line = _line_of(reader.loop.op)
        what = f"the step returns those of the scan at {line}, or another loop reads them"
    else:
        what = f"{reader.op.name} at {_line_of(reader.op)} {why}"
    return (
        "release_gradients updates layer by layer, but the gradients of all layers are needed at "
        f"once: {what}. Only their sums may be, such as a global norm. Change it, or keep the "
        "gradients: without release_gradients, or with gradients='buffered'"
    )


def _line_of(op: Op) -> str:
    return source_info_util.summarize(op.equation.source_info.replace(traceback=op.traceback))
