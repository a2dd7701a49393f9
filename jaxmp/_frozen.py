"""Which params an optimizer never moves, read from its program: they need no masters."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp import _compat
from jaxmp._dtypes import at_least_float32, is_inexact, is_narrow
from jaxmp._tree import leaf_names

# What an operation makes of zeros is zero: where all its array operands are ...
_KEEP_ZERO = frozenset(
    {"add", "add_any", "sub", "neg", "sign", "abs", "sqrt", "convert_element_type", "copy"}
    | {"copy_p", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice"}
    | {"rev", "concatenate", "reduce_sum", "reduce_precision"}
)
# ... and where the first of them is. (A product is zero where an array is; a factor of zero may be
# a learning rate that Python will change.)
_FIRST_ZERO = frozenset({"div"})


def moved_by(inner: optax.GradientTransformation, params: PyTree) -> PyTree:
    """For each leaf of the params, whether an optimizer ever moves it.

    `optax.set_to_zero` on some params (LoRA, a frozen backbone) makes updates that are zero
    whatever the gradients. They are found by following zeros through the program of one update,
    also through `MultiSteps` and `apply_if_finite`, which branch.

    Args:
      inner: the optimizer. One that cannot be traced here, without arguments of its own or outside
        of its mesh, is taken to move all floats, which costs memory and no correctness, and no
        integers, which have no gradients; `check_rests` looks at that in each step.
      params: a tree of arrays.

    Returns:
      A tree of bools with the structure of the params.

    >>> transforms = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}
    >>> inner = optax.multi_transform(transforms, {"head": "train", "base": "freeze"})
    >>> moved_by(inner, {"head": jnp.bfloat16(1), "base": jnp.bfloat16(1)})
    {'base': False, 'head': True}
    """
    if all(
        jnp.issubdtype(x.dtype, jnp.inexact) and not is_narrow(x.dtype) for x in _leaves(params)
    ):
        return jax.tree.map(lambda _: True, params)  # no masters anyway
    wide = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, gradient_dtype(p.dtype)), params)
    values = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, at_least_float32(p.dtype)), params
    )

    def with_loss(grads: PyTree, state: Any, params: PyTree, loss: Any) -> Any:
        return inner.update(grads, state, params, value=loss)

    # The state and the loss are arguments too: a schedule that begins at zero does not stay there.
    # A train step gives optimizers the loss, and some cannot do without it.
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    for update, more in ((with_loss, (loss,)), (inner.update, ())):
        with contextlib.suppress(Exception):  # of whatever sort: the optimizer is the user's
            zeros = _zero_updates(update, wide, jax.eval_shape(inner.init, values), values, *more)
            return jax.tree.map(lambda zero: not zero, zeros)
    return jax.tree.map(is_inexact, params)


def gradient_dtype(dtype: Any) -> Any:
    """The dtype of the gradient that an optimizer sees: float32 for integers, which have none."""
    return at_least_float32(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def check_rests(
    inner: Any,
    given: tuple[PyTree, PyTree, PyTree],
    extra: dict[str, Any],
    updates: PyTree,
    moved: PyTree,
) -> None:
    """Raises ValueError if the optimizer moves what it was found never to move.

    It may depend on an argument, or on something in Python that has changed. The param has no
    master, and could not hold small updates; one of integers could hold none.

    Args:
      inner: the optimizer.
      given: the gradients, the state and the params that it was given.
      extra: what else it was given.
      updates: what came of it.
      moved: what `moved_by` found.
    """
    if all(_leaves(moved)):
        return
    if any(map(_compat.is_traced, _leaves((given, updates)))):
        rests = _leaves(_zero_updates(functools.partial(inner.update, **extra), *given))
    else:
        pairs = zip(_leaves(updates), _leaves(moved), strict=True)
        rests = [not moves and not np.any(u) for u, moves in pairs]
    for i, (moves, at_rest) in enumerate(zip(_leaves(moved), rests, strict=True)):
        if not moves and not at_rest:
            raise ValueError(
                f"the optimizer moves {leaf_names(moved)[i]!r} now, but did not when its state was "
                "made, so that there is no master for it. Make the masters anew: "
                "state._replace(master=tx.init(params).master), with the tx that moves it. If the "
                "param holds integers, it has no gradient: freeze it, with optax.set_to_zero as "
                "the last that it passes through"
            )


def _leaves(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree)


def _zero_updates(update: Callable[..., tuple[PyTree, Any]], *args: Any) -> PyTree:
    """For each update of an optimizer, whether it is zero whatever goes in."""
    closed, updates = jax.make_jaxpr(lambda *args: update(*args)[0], return_shape=True)(*args)
    zeros = _zeros(_compat.open_jaxpr(closed), [False] * len(closed.in_avals))
    return jax.tree.unflatten(jax.tree.structure(updates), zeros)


def _zeros(jaxpr: Any, inputs: list[bool]) -> list[bool]:
    """Which outputs of a program are zero whatever goes in, given the inputs that are."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def is_zero(atom: Any) -> bool:
        if hasattr(atom, "val"):
            return bool(np.ndim(atom.val) == 0 and atom.val == 0)
        return known.get(atom, False)

    for equation in jaxpr.eqns:
        made = _made(equation, [is_zero(x) for x in equation.invars])
        known.update(zip(equation.outvars, made, strict=True))
    return [is_zero(x) for x in jaxpr.outvars]


def _made(equation: Any, zero: list[bool]) -> list[bool]:
    name, count = equation.primitive.name, len(equation.outvars)
    bodies = _compat.sub_jaxprs(equation)
    if name == "cond":
        branches = [_zeros(body, zero[1:]) for body in bodies]
        return [all(each) for each in zip(*branches, strict=True)]
    if len(bodies) == 1 and len(bodies[0].invars) == len(zero) and name not in ("scan", "while"):
        return _zeros(bodies[0], zero)
    if name == "mul":
        factors = zip(equation.invars, zero, strict=True)
        return [any(is_zero and not hasattr(atom, "val") for atom, is_zero in factors)]
    if name == "select_n":
        return [all(zero[1:])]
    if name in _KEEP_ZERO:
        return [all(zero)] * count
    return [name in _FIRST_ZERO and zero[0]] * count
