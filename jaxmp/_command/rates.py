"""Measures how fast a device multiplies matrices, by dtype."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Large enough to fill a device; a CPU needs a second for less.
_SIZES = {"cpu": 1024}
_SIZE = 8192
_QUEUED = 4


class Rate(NamedTuple):
    """How fast a device multiplied square matrices.

    Attributes:
      dtype: the dtype of both operands.
      precision: `"highest"` for exact float32 products, otherwise `""`.
      size: the number of rows, and of columns.
      seconds: the time of one product, the median of several rounds.
    """

    dtype: str
    precision: str
    size: int
    seconds: float

    @property
    def flops(self) -> float:
        """Floating-point operations in a second."""
        return 2 * self.size**3 / self.seconds


def measured_rates(
    dtypes: list[str],
    *,
    size: int | None = None,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Rate]:
    """Measures products on the default device, float32 also at the precision `"highest"`.

    Each product is compiled and run before. A round queues several of each dtype and waits for the
    last, so that starting them costs no time of the device.

    Args:
      dtypes: names of dtypes.
      size: of the square matrices; by default 8192, and 1024 on a CPU.
      rounds: how many rounds there are.
      clock: the clock, in seconds.

    Returns:
      A rate for each dtype.
    """
    n = size or _SIZES.get(jax.default_backend(), _SIZE)
    kinds = [(dtype, "") for dtype in dtypes]
    if "float32" in dtypes:
        kinds.insert(dtypes.index("float32") + 1, ("float32", "highest"))
    products = [_started_product(*kind, n) for kind in kinds]
    # In turns, so that what else the machine does slows all of them alike.
    times = [[_seconds(product, clock) for product in products] for _ in range(rounds)]
    medians = map(statistics.median, zip(*times, strict=True))
    return [Rate(*kind, n, seconds) for kind, seconds in zip(kinds, medians, strict=True)]


def timed_product(dtype: str, precision: str, platform: str) -> Any:
    """Returns the product that is measured: of rows by rows, jitted.

    Float8 products of GPUs want both operands along the sum, and have results of 16 bits. They go
    to cuBLAS: in a kernel of the compiler's own, operands may be widened, and nothing says so.
    """
    is_float8 = dtype.startswith("float8")
    options = {"xla_gpu_enable_triton_gemm": False} if is_float8 and platform == "gpu" else None
    result = jnp.bfloat16 if is_float8 else jnp.dtype(dtype)
    rows_by_rows = (((1,), (1,)), ((), ()))

    def multiply(a: Any, b: Any) -> Any:
        return lax.dot_general(
            a, b, rows_by_rows, precision=precision or None, preferred_element_type=result
        )

    return jax.jit(multiply, compiler_options=options)


def _started_product(dtype: str, precision: str, n: int) -> Callable[[], Any]:
    """Returns a product without arguments that has been compiled and run."""
    multiply = timed_product(dtype, precision, jax.default_backend())
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (n, n)).astype(dtype) for key in keys)
    for _ in range(2):  # the first call compiles
        jax.block_until_ready(multiply(a, b))
    return lambda: multiply(a, b)


def _seconds(product: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    jax.block_until_ready([product() for _ in range(_QUEUED)])
    return (clock() - start) / _QUEUED
