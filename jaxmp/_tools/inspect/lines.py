"""Finds the line of the user's code and the module of the model that an equation comes from."""

import functools
import importlib.util
import os
import re
import sysconfig
from collections.abc import Sequence
from typing import Any

from jaxmp._program.scopes import names_in, without_reason
from jaxmp._tools.hlo.parser import Frame
from jaxmp._tools.inspect.equations import Site

# Lines in these libraries do not help a user; the line that called them does. JAX could exclude
# such files by itself, but for the whole process, including its error messages.
_LIBRARIES = ("jaxmp", "flax", "optax", "chex", "jmp", "haiku", "equinox", "qwix", "einops")
# These call functions of others, and make nothing themselves.
_CALLERS = ("jax", "jaxlib", "jaxmp._program", "jaxtyping", "beartype")
# A line for equations without a traceback, such as those that JAX adds under `vmap`.
UNKNOWN = "(unknown)"
# Names that JAX puts into the scopes of compiled programs, and that are not modules.
_NO_MODULE = re.compile(r"closed_call|eval_jaxpr|while|body|cond|branch_\d+_fun|shard_map|\w+_call")


class Lines:
    """A finder of source lines that caches the result for each traceback."""

    def __init__(self) -> None:
        # JAX shares one traceback among many equations: its frames are read once.
        self._lines: dict[Any, tuple[str, str]] = {}

    def of(self, site: Site) -> str:
        """Returns the line of an equation as `"file.py:12 (function)"`.

        Args:
          site: an equation.

        Returns:
          The innermost line in the user's code, of the equation itself or else of an enclosing
          equation. If there is none, as for an optimizer that is audited alone, the line in the
          library.
        """
        # The body of a function that JAX jits and caches, such as `jnp.var`, has the traceback of
        # its first caller. The enclosing equation has the line of this one.
        fallback = ""
        at: Site | None = site
        while at is not None:
            traceback = at.equation.source_info.traceback
            if traceback not in self._lines:
                self._lines[traceback] = _innermost_lines(traceback)
            user, library = self._lines[traceback]
            if user:
                return user
            fallback = fallback or library
            at = at.outer
        return fallback or UNKNOWN


def _innermost_lines(traceback: Any) -> tuple[str, str]:
    """Returns the innermost line of the user's code, and of a library other than JAX."""
    library = ""
    for frame in traceback.frames if traceback is not None else ():
        owner = owner_of_file(frame.file_name)
        if owner == "user" or (owner == "library" and not library):
            text = line_text(frame.file_name, frame.line_num, frame.function_name)
            if owner == "user":
                return text, library
            library = text
    return "", library


def line_text(file: str, line: int, function: str) -> str:
    """Formats a line for reports.

    >>> line_text("/home/me/net.py", 12, "make.<locals>.loss")
    'net.py:12 (make.loss)'
    """
    function = function.replace("<locals>.", "")
    return f"{os.path.basename(file)}:{line}" + (f" ({function})" if function else "")


@functools.lru_cache(maxsize=4096)
def owner_of_file(file: str) -> str:
    """Returns whose file it is: `"user"`, `"library"`, `"jax"` (or a caller) or `"python"`."""
    if file.startswith(("<frozen", "<@beartype")):
        return "python"
    if file.startswith(_folders(_CALLERS)):
        return "jax"
    if file.startswith(_folders(_LIBRARIES)):
        return "library"
    python = sysconfig.get_path("stdlib") + os.sep
    # site-packages and dist-packages are inside of the folder of the standard library.
    if file.startswith(python) and "-packages" not in file[len(python) :].partition(os.sep)[0]:
        return "python"
    return "user"


@functools.cache
def _folders(packages: tuple[str, ...]) -> tuple[str, ...]:
    # Without importing them: most users have a few of these libraries.
    specs = [importlib.util.find_spec(package) for package in packages]
    return tuple(
        folder.rstrip(os.sep) + os.sep
        for spec in specs
        if spec is not None
        for folder in spec.submodule_search_locations or ()
    )


def scopes_of(site: Site) -> str:
    """Returns the scopes of an equation and of all enclosing equations, as JAX writes them."""
    scopes: list[str] = []
    at: Site | None = site
    while at is not None:
        scopes.append(str(at.equation.source_info.name_stack))
        at = at.outer
    return "/".join(scope for scope in reversed(scopes) if scope)


def module_path(scopes: str) -> str:
    """Returns the path of the module, without the names that JAX's transformations add.

    >>> module_path("transpose(jvp(LM))/jvp(LM)/rematted_computation/Block_0/q")
    'LM/Block_0/q'
    """
    # Also drop the marks that autocast and full_precision leave.
    return "/".join(name for name in names_in(scopes) if not name.startswith("jaxmp."))


def direction(scopes: str) -> str:
    """Returns the pass that an equation belongs to, according to its scopes.

    Returns:
      `"forward"`, `"backward"`, `"recomputed"` (forward operations repeated in the backward pass),
      or `""` outside of both, as in an optimizer or in a program without gradients.

    >>> direction("transpose(jvp(LM))/Block_0/q"), direction("LM/Block_0/q")
    ('backward', '')
    """
    # JAX puts "rematted_computation" inside of "transpose(", so that it comes first here.
    if "rematted_computation" in scopes:
        return "recomputed"
    if "transpose(" in scopes:
        return "backward"
    return "forward" if "jvp(" in scopes else ""


def line_of_frames(frames: Sequence[Frame]) -> str:
    """Returns the innermost line of the user's code, or else of a library."""
    for owner in ("user", "library"):
        for frame in frames:
            if owner_of_file(frame.file) == owner:
                return line_text(frame.file, frame.line, frame.function)
    return UNKNOWN


def path_of_operation(op_name: str) -> str:
    """Returns the module of an operation in a compiled program, by its name.

    >>> path_of_operation("jit(step)/jvp(LM)/while/body/closed_call/Block_0/q/dot_general")
    'LM/Block_0/q'
    """
    # Fused operations may have the names of several; the first stands for all.
    scopes = without_reason(op_name.partition(";")[0]).rpartition("/")[0]
    path = "" if ":" in scopes else module_path(scopes)  # combined collectives have several names
    return "/".join(name for name in path.split("/") if not _NO_MODULE.fullmatch(name))
