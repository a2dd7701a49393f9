"""Where in the user's code an equation comes from, and in which module of the model."""

import functools
import importlib.util
import os
import sysconfig
from typing import Any

from jaxmp._audit._walk import Site
from jaxmp._name_stacks import names_in

# Lines in these say nothing to a user: the line that called them does. JAX can leave out such
# files by itself, but what is registered there holds for the whole process, error messages too.
_LIBRARIES = (
    *("jaxmp", "flax", "optax", "chex", "jmp", "haiku", "equinox", "qwix", "einops"),
    *("jaxtyping", "beartype"),
)
UNKNOWN = "(unknown)"


class Lines:
    """Finds source lines, each traceback once."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[str, str]] = {}

    def of(self, site: Site) -> str:
        """The line as `"file.py:12 (function)"`.

        Args:
          site: an equation.

        Returns:
          The innermost line in the user's code: of the equation itself, or of the equation that
          it is inside of, if it is inside of library code. Where there is none, as in an optimizer
          that is audited alone, the line of the library.
        """
        fallback = ""
        at: Site | None = site
        while at is not None:
            user, library = self._of_traceback(at.equation.source_info.traceback)
            if user:
                return user
            fallback = fallback or library
            at = at.outer
        return fallback or UNKNOWN

    def _of_traceback(self, traceback: Any) -> tuple[str, str]:
        if traceback is None:
            return "", ""
        if traceback not in self._known:
            self._known[traceback] = _innermost(traceback)
        return self._known[traceback]


def _innermost(traceback: Any) -> tuple[str, str]:
    """The innermost lines of the user and of a library other than JAX."""
    library = ""
    for frame in traceback.frames:
        kind = kind_of(frame.file_name)
        if kind == "user":
            return _text(frame), library
        if kind == "library":
            library = library or _text(frame)
    return "", library


def _text(frame: Any) -> str:
    return line_text(frame.file_name, frame.line_num, frame.function_name)


def line_text(file: str, line: int, function: str) -> str:
    """A line as reports have it.

    >>> line_text("/home/me/net.py", 12, "make.<locals>.loss")
    'net.py:12 (make.loss)'
    """
    function = function.replace("<locals>.", "")
    return f"{os.path.basename(file)}:{line}" + (f" ({function})" if function else "")


@functools.lru_cache(maxsize=4096)
def kind_of(file: str) -> str:
    """Whose file it is: `"user"`, `"library"`, `"jax"` or `"python"`."""
    if file.startswith(("<frozen", "<@beartype")):
        return "python"
    if file.startswith(_folders(("jax", "jaxlib"))):
        return "jax"
    if file.startswith(_folders(_LIBRARIES)):
        return "library"
    python = sysconfig.get_path("stdlib") + os.sep
    if file.startswith(python) and "-packages" not in file[len(python) :].partition(os.sep)[0]:
        return "python"
    return "user"


@functools.cache
def _folders(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Where packages are, without importing them."""
    specs = [importlib.util.find_spec(package) for package in packages]
    return tuple(
        folder.rstrip(os.sep) + os.sep
        for spec in specs
        if spec is not None
        for folder in spec.submodule_search_locations or ()
    )


def scopes_of(site: Site) -> str:
    """The scopes of an equation and of all that encloses it, as JAX writes them."""
    scopes: list[str] = []
    at: Site | None = site
    while at is not None:
        scopes.append(str(at.equation.source_info.name_stack))
        at = at.outer
    return "/".join(scope for scope in reversed(scopes) if scope)


def module_path(scopes: str) -> str:
    """The path of the module, without what JAX's transformations put around it.

    >>> module_path("transpose(jvp(LM))/jvp(LM)/rematted_computation/Block_0/q")
    'LM/Block_0/q'
    """
    # Without the marks that autocast and full_precision leave.
    return "/".join(name for name in names_in(scopes) if not name.startswith("jaxmp."))


def direction(scopes: str) -> str:
    """Whether an equation belongs to the forward or the backward pass, as far as scopes say.

    Returns:
      `"forward"`, `"backward"`, `"recomputed"` (the forward pass again, within the backward one),
      or `""` outside of both, as in an optimizer or where nothing is differentiated.

    >>> direction("transpose(jvp(LM))/Block_0/q"), direction("LM/Block_0/q")
    ('backward', '')
    """
    if "rematted_computation" in scopes:
        return "recomputed"
    if "transpose(" in scopes:
        return "backward"
    return "forward" if "jvp(" in scopes else ""
