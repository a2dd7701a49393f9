"""Finds lines of a test file by the comments on them."""

import inspect
import pathlib


def line_of(comment: str, function: str = "") -> str:
    """What an audit calls the line of the calling file that ends in a comment."""
    caller = inspect.stack()[1].filename
    lines = pathlib.Path(caller).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"  # {comment}")]
    return f"{pathlib.Path(caller).name}:{number} ({function})"
