"""The guides of docs/from: programs before and after come to the same, and their tables hold."""

import functools
import pathlib
import re
from typing import Any

import numpy as np
import pytest

import jaxmp
from tests.guides.pages import FOLDER, GUIDES, Guide, skip_where_absent

pytestmark = [pytest.mark.every_case, pytest.mark.usefixtures("standard_promotion")]

PAGES = sorted(FOLDER.glob("*.md"))
RECORDED = [guide for guide in GUIDES if guide.distributions]
each_guide = pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
each_recorded = pytest.mark.parametrize("guide", RECORDED, ids=lambda guide: guide.name)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@functools.cache
def before(guide: Guide, folder: pathlib.Path) -> Any:
    return guide.recorded if guide.distributions else guide.run_before(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("guides")


def error(got: Any, want: Any) -> float:
    """The norm of the difference of all params, divided by the norm."""
    flat = [np.concatenate([np.ravel(x) for x in each]).astype(np.float64) for each in (got, want)]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


def test_every_page_is_compared_or_says_that_it_was_not_run() -> None:
    compared = {guide.name for guide in GUIDES}
    for page in PAGES:
        not_run = "not run here" in page.read_text().replace("\n", " ")
        assert page.stem in compared or not_run or page.stem == "index", page
    assert len(PAGES) == 12


@each_guide
@pytest.mark.slow
def test_after_comes_to_what_was_before(guide: Guide, folder: pathlib.Path) -> None:
    want, got = before(guide, folder), guide.run_after()
    assert got["scales"] == want["scales"]
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=guide.loss)
    assert [np.shape(x) for x in got["params"]] == [np.shape(x) for x in want["params"]]
    assert error(got["params"], want["params"]) < guide.error
    if want["scales"]:  # with an overflow, and with growth unless the page says why not
        assert np.isnan(want["losses"][5])
        assert want["scales"][5] == want["scales"][4] / 2
        assert guide.name == "mpx" or max(np.diff(want["scales"])) > 0


@each_guide
@pytest.mark.slow
def test_the_tolerance_sees_gradients_of_another_size(guide: Guide, folder: pathlib.Path) -> None:
    """Positive control: steps a tenth larger. (Adam, in the page about MaxText, has its own.)"""
    larger = guide.program("After").replace("sgd(0.05", "sgd(0.055").replace("w(1e-2", "w(1.1e-2")
    assert larger != guide.program("After")
    got = guide.run_after(larger)
    assert error(got["params"], before(guide, folder)["params"]) > guide.error


@each_recorded
def test_before_comes_to_what_was_recorded(guide: Guide, tmp_path: pathlib.Path) -> None:
    skip_where_absent(*guide.distributions)
    want, got = guide.recorded, guide.run_before(tmp_path)
    assert got["scales"] == want["scales"]
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=guide.loss)
    assert error(got["params"], want["params"]) < guide.error


@each_recorded
def test_the_figures_on_the_page_are_those(guide: Guide) -> None:
    steps, theirs, ours, *scales = (
        [cell.strip() for cell in row.strip("| ").split("|")]
        for row in re.search(r"(?:^\|.*\n)+", guide.text, re.MULTILINE)[0].splitlines()
        if "---" not in row
    )
    assert steps[0] == "step"
    rows = [int(step) - 1 for step in steps[1:]]
    losses = np.array(guide.recorded["losses"])[rows]
    assert theirs[0].split()[1].rstrip(",") == guide.recorded["versions"][guide.distributions[0]]
    np.testing.assert_allclose(np.float64(theirs[1:]), losses, atol=5.1e-5)
    np.testing.assert_allclose(np.float64(ours[1:]), losses, rtol=guide.loss, atol=1e-4)
    assert bool(scales) == bool(guide.recorded["scales"])
    for row in scales:
        np.testing.assert_array_equal(np.float64(row[1:]), np.array(guide.recorded["scales"])[rows])


@each_page
def test_every_name_of_jaxmp_exists(page: pathlib.Path) -> None:
    for name in set(re.findall(r"(?<![/\w])jaxmp((?:\.[a-zA-Z_]\w*)+)", page.read_text())):
        found: Any = jaxmp
        for part in name.split(".")[1:]:
            found = getattr(found, part)


@each_page
def test_every_policy_is_one(page: pathlib.Path) -> None:
    text = page.read_text()
    for policy in re.findall(r"\"((?:mixed_|p=|params=|O[0-3])[^\"]*)\"", text):
        jaxmp.get_policy(policy)
    for products in re.findall(r"`products=([\w:=]+)`", text):
        jaxmp.get_policy(f"mixed_float8,products={products}")
