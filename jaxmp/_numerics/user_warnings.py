"""Warnings that point to the user's line, not to a line of a library in between."""

import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, get_args

_BETWEEN = frozenset(
    {"beartype", "contextlib", "equinox", "flax", "functools", "jax", "jaxmp", "jaxtyping", "optax"}
)

_TEXTS: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the user's line, even if transformations of JAX are in between."""
    frame: Any = sys._getframe()
    level = 1
    # Not `skip_file_prefixes`: it is for Python 3.12 and later, and takes paths of files.
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN and frame.f_back:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_once(text: str, about: type, *, again: bool = False) -> None:
    """Warns like `warn`, but repeats a text about a class only if `again` is true."""
    texts = _TEXTS.setdefault(about, set())
    if again or text not in texts:
        texts.add(text)
        warn(text)


def check_option(name: str, value: str, options: Any) -> Any:
    """Returns an option, and raises ValueError if it is none of a `Literal`."""
    *others, last = map(repr, get_args(options))
    if value not in get_args(options):
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
    return value


def first_few(names: Sequence[str], most: int = 3) -> str:
    """Lists the first names for a message, and the number of the others.

    >>> first_few(["a", "b", "c", "d"]), first_few(["a", "b"])
    ('a, b, c and 1 more', 'a, b')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
