"""Is it right, is it fast, is it small? Tests the site's claims on one GPU, in ten minutes.

Runs the parts of `on_device` in order of importance, each in its own process that ends when its
time is over, and writes JSON and a page of Markdown after each. It needs no network. A part that
fails does not stop the next, but the exit status is then 1. A part that ran out of time, or a
refuted claim, is a result.

    make device                                  # makes the environment, too
    make device ARGS="--small"                   # a dry run at toy sizes, on a CPU
    python benchmarks/device.py --wheelhouse wheels --results results   # a bare, offline machine
    python benchmarks/device.py --continue results.json   # what an earlier run had no time for
    python benchmarks/device.py --fill-docs      # the newest results into docs/why.md
"""

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from on_device import page
from on_device.claims import as_rows
from on_device.parts import PARTS, Part
from on_device.recorder import Recorder, read_rows

_BENCHMARKS = pathlib.Path(__file__).parent
_ROOT = _BENCHMARKS.parent
_RESULTS = _BENCHMARKS / "results"
_BUILD = _ROOT / "build" / "device"
_DOCS = _ROOT / "docs" / "why.md"
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "flax", "optax")
_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia")
_LOG_LINES = 12
_LEAST_SECONDS = 2.0  # that a part needs to begin


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts that the arguments say; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parse(argv)
    if args.part:
        _run_here(args)
        return 0
    if args.fill_docs:
        _DOCS.write_text(page.filled(_DOCS.read_text(), _RESULTS))
        return 0
    return _run_all(args, argv)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description="Proves or refutes what the site says of devices.")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="of all parts")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument("--small", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        help="the folder of the results; by default benchmarks/results, and for some of the parts, "
        "or toy sizes, that of --work",
    )
    parser.add_argument(
        "--work", type=pathlib.Path, default=_BUILD, help="the folder of logs and caches"
    )
    parser.add_argument("--wheelhouse", type=pathlib.Path, help="a folder of wheels to install")
    parser.add_argument(
        "--continue",
        dest="earlier",
        type=pathlib.Path,
        metavar="RESULTS",
        help="the JSON of an earlier run on such a device: only what it lacks is measured",
    )
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="TEXT", help="measure these contenders anew"
    )
    parser.add_argument("--fill-docs", action="store_true", help="the newest results into the docs")
    parser.add_argument("--fail", nargs="+", choices=names, default=[], help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.results is None:
        args.results = _RESULTS if args.only == names and not args.small else args.work
    return args


def _run_here(args: argparse.Namespace) -> None:
    """The process of one part."""
    if args.part in args.fail:
        raise RuntimeError("planted by --fail")
    module = importlib.import_module(f"on_device.{args.part}")
    module.run(Recorder(args.rows, args.part, args.deadline, args.small))


def _run_all(args: argparse.Namespace, argv: Sequence[str]) -> int:
    began = time.time()
    # What ends this process ends the part that runs, too: it would keep the device.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    args.work.mkdir(parents=True, exist_ok=True)
    rows = args.work / "rows.jsonl"
    rows.unlink(missing_ok=True)
    gpu, path = _gpu(), None
    reports = _continue(args, gpu, rows) if args.earlier else {}
    environment = _environment(args)
    parts = [part for part in PARTS if part.name in args.only]
    shares = sum(part.seconds for part in parts)
    # The last part, too, must have ended, and its page be written, within the budget.
    budget, share = args.budget - 5, 0
    for part in parts:
        share += part.seconds
        deadline = began + budget * share / shares
        reports[part.name] = _run_part(part, args, rows, deadline, environment)
        context = _context(args, argv, rows, gpu)
        context |= {"parts": reports, "seconds": time.time() - began}
        try:
            path = page.write(args.results, context, read_rows(rows), path)
        except Exception:  # of one part; the others are still to come
            traceback.print_exc()
        print(f"{part.name}: {reports[part.name]['status']}", flush=True)
        print(reports[part.name]["log"], end="", flush=True)
    print("\n".join(page.verdict_table(context, as_rows(read_rows(rows)))))
    print(f"wrote {path}, after {time.time() - began:.0f} s")
    return int(any(report["status"].startswith("failed") for report in reports.values()))


def _continue(args: argparse.Namespace, gpu: dict[str, str], rows: pathlib.Path) -> dict[str, Any]:
    """Writes the rows of an earlier run; returns what it said of its parts."""
    results = json.loads(args.earlier.read_text())
    if gpu and results["machine"] != gpu["name"]:
        raise SystemExit(
            f"--continue {args.earlier.name}: those results are of one {results['machine']}, and "
            f"this is one {gpu['name']}: run all parts here, without --continue"
        )
    if results["small"] != args.small or results["versions"]["jax"] != metadata.version("jax"):
        raise SystemExit(
            f"--continue {args.earlier.name}: those results are of jax {results['versions']['jax']}"
            f"{' at toy sizes' * results['small']}: run all parts, without --continue"
        )
    with rows.open("w") as file:
        for row in results["rows"]:
            if not any(text in row.get("contender", "") for text in args.again):
                file.write(json.dumps(row) + "\n")
    return dict(results["parts"])


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """What the processes of the parts get: the way to the packages, and no silent fall-back."""
    paths = [str(_ROOT), str(_BENCHMARKS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if args.wheelhouse:
        paths.insert(0, _install(args.wheelhouse, args.work / "packages"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str(args.work / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(args.work / "inductor"),
    }
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    # With a GPU that JAX cannot use, it says so; it would compute on the CPU otherwise.
    if any(path and os.path.exists(path) for path in (shutil.which("nvidia-smi"), *_DRIVERS)):
        environment.setdefault("JAX_PLATFORMS", "cuda,cpu")
    elif args.small:
        environment.setdefault("JAX_PLATFORMS", "cpu")
    if args.small and environment["JAX_PLATFORMS"] == "cpu":
        environment.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    return environment


def _install(wheelhouse: pathlib.Path, target: pathlib.Path) -> str:
    wheels = sorted(wheelhouse.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"--wheelhouse {wheelhouse} has no wheels: give a folder of *.whl files")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--upgrade", "--target", str(target), *map(str, wheels)]
    subprocess.run(command, check=True)
    return str(target)


def _run_part(
    part: Part,
    args: argparse.Namespace,
    rows: pathlib.Path,
    deadline: float,
    environment: dict[str, str],
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", part.name, "--rows", str(rows)]
    command += ["--deadline", str(deadline), *["--small"] * args.small]
    command += ["--fail", *args.fail] if args.fail else []
    if part.platforms:
        environment = environment | {"JAX_PLATFORMS": part.platforms}
    log = args.work / f"{part.name}.log"
    began = time.time()
    if deadline - began < _LEAST_SECONDS:
        return _unrun("not run: out of time")
    if part.needs and importlib.util.find_spec(part.needs) is None:
        return _unrun(f"skipped: {part.needs} is not installed")
    with log.open("w") as file:
        # A session of its own, so that the processes that a part has started end with it.
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(timeout=deadline - began)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    text = "ended: out of time" if status is None else "ok"
    text = f"failed: exit {status}" if status else text
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return {
        "status": text,
        "seconds": time.time() - began,
        "log": "" if status == 0 else "".join(line[:300] + "\n" for line in lines),
    }


def _unrun(status: str) -> dict[str, Any]:
    return {"status": status, "seconds": 0.0, "log": ""}


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _context(
    args: argparse.Namespace, argv: Sequence[str], rows: pathlib.Path, gpu: dict[str, str]
) -> dict[str, Any]:
    machines = [row for row in read_rows(rows) if "machine" in row]
    device = next((row for row in machines if row["platform"] != "cpu"), (machines or [{}])[0])
    return {
        "machine": device.get("machine") or gpu.get("name", "unknown device"),
        "platform": device.get("platform"),
        "driver": gpu.get("driver"),
        "versions": _versions(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python benchmarks/device.py", *_without_paths(argv)]),
        "small": args.small,
        "budget": args.budget,
    }


def _without_paths(argv: Sequence[str]) -> list[str]:
    """Arguments without the folders of a machine, for results that are published."""
    return [pathlib.Path(text).name if os.sep in text else text for text in argv]


def _gpu() -> dict[str, str]:
    """The name and the driver of the first GPU; nothing where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        name, driver = output.stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return {"name": name, "driver": driver}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in (*_PACKAGES, "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    text = (_ROOT / "jaxmp" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(.*)"', text, re.MULTILINE)
    return versions | {"jaxmp": version[1] if version else "unknown"}


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a compilation in progress would hold the process of a part
