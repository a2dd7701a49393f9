"""How many floating-point operations a device can do in a second, from a table or measured."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike
from measurement import Contender, Measurement


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


# Data sheets of CPUs do not tell. A CPU multiplies matrices in turn with the contenders instead, so
# that a busy machine slows both.
PROBE = "float32 matrix product"
_SIZE = 2048


def probes() -> list[Contender]:
    """What to time along with the contenders in order to know the peak of this device."""
    if jax.devices()[0].platform != "cpu":
        return []
    # A matrix that is its own square, so that any number of steps leaves it as it is.
    return [
        Contender(
            PROBE,
            lambda: jnp.full((_SIZE, _SIZE), 1 / _SIZE, jnp.float32),
            lambda x, batch: (x @ x, {}),
        )
    ]


def find_peak(times: Mapping[str, Measurement]) -> tuple[Peak | None, str]:
    """The peak of the device that computes, and where the number comes from, in words.

    Args:
      times: of the contenders and of what `probes` returned.
    """
    kind = jax.devices()[0].device_kind
    if PROBE in times:
        rate = 2e-12 * _SIZE**3 / min(times[PROBE].seconds)
        source = f"the fastest round of a {PROBE} of size {_SIZE}, {rate:.3g} TFLOP/s"
        return Peak(rate, rate, rate), source
    for name, peak in _PEAKS.items():
        if name.lower() in kind.lower():
            return peak, f"the data sheet of {name}: {peak.half:g} TFLOP/s in 16 bits, " + (
                f"{peak.tf32:g} in TF32, {peak.float32:.3g} in float32"
            )
    return None, f"unknown for {kind}"
