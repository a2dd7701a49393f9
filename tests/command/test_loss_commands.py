"""`jaxmp plan`: what it hands on, and its exit codes."""

import json
import pathlib
import sys
import textwrap

import pytest

from jaxmp._tools.command.main import main
from tests.support.surroundings import without_compilers  # noqa: F401

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A file with losses, whose first part needs more bits than the second."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
            import jax
            import jax.numpy as jnp

            def loss_fn(params, x, power=2):
                with jax.named_scope("wide"):
                    h = x @ params["wide"] - 1000.0
                with jax.named_scope("out"):
                    return jnp.mean((h @ params["out"]) ** power)

            def loss():
                params = {"wide": jnp.full((8, 8), 125.01), "out": jnp.eye(8)}
                return loss_fn, (params, jnp.ones((4, 8))), {"power": 2}

            def one_argument():
                return loss_fn, (loss()[1][0],)

            class State:
                opt_state = None

            def step():
                return (lambda state, batch: state), (State(), jnp.ones((4, 8)))
        """)
    )
    return path


def test_plan_of_a_number_of_params(capsys: Captured) -> None:
    """8e9 params in 2 + 2 + 8 bytes over 8 devices, and float32 gradients."""
    how = ["--policy", "bfloat16", "--master", "remainder", "--devices", "8"]
    assert main(["plan", "8B", *how, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    sizes = {row["name"]: row["bytes"] for row in plan["rows"]}
    assert (sizes["params"], sizes["masters"], sizes["moments"]) == (2e9, 2e9, 8e9)
    assert sizes["gradients"] == 4e9


def test_a_plan_that_does_not_fit_has_code_1(capsys: Captured) -> None:
    assert main(["plan", "70B", "--device", "v5e"]) == 1
    out, err = capsys.readouterr()
    assert "70,000,000,000 params" in out
    assert err.startswith("it does not fit: ")


@pytest.mark.usefixtures("without_compilers")
def test_plan_of_a_loss(module: pathlib.Path, capsys: Captured) -> None:
    how = ["--optimizer", "sgd", "--device", "v5e", "--microbatches", "2"]
    assert main(["plan", f"{module}:loss", *how, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["params"] == 2 * 8 * 8
    assert plan["residual_bytes"] > 0
    assert plan["is_complete"] is False
    assert "the compiler for v5e is not installed" in plan["limits"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "8X"], "params as a text are a number such as '8B'"),
        (
            ["plan", "{module}:one_argument"],
            "should return (loss_fn, (params, batch)) here, but it",
        ),
        (["plan", "train.py"], "'train.py' names no program. Write package.module:factory"),
        (["plan", "{module}:step"], "step() returns a step and its state, but this command makes"),
        (["plan", "8B", "--optimizer", "adamx"], "'adamx' is no optimizer of optax"),
        (["plan", "8B", "--microbatches", "2"], "microbatches would be of a step, and there is"),
        (["plan", "{module}:loss", "--policy", "mixed_bfloat17"], "mixed_bfloat16"),
    ],
)
def test_wrong_use_of_losses_has_code_2(
    module: pathlib.Path, arguments: list[str], said: str, capsys: Captured
) -> None:
    assert main([text.format(module=module) for text in arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""
