"""The peak floating-point operations per second of a device, from a table or measured."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from lab.timing import Contender, Measurement

from jaxmp._tools.planning.devices import Peaks, find_device

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


def find_peak(times: Mapping[str, Measurement]) -> tuple[Peaks | None, str]:
    """The peaks of the device that computes, and where the numbers come from, in words.

    Args:
      times: of the contenders and of what `probes` returned.
    """
    if PROBE in times:
        rate = 2.0 * _SIZE**3 / min(times[PROBE].seconds)
        source = f"the fastest round of a {PROBE} of size {_SIZE}, {rate / 1e12:.3g} TFLOP/s"
        return Peaks(rate, rate, rate, rate), source
    try:
        device = find_device(jax.devices()[0])
    except ValueError as error:
        return None, f"unknown: {error}"
    half, tf32, float32 = (
        device.peaks.of(dtype, precision) / 1e12
        for dtype, precision in (("bfloat16", None), ("float32", None), ("float32", "highest"))
    )
    rates = f"{half:g} TFLOP/s in 16 bits, {tf32:g} in float32, {float32:.3g} in exact float32"
    return device.peaks, f"the data sheet of {device.name}: {rates}"
