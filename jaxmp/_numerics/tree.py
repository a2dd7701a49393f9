"""Casting, finiteness, selection and path names of pytrees, for all other modules."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from jaxmp._numerics.dtypes import at_least_float32, is_floating, is_inexact, is_key


def cast_floating(tree: PyTree, dtype: Any) -> PyTree:
    """Casts the floating leaves of a tree, and nothing else.

    Integers, booleans, complex numbers, keys, `None`, float0, strings and Python scalars (which
    take the dtype of the arrays they meet) pass unchanged.

    Args:
      tree: any pytree; NumPy floats become JAX arrays, `ShapeDtypeStruct` leaves stay abstract.
      dtype: the floating dtype wanted.

    Returns:
      The tree with its floating leaves in `dtype`; a leaf that has it already is not copied.

    >>> cast_floating({"w": jnp.ones(2), "step": jnp.int32(3)}, jnp.bfloat16)["w"].dtype.name
    'bfloat16'
    """
    dtype = jnp.dtype(dtype)

    # A cast of every leaf would break some: a bfloat16 step counter stops at 256, and a typed PRNG
    # key raises.
    def cast_leaf(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct) and is_floating(x):
            return x.update(dtype=dtype)
        if not isinstance(x, (jax.Array, np.ndarray, np.generic)) or not is_floating(x):
            return x
        if isinstance(x, jax.Array) and x.dtype == dtype and not x.weak_type:
            return x
        return jnp.asarray(x, dtype)

    return jax.tree.map(cast_leaf, tree)


def widen(tree: PyTree) -> PyTree:
    """Casts float leaves narrower than 32 bits to float32; wider and complex leaves stay."""
    return jax.tree.map(
        lambda x: cast_floating(x, at_least_float32(x.dtype)) if is_floating(x) else x, tree
    )


def strong(tree: PyTree) -> PyTree:
    """Makes every numeric leaf an array with a named dtype."""

    # A Python scalar or a weakly typed array in a state changes its type after the first step,
    # which compiles the step a second time.
    def strengthen(x: Any) -> Any:
        if not isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            return x
        x = jnp.asarray(x)
        weak = not is_key(x) and x.weak_type
        return jax.lax.convert_element_type(x, x.dtype) if weak else x

    return jax.tree.map(strengthen, tree)


def copied(tree: PyTree) -> PyTree:
    """Copies every array, so that either tree may be donated."""
    return jax.tree.map(_copied, strong(tree))


def _copied(x: Any) -> Any:
    # Copies by JAX's own function are a program for each shape, and these are none.
    if not isinstance(x, jax.core.Tracer) and x.is_fully_addressable:
        return jax.device_put(x, may_alias=False)
    return jnp.array(x, copy=True)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether no floating or complex number anywhere in the tree is infinite or NaN.

    Each leaf is tested in its own dtype. Inside of a `jax.shard_map` it sees the numbers of one
    device; `jax.lax.pmin(all_finite(grads), axis)` is the same on all devices of the mesh axes, as
    a flag must be that decides on a step.

    Args:
      tree: any pytree; leaves that are not floats are ignored.

    Returns:
      A boolean scalar, true for a tree without floats.

    >>> bool(all_finite([jnp.ones(3), jnp.float16(jnp.inf)])), bool(all_finite([1, None]))
    (False, True)
    """
    # Not by a norm of all leaves: it would overflow on large finite values.
    floats = [x for x in map(_as_array, jax.tree.leaves(tree)) if is_inexact(x)]
    return _all_finite(floats) if floats else jnp.array(True)


@functools.partial(jax.jit, inline=True)  # one dispatch where the caller is not compiled
def _all_finite(floats: list[Any]) -> Bool[Array, ""]:
    floats = list(map(_widen_float8, floats))
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


def _widen_float8(x: Any) -> Any:
    # Not every backend has is_finite for 8-bit floats; float32 holds them all exactly.
    return widen(x) if jnp.dtype(x.dtype).itemsize == 1 else x


