#!/usr/bin/env bash
# A float32 sum over devices that XLA runs in bfloat16, though no line of the program asks for it.
#
# Seen with jax 0.10.2, jaxlib 0.10.2 and libtpu 0.0.42.1, which this script installs, and the same, line for
# line, with jax 0.12.0.1 and libtpu 0.0.50.1. Compiled for eight TPUs v5e; no TPU is needed. A float32 array is summed over eight devices (`lax.psum`), and then read
# by a cast to bfloat16, or by a float32 product at the default precision. The lowered program has a float32
# all-reduce, the compiled one an all-reduce in bfloat16: the numbers are rounded on each device before they are
# added, and sums are rounded too. The order in the program, sum first and round then, is not kept. Moves, clips
# and optimization_barrier between sum and cast do not change that. lax.reduce_precision(x, 8, 7) before the
# cast does, as do a product at the highest precision, and a cast to float16. The compilers for GPUs of the same
# jax keep float32 everywhere.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1 numpy==2.4.6
cat >"$folder/sums.py" <<'PY'
import os, re

os.environ |= {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
}
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = Mesh(np.array(devices).reshape(8), ("d",))
x = jax.ShapeDtypeStruct((8 * 256, 256), jnp.float32, sharding=NamedSharding(mesh, P("d")))
low, barrier = jnp.bfloat16, lax.optimization_barrier
readers = {
    "nothing": (lambda s: s, "f32"),
    "a cast to bfloat16": (lambda s: s.astype(low), "bf16"),
    "a transpose, a clip and a cast": (lambda s: jnp.clip(s.T, -1, 1).astype(low), "bf16"),
    "a barrier and a cast": (lambda s: barrier(s).astype(low), "bf16"),
    "a float32 product, default precision": (lambda s: s @ s, "bf16"),
    "a float32 product, highest precision": (lambda s: jnp.matmul(s, s, precision="highest"), "f32"),
    "a cast to float16": (lambda s: s.astype(jnp.float16), "f32"),
    "reduce_precision and a cast": (lambda s: lax.reduce_precision(s, 8, 7).astype(low), "f32"),
    "a multiplication and a cast": (lambda s: (3 * s).astype(low), "f32"),
}
changed = 0
for name, (read, expected) in readers.items():
    body = jax.shard_map(lambda x: read(lax.psum(x, "d")), mesh=mesh, in_specs=P("d"), out_specs=P())
    lowered = jax.jit(body).lower(x)
    assert re.search(r"all_reduce.*?tensor<256x256xf32>", lowered.as_text(), re.S)
    compiled = lowered.compile().as_text()
    found = re.search(r"= (f32|bf16)\[256,256\]\S* all-reduce\(", compiled)
    dtype = found[1] if found else "none"
    changed += dtype != expected
    print(f"summed in {dtype:4}  read by {name}{'' if dtype == expected else '  CHANGED'}")
raise SystemExit(changed > 0)
PY
"$folder/env/bin/python" "$folder/sums.py"
