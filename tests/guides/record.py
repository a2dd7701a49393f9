"""Records what programs came to before they were changed: `python -m tests.guides.record [page]`.

Needs what the pages come from: torch, torchao, keras, mixed_precision_for_JAX.
"""

import pathlib
import sys
import tempfile

from tests.guides.pages import GUIDES


def main(names: list[str]) -> None:
    """Records the pages of these names, or all."""
    for guide in GUIDES:
        if guide.distributions and (not names or guide.name in names):
            with tempfile.TemporaryDirectory() as folder:
                guide.record(pathlib.Path(folder))
            print(guide.name, guide.recorded["versions"])


if __name__ == "__main__":
    main(sys.argv[1:])
