"""What a train step offers to its optimizer: for line searches, the loss as a function."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._numerics.loss_scale import LossScaleState
from jaxmp._numerics.tree import all_finite, split_floats
from jaxmp._program.mesh_axes import on_current_axes
from jaxmp._training.microbatch import Evaluation
from jaxmp._training.train_state import TrainState


def step_with_first_offer(
    state: TrainState,
    grads: PyTree,
    offers: Sequence[dict[str, Any]],
    finite: Any,
    collections: dict[str, PyTree],
) -> TrainState:
    """Returns the next state; the optimizer gets the first of the offers that it takes."""
    # An optimizer does not say what it takes: optax's chains take anything, and pass it to parts
    # that may not.
    *better, last = offers
    first = None
    for offer in better:
        try:
            return state.apply_gradients(grads, offer, finite=finite, **collections)
        except TypeError as error:
            first = first or error
    try:
        return state.apply_gradients(grads, last, finite=finite, **collections)
    except TypeError as error:
        raise error from first


def value_function(
    evaluate_batch: Callable[..., tuple[Any, Evaluation]],
    params: PyTree,
    operands: tuple[PyTree, PyTree, LossScaleState | None],
    evaluation: Evaluation,
) -> Callable[[PyTree], Any]:
    """Returns the loss of a step as a function of float32 params, with the gradients of a step.

    Optimizers that search along a line evaluate and differentiate it. As in a step, params are
    rounded to the dtypes of the live ones, and gradients are scaled inside and float32 outside. The
    operands are the batch, the collections and the loss scale.
    """

    def evaluate_at(values: PyTree, factor: Any) -> tuple[Any, list[Any]]:
        # The point of a search is a float32 master; a step reads rounded params.
        live = jax.tree.map(lambda x, p: jnp.asarray(x, p.dtype), values, params)
        batch, others, scale = jax.tree.map(on_current_axes, operands)
        scale = None if scale is None else scale._replace(scale=factor * scale.scale)
        _, (loss, grads, _) = evaluate_batch(live, batch, others, scale)
        return loss, split_floats(grads)[0]

    def loss_and_grads(values: PyTree) -> tuple[Any, list[Any]]:
        if operands[2] is None:
            return evaluate_at(values, 1.0)
        begin = operands[2].scale, evaluation.loss, evaluation.grads
        scale, loss, grads = jax.tree.map(on_current_axes, begin)

        # The scale suits the point where the step is. Elsewhere gradients may be larger.
        def overflows(turn: Any) -> Any:
            factor, loss, grads = turn
            may_fall = factor * scale > 1
            return (factor > 1) | (may_fall & jnp.isfinite(loss) & ~all_finite(grads))

        def lower(turn: Any) -> Any:
            factor = turn[0] / _BACKOFF
            return factor, *evaluate_at(values, factor)

        # So that the loss is traced once, it is evaluated in the loop alone.
        zeros = jax.tree.map(jnp.zeros_like, (loss, split_floats(grads)[0]))
        initial = jnp.float32(_BACKOFF), *zeros
        return jax.lax.while_loop(overflows, lower, initial)[1:]

    # Differentiated by hand: 16-bit gradients are scaled inside, and float32 outside.
    @jax.custom_jvp
    def value(values: PyTree) -> Any:
        return evaluate_at(values, 1.0)[0]

    @value.defjvp
    def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[Any, Any]:
        loss, grads = loss_and_grads(*primals)
        dots = zip(grads, split_floats(tangents[0])[0], strict=True)
        return loss, sum(jnp.vdot(x, y) for x, y in dots)

    return value


_BACKOFF = 16.0  # by which a loss scale falls that overflows somewhere on a line
