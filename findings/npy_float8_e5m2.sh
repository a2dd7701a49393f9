#!/usr/bin/env bash
# numpy.save writes an array of float8_e5m2 to a file that numpy.load cannot read.
#
# Seen with numpy 2.4.6 and ml_dtypes 0.6.0. The header of the file says '<f1', a float of one byte, which numpy.load
# refuses: ValueError, no valid dtype descriptor. Of eight other dtypes of ml_dtypes, the header says '<V1' or '<V2':
# they are read as bytes without a dtype, and a view gives them their numbers again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0
cat >"$folder/npy_float8_e5m2.py" <<'PY'
import io
import ml_dtypes, numpy as np

changed = 0
for name in (
    "float8_e5m2", "float8_e5m2fnuz", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e3m4",
    "float8_e8m0fnu", "int4", "bfloat16",
):
    x = np.ones(4, getattr(ml_dtypes, name))
    file = io.BytesIO()
    np.save(file, x)
    header = file.getvalue().split(b"'descr': '")[1][:3].decode()
    file.seek(0)
    try:
        read = np.load(file)
        found = "numbers again by a view" if read.view(x.dtype).tolist() == x.tolist() else "other numbers"
    except ValueError as error:
        found = f"ValueError: {error}"
    expected = "ValueError" if name == "float8_e5m2" else "numbers again by a view"
    changed += not found.startswith(expected)
    print(f"{name:15} {header} {found}{'' if found.startswith(expected) else '  CHANGED'}")
raise SystemExit(changed > 0)
PY
"$folder/env/bin/python" "$folder/npy_float8_e5m2.py"
