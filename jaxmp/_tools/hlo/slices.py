"""Reads what TPU slices send to each other.

Within a slice, devices have collectives. Between slices the TPU compiler writes a pair of `send`
and `recv` to the host, whose runtime sums or gathers. The number of devices in the header of the
program is that of one slice.
"""

import re
from typing import NamedTuple

from jaxmp._tools.hlo.parser import Instruction, Module
from jaxmp._tools.hlo.replica_groups import Groups, explicit_groups, numbers_in

_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_REDUCERS = {"SUM": "add", "MAX": "max", "MIN": "min", "PRODUCT": "mul"}
_HANDLER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
# Devices have ids like 200003: the fourth device of the second slice.
_SLICE = 100_000
_EVERY_DEVICE = re.compile(r'_xla_megascale_target="?\{([\d,]+)\}x\{(\d+):(\d+)\}')
_LISTED = re.compile(r"_xla_megascale_target=\"?\{((?:\{[\d,>-]*\},?)*)\}")


class Exchange(NamedTuple):
    """What an instruction does as a collective.

    Attributes:
      kind: the kind of collective.
      reducer: the operation of an all-reduce or a reduce-scatter; empty in other kinds.
      groups: the devices that communicate with each other. Within a slice, each is its position in
        the device assignment of that slice, and all slices do the same. Between slices, the devices
        of the first slice come first, in each slice in the order of their ids.
      factor: how much larger the whole array is than the one that the instruction shows.
      between_slices: whether it goes from one slice to another.
    """

    kind: str
    reducer: str
    groups: Groups
    factor: int
    between_slices: bool


class Slices:
    """The slices of a program.

    Attributes:
      count: how many slices communicate; 1 without any communication between slices.

    Raises:
      ValueError: if a target has an unknown syntax.
    """

    def __init__(self, module: Module) -> None:
        self._devices = module.devices
        self._ids = {
            instruction: _target_ids(instruction.structure)
            for instruction in module.instructions()
            if instruction.opcode == "send" and _HANDLER in instruction.structure
        }
        numbers = {i // _SLICE for ids in self._ids.values() for group in ids for i in group}
        # Compilers count slices from 1. The smallest number may be larger, as a permute may go
        # between later slices alone.
        self._first = min(numbers, default=0) and 1
        self.count = max(numbers, default=0) - self._first + 1

    def sent(self, instruction: Instruction) -> Exchange | None:
        """Returns what an instruction sends between slices, or None if it sends nothing there.

        Raises:
          ValueError: if the kind of collective is unknown.
        """
        ids = self._ids.get(instruction)
        if ids is None:
            return None
        kind = _megascale(instruction.structure, "transfer_type")
        if kind not in _KINDS:
            raise ValueError(f"unknown kind of collective between slices: {kind!r}")
        operation = _megascale(instruction.structure, "reduce_operation")
        reducer = _REDUCERS.get(operation, "mixed") if operation else ""
        first, size = self._first, self._devices
        groups = tuple(
            tuple((device // _SLICE - first) * size + device % _SLICE for device in group)
            for group in ids
        )
        # A send shows its operand, and a gather is measured by its result.
        factor = len(groups[0]) if kind == "ALL_GATHER" else 1
        return Exchange(_KINDS[kind], reducer, groups, factor, between_slices=True)


def _megascale(structure: str, name: str) -> str:
    match = re.search(rf'_xla_megascale_{name}="(\w+)"', structure)
    return match.group(1) if match else ""


def _target_ids(structure: str) -> Groups:
    """Parses the groups of device ids.

    Each device with its like in other slices, `{1,2}x{0:7}`; or lists, `{{100000,200000}}`; or
    pairs, `{{100000->200000}}`.
    """
    if match := _EVERY_DEVICE.search(structure):
        slices, first, last = numbers_in(match.group(1)), int(match.group(2)), int(match.group(3))
        return tuple(tuple(n * _SLICE + i for n in slices) for i in range(first, last + 1))
    if match := _LISTED.search(structure):
        return explicit_groups(match.group(1))
    raise ValueError(f"unknown way of writing the slices of a collective: {structure[:200]}")
