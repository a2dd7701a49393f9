#!/usr/bin/env bash
# A trainer of Tunix that ends removes the listeners of everybody else from jax.monitoring.
#
# Seen with google-tunix 0.1.7 and jax 0.10.2. Its MetricsLogger registers listeners for scalars, and its close(), which
# the trainers call after train(), clears all listeners of the process. A counter of compilations that the user, or a
# library for profiles and dashboards, had registered is silent from then on, and unregister_event_duration_listener of
# it fails with an AssertionError. Register such listeners after the training, or again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet google-tunix==0.1.7 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 numpy==2.4.6
cat >"$folder/tunix_clears_listeners.py" <<'PY'
import tempfile

import jax, jax.numpy as jnp
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions

count = 0


def listen(name, seconds, **_):
    global count
    count += "backend_compile" in name


jax.monitoring.register_event_duration_secs_listener(listen)
jax.jit(lambda x: x + 1)(jnp.ones(3))
before = count
logger = MetricsLogger(MetricsLoggerOptions(log_dir=tempfile.mkdtemp()))
logger.close()
seen = count
jax.jit(lambda x: x + 2)(jnp.ones(5))
print(f"compilations that the user's listener heard: {before} before the logger, {count - seen} after it was closed")
raise SystemExit(before == 0 or count != seen)
PY
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/tunix_clears_listeners.py"
