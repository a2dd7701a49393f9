#!/usr/bin/env bash
# safetensors writes float8 arrays for NumPy and Flax, and its readers for NumPy and Flax refuse them.
#
# Seen with safetensors 0.8.0, numpy 2.4.6, ml_dtypes 0.6.0 and jax 0.10.2. save_file of safetensors.numpy and of
# safetensors.flax takes float8_e4m3fn and float8_e5m2. load_file of both raises AttributeError: module 'numpy' has no
# attribute 'float8_e4m3fn'. The bytes in the file are right: a view of them has the numbers. bfloat16, which NumPy does
# not have either, is read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.6.0
cat >"$folder/safetensors_float8.py" <<'PY'
import pathlib, tempfile
import jax.numpy as jnp, numpy as np, safetensors, safetensors.flax, safetensors.numpy

path = pathlib.Path(tempfile.mkdtemp()) / "x.safetensors"
expected = {"float8_e4m3fn": "AttributeError", "float8_e5m2": "AttributeError", "bfloat16": "bfloat16"}
changed = 0
for dtype, outcome in expected.items():
    x = np.arange(4).astype(dtype)
    for library, array in [(safetensors.numpy, x), (safetensors.flax, jnp.asarray(x))]:
        library.save_file({"x": array}, path)
        ((_, entry),) = safetensors.deserialize(path.read_bytes())
        held = np.frombuffer(bytes(entry["data"]), dtype).tolist() == x.tolist()
        try:
            found = library.load_file(path)["x"].dtype.name
        except AttributeError as error:
            found = f"AttributeError: {error}"
        same = held and found.startswith(outcome)
        changed += not same
        print(f"{library.__name__:17} {dtype:13} bytes right: {held}; load_file: {found}{'' if same else '  CHANGED'}")
raise SystemExit(changed > 0)
PY
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/safetensors_float8.py"
