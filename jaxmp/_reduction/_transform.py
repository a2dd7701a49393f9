"""A function, rewritten so that the gradients of its params are summed in float32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._calls import joined, split, traced
from jaxmp._reduction._interpreter import evaluate
from jaxmp._reduction._layout import Layout
from jaxmp._reduction._values import FLOAT32, Value, is_half, is_ours


def reduced_in_float32(
    fun: Callable[..., Any],
    args: Sequence[Any],
    argnums: Sequence[int],
    layouts: Sequence[Layout | None] | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same function of wider params: its value is the same, its gradients are float32.

    Args:
      fun: a function of pytrees.
      args: its arguments.
      argnums: which of them are params.
      layouts: how the leaves of the params lie on the devices, if they are to be gathered.

    Returns:
      The function, for arguments like these, and the arguments, params of 16 bits as float32.
      The value is computed with the params as they were given.
    """
    args = tuple(jax.tree.map(jnp.asarray, x) if i in argnums else x for i, x in enumerate(args))
    # NumPy's arrays stay what they are: masks and lengths that a program may depend on, and
    # numbers of 64 bits that it hands on.
    static, arrays = split((args, {}), numpy=False)
    closed, returned = traced(fun, static, arrays, as_jit=True, numpy=False)
    marks = _marks(args, argnums, layouts)

    def rewritten(*wide: Any) -> Any:
        _, wides = split(wide, numpy=False)
        values = [
            Value(y) if mark is None else _param(x, y, mark[0])
            for x, y, mark in zip(arrays, wides, marks, strict=True)
        ]
        made = evaluate(closed.jaxpr, closed.consts, values)
        return joined(returned, [value.bare() for value in made])

    wide = tuple(_widened(x) if i in argnums else x for i, x in enumerate(args))
    return rewritten, wide


def _widened(params: Any) -> Any:
    """Params of 16 bits as float32; others, of 8 bits say, are no sums over the batch of ours."""
    return jax.tree.map(lambda x: x.astype(FLOAT32) if is_half(x) else x, params)


def _marks(
    args: Sequence[Any], argnums: Sequence[int], layouts: Sequence[Layout | None] | None
) -> list[tuple[Layout | None] | None]:
    """For each array among the arguments its layout in a tuple if it is a param, else None."""
    given = None if layouts is None else iter(layouts)
    marks: dict[int, list[tuple[Layout | None] | None]] = {}
    for i in argnums:
        leaves = jax.tree.leaves(args[i])
        of_leaves = [None if given is None else next(given) for _ in leaves]
        marks[i] = [
            (layout,) if is_ours(leaf) else None
            for leaf, layout in zip(leaves, of_leaves, strict=True)
        ]
    found: list[tuple[Layout | None] | None] = []
    for i, arg in enumerate(args):
        found += marks[i] if i in marks else [None] * len(split(arg, numpy=False)[1])
    return found


def _param(array: Any, wide: Any, layout: Layout | None) -> Value:
    exact = array.dtype == FLOAT32
    return Value(wide if exact else array, wide, layout)
