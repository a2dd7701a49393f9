"""Patterns that find modules: globs over paths, class names, expressions, predicates."""

import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

Pattern = str | re.Pattern[str] | type | Callable[[str, Any], Any]

# A set of characters, as in a shell: a bracket that comes first in it belongs to it.
_SET = re.compile(r"\[((?:!.|[^!])[^]]*)\]", re.DOTALL)


def matches(pattern: Pattern, path: str, module: Any) -> bool:
    """Whether a pattern, as `check_pattern` returns it, matches a module.

    Its path is names joined by `/`, `""` for the root. The module is None if only that is known. A
    glob is compared with the last names of the path, and a star stays within one name.

    >>> matches("*norm*", "layer/norm1", None), matches("*norm*", "norm/dense", None)
    (True, False)
    """
    if isinstance(pattern, str):
        kind, _, text = pattern.partition(":")
        if kind == "type":
            # Base classes too: a user's subclass of a norm is a norm.
            names = [base.__name__ for base in type(module).__mro__]
            return module is not None and any(fnmatch.fnmatchcase(name, text) for name in names)
        if kind == "re":
            return re.fullmatch(text, path) is not None
        return _names_match(_compile_glob(pattern), path.split("/") if path else [])
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(path) is not None
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return bool(pattern(path, module))


def hides_all_of(earlier: Pattern, later: Pattern) -> bool:
    """Whether an earlier pattern surely matches all that a later one matches, in any model.

    >>> hides_all_of("**", "head"), hides_all_of("*", "head"), hides_all_of("head", "*")
    (True, True, False)
    """
    if earlier == later or earlier in ("**", "/**", "re:.*"):
        return True
    # A star is any name: all modules but the model itself.
    is_glob = isinstance(later, str) and not later.startswith(("type:", "re:"))
    return earlier == "*" and is_glob and not matches(later, "", None)


def is_about_paths(pattern: Pattern) -> bool:
    """Whether a pattern looks only at paths, and not at modules.

    >>> is_about_paths("*norm*"), is_about_paths("type:*Norm")
    (True, False)
    """
    if isinstance(pattern, str):
        return not pattern.startswith("type:")
    return isinstance(pattern, re.Pattern)


def check_pattern(pattern: Any) -> Pattern:
    """Returns the pattern, if it is valid.

    Raises:
      ValueError: for text that is not a valid glob or regular expression.
      TypeError: for a value that is not a pattern at all.

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
            _compile_glob(pattern)
        elif pattern == "type:":
            raise ValueError("'type:' names no class. Write a class name, as in 'type:*Norm'")
        return pattern
    if isinstance(pattern, re.Pattern):
        if not isinstance(pattern.pattern, str):
            raise TypeError(f"{pattern!r} matches bytes, but paths are text")
        return pattern
    if isinstance(pattern, type):
        return pattern
    if callable(pattern) and not isinstance(pattern, functools.partial) and _is_predicate(pattern):
        return pattern
    raise TypeError(
        "a pattern must be a glob such as '*norm*', a compiled regular expression, a module class "
        f"or a hashable function (path, module) -> bool; got {pattern!r}"
    )


def _is_predicate(function: Any) -> bool:
    # Modules of Flax are callable too, but with arrays.
    is_module = any(base.__module__.startswith("flax.") for base in type(function).__mro__)
    try:
        hash(function)  # rules are hashable
        inspect.signature(function).bind("path", None)
    except (TypeError, ValueError):
        return False
    return not is_module


def pattern_text(pattern: Pattern) -> str:
    """Returns the text of a pattern, for people to read.

    >>> pattern_text(dict), pattern_text(re.compile("a.*"))
    ('dict', 're:a.*')
    """
    if isinstance(pattern, str):
        return pattern
    if isinstance(pattern, re.Pattern):
        return f"re:{pattern.pattern}"
    name = getattr(pattern, "name", None) or getattr(pattern, "__name__", None)
    return str(name or repr(pattern))


def _names_match(globs: Sequence[re.Pattern[str] | None], names: Sequence[str]) -> bool:
    """Whether globs match all names of a path: an expression for each name, None for `**`."""
    # Only the last `**` so far is ever extended. The earlier ones took the least that they could,
    # and no other choice leaves more names to the later globs. So the time grows with the product
    # of both numbers. One expression for the whole path would try all choices, and twice as many
    # with every `**`.
    i = j = resume_at = 0
    last_any: int | None = None
    while j < len(names):
        glob = globs[i] if i < len(globs) else None
        if i < len(globs) and glob is None:
            last_any, resume_at, i = i, j, i + 1
        elif glob is not None and glob.match(names[j]):
            i, j = i + 1, j + 1
        elif last_any is not None:
            resume_at += 1
            i, j = last_any + 1, resume_at
        else:
            return False
    return all(glob is None for glob in globs[i:])


@functools.lru_cache(maxsize=1024)
def _compile_glob(pattern: str) -> tuple[re.Pattern[str] | None, ...]:
    """Returns an expression for each name of a glob, and None for each `**`."""
    names = [] if pattern == "/" else pattern.removeprefix("/").split("/")
    if fault := _fault_of(pattern, names):
        raise ValueError(f"{pattern!r} is no valid glob: {fault}")
    # Matched from the right, so that rules hold when a model becomes a part of another.
    anywhere = [] if pattern.startswith("/") else ["**"]
    return tuple(
        None if name == "**" else re.compile(fnmatch.translate(name))
        for name in (*anywhere, *names)
    )


def _fault_of(pattern: str, names: Sequence[str]) -> str | None:
    """Returns the fault of an invalid glob."""
    # `fnmatch` itself would take such a glob by the letter.
    if "" in names:
        defect = "is empty" if not pattern else "has an empty name between or after slashes"
        return (
            f"it {defect}. Write names joined by single slashes, such as 'decoder/**/mlp', or '/' "
            "for the model itself"
        )
    for name in names:
        if "**" in name and name != "**":
            return (
                "'**' stands for whole names and must be alone between slashes, as in "
                "'decoder/**/mlp'. Within a name write '*'"
            )
        if "[" in _SET.sub("", name):
            return "'[' without a closing ']'"
        for chars in _SET.findall(name):
            if any(first > last for first, last in re.findall("(.)-(.)", chars.removeprefix("!"))):
                return f"[{chars.removeprefix('!')}] is no set"
    return None