def all_zero(tree: PyTree) -> Bool[Array, ""]:
    """Whether all floats of a tree are zero, and there are some.

    >>> bool(all_zero([jnp.zeros(3), jnp.zeros(2)])), bool(all_zero([jnp.zeros(3), jnp.ones(2)]))
    (True, False)
    """
    floats = [x for x in map(_as_array, jax.tree.leaves(tree)) if is_inexact(x)]
    return jnp.all(jnp.stack([jnp.all(x == 0) for x in floats])) if floats else jnp.array(False)


def count_nonfinite(tree: PyTree) -> PyTree:
    """Counts the numbers of each leaf that are infinite or NaN; other leaves than floats count 0.

    >>> count_nonfinite({"w": jnp.array([1.0, jnp.nan]), "step": jnp.int32(3)})
    {'step': Array(0, dtype=uint32), 'w': Array(1, dtype=uint32)}
    """

    def count(x: Any) -> Any:
        if not is_inexact(x):
            return jnp.uint32(0)
        return jnp.sum(~jnp.isfinite(_widen_float8(x)), dtype=jnp.uint32)

    return jax.tree.map(count, tree)


def stays_finite(new: PyTree, old: PyTree) -> Bool[Array, ""]:
    """Whether all numbers that were finite still are; a state may hold infinities.

    >>> old = jnp.array([1.0, jnp.inf])
    >>> bool(stays_finite(old + 1, old)), bool(stays_finite(old / 0, old))
    (True, False)
    """
    flags = [
        jnp.all(jnp.isfinite(x) | ~jnp.isfinite(y))
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if x is not y and is_inexact(y)
    ]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def _as_array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, (float, complex)) else x


def select(pred: Bool[Array, ""], on_true: PyTree, on_false: PyTree) -> PyTree:
    """Returns `on_true` if `pred` holds, else `on_false`: one whole tree, never a mixture.

    Unlike arithmetic with a mask, this does not spread a NaN from the tree that is not taken.

    Args:
      pred: a boolean scalar.
      on_true: a tree of arrays, which may include PRNG keys.
      on_false: a tree of the same structure and dtypes, and of shapes that broadcast to the same.

    Returns:
      The chosen tree.

    Raises:
      TypeError: if `pred` is not a boolean scalar, or two leaves differ in dtype: promotion would
        change the type of a state between steps.

    >>> select(jnp.array(False), {"a": jnp.float32(jnp.nan)}, {"a": jnp.float32(1.0)})
    {'a': Array(1., dtype=float32)}
    """
    check_flag(pred, "pred")

    def choose(new: Any, old: Any) -> Any:
        new, old = jnp.asarray(new), jnp.asarray(old)
        if new.dtype != old.dtype:
            raise TypeError(f"cannot select between {new.dtype} and {old.dtype}: cast one of them")
        return jax.lax.select(pred, *jnp.broadcast_arrays(new, old))

    return jax.tree.map(choose, on_true, on_false)


def check_flag(flag: Any, name: str) -> None:
    """Raises TypeError unless `flag` is a boolean scalar."""
    if jnp.shape(flag) != () or jnp.result_type(flag) != jnp.bool_:
        raise TypeError(
            f"{name} must be a boolean scalar, such as jaxmp.numbers.all_finite(grads); got "
            f"{jnp.result_type(flag)}{list(jnp.shape(flag))}"
        )


def check_arrays(tree: PyTree, name: str) -> None:
    """Raises TypeError if leaves are not numeric, and names the first such leaf."""
    for i, x in enumerate(jax.tree.leaves(tree)):
        if isinstance(x, (int, float, complex)):
            continue
        dtype = getattr(x, "dtype", None)
        if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
            raise TypeError(
                f"{name}, leaf {leaf_names(tree)[i]!r}, is a {dtype or type(x).__name__}: params "
                f"are trees of arrays. {_OF_NNX if is_from('flax.nnx', tree) else _OF_OTHERS}"
            )


