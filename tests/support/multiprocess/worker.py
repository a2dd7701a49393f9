"""One process of a job. See the package."""

import faulthandler
import json
import sys
from pathlib import Path

import jax

from tests.support.multiprocess import scenarios

SECONDS = 60


def main() -> None:
    """Joins the job, runs its calls, and writes what they returned."""
    process, port, processes, devices = map(int, sys.argv[1:5])
    # Shows where every thread hangs, and lets no process outlive its launcher.
    faulthandler.dump_traceback_later(float(sys.argv[5]), exit=True)
    folder = Path(sys.argv[6])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        processes,
        process,
        coordinator_bind_address=f"127.0.0.1:{port}",
        initialization_timeout=SECONDS,
        heartbeat_timeout_seconds=SECONDS,
        shutdown_timeout_seconds=SECONDS,
    )
    assert jax.process_count() == processes
    assert jax.device_count() == processes * devices
    mesh = scenarios.make_mesh(jax.device_count())
    calls = json.loads((folder / "calls.json").read_text())
    results = {
        label: getattr(scenarios, function)(mesh, **kwargs)
        for label, (function, kwargs) in calls.items()
    }
    (folder / f"result-{process}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
