"""The tracing cost of other libraries that rewrite functions, on the models of this one.

They need older releases of JAX than jaxmp does, so they run in their own environment and are
compared with the float32 program there:

    python -m venv peers
    peers/bin/pip install grampax jaxamp jax==0.8.2 quax==0.2.1 flax==0.12.2 optax jmp rich
    PYTHONPATH=. peers/bin/python benchmarks/peers_autocast.py peers.json
    python benchmarks/bench_autocast.py --peers peers.json
"""

import argparse
import contextlib
import importlib
import io
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from bench_autocast import Case, Functions, Library, Stack, tracing_rows
from measurement import Row

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

_LIBRARIES: tuple[Library, ...] = ("linen", "nnx", "plain JAX")
_STACKS: tuple[Stack, ...] = ("one by one", "scan")


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a JSON list of rows."""
    parser = argparse.ArgumentParser(description="What tracing costs under other libraries.")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--libraries", nargs="+", choices=_LIBRARIES, default=_LIBRARIES)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for library, stack in itertools.product(args.libraries, _STACKS):
        if library != "plain JAX" or stack == "scan":
            rows += _rows(library, stack, args.layers, args.repeats)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


def _peers() -> dict[str, Wrapper]:
    def grampax(fun: Callable[..., Any]) -> Callable[..., Any]:
        return importlib.import_module("grampax").autocast(fun, jnp.bfloat16)

    def jaxamp(fun: Callable[..., Any]) -> Callable[..., Any]:
        return importlib.import_module("jaxamp").amp(fun, compute_dtype=jnp.bfloat16)

    return {"grampax": grampax, "jaxamp": jaxamp}


def _versions() -> str:
    packages = ("jax", "grampax", "quax", "jaxamp")
    return ", ".join(f"{name} {metadata.version(name)}" for name in packages)


def _rows(library: Library, stack: Stack, layers: int, rounds: int) -> list[Row]:
    plain = Case(library, stack, layers, "nobody: float32").functions()
    cases: dict[str, Functions] = {"nobody: float32": plain, "nobody, again": plain}
    failures: dict[str, str] = {}
    for name, wrap in _peers().items():
        loss = _quiet(wrap(plain.loss))
        cases[name] = Functions(loss, jax.value_and_grad(loss), plain.arguments)
    for name, functions in list(cases.items()):
        try:  # before anything is measured, to fill caches too
            functions.lower()
            functions.forward()
        except Exception as error:  # whatever it is, it is what users get
            first = (str(error).splitlines() or [""])[0].split(". ")[0].replace("|", "/")
            failures[name] = f"{type(error).__name__}: {first}"
            del cases[name]
    rows = tracing_rows(cases, rounds)
    rows += [{"author": name, "total_ratio": text} for name, text in failures.items()]
    case = f"{library}, {layers} layers, {stack} ({_versions()})"
    return [{"case": case, **row} for row in rows]


def _quiet(fun: Callable[..., Any]) -> Callable[..., Any]:
    """grampax prints what it traces."""

    def quiet(*args: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return fun(*args)

    return quiet


if __name__ == "__main__":
    main()
