"""What the device can do at best: copies, and products of large matrices by dtype."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._tools.planning.devices import find_device
from on_device.recorder import Recorder
from on_device.steps import WITHOUT_TRITON, peak_of

_QUEUED = 5
_ROUNDS = 5
# What is multiplied, at which precision.
_PRODUCTS = (
    ("bfloat16", None),
    ("float16", None),
    ("float32", "tensorfloat32"),
    ("float32", "highest"),
    ("float8_e4m3fn", None),
)


def run(recorder: Recorder) -> None:
    """Records a row for the copy, and for each product."""
    recorder.record_machine()
    rate, seconds = copy_bandwidth(recorder.small)
    row: dict[str, Any] = {"median_ms": 1e3 * seconds, "gigabytes_per_second": rate / 1e9}
    try:
        row["share_of_sheet"] = rate / find_device(jax.devices()[0]).bandwidth
    except ValueError:
        row["remark"] = "a device without a data sheet here"
    recorder.record(contender="copy", **row)
    for dtype, precision in _PRODUCTS:
        name = f"{dtype} product" + (f" ({precision})" if precision else "")
        if recorder.has_measured(name):
            continue
        try:
            recorder.record(contender=name, **_product_row(dtype, precision, recorder.small))
        except Exception as error:
            recorder.record_failure(name, error)


def copy_bandwidth(small: bool) -> tuple[float, float]:
    """Bytes read and written in a second by a copy of a large array, and its seconds."""
    count = 2**20 if small else 2**29
    x = jax.random.normal(jax.random.key(0), (count,))
    # A sum with one: XLA would leave a mere copy of an argument out.
    seconds = _median_seconds(jax.jit(lambda x: x + 1, donate_argnums=0), x)
    return 2 * 4 * count / seconds, seconds


def _product_row(dtype: str, precision: str | None, small: bool) -> dict[str, Any]:
    size = 256 if small else 8192
    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, (size, size)).astype(dtype) for key in keys)
    is_float8 = dtype.startswith("float8")

    def product(x: Any) -> Any:
        return jax.lax.dot_general(
            x,
            w,
            (((1,), (1,)), ((), ())),  # along the rows of both, as float8 wants it
            precision=precision,
            preferred_element_type=jnp.bfloat16 if is_float8 else None,
        )

    on_gpu = jax.default_backend() == "gpu"
    # Trying XLA's own kernels for a product of this size took 15 s, and cuBLAS's are the ceiling.
    options: Any = WITHOUT_TRITON if on_gpu else None
    compiled = jax.jit(product).lower(x).compile(options)
    seconds = _median_seconds(compiled, x, chained=False)
    rate = 2 * size**3 / seconds
    row: dict[str, Any] = {"median_ms": 1e3 * seconds, "teraflops": rate / 1e12}
    if peak := peak_of(dtype, precision):
        row["share_of_sheet"] = rate / peak
    if is_float8 and on_gpu:
        row["remark"] = "cuBLAS, float8" if "$f8" in (compiled.as_text() or "") else "no $f8 kernel"
    return row


def _median_seconds(step: Callable[[Any], Any], x: Any, *, chained: bool = True) -> float:
    """Of one call, where several are queued, so that starting them takes no time of the device."""
    result = step(x)
    seconds = []
    for _ in range(_ROUNDS):
        jax.block_until_ready(result)
        began = time.perf_counter()
        for _ in range(_QUEUED):
            result = step(result if chained else x)
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - began) / _QUEUED)
    return statistics.median(seconds)
