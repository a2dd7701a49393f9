#!/usr/bin/env bash
# A step that Keras skips for its overflow leaves NaN in BatchNormalization, for good.
#
# Seen with keras 3.15.1 and jax 0.10.2. Under mixed_float16 the loss scale optimizer skips a step whose gradients are
# not finite: no weight changes, its iterations do not count, and the scale is halved. But the moving mean and variance
# of the same batch are taken over. After one batch that overflows they are not finite, and a running average stays so:
# training goes on with a finite loss, and each later prediction is NaN. Keras on other backends was not tried.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 keras==3.15.1 numpy==2.4.6
cat >"$folder/keras_skipped_step.py" <<'PY'
import keras, numpy as np

keras.utils.set_random_seed(0)
keras.mixed_precision.set_global_policy("mixed_float16")
norm = keras.layers.BatchNormalization()
first = keras.layers.Dense(16)
last = keras.layers.Dense(1, dtype="float32")
model = keras.Sequential([keras.Input((8,)), first, norm, last])
model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


def finite(*arrays):
    return all(np.isfinite(np.asarray(y, np.float32)).all() for y in arrays)


seen = []
for name, scale, steps in [("normal", 1, 1), ("too large", 1e5, 1), ("normal", 1, 20)]:
    for _ in range(steps):
        loss = model.train_on_batch(scale * x, x[:, :1])
    row = (
        finite(first.kernel, last.kernel),
        finite(norm.moving_mean, norm.moving_variance),
        finite(model.predict(x, verbose=0)),
    )
    seen.append(row)
    print(f"{steps:2} {name} batches: loss {loss:.3g}; finite weights {row[0]}, averages {row[1]}, predictions {row[2]}")
print("loss finite at the end:", bool(np.isfinite(loss)))
expected = [(True, True, True), (True, False, False), (True, False, False)]
raise SystemExit(seen != expected)
PY
KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/keras_skipped_step.py"
