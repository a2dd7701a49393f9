"""How many floating-point operations a device can do in a second, from a table or measured."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike


class Peak(NamedTuple):
    """Dense matrix products, in TFLOP/s: 16-bit operands, float32 as TF32, and exact float32."""

    half: float
    tf32: float
    float32: float

    def of(self, dtype: DTypeLike, precision: str | None) -> float:
        """The peak for operands of this dtype at this matmul precision, in FLOP/s."""
        if jnp.dtype(dtype).itemsize < 4:
            return 1e12 * self.half
        return 1e12 * (self.float32 if precision == "highest" else self.tf32)


# From the makers' data sheets, without sparsity. The first name within the device kind counts. A
# TPU multiplies float32 in bfloat16 passes: one by default, six at the highest precision.
_PEAKS = {
    "A100": Peak(312, 156, 19.5),
    "H100 PCIe": Peak(756, 378, 51),
    "H100 NVL": Peak(835, 417, 60),
    "H100": Peak(990, 495, 67),
    "H200": Peak(990, 495, 67),
    "TPU v4": Peak(275, 275, 275 / 6),
    "TPU v5 lite": Peak(197, 197, 197 / 6),
    "TPU v5e": Peak(197, 197, 197 / 6),
    "TPU v5": Peak(459, 459, 459 / 6),
    "TPU v6": Peak(918, 918, 918 / 6),
}


def find_peak() -> tuple[Peak | None, str]:
    """The peak of the device that computes, and where the number comes from, in words."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        size = 2048
        rate = measured_matmul(size)
        text = f"the best float32 {size} x {size} matrix product of this run, {rate:.3g} TFLOP/s"
        return Peak(rate, rate, rate), text
    for name, peak in _PEAKS.items():
        if name.lower() in device.device_kind.lower():
            return peak, f"the data sheet of {name}: {peak.half:g} TFLOP/s in 16 bits, " + (
                f"{peak.tf32:g} in TF32, {peak.float32:.3g} in float32"
            )
    return None, f"unknown for {device.device_kind}"


def measured_matmul(size: int, repeats: int = 5) -> float:
    """The best rate of a square float32 matrix product, in TFLOP/s."""
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2e-12 * size**3 / best
