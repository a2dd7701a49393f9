#!/usr/bin/env bash
# Orbax restores weights into a narrower dtype without a word, also into one that cannot hold them.
#
# Seen with orbax-checkpoint 0.12.8 and jax 0.10.2. StandardCheckpointer.restore takes a tree of shapes and dtypes, and
# casts what was saved to these. There is no warning, and no error: float32 weights become bfloat16, 70000 becomes
# infinite in float16 and NaN in float8_e4m3fn, and as an int8 it wraps around to 112. A typing error in a dtype of the
# target is not seen. A shape that differs is an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8 numpy==2.4.6
cat >"$folder/orbax_narrower.py" <<'PY'
import pathlib, tempfile, warnings
import jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp

folder = pathlib.Path(tempfile.mkdtemp()) / "weights"
saved = {"w": jnp.float32([1 + 2**-12, 70000, 1e-30])}
expected = {
    "float32": [1 + 2**-12, 70000, np.float32(1e-30)],
    "bfloat16": [1, 70144, float(jnp.bfloat16(1e-30))],
    "float16": [1, np.inf, 0],
    "float8_e4m3fn": [1, np.nan, 0],
    "int8": [1, 112, 0],
}
changed = 0
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, saved)
    checkpointer.wait_until_finished()
    for dtype, numbers in expected.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            like = {"w": jax.ShapeDtypeStruct((3,), dtype)}
            found = np.asarray(checkpointer.restore(folder, like)["w"]).astype(np.float64)
        said = [str(w.message) for w in caught if "dtype" in str(w.message) or "cast" in str(w.message)]
        same = np.array_equal(found, np.float64(numbers), equal_nan=True) and not said
        changed += not same
        print(f"{dtype:14} {found.tolist()}, warnings about it: {len(said)}{'' if same else '  CHANGED'}")
raise SystemExit(changed > 0)
PY
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/orbax_narrower.py"
