"""Estimates how long the kernels of a compiled program take at least: the roofline model.

A kernel takes as long as its products at the device's peak, or as its bytes at the bandwidth of
device memory, whichever is longer (Williams, Waterman and Patterson, "Roofline", 2009).
"""

import collections
import functools
import re
from typing import NamedTuple

from jaxmp._hlo.kernels import Kernel, Schedule, cycles_of
from jaxmp._hlo.operations import HloProduct, products_of
from jaxmp._hlo.parser import Instruction, Module
from jaxmp._hlo.traffic import Traffic
from jaxmp._planning.devices import Device

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_READ_TARGETS = re.compile(r"__cublas|__cudnn\$conv")
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    r"|ragged-all-to-all)(-start)?"
)
# Copies that run beside other work: they take bandwidth from it, and no time of their own.
_BESIDE = ("copy-start", "slice-start", "dynamic-slice-start")


class KernelTime(NamedTuple):
    """One kernel of a program on one device.

    Attributes:
      kernel: the kernel, with how often it runs.
      products: the products of one run.
      bytes: what one run moves through device memory.
      seconds: how long one run takes at least.
      bound: what that is for: `"compute"`, `"memory"` or `"launch"`; `"beside"` for copies that
        run beside other work, and `"transfer"` for collectives, both of no time of their own.
      cycles: what a TPU's compiler expects of one run, or 0.
    """

    kernel: Kernel
    products: tuple[HloProduct, ...]
    bytes: float
    seconds: float
    bound: str
    cycles: int


class Roofline:
    """The kernels of a program with the least time that a device needs for each.

    Args:
      module: the program.
      device: the device.
    """

    def __init__(self, module: Module, device: Device) -> None:
        self._module, self._device = module, device
        self._traffic = Traffic(module)
        self._schedule = Schedule(module, lambda each: self.time(each).seconds)
        self.time = functools.cache(self._time)
        self.kernels = [
            self.time(each.instruction)._replace(kernel=each) for each in self._schedule.kernels()
        ]

    @property
    def seconds(self) -> float:
        """The least time of one run of the program.

        All kernels one after the other; but not less than all bytes take, those of copies that run
        beside other work among them.
        """
        by_kernel = sum(each.kernel.times * each.seconds for each in self.kernels)
        return max(by_kernel, self.bytes / self._device.bandwidth)

    @property
    def bytes(self) -> float:
        """What a run of the program moves through the memory of one device."""
        return sum(each.kernel.times * each.bytes for each in self.kernels)

    @property
    def flops(self) -> dict[str, float]:
        """The operations of products on one device, by the dtype of their operands."""
        total: dict[str, float] = collections.defaultdict(float)
        for each in self.kernels:
            for product in each.products:
                exact = " (exact)" if product.precision == "highest" else ""
                total[product.dtype + exact] += each.kernel.times * product.flops
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @property
    def unknown_loops(self) -> list[str]:
        """Loops of unknown length, which count as one turn."""
        return self._schedule.unknown_loops

    @property
    def conditionals(self) -> int:
        """How many there are; of each the slowest branch counts."""
        return self._schedule.conditionals

    @property
    def unread_calls(self) -> list[str]:
        """Names of kernels from elsewhere, whose operations the program does not tell."""
        found = (each.kernel.instruction for each in self.kernels)
        targets = [_TARGET.search(each.structure) for each in found if each.opcode == "custom-call"]
        names = dict.fromkeys(target[1] for target in targets if target is not None)
        return [name for name in names if not _READ_TARGETS.search(name)]

    def _time(self, instruction: Instruction) -> KernelTime:
        moved = self._traffic.bytes(instruction)
        products = tuple(products_of(self._module, instruction))
        cycles = cycles_of(instruction)
        alone = Kernel(instruction, 1)
        if _COLLECTIVE.fullmatch(instruction.opcode):
            return KernelTime(alone, products, moved, 0.0, "transfer", cycles)
        if instruction.opcode in _BESIDE:
            return KernelTime(alone, products, moved, 0.0, "beside", cycles)
        peaks = self._device.peaks
        compute = sum(each.flops / peaks.of(each.dtype, each.precision) for each in products)
        roofs = {"compute": compute, "memory": moved / self._device.bandwidth}
        longest = max(roofs, key=lambda roof: roofs[roof])
        launch = self._device.launch
        bound = longest if roofs[longest] > launch else "launch"
        return KernelTime(alone, products, moved, roofs[longest] + launch, bound, cycles)
