"""Which params an optimizer never moves, read from its program: they need no masters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxmp import _compat
from jaxmp._dtypes import at_least_float32, is_narrow

# What an operation makes of zeros is zero: where all its array operands are ...
_KEEP_ZERO = frozenset(
    {"add", "add_any", "sub", "neg", "sign", "abs", "sqrt", "convert_element_type", "copy"}
    | {"copy_p", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice"}
    | {"rev", "concatenate", "reduce_sum", "reduce_precision"}
)
# ... and where the first of them is (a product is zero where any is).
_FIRST_ZERO = frozenset({"div", "integer_pow"})


def moved_by(inner: optax.GradientTransformation, params: PyTree) -> PyTree:
    """For each leaf of the params, whether an optimizer ever moves it.

    `optax.set_to_zero` on some params (LoRA, a frozen backbone) makes updates that are zero
    whatever the gradients. They are found by following zeros through the program of one update,
    also through `MultiSteps` and `apply_if_finite`, which branch.

    Args:
      inner: the optimizer. One that cannot be traced without arguments of its own is taken to
        move everything, which costs memory and no correctness.
      params: a tree of arrays.

    Returns:
      A tree of bools with the structure of the params.

    >>> transforms = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}
    >>> inner = optax.multi_transform(transforms, {"head": "train", "base": "freeze"})
    >>> moved_by(inner, {"head": jnp.bfloat16(1), "base": jnp.bfloat16(1)})
    {'base': False, 'head': True}
    """
    leaves, treedef = jax.tree.flatten(params)
    kinds = tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
    if all(jnp.issubdtype(dtype, jnp.inexact) and not is_narrow(dtype) for _, dtype in kinds):
        return jax.tree.map(lambda _: True, params)  # no masters anyway
    return jax.tree.unflatten(treedef, _moved(inner, treedef, kinds))


@functools.lru_cache(maxsize=64)
def _moved(inner: Any, treedef: Any, kinds: tuple[Any, ...]) -> tuple[bool, ...]:
    values = [jax.ShapeDtypeStruct(shape, at_least_float32(dtype)) for shape, dtype in kinds]
    params = jax.tree.unflatten(treedef, values)

    def update(grads: PyTree, state: Any, params: PyTree) -> list[Any]:
        return jax.tree.leaves(inner.update(grads, state, params)[0])

    try:
        # The state is an argument too: a schedule that begins at zero does not stay there.
        jaxpr = jax.make_jaxpr(update)(params, jax.eval_shape(inner.init, params), params).jaxpr
    except (TypeError, ValueError):  # an argument is missing, or integers do not promote
        return (True,) * len(kinds)
    return tuple(not zero for zero in _zeros(jaxpr, [False] * len(jaxpr.invars)))


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
        return [any(zero)]
    if name == "select_n":
        return [all(zero[1:])]
    if name in _KEEP_ZERO:
        return [all(zero)] * count
    return [name in _FIRST_ZERO and zero[0]] * count
