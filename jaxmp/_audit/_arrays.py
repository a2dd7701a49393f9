"""The dtypes of what a function takes and returns, field by field."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax

from jaxmp._audit._rows import Arrays

# A dictionary of more keys, such as params of a hundred blocks, is one row.
_MOST_KEYS = 12


def argument_rows(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Arrays, ...]:
    """The rows of the arguments, under the names that the function has for them."""
    rows: list[Arrays] = []
    for name, value in _named(fn, args, kwargs).items():
        rows += _rows("argument", name, value)
    return tuple(rows)


def result_rows(result: Any) -> tuple[Arrays, ...]:
    """The rows of the result; of a tuple, those of each of its items."""
    items = {"result": result}
    if type(result) is tuple:
        items = {f"result[{i}]": item for i, item in enumerate(result)}
    return tuple(row for name, item in items.items() for row in _rows("result", name, item))


def _named(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    numbered = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
    try:
        signature = inspect.signature(fn)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return numbered
    named: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}[{i}]": item for i, item in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named


def _rows(role: Literal["argument", "result"], name: str, value: Any) -> Iterator[Arrays]:
    for field, part in _fields(name, value, depth=2):
        groups: dict[str, list[Any]] = {}
        for leaf in jax.tree.leaves(part):
            if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
                groups.setdefault(str(_dtype(leaf)), []).append(leaf)
        for dtype, leaves in groups.items():
            elements = sum(leaf.size for leaf in leaves)
            size = sum(leaf.size * _dtype(leaf).itemsize for leaf in leaves)
            yield Arrays(role, field, dtype, len(leaves), int(elements), int(size))


def _dtype(leaf: Any) -> Any:
    """The dtype that JAX gives an array, which makes 32 bits of NumPy's 64."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)


def _fields(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """A value, or its fields if it is a dictionary, dataclass or NamedTuple: `state.params`."""
    fields: dict[str, Any] = {}
    if depth and hasattr(value, "_fields"):
        fields = {field: getattr(value, field) for field in value._fields}
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {field: getattr(value, field) for field in names}
    elif depth == 2 and isinstance(value, Mapping) and len(value) <= _MOST_KEYS:
        fields = {str(key): item for key, item in value.items()}
    if not fields:
        yield name, value
    for field, item in fields.items():
        yield from _fields(f"{name}.{field}", item, depth - 1)
