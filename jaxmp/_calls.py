"""A call of a function as JAX can trace it: its arrays, and the rest."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxmp import _compat

# Kinds of NumPy dtypes that JAX has no arrays of: objects, text, dates.
_NO_NUMBERS = "OSUMm"


@dataclasses.dataclass(frozen=True)
class Static:
    """What is no array among the arguments or the results of a call: part of its signature.

    Attributes:
      tree: the structure.
      leaves: its leaves, `_ARRAY` in place of each array.
    """

    tree: Any
    leaves: tuple[Any, ...] = dataclasses.field(compare=False)
    # 1, 1.0 and True are equal, but a function may do another thing with each.
    key: tuple[Any, ...] = ()


_ARRAY: Any = object()


def split(tree: Any, *, numpy: bool = True) -> tuple[Static, list[Any]]:
    """The arrays of a tree, and the rest, to which NumPy's may belong."""

    def is_array(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) or (numpy and _is_of_numpy(leaf))

    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    rest = tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
    key = tuple((type(leaf), str(leaf) if isinstance(leaf, float) else leaf) for leaf in rest)
    return Static(structure, rest, key), arrays


def _is_of_numpy(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in _NO_NUMBERS


def joined(static: Static, arrays: Iterable[Any]) -> Any:
    """The inverse of `split`."""
    given = iter(arrays)
    leaves = [next(given) if leaf is _ARRAY else leaf for leaf in static.leaves]
    return jax.tree.unflatten(static.tree, leaves)


def traced(
    fun: Callable[..., Any],
    static: Static,
    arrays: list[Any],
    *,
    as_jit: bool = False,
    numpy: bool = True,
) -> tuple[Any, Static]:
    """The jaxpr of a call, and what is no array in what it returns.

    Args:
      fun: a function.
      static: what is no array in `(args, kwargs)`.
      arrays: the arrays in it.
      as_jit: whether dictionaries and lists among the arguments may be changed, as under `jax.jit`
        and `jax.grad`, which give a function copies of them.
      numpy: whether NumPy's arrays among the results are arrays of the program too.

    Raises:
      TypeError: if the function changes its arguments, and the change would be lost.
    """
    found: list[Static] = []

    @functools.wraps(fun, assigned=("__name__", "__qualname__"), updated=())
    def of_arrays(*arrays: Any) -> list[Any]:
        args, kwargs = joined(static, arrays)
        objects = _objects((args, kwargs)) if as_jit else [(args, kwargs)]
        before = [jax.tree.flatten(each) for each in objects]
        returned, results = split(fun(*args, **kwargs), numpy=numpy)
        _check_unchanged(before, objects)
        found[:] = [returned]
        return results

    try:
        return _compat.trace(of_arrays, arrays), found[0]
    except Exception as error:
        if note := _NOTES.get(type(error).__name__):
            error.add_note(note)
        raise


# Flax's errors, by name: it is not imported here.
_NOTES = {
    "TraceContextError": "A function that is rewritten may change the state of nnx modules only if "
    "they are its arguments: jaxmp.nnx.autocast(loss_fn, policy)(model, batch)",
}


def _objects(tree: Any) -> list[Any]:
    """What is in the dictionaries and lists of a tree: arrays, modules."""
    return jax.tree.leaves(tree, is_leaf=lambda x: not isinstance(x, (dict, list, tuple)))


def _check_unchanged(before: list[Any], objects: list[Any]) -> None:
    """Raises TypeError if a function has changed its arguments, copies of the caller's."""
    same = all(
        structure == now and all(new is old for new, old in zip(leaves, old_leaves, strict=True))
        for (old_leaves, structure), (leaves, now) in zip(
            before, map(jax.tree.flatten, objects), strict=True
        )
    )
    if not same:
        raise TypeError(
            "the function changes its arguments in place, which would be lost: it runs on copies. "
            "For nnx modules with state (BatchNorm, Dropout, caches), use jaxmp.nnx.autocast and "
            "jaxmp.nnx.value_and_grad, which take the changes back; for others, return what is new"
        )
