"""`--eighth=K`: beside the tests that -m selects, one eighth of the others. So each has its turn.

Which eighth a test is in depends on its name alone: not on other tests, nor on the machine.
"""

import zlib
from collections.abc import Iterator

import pytest

EIGHTHS = 8


def eighth_of(nodeid: str) -> int:
    """The eighth that a test belongs to, from 0 to 7."""
    return zlib.crc32(nodeid.encode()) % EIGHTHS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--eighth", type=int, choices=range(EIGHTHS), help="run one eighth of the other tests too"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    everything = list(items)
    yield  # -m selects
    wanted = config.getoption("eighth")
    if wanted is not None:
        selected = set(items)
        items[:] = [x for x in everything if x in selected or eighth_of(x.nodeid) == wanted]
