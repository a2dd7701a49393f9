"""The `jaxmp` command as a user calls it: exit codes, tables, JSON, and one line for an error."""

import html
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import tomllib
from typing import Any

import pytest

from jaxmp._tools.command.commands import COMMANDS, parse_checks
from jaxmp._tools.command.machine import version_of
from jaxmp._tools.command.main import main
from jaxmp._tools.command.program import UsageError

ROOT = pathlib.Path(__file__).parents[2]
ESCAPE = "\x1b"


@pytest.fixture
def program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with a program that has one upcast, which makes a fifth of the FLOPs wide."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the folder of the file
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
            import jax
            import jax.numpy as jnp

            def loss(params, x):
                x = (x @ params["low"]).astype(jnp.float32)
                return jnp.sum(x @ params["high"])

            def program():
                def array(*shape, dtype):
                    return jax.ShapeDtypeStruct(shape, dtype)
                low, high = array(8, 16, dtype="bfloat16"), array(16, 2, dtype="float32")
                params = {"low": low, "high": high}
                return loss, (params, array(4, 8, dtype="bfloat16"))

            def untraceable():
                return loss, ({"low": 3}, None)
        """)
    )
    return f"{path}:program"


Captured = pytest.CaptureFixture[str]


def test_audit_prints_tables_without_escape_codes(program: str, capsys: Captured) -> None:
    assert main(["audit", program]) == 0
    out, err = capsys.readouterr()
    assert "Products: 1.28 kFLOP" in out
    assert "train.py:6 (loss)" in out
    assert ESCAPE not in out
    assert err == ""


def test_audit_fails_with_what_does_not_hold(program: str, capsys: Captured) -> None:
    assert main(["audit", program, "--check", "products=bfloat16,share=0.8,upcasts=1"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["audit", program, "--check", "products=bfloat16", "--check", "upcasts=0"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("the audit failed.\nproducts: 80.0 % of their FLOPs")
    assert "upcasts: 1 make products wide, allowed are 0:" in err


def test_audit_as_json_is_the_report(program: str, capsys: Captured) -> None:
    assert main(["audit", program, "--json", "--check", "upcasts=0"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["flops"] == 1280
    assert [row["flops"] for row in found["products"]] == [1024, 256]
    assert found["upcasts"][0]["line"] == "train.py:6 (loss)"
    assert found["check"]["passed"] is False


def test_what_a_program_prints_is_not_part_of_the_answer(program: str, capsys: Captured) -> None:
    path = pathlib.Path(program.partition(":")[0])
    path.write_text(
        "print('loading')\n" + path.read_text().replace("    x =", "    print('in')\n    x =")
    )
    assert main(["audit", program, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["flops"] == 1280
    assert err.startswith("loading\nin\n")


def test_audit_writes_a_page(program: str, tmp_path: pathlib.Path, capsys: Captured) -> None:
    assert main(["audit", program, "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    assert html.unescape(text).count(program) == 1


def test_audit_compiles_if_asked_to(program: str, capsys: Captured) -> None:
    assert main(["audit", program, "--compiled", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compiled"]["rows"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["audit", "nowhere:program"], "jaxmp audit: there is no module 'nowhere', n"),
        (["audit", "{program}", "--check", "product=f32"], "cannot read --check 'product=f32'"),
        (
            ["audit", "{program}", "--check", "kept=bfloat16"],
            "--check kept cannot be 'bfloat16'. Write it as in kept=bfloat16:4096",
        ),
        (
            ["audit", "{program}", "--check", "share=0.5"],
            "jaxmp audit: ValueError: nothing to check",
        ),
        (["audit", "{program}", "--html", "/no/such/folder/page.html"], "FileNotFoundError"),
        (["audit", "{untraceable}"], "jaxmp audit: TypeError: "),
    ],
)
def test_wrong_use_is_one_message_and_code_2(
    program: str, arguments: list[str], said: str, capsys: Captured
) -> None:
    names = {"program": program, "untraceable": program.replace(":program", ":untraceable")}
    assert main([text.format(**names) for text in arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""
    assert "Traceback" not in err


def test_a_traceback_can_be_asked_for() -> None:
    with pytest.raises(UsageError, match="there is no module"):
        main(["audit", "not_there:program", "--traceback"])


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["audit"], "jaxmp audit PROGRAM"),
        (["adit"], "jaxmp [-h]"),
        (["--jsn"], "jaxmp [-h]"),
        (["doctor", "--jsn"], "jaxmp doctor [options]"),
        (["bench", "train.py:loss"], "jaxmp [-h]"),
        (["doctor", "--device", "h100"], "jaxmp doctor [options]"),
        (["plan", "8B", "--device", "h1000"], "jaxmp plan WHAT [options]"),
        (["plan", "8B", "--master", "float64"], "jaxmp plan WHAT [options]"),
    ],
)
def test_arguments_that_do_not_exist_have_code_2(
    arguments: list[str], usage: str, capsys: Captured
) -> None:
    """The usage is that of the command, which lists its options."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"usage: {usage}")


