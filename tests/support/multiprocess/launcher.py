"""Starts the processes of a job and ends them: when all are done, one failed, or time is up."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ATTEMPTS = 3
# How the coordinator says that its port is taken.
PORT_TAKEN = ("Failed to start RPC server", "Address already in use")
# A survivor of a lost process may hang for minutes in a collective.
GRACE_SECONDS = 1.0
# What a worker has left to show where it hangs before the launcher ends it.
TRACEBACK_SECONDS = 10.0


class Call:
    """A function of `scenarios.py` and its keyword arguments, all of which JSON can hold."""

    def __init__(self, function: str, **kwargs: Any) -> None:
        self.function, self.kwargs = function, kwargs


@dataclasses.dataclass(frozen=True)
class Exit:
    """How a process ended, as `subprocess` says it, and whether the launcher ended it."""

    returncode: int
    terminated: bool
    output: str


class JobFailed(AssertionError):
    """A process of a job failed; the message holds the output of all, those that failed first."""

    def __init__(self, exits: Sequence[Exit]) -> None:
        def severity(item: tuple[int, Exit]) -> tuple[bool, bool]:
            return item[1].terminated, item[1].returncode == 0

        shown = [
            f"--- process {i}: {'ended by the launcher' if e.terminated else e.returncode}\n"
            f"{e.output[-6000:]}"
            for i, e in sorted(enumerate(exits), key=severity)
        ]
        super().__init__("\n".join(["a job of several processes failed", *shown]))


def run_job(
    calls: Mapping[str, Call],
    *,
    processes: int,
    folder: Path,
    devices: int = 1,
    timeout: float = 240.0,
) -> list[dict[str, Any]]:
    """What the calls returned, by label, for each process, which run them in this order."""
    exits = start_job(calls, processes=processes, folder=folder, devices=devices, timeout=timeout)
    if any(e.returncode for e in exits):
        raise JobFailed(exits)
    return [json.loads((folder / f"result-{i}.json").read_text()) for i in range(processes)]


def start_job(
    calls: Mapping[str, Call], *, processes: int, folder: Path, devices: int, timeout: float = 240.0
) -> list[Exit]:
    """Runs a job that may fail, and tells how each process ended. Arguments as of `run_job`."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "calls.json"
    spec.write_text(json.dumps({label: [c.function, c.kwargs] for label, c in calls.items()}))

    def commands(port: int) -> list[list[str]]:
        limit = str(max(1.0, timeout - TRACEBACK_SECONDS))
        common = [str(port), str(processes), str(devices), limit, str(folder)]
        # All but the one warning that pyproject.toml expects on some jaxlibs.
        strict = ["-W", "error", "-W", "ignore:the CPU compiler of jaxlib"]
        worker = [sys.executable, "-u", *strict, "-m", "tests.support.multiprocess.worker"]
        return [[*worker, str(i), *common] for i in range(processes)]

    return retry_ports(commands, folder=folder, timeout=timeout)


def retry_ports(
    commands: Callable[[int], list[list[str]]], *, folder: Path, timeout: float
) -> list[Exit]:
    """Runs processes that share a port, once more if it turns out to be taken."""
    for _ in range(ATTEMPTS):
        with reserved_port() as port:
            exits = run_together(commands(port), folder=folder, timeout=timeout)
        if not any(e.returncode and sign in e.output for e in exits for sign in PORT_TAKEN):
            break
    return exits


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the kernel gives to nobody else who asks for any port.

    A port that was merely looked up can be gone before the coordinator binds it. The coordinator
    may bind this one, as gRPC sets SO_REUSEPORT like the socket that holds it here, which never
    listens.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def run_together(commands: Sequence[Sequence[str]], *, folder: Path, timeout: float) -> list[Exit]:
    """Runs processes at once; ends all that are left once one failed or the time is up."""
    logs = [folder / f"output-{i}.txt" for i in range(len(commands))]
    running: list[subprocess.Popen] = []
    terminated: set[int] = set()
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as out:
                running.append(_start(command, out))
        _wait(running, time.monotonic() + timeout)
    finally:
        # Also when the test itself is interrupted.
        for i, process in enumerate(running):
            if process.poll() is None:
                terminated.add(i)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [
        Exit(process.returncode, i in terminated, log.read_text(errors="replace"))
        for i, (process, log) in enumerate(zip(running, logs, strict=True))
    ]


def _start(command: Sequence[str], out: Any) -> subprocess.Popen:
    # JAX's flags of the test process are not meant for the workers, but XLA's are: bits are
    # compared. A proxy would be asked for 127.0.0.1. NPROC is the size of XLA's thread pools.
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("JAX_") and not k.lower().endswith("_proxy")
    }
    env |= {"NPROC": "2", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _wait(running: Sequence[subprocess.Popen], deadline: float) -> None:
    while time.monotonic() < deadline:
        codes = [process.poll() for process in running]
        if all(code is not None for code in codes):
            return
        if any(codes):
            # What the others have to say about it belongs into the output.
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
