"""Turns the state of one optimizer into that of another: of another storage or policy, of optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree, UInt32

from jaxmp._compact_state import expanded_state, is_compact, stored_like
from jaxmp._dtypes import is_floating, is_narrow
from jaxmp._loss_scale import DynamicLossScale, LossScaleState
from jaxmp._master_storages import STORAGES, storage_of
from jaxmp._masters import is_masked
from jaxmp._optimizer import MixedPrecision
from jaxmp._optimizer_step import MixedPrecisionState
from jaxmp._placement import placed_beside
from jaxmp._tree import (
    cast_floating,
    check_arrays,
    check_like,
    copied,
    leaf_names,
    same_structure,
    strong,
)


def convert_state(
    state: Any, tx: MixedPrecision, *, params: PyTree = None, widen_params: bool = False
) -> Any:
    """The state of training as another optimizer keeps it, with nothing lost that it can hold.

    A checkpoint with float32 masters goes on with 16-bit remainders, one of plain optax in mixed
    precision, one with 8-bit moments in float32. Read the checkpoint with the optimizer that wrote
    it, then convert.

    Args:
      state: a `TrainState`, that of Flax, or whatever has `params`, `opt_state` and a `replace`;
        or, with `params`, the optimizer state: of `mixed_precision`, of plain optax, or None if
        there is none but the params.
      tx: the optimizer to go on with. Inside it must be the same one as before.
      params: the live params, if `state` is an optimizer state.
      widen_params: whether masters may begin as params of 16 bits, where the state has none. What
        rounding took from them is lost.

    Returns:
      What was given, in arrays of its own: the state with other params, optimizer state and `tx`;
      or params and optimizer state. Masters are the same to the bit wherever the new storage can
      hold them, moments too. The step, the counts of skips and the random words go on. A dynamic
      loss scale goes on from the scale of the state, unless that is 1; others begin anew.

    Raises:
      ValueError: if masters, or float32 params, would have to be made of 16-bit params without
        being asked for, or the state is that of another optimizer.
      TypeError: if `tx` is not wrapped in `mixed_precision`, or `state` is no state.

    >>> import jaxmp
    >>> old = jaxmp.mixed_precision(optax.sgd(0.1), "bfloat16")
    >>> state = jaxmp.TrainState.create(params={"w": jnp.float32(1.001)}, tx=old)
    >>> new = jaxmp.mixed_precision(optax.sgd(0.1), "bfloat16", master="remainder")
    >>> converted = convert_state(state, new)
    >>> converted.opt_state.master
    {'w': Array(8389, dtype=int16)}
    >>> convert_state(converted, old).opt_state.master
    {'w': Array(1.001, dtype=float32)}
    """
    if not isinstance(tx, MixedPrecision):
        raise TypeError(
            f"tx must be jaxmp.mixed_precision(optimizer, policy), got {type(tx).__name__}"
        )
    if params is not None:
        return copied(_converted(params, state, tx, widen_params))
    if not all(hasattr(state, name) for name in ("params", "opt_state", "replace")):
        raise TypeError(
            f"convert_state takes a TrainState, or an optimizer state and params=..., got "
            f"{type(state).__name__}"
        )
    live, opt_state = _converted(state.params, state.opt_state, tx, widen_params)
    return copied(state.replace(params=live, opt_state=opt_state, tx=tx))


def _converted(
    params: PyTree, opt_state: Any, tx: MixedPrecision, widen_params: bool
) -> tuple[PyTree, MixedPrecisionState]:
    check_arrays(params, "params")
    params = strong(params)
    old = opt_state if isinstance(opt_state, MixedPrecisionState) else None
    kept = jax.tree.map(lambda _: optax.MaskedNode(), params) if old is None else old.master
    values = jax.tree.map(_master, params, kept)
    # Under rules params have the dtypes that the model gave them.
    live, new = tx.init_params(values, like=params if tx.rules.rules else None)
    if not widen_params:
        _check_not_widened(params, kept, live, new.master)
    inner = opt_state if old is None else old.inner
    new = _counted_from(_steps(inner, kept), new)
    if inner is not None:
        new = new._replace(inner=_inner_like(new.inner, inner))
    if old is not None:
        new = new._replace(
            loss_scale=_scale_after(old.loss_scale, new.loss_scale, tx),
            grads_finite=old.grads_finite,
            skipped=old.skipped,
            consecutive_skips=old.consecutive_skips,
        )
    return live, placed_beside(live, new)


def _master(param: Any, kept: Any) -> Any:
    narrow = is_floating(param) and is_narrow(param.dtype)
    return storage_of(kept).load(param, kept) if narrow else param


def _is_count(kept: Any) -> bool:
    return not is_masked(kept) and storage_of(kept) is STORAGES["stochastic"]


def _steps(inner: Any, master: PyTree) -> UInt32[Array, ""]:
    """How many times something was rounded at random so far."""
    states = [x for x in jax.tree.leaves(inner, is_leaf=is_compact) if is_compact(x)]
    counts = [x.step for x in states] + [x for x in jax.tree.leaves(master) if _is_count(x)]
    return functools.reduce(jnp.maximum, counts, jnp.uint32(0))


def _counted_from(steps: UInt32[Array, ""], state: MixedPrecisionState) -> MixedPrecisionState:
    """With counts that go on, as the same words twice would round the same way twice."""

    def with_steps(x: Any) -> Any:
        return x._replace(step=steps) if is_compact(x) else x

    return state._replace(
        inner=jax.tree.map(with_steps, state.inner, is_leaf=is_compact),
        master=jax.tree.map(lambda x: steps if _is_count(x) else x, state.master),
    )


def _has_master(param: Any, kept: Any) -> bool:
    """Whether the state knows more of a param than its 16 bits."""
    return not is_narrow(param.dtype) or not (is_masked(kept) or _is_count(kept))


def _check_not_widened(params: PyTree, old: PyTree, live: PyTree, new: PyTree) -> None:
    """Raises ValueError where a master would have no more than the bits of its param."""

    def is_widened(param: Any, before: Any, after: Any, kept: Any) -> bool:
        return _has_master(after, kept) and not _has_master(param, before)

    widened = jax.tree.leaves(jax.tree.map(is_widened, params, old, live, new))
    if any(widened):
        name = leaf_names(params)[widened.index(True)]
        raise ValueError(
            f"params, leaf {name!r}, is narrow, and the state has no master of it: the new one "
            "would begin with what rounding has left. Read the masters with the optimizer that "
            "wrote them; or, if there are none, give widen_params=True"
        )


def _inner_like(like: Any, inner: Any) -> Any:
    """The state of the inner optimizer, stored as in `like`."""
    if _stored_alike(inner, like):  # and not rounded at random once more
        return inner
    expanded, wanted = expanded_state(inner), jax.eval_shape(expanded_state, like)
    check_like(
        expanded,
        wanted,
        name="the state of the optimizer",
        like_name="that of tx",
        advice="The optimizer inside of tx must be the one that made the state.",
    )

    def cast(x: Any, y: Any) -> Any:
        return cast_floating(jnp.asarray(x), y.dtype) if is_floating(y) else jnp.asarray(x)

    return stored_like(like, jax.tree.map(cast, expanded, wanted))


def _stored_alike(a: Any, b: Any) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    return same_structure(a, b) and all(
        jnp.shape(x) == jnp.shape(y) and jnp.result_type(x) == jnp.result_type(y) for x, y in leaves
    )


def _scale_after(old: LossScaleState, new: LossScaleState, tx: MixedPrecision) -> LossScaleState:
    if not isinstance(tx.loss_scale, DynamicLossScale):
        return new
    return jax.tree.map(lambda a, b: jnp.where(old.scale == 1, b, a), old, new)
