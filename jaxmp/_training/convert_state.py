"""Converts optimizer states to another storage or policy, also from plain optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import is_floating, is_narrow
from jaxmp._numerics.loss_scale import DynamicLossScale
from jaxmp._numerics.tree import (
    cast_floating,
    check_arrays,
    check_like,
    copied,
    leaf_names,
    same_structure,
    strong,
)
from jaxmp._policies.presets import dtypes_of
from jaxmp._program.cpu_compiler import warn_of_cpu_compiler
from jaxmp._training.compact_forms import expanded_state, is_compact, store_like
from jaxmp._training.first_state import in_one_program
from jaxmp._training.master_storages import STORAGES, storage_of
from jaxmp._training.masters import is_masked
from jaxmp._training.optimizer import MixedPrecision, check_wrapped
from jaxmp._training.optimizer_step import MixedPrecisionState


def convert_state(
    state: Any, tx: MixedPrecision, *, params: PyTree = None, widen_params: bool = False
) -> Any:
    """Converts a training state for another optimizer; loses nothing that the new one can hold.

    For example, from float32 masters to 16-bit remainders, from plain optax to mixed precision, or
    from 8-bit moments to float32. Read the checkpoint with the optimizer that wrote it, then
    convert.

    Args:
      state: a `TrainState`, Flax's `TrainState`, or any object with `params`, `opt_state` and
        `replace`. Or, if `params` is given, an optimizer state: of `mixed_precision`, of plain
        optax, or None if there are only params.
      tx: the optimizer to continue with. Its inner optimizer must be the same as before.
      params: the live params, if `state` is an optimizer state.
      widen_params: whether masters may start from 16-bit params where the state has no masters. The
        bits that rounding removed are lost.

    Returns:
      The state with new params, optimizer state and `tx`; or, if `params` was given, params and
      optimizer state. All arrays are copies. Masters and moments stay the same to the bit wherever
      the new storage can hold them. The step, the counts of skips and the random words continue. A
      dynamic loss scale continues from the scale of the state, unless that is 1; other loss scales
      start anew.

    Raises:
      ValueError: if masters, or float32 params, would have to be made from 16-bit params without
        `widen_params`, or the state belongs to another optimizer.
      TypeError: if `tx` is not wrapped in `mixed_precision`, or `state` is not a state.

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
    check_wrapped(tx)
    if params is not None:
        return _convert_state(params, state, tx, widen_params)
    if not all(hasattr(state, name) for name in ("params", "opt_state", "replace")):
        raise TypeError(
            f"convert_state takes a TrainState, or an optimizer state and params=..., got "
            f"{type(state).__name__}"
        )
    live, opt_state = _convert_state(state.params, state.opt_state, tx, widen_params)
    others = copied(state.replace(params=None, opt_state=None, tx=tx))
    return others.replace(params=live, opt_state=opt_state)


def _convert_state(
    params: PyTree, opt_state: Any, tx: MixedPrecision, widen_params: bool
) -> tuple[PyTree, MixedPrecisionState]:
    check_arrays(params, "params")
    convert = functools.partial(_convert_parts, tx, widen_params)
    live, opt_state = in_one_program(convert, strong(params), opt_state)
    warn_of_cpu_compiler(dtypes_of(tx.rules), live)
    return live, opt_state


