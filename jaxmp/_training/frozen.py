"""Finds the params that an optimizer never changes, from its program: they need no masters."""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import at_least_float32, is_inexact, is_narrow
from jaxmp._numerics.tree import leaf_names
from jaxmp._program import compat
from jaxmp._program.facts import Question, propagate
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
        integers, which have no gradients. `check_frozen` checks this in each step.
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
    for update, more in ((with_loss, (loss,)), (inner.update, ())):
        with contextlib.suppress(Exception):  # any exception: the optimizer is the user's
            zeros = _zero_updates(update, grads, jax.eval_shape(inner.init, values), values, *more)
            return jax.tree.map(lambda zero: not zero, zeros)
    return jax.tree.map(is_inexact, params)


def gradient_dtype(dtype: Any) -> Any:
    """Returns the gradient dtype that an optimizer sees: float32 for integers, which have none."""
    return at_least_float32(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def check_frozen(
    inner: Any,
    arguments: tuple[PyTree, PyTree, PyTree],
    extra: dict[str, Any],
    updates: PyTree,
    trainable: PyTree,
) -> None:
    """Raises ValueError if the optimizer changes a param that it was found never to change.

    The optimizer may depend on an argument, or on Python state that has changed. The param has no
    master, so that it would lose small updates; an integer param would lose all.

    Args:
      inner: the optimizer.
      arguments: the gradients, state and params that the optimizer was called with.
      extra: its further arguments.
      updates: the updates that it returned.
      trainable: the result of `trainable_leaves`.
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


_IS_ZERO = Question(
    nothing=False,
    join=operator.and_,
    rule=_zero_results,
    literal=lambda atom: bool(np.ndim(atom.val) == 0 and atom.val == 0),
)
