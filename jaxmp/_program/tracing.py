"""Splits the arguments of a call into arrays and the rest, and traces the call."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from jaxmp._program import compat
from jaxmp._program.explicit_axes import Axes, on_automatic_axes
from jaxmp._program.mesh_axes import explicit_mesh

# Kinds of NumPy dtypes that JAX has no arrays of: objects, text, dates.
_NO_NUMBERS = "OSUMm"


@jax.tree_util.register_static  # no leaf, so that jit can return it
@dataclasses.dataclass(frozen=True)
class Static:
    """The part of a call's arguments or results that is not arrays. It belongs to the signature.

    Attributes:
      tree: the structure.
      leaves: its leaves, `_ARRAY` in place of each array.
    """

    tree: Any
    leaves: tuple[Any, ...] = dataclasses.field(compare=False)
    # 1, 1.0 and True are equal, but a function may treat each differently.
    key: tuple[Any, ...] = ()

    @property
    def are_arrays(self) -> list[bool]:
        """Whether each leaf is an array."""
        return [leaf is _ARRAY for leaf in self.leaves]


_ARRAY: Any = object()


def partition(tree: Any, *, numpy: bool = True) -> tuple[Static, list[Any]]:
    """Splits a tree into the static rest and its arrays; `numpy` counts NumPy arrays as arrays."""

    def is_array(leaf: Any) -> bool:
        is_numpy = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in _NO_NUMBERS
        return isinstance(leaf, jax.Array) or (numpy and is_numpy)

    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    static_leaves = tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
    key = tuple(
        (type(leaf), str(leaf) if isinstance(leaf, float) else leaf) for leaf in static_leaves
    )
    return Static(structure, static_leaves, key), arrays


def combine(static: Static, arrays: Iterable[Any]) -> Any:
    """Rebuilds a tree: the inverse of `partition`."""
    arrays = iter(arrays)
    leaves = [next(arrays) if leaf is _ARRAY else leaf for leaf in static.leaves]
    return jax.tree.unflatten(static.tree, leaves)


def trace_call(
    fun: Callable[..., Any],
    static: Static,
    arrays: list[Any],
    *,
    as_jit: bool = False,
    numpy: bool = True,
    explicit: bool = False,
) -> "Traced":
    """Traces a call, for automatic mesh axes.

    Args:
      fun: a function.
      static: the static part of `(args, kwargs)`.
      arrays: the arrays of `(args, kwargs)`.
      as_jit: whether dictionaries and lists among the arguments may be changed, as under `jax.jit`
        and `jax.grad`, which give a function copies of them.
      numpy: whether NumPy arrays among the results are arrays of the program too.
      explicit: whether explicit mesh axes stay explicit.

    Raises:
      TypeError: if the function changes its arguments, and the change would be lost.
    """
    last: list[Static] = []

    @functools.wraps(fun, assigned=("__name__", "__qualname__"), updated=())
    def of_arrays(*arrays: Any) -> list[Any]:
        args, kwargs = combine(static, arrays)
        objects = [(args, kwargs)]
        if as_jit:  # dictionaries and lists may change, the arrays and modules in them may not
            containers = (dict, list, tuple)
            objects = jax.tree.leaves(objects, is_leaf=lambda x: not isinstance(x, containers))
        before = list(map(_leaves_of, objects))
        returned, results = partition(fun(*args, **kwargs), numpy=numpy)
        _check_unchanged(before, objects)
        last[:] = [returned]
        return results

    def trace(arrays: Sequence[Any]) -> tuple[Any, Static]:
        with compat.to_be_read():
            return compat.trace(of_arrays, arrays), last[0]

    def traced(arrays: Sequence[Any]) -> "Traced":
        types = [compat.type_or_given(x) for x in arrays]
        if explicit:
            return Traced(*trace(arrays), Axes(None), traced, types)
        return Traced(*on_automatic_axes(trace, arrays), traced, types)

    with _with_notes():
        return traced(arrays)


class Traced(NamedTuple):
    """A traced call.

    Attributes:
      closed: its jaxpr, for automatic mesh axes.
      returned: the static part of its results.
      axes: the explicit mesh axes that it was called on.
      trace: traces the function again, for other arrays or types.
      types: the types of its arrays, on explicit axes.
    """

    closed: Any
    returned: Static
    axes: Axes
    trace: "Callable[[Sequence[Any]], Traced]"
    types: list[Any]

    def for_dtypes(self, dtypes: Sequence[Any]) -> Any:
        """Returns the jaxpr of the call for arrays of other dtypes."""
        pairs = zip(self.types, dtypes, strict=True)
        other = [x if x.dtype == d else x.update(dtype=d, weak_type=False) for x, d in pairs]
        return self.trace(other).closed


# Errors of Flax, which is not imported here, and of JAX, by name.
_NOTES = {
    "UnexpectedTracerError": "As under jax.jit, a jax.custom_vjp inside may not close over traced "
    "values: pass them to it as arguments (with jaxopt, to solver.run and to the objective)",
    "TraceContextError": "A function that is rewritten may change the state of nnx modules only if "
    "they are its arguments: jaxmp.nnx.autocast(loss_fn, policy)(model, batch)",
}


@contextlib.contextmanager
def _with_notes() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if note := _NOTES.get(type(error).__name__):
            error.add_note(note)
        raise


def _leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves and the structure of a tree; None for leaves that change per flatten.

    A state of Flax is a leaf: a module merged from it, or its `nnx.remat`, writes to its variables,
    and a function of a state returns the new one.
    """
    flatten = functools.partial(jax.tree.flatten, is_leaf=_is_state)
    (leaves, structure), (leaves_again, _) = flatten(tree), flatten(tree)
    return [a if a is b else None for a, b in zip(leaves, leaves_again, strict=True)], structure


