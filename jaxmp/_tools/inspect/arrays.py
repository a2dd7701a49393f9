"""Lists the dtypes of a function's arguments and results, field by field."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax

from jaxmp._tools.inspect.rows import Arrays

# A dictionary with more keys, such as the params of a hundred blocks, is one row.
_MOST_KEYS = 12


def argument_rows(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Arrays, ...]:
    """Returns the rows of the arguments, named after the function's parameters."""
    rows: list[Arrays] = []
    for name, value in _named_arguments(fn, args, kwargs).items():
        rows += _array_rows("argument", name, value)
    return tuple(rows)


def result_rows(result: Any) -> tuple[Arrays, ...]:
    """Returns the rows of the result; a tuple has rows for each item."""
    items = {"result": result}
    if type(result) is tuple:
        items = {f"result[{i}]": item for i, item in enumerate(result)}
    return tuple(row for name, item in items.items() for row in _array_rows("result", name, item))


def _named_arguments(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
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


def _array_rows(role: Literal["argument", "result"], name: str, value: Any) -> Iterator[Arrays]:
    for field, part in _with_fields(name, value, depth=2):
        groups: dict[str, list[Any]] = {}
        for leaf in jax.tree.leaves(part):
            if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
                groups.setdefault(str(_dtype_in_jax(leaf)), []).append(leaf)
        for dtype, leaves in groups.items():
            elements = sum(leaf.size for leaf in leaves)
            size = sum(leaf.size * _dtype_in_jax(leaf).itemsize for leaf in leaves)
            yield Arrays(role, field, dtype, len(leaves), int(elements), int(size))


def _dtype_in_jax(leaf: Any) -> Any:
    """Returns the dtype that an array has in JAX, which may turn NumPy's 64 bits into 32."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)


def _with_fields(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yields a value, or its fields if it is a dictionary, dataclass or NamedTuple.

    The name of a field is like `state.params`.
    """
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
        yield from _with_fields(f"{name}.{field}", item, depth - 1)
