"""How a command line names a program, and what is said of names that are wrong."""

import pathlib
import sys
import textwrap
from collections.abc import Iterator

import pytest

from jaxmp._tools.command.program import UsageError, load_program


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A current folder whose modules are forgotten afterwards."""
    known, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "programs.py").write_text(MODULE)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - known:
        del sys.modules[name]


MODULE = textwrap.dedent("""
    import dataclasses

    PAIR = (abs, (1,))

    @dataclasses.dataclass
    class Config:
        width: int = 3

    def program():
        return power, (2,), {"times": Config().width}

    def power(x, times=1):
        return x**times

    def without_kwargs():
        return [power, [5]]

    def unpacked():
        return power, 2

    def several():
        return power, 1, 2, 3

    def nothing():
        pass

    def broken():
        raise RuntimeError("no data here\\nsecond line")

    def ended():
        raise SystemExit("usage: train.py")

    def arguments():
        import sys
        return abs, sys.argv[1:]
""")


@pytest.mark.parametrize("place", ["ours.programs", "ours/programs.py"])
def test_modules_and_files_have_programs(folder: pathlib.Path, place: str) -> None:
    program = load_program(f"{place}:program")
    assert program.fn(*program.args, **program.kwargs) == 8
    assert load_program(f"{place}:without_kwargs")[2:] == ((5,), {})


def test_a_file_may_be_called_as_a_package_is_and_import_its_neighbours(
    folder: pathlib.Path,
) -> None:
    (folder / "jax.py").write_text("import neighbour\n\ndef program():\n    return abs, (7,)\n")
    (folder / "neighbour.py").write_text("")
    assert load_program("./jax.py:program").args == (7,)
    assert sys.modules["jax"].__file__ != str(folder / "jax.py")


FACTORY = "a factory takes no arguments and returns (fn, args) or (fn, args, kwargs)"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ours.programs", "'ours.programs' names no program. Write package.module:factory or "),
        (":program", "':program' names no program"),
        ("ours.programs:", "'ours.programs:' names no program"),
        ("theirs:program", "there is no module 'theirs', neither installed nor in "),
        ("ours.none:program", "there is no module 'ours.none', neither installed nor in "),
        ("ours/none.py:program", "there is no file 'ours/none.py' in "),
        ("ours.programs:progam", "ours.programs has no 'progam'. Did you mean 'program'?"),
        (
            "ours.programs:PAIR",
            "is no function but a tuple (builtin_function_or_method, tuple). Ma",
        ),
        (
            "ours.programs:power",
            f"ours.programs:power wants arguments (x), but {FACTORY}. If it is",
        ),
        ("ours.programs:nothing", f"ours.programs:nothing() returned None, but {FACTORY}"),
        ("ours.programs:unpacked", "returned a tuple (function, int), but a factory"),
        ("ours.programs:several", "The arguments stand in a tuple of their own: (fn, (params, "),
        (
            "ours.programs:broken",
            "calling ours.programs:broken() failed: RuntimeError: no data here (--traceback shows",
        ),
        ("ours.programs:ended", "calling ours.programs:ended() failed: SystemExit: usage: train"),
    ],
)
def test_wrong_names_and_results_are_explained(folder: pathlib.Path, name: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_program(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_script_does_not_see_the_arguments_of_the_command(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["jaxmp", "audit", "ours.programs:arguments", "--json"])
    assert load_program("ours.programs:arguments").args == ()
    assert sys.argv[1] == "audit"


@pytest.mark.parametrize("place", ["faulty", "faulty.py"])
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def (", "SyntaxError: "),
    ],
)
def test_modules_that_do_not_import_are_explained(
    folder: pathlib.Path, place: str, source: str, error: str
) -> None:
    (folder / "faulty.py").write_text(source)
    with pytest.raises(UsageError, match=f"importing {place} failed: {error}"):
        load_program(f"{place}:program")
