#!/usr/bin/env bash
# On CPUs a product of bfloat16 that returns float32 runs, and its transpose raises an error.
#
# Seen with jax and jaxlib 0.10.2; 0.12.0.1 is the same. `jnp.matmul(a, b, preferred_element_type=jnp.float32)` of
# bfloat16 is float32 sums, as on TPUs and GPUs. With `.T` behind it in the same jit: JaxRuntimeError,
# "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32". float16, and a bfloat16 result, run in both forms.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat >"$folder/cpu_bfloat16_products.py" <<'PY'
import jax, jax.numpy as jnp

changed = 0
for low, wide in (("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")):
    a, b = jnp.ones((128, 256), low), jnp.ones((256, 512), low)
    product = lambda a, b: jnp.matmul(a, b, preferred_element_type=wide)
    for name, fun in (("a @ b", product), ("(a @ b).T", lambda a, b: product(a, b).T)):
        try:
            found = f"runs, {float(jax.jit(fun)(a, b)[0, 0])}"
        except jax.errors.JaxRuntimeError as error:
            found = str(error)
        fails = name != "a @ b" and (low, wide) == ("bfloat16", "float32")
        expected = "Unsupported element type for DotThunk" if fails else "runs, 256.0"
        changed += expected not in found
        print(f"{low} -> {wide}: {name:10} {found}{'' if expected in found else '  CHANGED'}")
raise SystemExit(changed > 0)
PY
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/cpu_bfloat16_products.py"
