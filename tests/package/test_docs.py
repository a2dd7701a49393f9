"""Every Python block of README and docs runs, each page in one namespace from top to bottom."""

import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.annotations, pytest.mark.every_case]

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


def run(page: pathlib.Path) -> None:
    text = page.read_text()
    namespace: dict[str, object] = {}
    for match in BLOCK.finditer(text):
        line = text[: match.start(1)].count("\n")
        code = compile("\n" * line + match.group(1), str(page), "exec")
        exec(code, namespace)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page.name == "README.md" else pytest.mark.slow)
        for page in PAGES
        if BLOCK.search(page.read_text())
    ],
    ids=name_of,
)
def test_code_runs(page: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And README's table is what its code prints."""
    run(page)
    if page.name == "README.md":
        printed = capsys.readouterr().out
        rows = re.findall("^[│┃].*$", page.read_text(), re.MULTILINE)
        assert rows
        assert [row for row in rows if row not in printed] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/distributed.md"])
def test_code_about_devices_runs_on_one(page: str) -> None:
    code = (
        "import pathlib, sys, jax; from tests.package.test_docs import run; "
        "assert jax.device_count() == 1; run(pathlib.Path(sys.argv[1]))"
    )
    # All but the one warning that pyproject.toml expects on some jaxlibs.
    strict = ["-W", "error", "-W", "ignore:the CPU compiler of jaxlib"]
    subprocess.run([sys.executable, *strict, "-c", code, page], cwd=ROOT, check=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_claims_name_tests_and_benchmarks_that_are_there() -> None:
    named = re.findall(r"`((?:tests|benchmarks)/[^`]*)`", (ROOT / "docs/why.md").read_text())
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