_OF_NNX = (
    "For a live nnx module take jaxmp.nnx.make_train_step, or jaxmp.nnx.value_and_grad, which keep "
    "its state. Or split it: graphdef, params, rest = nnx.split(model, nnx.Param, ...), and "
    "nnx.merge(graphdef, params, rest) in the loss function"
)
_OF_OTHERS = (
    "Of a model that holds other things, such as an Equinox module, take the arrays: params, "
    "static = eqx.partition(model, eqx.is_inexact_array), and eqx.combine(params, static) in the "
    "loss function. Keep PRNG keys in another argument"
)


def is_from(package: str, x: Any) -> bool:
    """Whether the class of an object, or one that it inherits from, is of a package.

    >>> is_from("numpy", np.float32(1.0)), is_from("flax.nnx", np.float32(1.0))
    (True, False)
    """
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in type(x).__mro__)


def check_differentiable(tree: PyTree, name: str) -> None:
    """Raises TypeError if leaves are not floats, and names the first such leaf."""
    for i, x in enumerate(jax.tree.leaves(tree)):
        if not is_inexact(x) and not isinstance(x, (float, complex)):
            dtype = getattr(x, "dtype", type(x).__name__)
            raise TypeError(
                f"{name}, leaf {leaf_names(tree)[i]!r}, is {dtype}: only floating leaves have "
                "gradients and masters. Keep counters, keys and tables of integers in another "
                "argument (or convert the leaf to a float)"
            )


def split_floats(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any], PyTree], PyTree]]:
    """Returns the leaves that have gradients, and a function that puts new ones in their place.

    >>> floats, merge = split_floats({"table": 3, "w": 1.0})
    >>> floats, merge([2.0], {"table": 4, "w": None})
    ([1.0], {'table': 4, 'w': 2.0})
    """
    leaves, treedef = jax.tree.flatten(tree)
    structure: Any = treedef
    has_gradient = [is_inexact(x) or isinstance(x, (float, complex)) for x in leaves]

    def merge(floats: Sequence[Any], others: PyTree) -> PyTree:
        values, leaves = iter(floats), structure.flatten_up_to(others)
        return structure.unflatten(
            next(values) if is_float else x
            for is_float, x in zip(has_gradient, leaves, strict=True)
        )

    return [x for x, is_float in zip(leaves, has_gradient, strict=True) if is_float], merge


def leaf_names(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Returns `"decoder/layer_0/kernel"` for each leaf, in the order of `jax.tree.leaves`.

    >>> leaf_names({"layer": [1, {"w": 2}]})
    ['layer/0', 'layer/1/w']
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "(root)" for path, _ in paths]


def same_structure(a: PyTree, b: PyTree) -> bool:
    """Whether two trees have the same containers and leaves in the same places."""
    structure: Any = jax.tree.structure
    return bool(structure(a) == structure(b))


def check_like(tree: PyTree, like: PyTree, *, name: str, like_name: str, advice: str) -> None:
    """Raises ValueError unless two trees have the same structure and their leaves the same shapes.

    The message names the leaves that differ, and ends with `advice`, a full sentence.
    """
    if not same_structure(tree, like):
        names, like_names = leaf_names(tree), leaf_names(like)
        missing = [n for n in like_names if n not in set(names)]
        surplus = [n for n in names if n not in set(like_names)]
        difference = "".join(
            f"; {label}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            for label, names in (("missing", missing), ("left over", surplus))
            if names
        )
        difference = difference or (
            f"; same leaves in other containers: {jax.tree.structure(tree)} against "
            f"{jax.tree.structure(like)}"
        )
        raise ValueError(f"{name} and {like_name} have different structures{difference}. {advice}")
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
    for i, (x, y) in enumerate(leaves):
        if jnp.shape(x) != jnp.shape(y):
            raise ValueError(
                f"{name} leaf {leaf_names(tree)[i]!r} has shape {jnp.shape(x)}, but the leaf of "
                f"{like_name} has {jnp.shape(y)}. {advice}"
            )
