"""Which tests run: `--cases=N` at most N of each, `--share=K/N` of these some, `--part` of others.

A test that is run for every combination of its parameters tells most of what it knows with a few
of them. What is chosen depends on names alone: not on other tests, nor on the machine.
"""

import collections
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Part(NamedTuple):
    """Part `number` of `count` parts; numbers begin with 0."""

    number: int
    count: int

    def __contains__(self, nodeid: object) -> bool:
        return _number_of(str(nodeid)) % self.count == self.number


def part(text: str) -> Part:
    """Reads "3/16".

    Raises:
      ValueError: for anything else, and for a number that is no part.
    """
    number, count = map(int, text.split("/"))
    if not 0 <= number < count:
        raise ValueError(text)
    return Part(number, count)


def chosen_cases(cases: dict[str, set[object]], count: int) -> list[str]:
    """Chooses cases in which each value of each parameter occurs, as far as they may be so many.

    Args:
      cases: the name of each, and the values that it is made of.
      count: how many there may be.
    """
    chosen: list[str] = []
    seen: set[object] = set()
    rest = sorted(cases, key=_number_of)
    while rest and len(chosen) < count:
        name = max(rest, key=lambda name: len(cases[name] - seen))
        if chosen and cases[name] <= seen:
            break
        rest.remove(name)
        chosen.append(name)
        seen |= cases[name]
    return chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, metavar="N", help="run at most N cases of a test, each value in one"
    )
    parser.addoption(
        "--share", type=part, metavar="K/N", help="of the tests chosen run part K of N alone"
    )
    parser.addoption(
        "--part", type=part, metavar="K/N", help="run part K of N parts of the other tests too"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    everything = list(items)
    yield  # -m selects
    count, share, wanted = map(config.getoption, ("cases", "share", "part"))
    selected = {x.nodeid for x in items} if count is None else _with_few_cases(items, count)
    selected = {x for x in selected if share is None or x in share}
    others = () if wanted is None else wanted
    items[:] = [x for x in everything if x.nodeid in selected or x.nodeid in others]


def _with_few_cases(items: list[pytest.Item], count: int) -> set[str]:
    tests: dict[str, dict[str, set[object]]] = collections.defaultdict(dict)
    for item in items:
        spec = getattr(item, "callspec", None)
        # Values are told apart by their names in the names of cases.
        values = set(enumerate(spec.id.split("-"))) if spec else set[object]()
        alone = spec is None or item.get_closest_marker("every_case")
        tests[item.nodeid if alone else item.nodeid.split("[")[0]][item.nodeid] = values
    return {name for cases in tests.values() for name in chosen_cases(cases, count)}


def _number_of(name: str) -> int:
    return zlib.crc32(name.encode())
