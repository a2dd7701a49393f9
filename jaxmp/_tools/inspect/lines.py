"""Finds the line of the user's code and the module of the model that an equation comes from."""

import re
from collections.abc import Sequence

from jaxmp._program.scopes import names_in, without_reason
from jaxmp._program.source_lines import innermost_lines, line_text, owner_of_file
from jaxmp._tools.hlo.parser import Frame
from jaxmp._tools.inspect.equations import Site
from jaxmp._tools.inspect.rows import Direction

# A line for equations without a traceback, such as those that JAX adds under `vmap`.
UNKNOWN = "(unknown)"
# Names that JAX puts into the scopes of compiled programs, and that are not modules.
_NO_MODULE = re.compile(r"closed_call|eval_jaxpr|while|body|cond|branch_\d+_fun|shard_map|\w+_call")


def line_of(site: Site) -> str:
    """Returns the line of an equation as `"file.py:12 (function)"`.

    It is the innermost one in the user's code, of the equation itself or else of an enclosing
    equation. If there is none, as for an optimizer that is audited alone, it is in the library.
    """
    # The body of a function that JAX jits and caches, such as `jnp.var`, has the traceback of its
    # first caller. The enclosing equation has the line of this one.
    fallback = ""
    at: Site | None = site
    while at is not None:
        user, library = innermost_lines(at.traceback)
        if user:
            return user
        fallback = fallback or library
        at = at.outer
    return fallback or UNKNOWN


def scopes_of(site: Site) -> str:
    """Returns the scopes of an equation and of all enclosing equations, as JAX writes them."""
    scopes: list[str] = []
    at: Site | None = site
    while at is not None:
        scopes.append(str(at.stack))
        at = at.outer
    return "/".join(scope for scope in reversed(scopes) if scope)


def module_path(scopes: str) -> str:
    """Returns the path of the module, without the names that JAX's transformations add.

    >>> module_path("transpose(jvp(LM))/jvp(LM)/rematted_computation/Block_0/q")
    'LM/Block_0/q'
    """
    # Also drop the marks that autocast and full_precision leave.
    return "/".join(name for name in names_in(scopes) if not name.startswith("jaxmp."))


def direction(scopes: str) -> Direction:
    """Returns the pass that an equation belongs to, according to its scopes.

    It is `""` outside of all, as in an optimizer or in a program without gradients.

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
