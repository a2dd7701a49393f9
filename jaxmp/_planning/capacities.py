"""How much memory accelerators have, and who compiles for them."""

from typing import Literal, NamedTuple

Compiler = Literal["gpu", "tpu"]


class Capacity(NamedTuple):
    """The memory of one device.

    Attributes:
      compiler: whose compiler makes programs for it.
      gigabytes: its memory by datasheet, in units of 1e9 bytes.
    """

    compiler: Compiler
    gigabytes: int

    @property
    def bytes(self) -> int:
        return self.gigabytes * 10**9


# By the vendors' datasheets, as of 2026. A chip of the TPU 7x is two devices for JAX.
CAPACITIES = {
    "v100": Capacity("gpu", 32),
    "a100": Capacity("gpu", 80),
    "h100": Capacity("gpu", 80),
    "h200": Capacity("gpu", 141),
    "b200": Capacity("gpu", 180),
    "v4": Capacity("tpu", 32),
    "v5e": Capacity("tpu", 16),
    "v5p": Capacity("tpu", 95),
    "v6e": Capacity("tpu", 32),
    "tpu7x": Capacity("tpu", 96),
}


def capacity_of(device: str) -> Capacity:
    """Returns the memory of a device by its name, `"h100"` or `"v5e"`.

    Raises:
      ValueError: for an unknown device.

    >>> capacity_of("v5e").gigabytes
    16
    """
    if not isinstance(device, str) or device.lower() not in CAPACITIES:
        raise ValueError(
            f"device must be one of {', '.join(map(repr, CAPACITIES))}, got {device!r}"
        )
    return CAPACITIES[device.lower()]