def _is_state(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")  # without Flax there are no states
    return nnx is not None and isinstance(x, nnx.State)


def _is_unchanged(before: tuple[list[Any], Any], tree: Any) -> bool:
    try:
        leaves, structure = _leaves_of(tree)
    except ValueError:  # a state of Equinox that was used can no longer be read
        return True
    pairs = zip(leaves, before[0], strict=False)  # of one length, if of one structure
    return structure == before[1] and all(a is b for a, b in pairs)


def _check_unchanged(before: list[Any], objects: list[Any]) -> None:
    """Raises TypeError if a function has changed its arguments, copies of the caller's."""
    if not all(itertools.starmap(_is_unchanged, zip(before, objects, strict=True))):
        raise TypeError(
            "the function changes its arguments in place. It runs on copies, so that the changes "
            "would be lost. For nnx modules with state (BatchNorm, Dropout, caches), use "
            "jaxmp.nnx.autocast and jaxmp.nnx.value_and_grad, which take the changes back. For "
            "other objects, return the new values"
        )


class Returned(NamedTuple):
    """The result of a function, in a form that jit can return: its arrays, and the rest."""

    arrays: list[Any]
    static: Static


Rewrite = Callable[[Traced, Static, list[Any]], list[Any]]


class _HeldArrays(Exception):
    """The function holds arrays of its own, which may change between its calls."""


def rewriting(
    fun: Callable[..., Any],
    rewrite: Rewrite,
    name: str,
    advice: str,
    *,
    as_jit: bool = False,
    explicit: bool = False,
) -> Callable[[Static, list[Any]], Returned]:
    """Returns a function that traces, rewrites and runs `fun` at each call.

    Outside of other traces it is compiled, once for each signature, unless `fun` holds arrays of
    its own, or numbers that change.

    Args:
      fun: the function.
      rewrite: computes the arrays that the function returns, from the traced call, the static part
        of the arguments, and their arrays.
      name: the name of the transformation.
      advice: what to do instead within a linen module.
      as_jit: whether dictionaries and lists among the arguments may be changed: see `trace_call`.
      explicit: whether explicit mesh axes stay explicit.

    Returns:
      A function of the two parts that `partition` makes of `(args, kwargs)`. It raises ValueError
      for a call with linen modules that are being initialized or changed.
    """

    held: list[Any] = []  # numbers that it held when it was last compiled; None for arrays

    def rewritten(static: Static, arrays: list[Any], may_capture: bool) -> Returned:
        traced = trace_call(fun, static, arrays, as_jit=as_jit, explicit=explicit)
        if not may_capture:
            held[:] = [None if compat.holds_arrays(traced.closed) else _held_numbers(fun)]
            if held == [None]:
                raise _HeldArrays

        def run(*arrays: Any) -> list[Any]:
            return rewrite(traced, static, list(arrays))

        with _with_notes():
            return Returned(traced.axes.run(run, arrays), traced.returned)

    rewritten.__name__ = rewritten.__qualname__ = getattr(fun, "__name__", name)
    compiled = jax.jit(rewritten, static_argnums=(0, 2))

    def call(static: Static, arrays: list[Any]) -> Returned:
        objects = (leaf for leaf in static.leaves if hasattr(leaf, "__dict__"))
        _check_no_linen_state([fun, *objects], name, advice)
        # Within another trace, a separate program would only have to be taken apart again.
        inline = any(map(compat.is_traced, arrays)) or not _is_hashable(static)
        if not inline and (not held or held == [_held_numbers(fun)]):
            with contextlib.suppress(_HeldArrays):
                return compiled(static, arrays, False)
        return rewritten(static, arrays, True)

    return call


def on_automatic_axes_inside(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, run on automatic axes where it is called on explicit ones."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        static, arrays = partition((args, kwargs), numpy=False)
        if explicit_mesh(arrays) is None:
            return fun(*args, **kwargs)
        traced = trace_call(fun, static, arrays, as_jit=True, numpy=False)
        results = traced.axes.run(core.jaxpr_as_fun(traced.closed), arrays)
        return combine(traced.returned, results)

    return call


def _is_hashable(static: Static) -> bool:
    try:
        hash(static)
    except TypeError:
        return False
    return True


def _check_no_linen_state(call: list[Any], name: str, advice: str) -> None:
    """Raises ValueError for a call with linen modules that are being initialized or changed."""
    linen = sys.modules.get("flax.linen")  # without Flax there are no linen modules
    if linen is None:
        return
    # Flax replaces a dictionary in an attribute of a module by its own.
    for value in _reachable_objects(call, (dict, sys.modules["flax.core"].FrozenDict)):
        scope = value.scope if isinstance(value, linen.Module) else None
        if scope is not None and scope.mutable:
            raise ValueError(
                f"inside of a linen module, {name} cannot go around {type(value).__name__}, which "
                "the function holds or is given: the variables that it makes or changes would be "
                f"lost. {advice}. If the function only reads an attribute, such as self.width, "
                "read it before"
            )


_LARGEST_CONTAINER = 100  # larger containers are not searched for modules


def _reachable_objects(call: list[Any], mappings: Any) -> Iterator[Any]:
    """Yields a function and its arguments, and all that they are bound to, hold and close over."""
    containers: Any = (list, tuple, *mappings)
    waiting, ids = list(call), set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in ids:
            continue
        ids.add(id(value))
        yield value
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        if inspect.ismethod(value):
            waiting += [value.__self__, value.__func__]
        if inspect.isfunction(value):
            waiting += [c.cell_contents for c in value.__closure__ or () if c != types.CellType()]
            waiting += [value.__defaults__, value.__kwdefaults__, *_named_globals(value)]
        # Other containers are skipped: they may make their elements anew, or read them from a file.
        if isinstance(value, containers) and len(value) <= _LARGEST_CONTAINER:
            waiting += value.values() if isinstance(value, mappings) else value


def _named_globals(function: Any) -> Iterator[Any]:
    """Yields the numbers, containers and functions of its module that a function names."""
    codes, known = [function.__code__], function.__globals__
    for code in codes:
        codes += filter(inspect.iscode, code.co_consts)
        values = map(known.get, code.co_names)
        yield from (x for x in values if not inspect.isfunction(x) or x.__globals__ is known)


def _held_numbers(fun: Callable[..., Any]) -> list[Any]:
    """Returns the numbers and strings that a function holds, and those of small NumPy arrays."""
    kinds = (int, float, complex, str, np.generic, np.ndarray)
    held = (x for x in _reachable_objects([fun], (dict,)) if isinstance(x, kinds))
    small = (x for x in held if getattr(x, "size", 1) <= _LARGEST_CONTAINER)
    return [
        (type(x), getattr(x, "dtype", None), np.shape(x), getattr(x, "tobytes", x.__repr__)())
        for x in small
    ]
