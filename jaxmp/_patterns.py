"""Patterns that modules are found by: globs over paths, class names, expressions, predicates."""

import fnmatch
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

Pattern = str | re.Pattern[str] | type | Callable[[str, Any], Any]

_ANY_NAMES = "(?:[^/]+/)*"


def matches(pattern: Pattern, path: str, module: Any) -> bool:
    """Whether a pattern matches a module.

    Args:
      pattern: what `check_pattern` returned.
      path: names joined by `/`, `""` for the root.
      module: the module, or None if only its path is known.

    Returns:
      Whether it does.

    >>> matches("*norm*", "layer/norm1", None), matches("*norm*", "norm/dense", None)
    (True, False)
    """
    if isinstance(pattern, str):
        kind, _, rest = pattern.partition(":")
        if kind == "type":
            names = [base.__name__ for base in type(module).__mro__]
            return module is not None and any(fnmatch.fnmatchcase(name, rest) for name in names)
        if kind == "re":
            return re.fullmatch(rest, path) is not None
        return _glob(pattern).fullmatch(f"{path}/" if path else "") is not None
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(path) is not None
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return bool(pattern(path, module))


def is_about_paths(pattern: Pattern) -> bool:
    """Whether a path is all that a pattern looks at, and not the module there.

    >>> is_about_paths("*norm*"), is_about_paths("type:*Norm")
    (True, False)
    """
    if isinstance(pattern, str):
        return not pattern.startswith("type:")
    return isinstance(pattern, re.Pattern)


def check_pattern(pattern: Any) -> Pattern:
    """The pattern, if it is one.

    Raises:
      ValueError: for text that is no valid glob or regular expression.
      TypeError: for what is no pattern at all.

    >>> check_pattern("decoder/**/mlp")
    'decoder/**/mlp'
    """
    if isinstance(pattern, str):
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        elif not pattern.startswith("type:"):
            _glob(pattern)
        elif pattern == "type:":
            raise ValueError("'type:' names no class. Write a class name, as in 'type:*Norm'")
        return pattern
    if isinstance(pattern, re.Pattern):
        if not isinstance(pattern.pattern, str):
            raise TypeError(f"{pattern!r} matches bytes, but paths are text")
        return pattern
    if isinstance(pattern, type):
        return pattern
    if callable(pattern) and not isinstance(pattern, functools.partial) and _takes_two(pattern):
        return pattern
    raise TypeError(
        "a pattern must be a glob such as '*norm*', a compiled regular expression, a module class "
        f"or a hashable function (path, module) -> bool; got {pattern!r}"
    )


def _takes_two(function: Any) -> bool:
    """Whether it looks like a predicate; a module is called too, but with arrays."""
    is_module = any(base.__module__.startswith("flax.") for base in type(function).__mro__)
    try:
        hash(function)
        inspect.signature(function).bind("path", None)
    except (TypeError, ValueError):
        return False
    return not is_module


def pattern_text(pattern: Pattern) -> str:
    """How a pattern is shown to people.

    >>> pattern_text(dict), pattern_text(re.compile("a.*"))
    ('dict', 're:a.*')
    """
    if isinstance(pattern, str):
        return pattern
    if isinstance(pattern, re.Pattern):
        return f"re:{pattern.pattern}"
    name = getattr(pattern, "name", None) or getattr(pattern, "__name__", None)
    return str(name or repr(pattern))


@functools.lru_cache(maxsize=1024)
def _glob(pattern: str) -> re.Pattern[str]:
    """The expression for a path with a slash after each name."""
    anchored = pattern.startswith("/")
    names = pattern.removeprefix("/").split("/")
    if pattern == "/":
        names = []
    elif "" in names:
        what = "is empty" if not pattern else "has an empty name between or after slashes"
        raise ValueError(
            f"{pattern!r} is no valid glob: it {what}. Write names joined by single slashes, such "
            "as 'decoder/**/mlp', or '/' for the model itself"
        )
    parts = [_ANY_NAMES if name == "**" else f"{_name(name, pattern)}/" for name in names]
    return re.compile(("" if anchored else _ANY_NAMES) + "".join(parts))


def _name(name: str, pattern: str) -> str:
    if "**" in name:
        raise ValueError(
            f"{pattern!r} is no valid glob: '**' stands for whole names and must be alone between "
            "slashes, as in 'decoder/**/mlp'. Within a name write '*'"
        )
    out, i = [], 0
    while i < len(name):
        char = name[i]
        if char == "[":
            # As in a shell, a bracket that comes first in a set belongs to it.
            first = i + 1 + name[i + 1 :].startswith("!")
            end = name.find("]", first + 1)
            if end < 0:
                raise ValueError(f"{pattern!r} is no valid glob: '[' without a closing ']'")
            out.append(_character_set(name[i + 1 : end], pattern))
            i = end
        else:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(char) or re.escape(char))
        i += 1
    return "".join(out)


def _character_set(text: str, pattern: str) -> str:
    negated, chars = text.startswith("!"), text.removeprefix("!")
    escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", chars)
    try:
        re.compile(f"[{escaped}]")
    except re.error:
        raise ValueError(f"{pattern!r} is no valid glob: [{chars}] is no set") from None
    return f"(?!/)[{'^' if negated else ''}{escaped}]"
