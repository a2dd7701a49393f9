"""Functions of live nnx modules as functions of arrays, and back."""

import contextlib
from collections.abc import Callable
from typing import Any

from flax import nnx

Within = Callable[[Any], contextlib.AbstractContextManager[Any]]


def pure(fun: Callable[..., Any], tag: str, within: Within | None = None) -> Callable[..., Any]:
    """A function of the structure and the state of modules, which returns both as it leaves them.

    Args:
      fun: a function of nodes: modules, arrays, and trees of them.
      tag: the name of the context that `call_pure` opens.
      within: a context to call it in, made from the nodes.

    Returns:
      `(graphdef, state) -> (graphdef, state)`, of the nodes before; and of the nodes and the
      result after.
    """

    def pure_fun(graphdef: Any, state: Any) -> Any:
        with nnx.merge_context(tag, True) as context:
            nodes = context.merge(graphdef, state)
        with contextlib.nullcontext() if within is None else within(nodes):
            out = fun(*nodes)
        with nnx.split_context(tag) as context:
            return context.split((nodes, out))

    return pure_fun


def call_pure(pure_fun: Callable[..., Any], tag: str, nodes: tuple[Any, ...]) -> Any:
    """Calls what `pure` returned, or a rewriting of it; what changed in the nodes is changed."""
    with nnx.update_context(tag):
        with nnx.split_context(tag) as context:
            graphdef, state = context.split(nodes)
        graphdef, state = pure_fun(graphdef, state)
        with nnx.merge_context(tag, False) as context:
            _, out = context.merge(graphdef, state)
    return out


def transformed(
    fun: Callable[..., Any], transform: Callable[..., Callable[..., Any]], tag: str
) -> Callable[..., Any]:
    """A function of modules under a transformation of functions of arrays.

    Args:
      fun: a function of nodes.
      transform: the transformation.
      tag: the name of the context for it.
    """
    rewritten = transform(pure(fun, tag))
    return lambda *nodes: call_pure(rewritten, tag, nodes)
