"""Every test that `.ci/run` leaves to `make full` has its turn: the parts are a partition.

Of a test of many cases some run each time, and every value of every parameter is in one of them.
"""

import collections
import itertools
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support.parts import chosen_cases

PARTS = 8
ROOT = pathlib.Path(__file__).parents[2]
MANY = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_first(i): pass

@pytest.mark.other
@pytest.mark.parametrize("i", range(40))
def test_other(i): pass
"""


def collected(file: pathlib.Path, *options: str) -> list[str]:
    """The names of the tests that pytest would run."""
    quiet = ["-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.parts", *quiet, *options]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    run = subprocess.run(
        [*command, str(file)], cwd=ROOT, env=alone, check=True, capture_output=True, text=True
    )
    return [line for line in run.stdout.splitlines() if "::" in line]


@pytest.fixture
def many(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "test_many.py"
    file.write_text(MANY)
    return file


@pytest.mark.parametrize(("options", "chosen"), [([], 3), (["--cases=2"], 2)])
def test_what_is_not_chosen_has_its_turn(
    many: pathlib.Path, options: list[str], chosen: int
) -> None:
    """Each test that `-m` leaves out, and each case that `--cases` does."""
    options = ["-m", "not other", *options]
    everything, selected = collected(many), collected(many, *options)
    assert (len(everything), len(selected)) == (43, chosen)
    runs = [collected(many, *options, f"--part={i}/{PARTS}") for i in range(PARTS)]
    times = collections.Counter(itertools.chain(*runs))
    assert times == {name: PARTS if name in selected else 1 for name in everything}
    assert max(map(len, runs)) < 20


def test_each_selected_test_is_in_one_share(many: pathlib.Path) -> None:
    chosen = collected(many, "-m", "other", "--cases=8")
    shares = [collected(many, "-m", "other", "--cases=8", f"--share={i}/2") for i in range(2)]
    assert sorted(itertools.chain(*shares)) == sorted(chosen)
    assert len(chosen) == 8
    assert all(shares)


def test_every_case_runs_where_that_is_asked_for(many: pathlib.Path) -> None:
    many.write_text(MANY.replace("mark.other", "mark.every_case"))
    assert len(collected(many, "--cases=2")) == 2 + 40


def test_each_value_of_each_parameter_is_in_a_case_that_is_chosen() -> None:
    product = itertools.product(range(4), "abc", [True, False])
    cases = {str(case): set(enumerate(case)) for case in product}
    chosen = chosen_cases(cases, 9)
    assert len(chosen) < 7
    assert set().union(*(cases[name] for name in chosen)) == set().union(*cases.values())
    assert chosen_cases(dict(reversed(cases.items())), 9) == chosen
    assert chosen_cases(cases, 2) == chosen[:2]
    assert chosen_cases({"alone": set()}, 1) == ["alone"]


@pytest.mark.parametrize("text", ["8/8", "-1/8", "1", "0/0"])
def test_what_is_no_part_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        collected(tmp_path, f"--part={text}")
    assert f"invalid part value: '{text}'" in error.value.stderr