def _convert_parts(
    tx: MixedPrecision, widen_params: bool, params: PyTree, opt_state: Any
) -> tuple[PyTree, MixedPrecisionState]:
    old = opt_state if isinstance(opt_state, MixedPrecisionState) else None
    masters = jax.tree.map(lambda _: optax.MaskedNode(), params) if old is None else old.master

    def load(param: Any, stored: Any) -> Any:
        narrow = is_floating(param) and is_narrow(param.dtype)
        return storage_of(stored).load(param, stored) if narrow else param

    values = jax.tree.map(load, params, masters)
    # Under rules, params keep the dtypes that the model gave them. Otherwise the policy's, as where
    # a state moves from float32 params to bfloat16 ones with masters.
    live, new = tx.init_params(values, like=params if tx.rules.rules else None)
    if not widen_params:
        _check_not_widened(params, masters, live, new.master)
    inner = opt_state if old is None else old.inner
    new = _with_counts_of(opt_state, masters, new)
    if inner is not None:
        new = new._replace(inner=_convert_inner(new.inner, inner))
    if old is not None:
        before, scale = old.loss_scale, new.loss_scale
        if isinstance(tx.loss_scale, DynamicLossScale):
            # A scale of 1 is that of a policy without scaling. From there, small float16 gradients
            # are lost until the scale has grown.
            scale = jax.tree.map(lambda a, b: jnp.where(before.scale == 1, b, a), before, scale)
        new = old._replace(inner=new.inner, master=new.master, kind=new.kind, loss_scale=scale)
    return copied((live, new))


def _is_count(stored: Any) -> bool:
    return not is_masked(stored) and storage_of(stored) is STORAGES["stochastic"]


def _with_counts_of(old: Any, masters: PyTree, state: MixedPrecisionState) -> MixedPrecisionState:
    """Continues the counts of steps, for random words, of an optimizer state and its masters."""
    states = [x for x in jax.tree.leaves(old, is_leaf=is_compact) if is_compact(x)]
    counts = [x.step for x in states] + [x for x in jax.tree.leaves(masters) if _is_count(x)]
    counts += jax.tree.leaves(old.kind) if isinstance(old, MixedPrecisionState) else []
    # Words that were used before would round the same way twice.
    steps = functools.reduce(lambda x, y: jnp.maximum(x, jnp.uint32(y)), counts, jnp.uint32(0))

    def with_steps(x: Any) -> Any:
        return x._replace(step=steps) if is_compact(x) else x

    return state._replace(
        inner=jax.tree.map(with_steps, state.inner, is_leaf=is_compact),
        master=jax.tree.map(lambda x: steps if _is_count(x) else x, state.master),
        kind=jax.tree.map(lambda x: steps.astype(x.dtype), state.kind),
    )


def _check_not_widened(params: PyTree, old: PyTree, live: PyTree, new: PyTree) -> None:
    """Raises ValueError if a master would start with only the bits of a narrow param."""

    # Whether the state holds more of a param than its 16 bits.
    def has_master(param: Any, stored: Any) -> bool:
        return not is_narrow(param.dtype) or not (is_masked(stored) or _is_count(stored))

    def is_widened(param: Any, before: Any, after: Any, stored: Any) -> bool:
        return has_master(after, stored) and not has_master(param, before)

    widened = jax.tree.leaves(jax.tree.map(is_widened, params, old, live, new))
    if any(widened):
        name = leaf_names(params)[widened.index(True)]
        raise ValueError(
            f"params, leaf {name!r}, is narrow, and the state has no master of it: a new master "
            "would lack the bits that rounding removed. Read the masters with the optimizer that "
            "wrote them; or, if there are none, give widen_params=True"
        )


def _convert_inner(like: Any, inner: Any) -> Any:
    """Stores the state of the inner optimizer in the form of `like`."""

    def types(tree: Any) -> list[Any]:
        return [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]

    if same_structure(inner, like) and types(inner) == types(like):
        return inner  # as it is: another rounding at random would change it
    expanded, expected = expanded_state(inner), jax.eval_shape(expanded_state, like)
    check_like(
        expanded,
        expected,
        name="the state of the optimizer",
        like_name="that of tx",
        advice="The optimizer inside of tx must be the one that made the state.",
    )

    def cast(x: Any, y: Any) -> Any:
        return cast_floating(jnp.asarray(x), y.dtype) if is_floating(y) else jnp.asarray(x)

    return store_like(like, jax.tree.map(cast, expanded, expected))
