"""The speed and the memory of devices, in one table, from the data sheets of their makers.

A sheet states the best that the hardware can do. Programs reach part of it.
"""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_EXACT = ("highest", "float32")


class Peaks(NamedTuple):
    """How fast a device multiplies matrices, by the dtype of the operands, in FLOP/s.

    Rates are dense, without structured sparsity. Zero means that the device has no such product:
    compilers widen the operands.

    Attributes:
      float32: exact float32, as with `precision="highest"`.
      tensorfloat32: float32 operands at JAX's default precision: TF32 on GPUs since Ampere, one
        pass in bfloat16 on TPUs, exact float32 elsewhere.
      bfloat16: bfloat16 operands.
      float16: float16 operands, summed in float32.
      float8: float8_e4m3fn and float8_e5m2 operands.
      int8: 8-bit integers.
    """

    float32: float
    tensorfloat32: float
    bfloat16: float = 0.0
    float16: float = 0.0
    float8: float = 0.0
    int8: float = 0.0

    def of(self, dtype: DTypeLike, precision: str | None = None) -> float:
        """The rate at which products of these operands run, in FLOP/s.

        Operands that a device does not multiply are widened to the next dtype that it does: float8
        to bfloat16, 16 bits to float32. Wider ones count as exact float32.

        Args:
          dtype: of the operands, of the wider one if they differ.
          precision: `"highest"` for exact float32 products, `"high"` for three passes of bfloat16
            on TPUs; by default JAX's default.

        >>> peaks = DEVICES["v5e"].peaks
        >>> peaks.of("float8_e4m3fn") == peaks.of("bfloat16") == peaks.of("float32")
        True
        >>> round(peaks.of("bfloat16") / peaks.of("float32", "highest"), 3)
        6.0
        """
        name = jnp.dtype(dtype).name
        if rate := self._by_dtype("float32" if name == "complex64" else name, precision):
            return rate
        if jnp.dtype(dtype).itemsize == 1 and max(self.bfloat16, self.float16):
            return self.bfloat16 or self.float16
        if jnp.dtype(dtype).itemsize < 4:
            return self._by_dtype("float32", precision)
        return self.float32

    def _by_dtype(self, name: str, precision: str | None = None) -> float:
        # TPUs, whose default for float32 is one pass of bfloat16.
        if name == "float32" and precision == "high" and self.tensorfloat32 == self.bfloat16:
            return 2 * self.float32  # three passes of bfloat16 instead of six
        if name == "float32":
            return self.float32 if precision in _EXACT else self.tensorfloat32
        if name in _FLOAT8:
            return self.float8
        return float(self._asdict().get({"uint8": "int8"}.get(name, name), 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device as JAX counts them: a GPU, or a TPU chip; of a v3 or 7x, one of a chip's two.

    Attributes:
      name: what `find_device` takes.
      platform: `"gpu"` or `"tpu"`.
      pattern: a regular expression for words of JAX's `device_kind`, in any case of letters.
      memory: its memory in bytes, as its maker states it; programs get a few percent less.
      bandwidth: bytes a second between that memory and the chip.
      peaks: its matrix products.
      aliases: other names.
    """

    name: str
    platform: str
    pattern: str
    memory: int
    bandwidth: float
    peaks: Peaks
    aliases: tuple[str, ...] = ()


_GIB = 2**30


def _gpu(
    name: str,
    pattern: str,
    memory: float | int,
    bandwidth: float | int,
    tflops: Peaks,
    *aliases: str,
) -> Device:
    """Gibibytes (the "80 GB" of a GPU are 80 GiB), gigabytes a second, teraFLOP/s."""
    return Device(
        name=name,
        platform="gpu",
        pattern=pattern,
        memory=int(memory * _GIB),
        bandwidth=bandwidth * 1e9,
        peaks=Peaks(*(1e12 * rate for rate in tflops)),
        aliases=aliases,
    )


def _tpu(
    name: str,
    pattern: str,
    memory: float | int,
    bandwidth: float | int,
    tflops: float | int,
    factors: Peaks,
    *aliases: str,
) -> Device:
    """Gibibytes, gigabytes a second, teraFLOP/s in bfloat16, multiples of that.

    A TPU multiplies float32 in passes of bfloat16: one by default, six for exact products.
    """
    return Device(
        name=name,
        platform="tpu",
        pattern=pattern,
        memory=int(memory * _GIB),
        bandwidth=bandwidth * 1e9,
        peaks=Peaks(*(1e12 * tflops * factor for factor in factors)),
        aliases=aliases,
    )


# Multiples of the rate in bfloat16: float32, its default, bfloat16 and more.
_BFLOAT16 = Peaks(1 / 6, 1, 1)
_BFLOAT16_INT8 = Peaks(1 / 6, 1, 1, int8=2)
_BFLOAT16_FLOAT8 = Peaks(1 / 6, 1, 1, float8=2)

# The more special kind stands before the more general one: the first that matches counts.
_TABLE = (
    # NVIDIA V100 data sheet, 2020: SXM2. No bfloat16, no TF32.
    _gpu("v100", r"V100", 32, 900, Peaks(15.7, 15.7, 0, 125, 0, 0)),
    # NVIDIA T4 data sheet, 2019.
    _gpu("t4", r"T4", 16, 320, Peaks(8.1, 8.1, 0, 65, 0, 130)),
    # NVIDIA A100 data sheet, 2021.
    _gpu("a100-40gb", r"A100.*40GB", 40, 1555, Peaks(19.5, 156, 312, 312, 0, 624)),
    _gpu("a100", r"A100", 80, 2039, Peaks(19.5, 156, 312, 312, 0, 624), "a100-80gb"),
    # NVIDIA A10 data sheet, 2021; the A10G of Amazon's g5 has 70 of its 125 TFLOP/s.
    _gpu("a10g", r"A10G", 24, 600, Peaks(31.5, 35, 70, 70, 0, 140)),
    _gpu("a10", r"A10", 24, 600, Peaks(31.2, 62.5, 125, 125, 0, 250)),
    # NVIDIA L4 and L40S data sheets, 2023, halved where they count sparsity.
    _gpu("l4", r"L4", 24, 300, Peaks(30.3, 60, 121, 121, 242.5, 242.5)),
    _gpu("l40s", r"L40S", 48, 864, Peaks(91.6, 183, 362, 362, 733, 733)),
    # NVIDIA Ada architecture paper, 2022: sums in float32.
    _gpu("rtx4090", r"RTX 4090", 24, 1008, Peaks(82.6, 82.6, 165.2, 165.2, 330.3, 660.6)),
    # NVIDIA H100 data sheet, 2023, and that of the GH200, halved where they count sparsity.
    _gpu("h100-pcie", r"H100 PCIe", 80, 2000, Peaks(51, 378, 756, 756, 1513, 1513)),
    _gpu("h100-nvl", r"H100 NVL", 94, 3900, Peaks(60, 417.5, 835, 835, 1670, 1670)),
    _gpu("h100", r"H100", 80, 3350, Peaks(67, 494.7, 989.4, 989.4, 1978.9, 1978.9), "h100-sxm"),
    _gpu("gh200", r"GH200", 96, 4000, Peaks(67, 494.7, 989.4, 989.4, 1978.9, 1978.9)),
    # NVIDIA H200 data sheet, 2024.
    _gpu("h200", r"H200", 141, 4800, Peaks(67, 494.7, 989.4, 989.4, 1978.9, 1978.9)),
    # NVIDIA DGX B200 data sheet, 2024, an eighth, halved where it counts sparsity.
    _gpu("b200", r"G?B200", 180, 8000, Peaks(75, 1125, 2250, 2250, 4500, 4500), "gb200"),
    # AMD MI300X data sheet, 2023. Its float8 is e4m3fnuz, which is another dtype.
    _gpu("mi300x", r"MI300X", 192, 5300, Peaks(163.4, 163.4, 1307.4, 1307.4, 0, 2614.9)),
    # Google Cloud TPU system architecture pages, 2021 to 2025. Halves of a chip, where JAX has two.
    _tpu("v3", r"TPU v3", 16, 450, 61.5, _BFLOAT16, "tpuv3"),
    _tpu("v4", r"TPU v4", 32, 1200, 275, _BFLOAT16, "tpuv4"),
    _tpu("v5e", r"TPU v5 ?(lite|e)", 16, 819, 197, _BFLOAT16_INT8, "tpuv5e", "v5litepod"),
    _tpu("v5p", r"TPU v5p?", 95, 2765, 459, _BFLOAT16_INT8, "tpuv5p"),
    _tpu("v6e", r"TPU v6( lite|e)?", 32, 1640, 918, _BFLOAT16_INT8, "tpuv6e", "trillium"),
    _tpu("7x", r"TPU ?v?7x?", 96, 3690, 1153.5, _BFLOAT16_FLOAT8, "tpu7x", "ironwood"),
)

# All devices of the table, by name.
DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}


def find_device(device: Any) -> Device:
    """Finds a device in the table.

    Args:
      device: its name, such as `"h100"`, `"v5e"` or `"TPU v5 lite"`; a device of JAX, such as
        `jax.devices()[0]`; or a `Device`, which is returned as it is.

    Returns:
      The device.

    Raises:
      ValueError: if the table does not have it.
      TypeError: if `device` is none of these.

    >>> find_device("H200").bandwidth, find_device("tpu7x").name
    (4800000000000.0, '7x')
    """
    if isinstance(device, Device):
        return device
    kind = device if isinstance(device, str) else getattr(device, "device_kind", None)
    if not isinstance(kind, str):
        raise TypeError(
            f"give a device's name, such as 'h100', or a device of JAX, got {type(device).__name__}"
        )
    name = re.sub(r"[ _]", "-", kind.strip().lower())
    for row in _TABLE:
        if name in (row.name, *row.aliases):
            return row
    # JAX's names of devices are like "NVIDIA A100-SXM4-80GB". Whole words: an A100 is not an A10.
    for row in _TABLE:
        if re.search(rf"(?<![a-z0-9])({row.pattern})(?![a-z0-9])", kind, re.IGNORECASE):
            return row
    raise ValueError(f"no data of a device {kind!r}. Known are {', '.join(DEVICES)}")


def is_of_kind(device: Any, kind: Device) -> bool:
    """Whether a device of JAX is of a kind in the table."""
    try:
        return find_device(device) == kind
    except ValueError:
        return False


def device_at_hand(otherwise: str) -> Device:
    """Returns the device that JAX computes on; another where the table does not have it."""
    # The table has no CPUs.
    try:
        return find_device(jax.devices()[0])
    except ValueError:
        return DEVICES[otherwise]
