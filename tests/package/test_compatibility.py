"""The page on compatibility says what pyproject.toml holds."""

import importlib.metadata
import pathlib
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The rows of the table on the page whose first column has a heading."""
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in table.splitlines()]


def requirements(extra: str | None) -> dict[str, Requirement]:
    """The packages that an installation with an extra brings, by name."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    found = [Requirement(line) for line in lines]
    return {each.name: each for each in found}


def floor(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == ">="
    return specifier.version


PACKAGES = {name: (with_extra, low, high) for name, with_extra, low, high in rows("package")}


def test_every_requirement_has_a_row_with_its_floor() -> None:
    required = requirements(None)
    extras = {name: requirements(name)[name] for name in ("flax", "equinox")}
    said = {name: low for name, (_, low, _) in PACKAGES.items() if name != "dm-haiku"}
    assert said == {name: floor(each) for name, each in (required | extras).items()}
    assert PACKAGES["dm-haiku"][1] == floor(requirements("test")["dm-haiku"])
    for name, (with_extra, *_) in PACKAGES.items():
        wanted = f"`jaxmp[{name}]`" if name in extras else ""
        assert with_extra == wanted or name == "dm-haiku"


def test_the_library_needs_no_library_of_models() -> None:
    assert not {"flax", "equinox", "dm-haiku"} & set(requirements(None))
    tests = {extra for each in requirements("test").values() for extra in each.extras}
    assert {"flax", "equinox"} <= tests


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_tested_here_is_not_below_the_floor(name: str) -> None:
    _, low, high = PACKAGES[name]
    assert Version(low) <= Version(high)
    assert Version(low) <= Version(importlib.metadata.version(name))


def test_pythons() -> None:
    said = [python for python, *_ in rows("Python")]
    prefix = "Programming Language :: Python :: "
    assert said == [
        each.removeprefix(prefix) for each in PROJECT["classifiers"] if each.startswith(prefix)
    ]
    assert PROJECT["requires-python"] == f">={said[0]}"
    newest = PACKAGES["jax"][2]
    assert max((Version(jax) for _, jax, _ in rows("Python"))) == Version(newest)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert all(re.search(rf"\b{re.escape(python)}\b", workflow) for python in said)
