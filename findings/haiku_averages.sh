#!/usr/bin/env bash
# Running averages of Haiku's BatchNorm are NaN from the first step on, under a policy of 16 bits.
#
# Seen with dm-haiku 0.0.17, jmp 0.0.4 and jax 0.10.2. hk.mixed_precision.set_policy(hk.BatchNorm, policy) with a
# policy that computes in 16 bits also holds for the averages inside of the module. The decay rate is rounded to the
# dtype of the inputs: 0.999 is 1 in bfloat16, and 0.9999 is 1 in float16. Nothing is ever added to the hidden average,
# and the correction of its bias divides zero by zero. Training does not show it, as the averages are not read there:
# the outputs of a model that is evaluated are NaN. A rate that does not round to 1 is fine, as is float32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 dm-haiku==0.0.17 jmp==0.0.4 numpy==2.4.6
cat >"$folder/haiku_averages.py" <<'PY'
import haiku as hk, jax, jax.numpy as jnp, jmp

x = jax.random.normal(jax.random.key(0), (64, 8))
changed = 0
for dtype, decay, expected in [
    (jnp.float32, 0.9999, True),
    (jnp.bfloat16, 0.99, True),
    (jnp.bfloat16, 0.999, False),
    (jnp.float16, 0.999, True),
    (jnp.float16, 0.9999, False),
]:
    def model(x, is_training):
        return hk.BatchNorm(True, True, decay)(x, is_training=is_training)

    hk.mixed_precision.set_policy(hk.BatchNorm, jmp.Policy(jnp.float32, dtype, jnp.float32))
    net = hk.transform_with_state(model)
    params, state = net.init(jax.random.key(1), x, True)
    for _ in range(3):
        trained, state = net.apply(params, state, None, x, True)
    evaluated, _ = net.apply(params, state, None, x, False)
    finite = [bool(jnp.isfinite(y).all()) for y in (trained, evaluated)]
    changed += finite != [True, expected]
    words = ["finite" if y else "NaN" for y in finite]
    note = "" if finite == [True, expected] else "  CHANGED"
    print(f"{dtype.__name__:8} decay {decay}: outputs in training {words[0]}, evaluated {words[1]}{note}")
raise SystemExit(changed > 0)
PY
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/haiku_averages.py"