def test_without_a_command_all_are_listed_and_the_code_is_2(capsys: Captured) -> None:
    """As ruff does: a script that forgot the command stops, a reader sees what there is."""
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for name, command in COMMANDS.items():
        assert re.search(rf"{name}\s+{re.escape(command.about)}", err)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_argument_with_what_has_to_come_first(name: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    first = "" if name == "doctor" else " WHAT" if name == "plan" else " PROGRAM"
    assert said.startswith(f"usage: jaxmp {name}{first} [options]\n")
    for argument in (*COMMANDS[name].arguments, "--json", "--traceback"):
        assert (argument if argument.startswith("-") else argument.upper()) in said


def test_the_version_is_that_of_the_package(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"jaxmp {version_of('jaxmp')}\n"


def test_a_user_who_stops_it_gets_no_traceback(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def stopped(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxmp._tools.command.main.load_program", stopped)
    assert main(["audit", program]) == 130
    assert capsys.readouterr().err == ""


def test_an_error_has_its_kind_and_the_way_to_its_place(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fails(name: str) -> None:
        raise KeyError("low")

    monkeypatch.setattr("jaxmp._tools.command.main.load_program", fails)
    assert main(["audit", program]) == 2
    assert capsys.readouterr().err == ("jaxmp audit: KeyError: 'low'\n(--traceback shows where)\n")


@pytest.mark.parametrize(
    ("texts", "checks"),
    [
        (["products=bfloat16"], {"products": ("bfloat16",)}),
        (["products=bfloat16, upcasts=0"], {"products": ("bfloat16",), "upcasts": 0}),
        (["upcasts=0,", "share=0.5"], {"upcasts": 0, "share": 0.5}),
        (["kept=bfloat16:10,float32:20"], {"kept": {"bfloat16": 10, "float32": 20}}),
        (["allow_unseen=pallas_call,while"], {"allow_unseen": ("pallas_call", "while")}),
    ],
)
def test_checks_are_read(texts: list[str], checks: dict[str, Any]) -> None:
    assert parse_checks(texts) == checks


def test_a_check_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="each name at most once, as in products=bfloat16,float16"):
        parse_checks(["upcasts=0", "upcasts=1"])


def test_the_script_of_the_package_is_this_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["jaxmp"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_it_runs_as_a_process(program: str) -> None:
    """`python -m jaxmp` ends with the code, and `import jaxmp` does not load the command.

    A pipe that knows ASCII alone, as on Windows, gets tables of it.
    """
    code = (
        "import sys, jaxmp; "
        "assert not any(name.startswith('jaxmp._tools.command') for name in sys.modules); "
        "import runpy; runpy.run_module('jaxmp', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "audit", program, "--check", "upcasts=0"]
    ascii_alone = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=ascii_alone, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert "| bfloat16 x bfloat16 " in done.stdout
    assert re.search(r"upcasts: 1 make products wide", done.stderr)
    assert "Products" in done.stdout
    assert ESCAPE not in done.stdout
