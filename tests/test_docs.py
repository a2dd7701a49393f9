"""Every Python block of README and docs runs, each page in one namespace from top to bottom."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_runs(page: pathlib.Path) -> None:
    text = page.read_text()
    namespace: dict[str, object] = {}
    blocks = list(BLOCK.finditer(text))
    assert blocks, "a page without code would pass in silence"
    for match in blocks:
        line = text[: match.start(1)].count("\n")
        code = compile("\n" * line + match.group(1), str(page), "exec")
        exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
