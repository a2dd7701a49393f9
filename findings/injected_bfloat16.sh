#!/usr/bin/env bash
# The first Adam step of optax.inject_hyperparams on bfloat16 params makes all of them NaN.
#
# Seen with optax 0.2.8 and jax 0.10.2. Without hyperparam_dtype, inject_hyperparams keeps each number in the dtype of
# the params. In bfloat16 b2 = 0.999 is 1, so that the second moment never changes, and the correction of its bias
# divides zero by zero. The same optimizer without inject_hyperparams keeps Python's numbers, and works, as does
# hyperparam_dtype=jnp.float32. In float16 0.999 does not round to 1, but eps = 1e-8 is 0: a param whose gradient is
# zero becomes NaN, with and without inject_hyperparams.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 optax==0.2.8 numpy==2.4.6
cat >"$folder/injected_bfloat16.py" <<'PY'
import functools
import jax.numpy as jnp, optax

inject = functools.partial(optax.inject_hyperparams(optax.adam), 1e-3)
wide = functools.partial(optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32), 1e-3)
plain = functools.partial(optax.adam, 1e-3)
changed = 0
for dtype, name, make, expected in [
    (jnp.bfloat16, "adam", plain, True),
    (jnp.bfloat16, "inject_hyperparams", inject, False),
    (jnp.bfloat16, "inject_hyperparams in float32", wide, True),
    (jnp.float32, "inject_hyperparams", inject, True),
]:
    tx, params = make(), {"w": jnp.ones(4, dtype)}
    state = tx.init(params)
    updates, state = tx.update({"w": jnp.full(4, 0.1, dtype)}, state, params)
    finite = bool(jnp.isfinite(updates["w"]).all())
    b2 = getattr(state, "hyperparams", {"b2": 0.999})["b2"]
    changed += finite != expected
    words = f"b2 {float(b2):.6g}, updates {'finite' if finite else 'NaN'}"
    print(f"{dtype.__name__:8} {name:30} {words}{'' if finite == expected else '  CHANGED'}")
params = {"w": jnp.ones(2, jnp.float16)}
tx = plain()
updates, _ = tx.update({"w": jnp.float16([0.1, 0])}, tx.init(params), params)
found = jnp.isnan(updates["w"]).tolist()
changed += found != [False, True]
print(f"float16  adam, gradients [0.1, 0]: updates are NaN: {found}")
raise SystemExit(changed > 0)
PY
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/injected_bfloat16.py"
