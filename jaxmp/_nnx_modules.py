"""Finds the modules of an nnx model, and what there is to know about each."""

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jaxmp._regions import takes_float_dtype


def is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def walk(
    node: Any, path: str = "", parent: str | None = None, above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any, str | None]]:
    """Path, module and the path of the calling module, parents first.

    A shared module comes once for each of its paths: that is how differing rules are found.
    """
    if id(node) in above:
        return
    if isinstance(node, nnx.Module):
        yield path, node, parent
        # Lists and dictionaries of modules are not called: their owner calls what is in them.
        parent = path if parent is None or is_called(node) else parent
    for name, value in vars(node).items():
        if name.startswith("_pytree__"):
            continue
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf=is_node)[0]:
            if isinstance(leaf, nnx.Pytree):
                inner = jax.tree_util.keystr(keys, simple=True, separator="/")
                names = "/".join(part for part in (path, name, inner) if part)
                yield from walk(leaf, names, parent, (*above, id(node)))


def first_paths(model: Any) -> dict[int, tuple[str, Any]]:
    """Each module once, with the first of its paths."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module, _ in walk(model):
        found.setdefault(id(module), (path, module))
    return found


def modules(model: Any) -> list[Any]:
    return [module for _, module in first_paths(model).values()]


def is_called(module: Any) -> bool:
    # Every class has a __call__ of its metaclass; only one in the class body is its instances'.
    return any("__call__" in vars(base) for base in type(module).__mro__)


def takes_dtype(module: Any) -> bool:
    return "dtype" in vars(module) and takes_float_dtype(module.dtype)


def is_flax_layer(module: Any) -> bool:
    """Whether Flax's own code is what puts this module together from layers."""
    return takes_dtype(module) and any(
        base.__module__.startswith("flax.nnx.nn.") for base in type(module).__mro__
    )


def is_from_flax(module: Any) -> bool:
    return type(module).__module__.startswith("flax.")


def leaves(variable: Any) -> list[Any]:
    return jax.tree.leaves(variable.get_raw_value())


def own_params(module: Any) -> list[Any]:
    return [
        leaf
        for name, value in vars(module).items()
        if not name.startswith("_pytree__")
        for leaf in jax.tree.leaves(value, is_leaf=is_node)
        if isinstance(leaf, nnx.Param)
    ]


def held_params(module: Any) -> list[Any]:
    """Its own params, and those in lists and dictionaries of Flax's, which compute nothing."""
    held = [
        inner
        for name, value in vars(module).items()
        if not name.startswith("_pytree__")
        for leaf in jax.tree.leaves(value, is_leaf=is_node)
        if isinstance(leaf, nnx.Module) and is_from_flax(leaf) and not is_called(leaf)
        for inner in held_params(leaf)
    ]
    return own_params(module) + held
