"""The tests whose truth depends on the device, run on this one."""

import os
import pathlib
from typing import Any

from on_device import names
from on_device.recorder import Recorder

ROOT = pathlib.Path(__file__).parents[2]
_MARK = "pytest.mark.device"
# The files in the order of their worth, should time be short; others come last.
_ORDER = (
    *("test_train_step", "test_faults", "test_parity_scalers", "test_skipping"),
    *("test_loss_scale", "test_master_storages", "test_split", "test_casts", "test_stochastic"),
    *("test_float32_products", "test_autocast", "test_float8", "test_kernels"),
)


def run(recorder: Recorder) -> None:
    """Records a row for each test."""
    import pytest

    files = [str(path.relative_to(ROOT)) for path in marked_files()]
    os.chdir(ROOT)
    # A warning of a driver refutes nothing.
    options = ["-m", "device", "-n", "0", "-W", "default"]
    options += ["-q", "-p", "no:cacheprovider", "--tb=short"]
    status = pytest.main([*options, *files], plugins=[_TestRecorder(recorder)])
    expected = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
    if status not in expected:
        raise RuntimeError(f"pytest ended with {status!r}")


def marked_files() -> list[pathlib.Path]:
    """The files with such tests, the most worthwhile first."""
    worth = {name: number for number, name in enumerate(_ORDER)}
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if _MARK in path.read_text()]
    return sorted(marked, key=lambda path: (worth.get(path.stem, len(worth)), path))


class _TestRecorder:
    """A plugin of pytest: a row for each test, which says "not run" until the test has ended."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def pytest_sessionstart(self) -> None:
        self._recorder.record_machine()  # not before the tests have set how many CPUs JAX has

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if not self._recorder.has_measured(item.nodeid)]

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self._recorder.record(contender=item.nodeid, outcome=names.NOT_RUN)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return  # of its fixtures
        row = {"outcome": report.outcome, "seconds_taken": report.duration}
        if not report.passed:
            row["remark"] = " ".join(self._reason(report).split())[-300:]
        self._recorder.record(contender=report.nodeid, **row)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._recorder.record(
                contender=report.nodeid, outcome="failed", remark=str(report.longrepr)[-300:]
            )

    def _reason(self, report: Any) -> str:
        if report.skipped:
            return str(report.longrepr[-1])
        crash = getattr(report.longrepr, "reprcrash", None)
        return crash.message if crash else str(report.longrepr)
