"""Finds the modules of an nnx model and their properties."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jaxmp._flax.module_casts import takes_float_dtype
from jaxmp._modules.decisions import has_call


def is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def modules_with_paths(
    node: Any, path: str = "", parent: str | None = None, above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any, str | None]]:
    """Yields the path of each module, the module, and the path of its caller; parents first.

    A shared module comes once for each of its paths, so that conflicting rules can be found.
    """
    if id(node) in above:
        return
    if isinstance(node, nnx.Module):
        yield path, node, parent
        # Lists and dictionaries of modules are not called: their owner calls their items.
        parent = path if parent is None or has_call(node) else parent
    for name, value in vars(node).items():
        if name.startswith("_pytree__"):  # nnx's own
            continue
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf=is_node)[0]:
            if isinstance(leaf, nnx.Pytree):
                inner = jax.tree_util.keystr(keys, simple=True, separator="/")
                names = "/".join(part for part in (path, name, inner) if part)
                yield from modules_with_paths(leaf, names, parent, (*above, id(node)))


def first_paths(model: Any) -> dict[int, tuple[str, Any]]:
    """Returns each module once, with its first path, by id."""
    pairs: dict[int, tuple[str, Any]] = {}
    for path, module, _ in modules_with_paths(model):
        pairs.setdefault(id(module), (path, module))
    return pairs


def modules(model: Any) -> list[Any]:
    return [module for _, module in first_paths(model).values()]


def takes_dtype(module: Any) -> bool:
    # Only an attribute of the instance can be set: a property of the class is the author's.
    return "dtype" in vars(module) and takes_float_dtype(module.dtype)


def is_flax_layer(module: Any) -> bool:
    """Whether this module is a layer of Flax, whose inner layers Flax's own code makes."""
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


def params_in_use(module: Any) -> list[Any]:
    """Returns a module's own params, and params in its Flax lists and dictionaries."""
    # These containers compute nothing, so the module itself uses the params in them.
    params = [
        param
        for name, value in vars(module).items()
        if not name.startswith("_pytree__")
        for leaf in jax.tree.leaves(value, is_leaf=is_node)
        if isinstance(leaf, nnx.Module) and is_from_flax(leaf) and not has_call(leaf)
        for param in params_in_use(leaf)
    ]
    return own_params(module) + params


def pure(
    fun: Callable[..., Any],
    tag: str,
    scopes: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
) -> Callable[..., Any]:
    """Turns a function of modules into a pure function of their structure and state.

    Args:
      fun: a function of nodes: modules, arrays, and trees of them.
      tag: the name of the context that `call_pure` opens.
      scopes: makes the context in which to call `fun` from the nodes.

    Returns:
      A function `(params, others, graphdef) -> (graphdef, state)`: of the nodes before the call, to
      the nodes and the result after it.
    """

    def pure_fun(params: Any, others: Any, graphdef: Any) -> Any:
        with nnx.merge_context(tag, True) as context:
            nodes = context.merge(graphdef, params, others)
        with contextlib.nullcontext() if scopes is None else scopes(nodes):
            out = fun(*nodes)
        with nnx.split_context(tag) as context:
            return context.split((nodes, out))

    return pure_fun


def call_pure(
    pure_fun: Callable[..., Any], tag: str, nodes: tuple[Any, ...], params: Any = nnx.Param
) -> Any:
    """Calls a function from `pure`, or a rewritten one, and writes changes back to the nodes.

    `params` is a filter for the variables that are its first argument.
    """
    # Flax's own transformations work like this: the same tag tells nnx which variables before the
    # call and after it are one.
    with nnx.update_context(tag):
        with nnx.split_context(tag) as context:
            graphdef, first, others = context.split(nodes, params, ...)
        graphdef, state = pure_fun(first, others, graphdef)
        with nnx.merge_context(tag, False) as context:
            _, out = context.merge(graphdef, state)
    return out


def with_transform(
    fun: Callable[..., Any], transform: Callable[..., Callable[..., Any]], tag: str
) -> Callable[..., Any]:
    """Applies a transformation of functions of arrays to a function of modules."""
    rewritten = transform(pure(fun, tag))
    return lambda *nodes: call_pure(rewritten, tag, nodes)
