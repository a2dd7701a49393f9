"""The programs that jaxmp makes are the committed ones; a change of them is a decision.

`python benchmarks/digests.py --compare` says what differs, and with `--texts` where. A change that
is meant is committed with new results: `python benchmarks/digests.py`.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmp._program import compat
from jaxmp._program.program import equations_in, is_part_call
from tests.support.same_operations import hash_of
from tests.support.surroundings import benchmark_path  # noqa: F401

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results" / f"digests_jax{jax.__version__}.json"
COMMITTED: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
SHARDED = [name for name, digest in COMMITTED.items() if digest["collectives"]]

pytestmark = [
    pytest.mark.jax,
    pytest.mark.usefixtures("standard_promotion", "benchmark_path"),
    pytest.mark.skipif(not COMMITTED, reason=f"there is no {RESULTS.name}: digests are of one jax"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="digests are of programs for CPUs"),
]


def digests() -> Any:
    return importlib.import_module("digests")


def test_every_program_has_a_digest() -> None:
    assert sorted(digests().PROGRAMS) == sorted(COMMITTED)


@pytest.mark.parametrize("name", COMMITTED)
def test_a_trace_is_the_committed_one(name: str) -> None:
    """Its text, equations, casts, FLOPs of products and bytes for the backward pass."""
    module = digests()
    now = module.traced(module.PROGRAMS[name]())
    assert module.differences(COMMITTED[name], now, module.TRACED) == []


@pytest.mark.parametrize("name", COMMITTED)
def test_parts_change_no_operation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal parts run as one function, and its calls compute what stood there before."""

    def traced() -> Any:
        program = digests().PROGRAMS[name]()
        return jax.make_jaxpr(program.run)(*program.args)

    shared = traced()
    if "unrolled-autocast" in name:  # a positive control
        assert any(map(is_part_call, equations_in([shared])))
    monkeypatch.setattr(compat, "is_staged", lambda: False)
    jax.clear_caches()  # JAX would give back what it has traced before
    assert hash_of(shared) == hash_of(traced())


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_collectives_are_the_committed_ones(name: str) -> None:
    module = digests()
    now = module.partitioned(module.PROGRAMS[name]())
    assert module.differences(COMMITTED[name], now, module.PARTITIONED) == []


def test_one_more_cast_is_seen() -> None:
    def with_cast(fun: Callable[..., Any]) -> Callable[..., Any]:
        def cast(params: Any, x: Any) -> Any:
            return fun(params, x.astype(jnp.float16).astype(jnp.float32))

        return cast

    module = digests()
    program = module.PROGRAMS["mlp-autocast-bfloat16"]()
    run, loss = with_cast(program.run), with_cast(program.loss)
    before = module.traced(program)
    now = module.traced(dataclasses.replace(program, run=run, loss=loss))
    differing = [line.split(":")[0] for line in module.differences(before, now, module.TRACED)]
    assert differing == ["sha", "equations", "casts"]


def test_what_is_in_a_text_and_what_is_not() -> None:
    """Constants and the order of operands are; names, sources and the order of sets are not."""
    text = importlib.import_module("digest_text")

    def text_of(fun: Callable[..., Any]) -> str:
        return str(text.text_of(jax.make_jaxpr(fun)(1.0, 2.0)))

    assert text_of(lambda x, y: x - y) == text_of(lambda a, b: a - b)
    assert text_of(lambda x, y: x - y) != text_of(lambda x, y: y - x)
    assert text_of(lambda x, y: x * 3.0) != text_of(lambda x, y: x * 3.5)
    assert text_of(lambda x, y: x * 3.0 + y * 3.0) != text_of(lambda x, y: (x + y) * 3.0)

    def make(name: str) -> Any:
        def inner(x: Any) -> Any:
            return jnp.sin(x)

        inner.__name__ = inner.__qualname__ = name
        return text.text_of(jax.make_jaxpr(jax.jit(inner))(1.0))

    assert make("one") == make("another")
    assert "sin0:float32[]~ = sin[accuracy=None] in0" in make("one")
    written = text._value({"b": frozenset("xyz"), "a": (make, jnp.dtype("bfloat16"))})
    assert written == "{'a': (<function>, bfloat16), 'b': {'x', 'y', 'z'}}"


def test_the_command_compares(tmp_path: Path) -> None:
    """It finds the package beside it, writes texts, and says what differs."""
    name = "mlp-jmp-bfloat16"
    old = COMMITTED | {name: COMMITTED[name] | {"casts": 2}}
    (tmp_path / RESULTS.name).write_text(json.dumps(old))
    command = [sys.executable, str(ROOT / "benchmarks/digests.py"), "--compare", "--only", name]
    command += ["--results", str(tmp_path), "--texts", str(tmp_path / "texts")]
    run = subprocess.run(command, env=os.environ, capture_output=True, text=True, cwd=tmp_path)
    assert f"{name}: casts: 2 -> {COMMITTED[name]['casts']}" in run.stdout, run.stderr
    assert run.returncode == 1
    assert "dot_general0:bfloat16[16,32]" in (tmp_path / f"texts/{name}.txt").read_text()
