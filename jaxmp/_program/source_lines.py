"""The line of the user's code that an operation comes from."""

import functools
import importlib.util
import os
import sysconfig
from typing import Any

# Lines in these libraries do not help a user; the line that called them does. JAX could exclude
# such files by itself, but for the whole process, including its error messages.
_LIBRARIES = ("jaxmp", "flax", "optax", "chex", "jmp", "haiku", "equinox", "qwix", "einops")
# These call functions of others, and make nothing themselves.
_CALLERS = ("jax", "jaxlib", "jaxmp._program", "jaxtyping", "beartype")


@functools.lru_cache(maxsize=4096)
def innermost_lines(traceback: Any) -> tuple[str, str]:
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
