"""`--eighth=K`: of the tests that are selected, one eighth, so that each has its turn.

Which eighth a test is in depends on its name alone: not on other tests, nor on the machine.
"""

import zlib

import pytest

EIGHTHS = 8


def eighth_of(nodeid: str) -> int:
    """The eighth that a test belongs to, from 0 to 7."""
    return zlib.crc32(nodeid.encode()) % EIGHTHS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--eighth", type=int, choices=range(EIGHTHS), help="run one eighth of the selected tests"
    )


@pytest.hookimpl(trylast=True)  # after -m and -k have had their say
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("eighth")
    if wanted is None:
        return
    left_out = [item for item in items if eighth_of(item.nodeid) != wanted]
    items[:] = [item for item in items if eighth_of(item.nodeid) == wanted]
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """An eighth of a few tests may well have none."""
    if session.config.getoption("eighth") is None:
        return
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
