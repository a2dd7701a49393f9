"""Data recorded from other systems, in tests/parity."""

import json
import pathlib
from typing import Any

import numpy as np

_PARITY = pathlib.Path(__file__).parents[1] / "parity"


def load_arrays(name: str) -> dict[str, Any]:
    """The arrays of an npz file, by name."""
    with np.load(_PARITY / name) as arrays:
        return dict(arrays)


def load_json(name: str) -> Any:
    """What a JSON file holds."""
    return json.loads((_PARITY / name).read_text())
