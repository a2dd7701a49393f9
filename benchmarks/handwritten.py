"""Train steps as people write them without jaxmp: the baseline of both benchmarks.

`loss_fn(params, batch)` gives a float32 loss; `init()` gives float32 params; `metrics` says what a
step reports.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax
from jaxtyping import Array, DTypeLike, PyTree
from lab.timing import Metrics

LossFn = Callable[[PyTree, PyTree], Array]
Init = Callable[[], PyTree]
MetricsFn = Callable[[Array, PyTree], Metrics]


class Steps(NamedTuple):
    """How to train: `start()` makes a state, `step(state, batch)` returns the next and metrics."""

    start: Callable[[], Any]
    step: Callable[[Any, PyTree], tuple[Any, Metrics]]


def loss_only(loss: Array, grads: PyTree) -> Metrics:
    """The metrics of a step that reports its loss and nothing that costs time."""
    del grads
    return {"loss": loss}


def loss_and_norm(loss: Array, grads: PyTree) -> Metrics:
    """What most training scripts log, and what `jaxmp.make_train_step` reports."""
    return {"loss": loss, "grad_norm": optax.tree.norm(grads)}


def plain(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    init: Init,
    *,
    dtype: DTypeLike = jnp.float32,
    metrics: MetricsFn = loss_only,
) -> Steps:
    """Bare optax with everything in one dtype: params, computation and moments."""

    def start() -> Any:
        params = _cast(init(), dtype)
        return params, tx.init(params)

    def step(state: Any, batch: PyTree) -> tuple[Any, Metrics]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics(loss, grads)

    return Steps(start, step)


def with_jmp(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    init: Init,
    *,
    policy: str,
    metrics: MetricsFn = loss_only,
) -> Steps:
    """float32 params that a jmp policy casts inside the loss; no loss scaling, no check."""
    cast = jmp.get_policy(policy).cast_to_compute

    def cast_loss(params: PyTree, batch: PyTree) -> Array:
        return loss_fn(cast(params), batch)

    return plain(cast_loss, tx, init, metrics=metrics)


def with_jmp_loss_scale(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    init: Init,
    *,
    policy: str,
    initial_scale: float,
    metrics: MetricsFn = loss_only,
) -> Steps:
    """The loop of jmp's README for float16: scale, unscale, check, and select old or new."""
    cast = jmp.get_policy(policy).cast_to_compute

    def start() -> Any:
        params = init()
        # jmp's object holds arrays only, and so cannot pass through an abstract compilation; the
        # state has its arrays instead.
        return params, tx.init(params), (jnp.float32(initial_scale), jnp.int32(0))

    def step(state: Any, batch: PyTree) -> tuple[Any, Metrics]:
        params, opt_state, (scale, count) = state
        loss_scale = jmp.DynamicLossScale(scale, count)

        def scaled(params: PyTree) -> tuple[Array, Array]:
            loss = loss_fn(cast(params), batch)
            return loss_scale.scale(loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jmp.select_tree(
            finite, (new_params, new_opt_state), (params, opt_state)
        )
        adjusted = loss_scale.adjust(finite)
        state = params, opt_state, (adjusted.loss_scale, adjusted.counter)
        return state, metrics(loss, grads) | {"loss_scale": scale}

    return Steps(start, step)


def with_masters(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    init: Init,
    *,
    dtype: DTypeLike,
    metrics: MetricsFn = loss_only,
) -> Steps:
    """Low-precision params beside float32 masters, which the optimizer sees; no check."""

    def start() -> Any:
        masters = init()
        return _cast(masters, dtype), masters, tx.init(masters)

    def step(state: Any, batch: PyTree) -> tuple[Any, Metrics]:
        params, masters, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads = _cast(grads, jnp.float32)
        updates, opt_state = tx.update(grads, opt_state, masters)
        masters = optax.apply_updates(masters, updates)
        return (_cast(masters, dtype), masters, opt_state), metrics(loss, grads)

    return Steps(start, step)


def _cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype), tree)
