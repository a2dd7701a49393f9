"""Says whether float8 products pay on a device, and for which sizes."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxmp._command.shapes import ProductShape
from jaxmp._planning.devices import Device
from jaxmp._policies.recipe import Recipe

_FORMAT = "float8_e4m3fn"
# What programs reach of the rates on the data sheet. Assumptions, as in docs/float8.md.
_OF_BFLOAT16, _OF_FLOAT8, _OF_BANDWIDTH = 0.7, 0.6, 0.8
# Kernels beside the products, forward and backward, in compiled programs: casts, and amaxes.
_LAUNCHES_BFLOAT16, _LAUNCHES_FLOAT8 = 1, 12
# The part of a step that stays as it is, attention, head and optimizer, in an example.
_ELSEWHERE = 1 / 3


class Float8Estimate(NamedTuple):
    """What float8 would change for a product with a weight, forward and backward.

    Attributes:
      shape: the product.
      left_out: why `mixed_float8` leaves it in 16 bits; `""` if it does not.
      bfloat16: the seconds of its three products in bfloat16, with the casts beside them.
      float8: the same in float8, one scale for each array.
    """

    shape: ProductShape
    left_out: str
    bfloat16: float
    float8: float

    @property
    def speedup(self) -> float:
        """How many times faster the layer is in float8; 1 if it is left out."""
        return 1.0 if self.left_out else self.bfloat16 / self.float8


def estimate_float8(shapes: Sequence[ProductShape], device: Device) -> list[Float8Estimate]:
    """Estimates what float8 does for the layers whose products have these sizes.

    The model of docs/float8.md: 70 % and 60 % of the peak rates of bfloat16 and float8, 80 % of
    the bandwidth, a launch for each kernel, and the bytes of compiled programs. x is M x K in
    bfloat16, w is K x N in float32, and the gradient g is M x N in bfloat16:

    - in bfloat16, w is cast: 6 bytes for each of its numbers;
    - in float8, x and g are read for the largest magnitude, and read and written in two layouts:
      6 bytes; w takes 10, as it is read in float32.

    Args:
      shapes: the products of the forward pass.
      device: a device that multiplies float8.

    Returns:
      An estimate for each.
    """
    return [_estimate(shape, device) for shape in shapes]


def _estimate(shape: ProductShape, device: Device) -> Float8Estimate:
    times = shape.runs * shape.batch
    m, k, n = shape.rows, shape.summed, shape.columns
    x, w, g = m * k, k * n, m * n
    bandwidth = _OF_BANDWIDTH * device.bandwidth
    flops = 6 * m * k * n
    peaks = device.peaks
    bfloat16 = flops / (_OF_BFLOAT16 * peaks.bfloat16) + 6 * w / bandwidth
    float8 = flops / (_OF_FLOAT8 * peaks.float8) + (6 * (x + g) + 10 * w) / bandwidth
    return Float8Estimate(
        shape=shape,
        left_out=_BATCH if shape.batch > 1 else Recipe().why_not(m, k, n, device.platform) or "",
        bfloat16=times * (bfloat16 + _LAUNCHES_BFLOAT16 * device.launch),
        float8=times * (float8 + _LAUNCHES_FLOAT8 * device.launch),
    )


def total_speedup(estimates: Sequence[Float8Estimate]) -> float:
    """Returns how many times faster all these layers together are in float8."""
    before = sum(each.bfloat16 for each in estimates)
    return before / sum(each.bfloat16 / each.speedup for each in estimates)


def step_speedup(layers: float, elsewhere: float = _ELSEWHERE) -> float:
    """Returns the speedup of a step of which a part does not get faster (Amdahl, 1967).

    >>> round(step_speedup(1.4), 2)
    1.24
    """
    return 1 / (elsewhere + (1 - elsewhere) / layers)


def float8_sentences(
    multiplies: bool | None, kind: str, estimates: Sequence[Float8Estimate]
) -> list[str]:
    """Says in sentences what float8 is on a device.

    Args:
      multiplies: whether the device multiplies float8; None if it is not known.
      kind: its name.
      estimates: those of the sizes that the user gave.
    """
    start = kind[:1].upper() + kind[1:]
    if "MI300" in start:
        return [f"{start} has other formats, e4m3fnuz and e5m2fnuz: not supported. {_WIDER}"]
    if multiplies is None:
        return [
            f"Whether {kind} multiplies float8 is not known. NVIDIA GPUs do from compute "
            "capability 8.9 on (L4, H100, B200), and TPUs from 7x. Others convert it to more bits: "
            "the numbers are right, and it is slower."
        ]
    if not multiplies:
        return [f"{start} does not multiply float8: it would be converted to more bits. {_WIDER}"]
    said = [
        f"{start} multiplies float8. Each product then differs from its bfloat16 by 4 to 6 %: "
        "train both for a while and compare the losses.",
    ]
    if estimates:
        said += _about(estimates)
    else:
        said.append("Whether it pays is decided by sizes: give them with --shapes.")
    return [*said, "Is it running in float8? `jaxmp audit PROGRAM --compiled` says so."]


# Below this estimate, a measurement might as well say the opposite.
_WORTH_IT = 1.05
_WIDER = "Use the policy named above."
_BATCH = "a batch of products, as in attention"


def _about(estimates: Sequence[Float8Estimate]) -> list[str]:
    inside = [each.shape.flops for each in estimates if not each.left_out]
    share = sum(inside) / sum(each.shape.flops for each in estimates)
    said = [f"mixed_float8 takes {100 * share:.0f} % of the FLOPs of these products."]
    if inside:
        layers = total_speedup(estimates)
        said.append(
            f"Estimated, not measured: {layers:.2f} times the speed of bfloat16 in these products, "
            f"and {step_speedup(layers):.2f} of a step that spends a third of its time elsewhere."
        )
        if layers < _WORTH_IT:
            said.append("For these sizes float8 does not pay: stay with 16 bits.")
    return said
