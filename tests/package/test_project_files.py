"""Version, source, floors and tools are said in one place; other files repeat what it says."""

import pathlib
import re
import tomllib

import jaxmp

ROOT = pathlib.Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
LINK = re.compile(r"\]\(([^)]*)\)")


def lines(path: str) -> list[str]:
    return [line.strip() for line in (ROOT / path).read_text().splitlines()]


def test_the_citation_has_version_and_source() -> None:
    said = lines("CITATION.cff")
    assert f"version: {jaxmp.__version__}" in said
    assert f"repository-code: {PROJECT['urls']['Source']}" in said


def test_the_conda_recipe_has_version_and_floors() -> None:
    said = lines("conda/recipe.yaml")
    assert f"version: {jaxmp.__version__}" in said
    assert f"repository: {PROJECT['urls']['Source']}" in said
    floors = {line.removeprefix("- ").replace(" ", "") for line in said if " >=" in line}
    python = f"python{PROJECT['requires-python']}"
    assert floors == {python, *PROJECT["dependencies"], *PYPROJECT["build-system"]["requires"]}


def test_the_landing_runs_the_commands_that_readme_names() -> None:
    said = lines("README.md")
    assert any(line.startswith("make demo") for line in said)
    assert any(line.startswith("make test") for line in said)
    assert 'part "make test" make test' in lines(".ci/run")


def test_commits_are_linted_with_the_linter_of_make_lint() -> None:
    (ruff,) = (x for x in PROJECT["optional-dependencies"]["dev"] if x.startswith("ruff=="))
    assert f"rev: v{ruff.removeprefix('ruff==')}" in lines(".pre-commit-config.yaml")


def test_the_newest_version_has_a_section_of_the_changelog() -> None:
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", jaxmp.__version__)


def test_links_of_the_readme_lead_to_the_source_on_a_package_index() -> None:
    text = (ROOT / "README.md").read_text()
    before = LINK.findall(text)
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    after = LINK.findall(text)
    assert any(link.startswith("docs/") for link in before)
    assert [link for link in after if not link.startswith(("https://", "#"))] == []
    assert all(link.startswith(PROJECT["urls"]["Source"]) for link in set(after) - set(before))
