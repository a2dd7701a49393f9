"""Runs an optimizer, and finds from its program the params that it never changes."""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import at_least_float32, is_inexact, is_narrow
from jaxmp._numerics.tree import check_like, leaf_names, same_structure
from jaxmp._program import compat
from jaxmp._program.facts import ForwardAnalysis, propagate
from jaxmp._program.op_classes import KEEPS_ZERO
from jaxmp._program.program import Op, read


def trainable_leaves(inner: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Returns for each leaf of the params whether an optimizer ever changes it.

    `optax.set_to_zero` on some params (LoRA, a frozen backbone) makes their updates zero for any
    gradients. This function follows zeros through the program of one update, also through the
    branches of `MultiSteps` and `apply_if_finite`.

    Args:
      inner: the optimizer. If it cannot be traced here, without its own arguments or outside of its
        mesh, it counts as changing all floats, which costs memory but not correctness, and no
        integers, which have no gradients. `updated` checks this in each step.
      params: a tree of arrays.

    Returns:
      A tree of bools with the structure of the params. All are True where no param is narrower than
      float32: no master is needed then.

    >>> transforms = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}
    >>> inner = optax.multi_transform(transforms, {"head": "train", "base": "freeze"})
    >>> trainable_leaves(inner, {"head": jnp.bfloat16(1), "base": jnp.bfloat16(1)})
    {'base': False, 'head': True}
    """
    dtypes = [x.dtype for x in jax.tree.leaves(params)]
    if all(jnp.issubdtype(dtype, jnp.inexact) and not is_narrow(dtype) for dtype in dtypes):
        return jax.tree.map(lambda _: True, params)  # no masters anyway

    def abstract(dtype_of: Callable[[Any], Any]) -> PyTree:
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype_of(p.dtype)), params)

    grads, values = abstract(gradient_dtype), abstract(at_least_float32)

    def with_loss(grads: PyTree, state: Any, params: PyTree, loss: Any) -> Any:
        return inner.update(grads, state, params, value=loss)

    # The state is an argument too: a schedule that begins at zero does not stay there. So is the
    # loss, which a train step passes and some optimizers require: Polyak steps are zero for one
    # loss, and not for others.
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    calls = (with_loss, (loss,)), (inner.update, ())
    for part, (update, more) in itertools.product(parts_of(grads), calls):
        with contextlib.suppress(Exception):  # any exception: the optimizer is the user's
            zeros = _zero_updates(update, part, jax.eval_shape(inner.init, values), values, *more)
            return jax.tree.map(lambda _, zero: not zero, params, zeros)
    return jax.tree.map(is_inexact, params)


def parts_of(tree: PyTree) -> list[PyTree]:
    """Returns what an optimizer may take gradients of: the fast params of a lookahead; all."""
    return [tree.fast, tree] if isinstance(tree, optax.LookaheadParams) else [tree]


def params_of(grads: PyTree, params: PyTree) -> PyTree:
    """Returns the params that have these gradients; if there are none, the gradients."""
    return next((part for part in parts_of(params) if same_structure(part, grads)), grads)


def gradient_dtype(dtype: Any) -> Any:
    """Returns the gradient dtype that an optimizer sees: float32 for integers, which have none."""
    return at_least_float32(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def updated(
    inner: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state_and_params: tuple[Any, PyTree],
    extra: dict[str, Any],
    trainable: PyTree,
) -> tuple[PyTree, Any]:
    """Returns the updates of an optimizer and its next state; its params are float32 or wider.

    Only the optimizer knows the form of its gradients. That of a lookahead takes those of the fast
    params, where a loss of all params has gradients of all.
    """

    def widen_gradient(grad: Any, param: Any) -> Any:
        dtype = gradient_dtype(param.dtype)  # a frozen table of integers has no gradient
        return jnp.asarray(grad, dtype) if is_inexact(param) else jnp.zeros_like(param, dtype)

    state, params = state_and_params
    like = params_of(grads, params)
    expected = parts_of(params)[0] if like is grads else like
    check = functools.partial(check_like, like_name="params", advice=_ADVICE_ON_GRADIENTS)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(like), strict=True)
    if any(is_inexact(p) and np.size(g) < np.size(p) for g, p in pairs):  # it would be broadcast
        check(grads, expected, name="gradients")
    errors: list[Exception] = []
    for part in parts_of(jax.tree.map(widen_gradient, grads, like)):
        try:
            updates, after = inner.update(part, state, params, **extra)
            check(updates, params, name="the updates of the optimizer")
        except Exception as error:  # any exception: the optimizer is the user's
            check(grads, expected, name="gradients")
            errors.append(error)
        else:
            _check_frozen(inner, (part, state, params), extra, updates, trainable)
            return updates, after
    if isinstance(errors[0], ValueError):
        errors[0].add_note(_ADVICE_ON_GRADIENTS)
    raise errors[0]


_ADVICE_ON_GRADIENTS = (
    "Differentiate with respect to the params that the optimizer updates. If it takes gradients of "
    "a part of its params, give tx.update those; a train step passes them for this optimizer: "
    "optax.GradientTransformationExtraArgs(inner.init, lambda grads, *args, **extra: "
    "inner.update(grads.part, *args, **extra))"
)


def _check_frozen(
    inner: Any,
    arguments: tuple[PyTree, PyTree, PyTree],
    extra: dict[str, Any],
    updates: PyTree,
    trainable: PyTree,
) -> None:
    """Raises ValueError if the optimizer changes a param that it was found never to change.

    The optimizer may depend on an argument, or on Python state that has changed. The param has no
    master, so that it would lose small updates; an integer param would lose all.
    """
    leaves = jax.tree.leaves
    if all(leaves(trainable)):
        return
    # Traced updates have no values, so their program is read. Outside of `jit`, only the values
    # show a rate that Python sets.
    if any(map(compat.is_traced, leaves((arguments, updates)))):
        are_zero = leaves(_zero_updates(functools.partial(inner.update, **extra), *arguments))
    else:
        pairs = zip(leaves(updates), leaves(trainable), strict=True)
        are_zero = [not is_trainable and not np.any(u) for u, is_trainable in pairs]
    for i, (is_trainable, is_zero) in enumerate(zip(leaves(trainable), are_zero, strict=True)):
        if not is_trainable and not is_zero:
            raise ValueError(
                f"the optimizer moves {leaf_names(trainable)[i]!r} now, but did not when its state "
                "was made, so that there is no master for it. Make the masters anew: "
                "state._replace(master=tx.init(params).master), with the tx that moves it. If the "
                "param holds integers, it has no gradient: freeze it by optax.set_to_zero, as the "
                "last transformation of its updates"
            )


def _zero_updates(update: Callable[..., tuple[PyTree, Any]], *args: Any) -> PyTree:
    """Returns for each update of an optimizer whether it is zero for any input."""
    closed, updates = jax.make_jaxpr(lambda *args: update(*args)[0], return_shape=True)(*args)
    zeros = propagate(read(closed), [False] * len(closed.in_avals), _IS_ZERO)
    return jax.tree.unflatten(jax.tree.structure(updates), zeros)


def _zero_results(op: Op, zeros: Sequence[bool]) -> list[bool]:
    """Returns which results of an operation are zero, given which operands are zero."""
    name, atoms = op.name, op.inputs
    if name == "mul":  # a literal factor of zero may be a learning rate that Python will change
        is_zero = any(x for x, atom in zip(zeros, atoms, strict=True) if not hasattr(atom, "val"))
    elif name == "select_n":  # `MultiSteps` and `apply_if_finite` choose between updates
        is_zero = all(zeros[1:])
    elif name in KEEPS_ZERO:
        is_zero = all(zeros)
    else:
        is_zero = name == "div" and zeros[0]
    return [is_zero] * len(op.outputs)


_IS_ZERO = ForwardAnalysis(
    bottom=False,
    join=operator.and_,
    transfer=_zero_results,
    literal=lambda atom: bool(np.ndim(atom.val) == 0 and atom.val == 0),
)
