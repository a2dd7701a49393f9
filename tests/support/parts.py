"""`--part=K/N`: beside the tests that -m selects, one of N parts of the others; each has its turn.

Which part a test is in depends on its name alone: not on other tests, nor on the machine.
"""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Part(NamedTuple):
    """Part `number` of `count` parts; numbers begin with 0."""

    number: int
    count: int

    def __contains__(self, nodeid: object) -> bool:
        return zlib.crc32(str(nodeid).encode()) % self.count == self.number


def part(text: str) -> Part:
    """Reads "3/16".

    Raises:
      ValueError: for anything else, and for a number that is no part.
    """
    number, count = map(int, text.split("/"))
    if not 0 <= number < count:
        raise ValueError(text)
    return Part(number, count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=part, metavar="K/N", help="run part K of N parts of the other tests too"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    everything = list(items)
    yield  # -m selects
    wanted = config.getoption("part")
    if wanted is not None:
        selected = set(items)
        items[:] = [x for x in everything if x in selected or x.nodeid in wanted]
