"""Counts the bytes that the kernels of a compiled program move through device memory.

A compiler's own count of bytes accessed, where there is one, takes what it copies into a TPU's
vector memory, and from one layout into another inside of a kernel, for traffic.
"""

import math
import re
from typing import NamedTuple

from benchmarks.lab.kernels import Schedule, does_work
from jaxmp._tools.hlo.parser import Array, Instruction, Module, Operand, dtype_of_hlo

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r":T\(([\d,]+)\)")
_SLICES = ("dynamic-slice", "slice", "gather")
# Opcodes that write their second or third operand into the first, where it lies.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_SAME = ("bitcast", "reshape")
_LIBRARY = ('"__cublas', '"__cudnn')
_DEPTH = 8


class _ArrayAt(NamedTuple):
    """An array of a shape.

    Attributes:
      elements: how many numbers it has.
      bytes: its size, with the padding of its tiles.
      is_far: whether it lies in device memory; other memories have a number.
    """

    dtype: str
    elements: int
    bytes: int
    is_far: bool


def _far(array: _ArrayAt) -> int:
    """The bytes of an array in device memory."""
    return array.bytes if array.is_far else 0


class Traffic:
    """The traffic of the instructions of a program.

    Args:
      module: the program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._users: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}

    def bytes(self, instruction: Instruction) -> float:
        """Returns the bytes that one run of an instruction reads from and writes to device memory.

        Of what a kernel only slices, gathers from or updates where it lies, that part counts which
        it touches. Work space of libraries does not count.
        """
        if not does_work(instruction):
            return 0.0
        results = _arrays(instruction.shape)
        if instruction.opcode == "slice-start":  # ((whole), slice, context)
            whole, part = results[0], results[1]
            return float(part.bytes * (whole.is_far + part.is_far))
        if instruction.opcode in ("copy-start", "collective-permute-start"):  # (to, from, ...)
            return float(sum(_far(each) for each in results[:2]))
        if instruction.opcode.endswith("-start") and instruction.shape.startswith("(("):
            return float(sum(_far(each) for each in results))  # ((operands), results)
        return self._read(instruction) + self._written(instruction, results)

    def _read(self, instruction: Instruction) -> float:
        total = 0.0
        for position, operand in enumerate(instruction.operands):
            size = sum(map(_far, self._operand(instruction, operand)))
            total += size * self._share_read(instruction, position) if size else 0.0
        return total

    def _written(self, instruction: Instruction, results: list[_ArrayAt]) -> float:
        if any(library in instruction.structure for library in _LIBRARY) and len(results) > 1:
            results = [each for each in results if each.dtype not in ("int8", "uint8")]
        shares = self._shares_written(instruction, _DEPTH)
        if len(shares) != len(results):
            shares = [1.0] * len(results)
        return sum(_far(each) * share for each, share in zip(results, shares, strict=True))

    def _operand(self, user: Instruction, operand: Operand) -> list[_ArrayAt]:
        found = self._module.find(user.computation, operand.name)
        arrays = _arrays(found.shape) if found else []
        if operand.element is not None and operand.element < len(arrays):
            return [arrays[operand.element]]
        return arrays

    def _share_read(self, user: Instruction, position: int, depth: int = _DEPTH) -> float:
        """Returns what part of an operand a user reads, from 0 to 1."""
        operand = self._operand(user, user.operands[position])
        size = sum(each.elements for each in operand)
        if size == 0 or depth == 0:
            return 1.0
        if user.opcode in _SLICES and position == 0:
            return min(1.0, sum(each.elements for each in _arrays(user.shape)) / size)
        if user.opcode in _UPDATES and position == 0:
            return 0.0 if user.opcode != "scatter" else self._shares_written(user, depth)[0]
        if user.opcode == "fusion" and user.called:
            return self._share_in(user.called[0], position, depth)
        return 1.0

    def _share_in(self, computation: str, number: int, depth: int) -> float:
        """Returns what part of its parameter a fused computation reads."""
        found = self._module.computations.get(computation)
        for each in found.instructions.values() if found else ():
            if each.opcode == "parameter" and each.argument == str(number):
                return self._share_used(each, depth)
        return 1.0

    def _share_used(self, value: Instruction, depth: int) -> float:
        if depth == 0 or value is self._module.root(value.computation):
            return 1.0
        total = 0.0
        for user, position in self._users_in(value.computation).get(value.name, ()):
            if user.opcode in _SAME:
                total += self._share_used(user, depth - 1)
            else:
                total += self._share_read(user, position, depth - 1)
        return min(1.0, total)

    def _users_in(self, computation: str) -> dict[str, list[tuple[Instruction, int]]]:
        if computation not in self._users:
            users: dict[str, list[tuple[Instruction, int]]] = {}
            for each in self._module.computations[computation].instructions.values():
                for position, operand in enumerate(each.operands):
                    users.setdefault(operand.name, []).append((each, position))
            self._users[computation] = users
        return self._users[computation]

    def _shares_written(self, instruction: Instruction | None, depth: int) -> list[float]:
        """Returns what part of each of its results an instruction writes."""
        if instruction is None or depth == 0:
            return [1.0]
        if instruction.opcode in _UPDATES and len(instruction.operands) > 1:
            update = instruction.operands[min(_UPDATES[instruction.opcode], 2)]
            part = sum(each.elements for each in self._operand(instruction, update))
            whole = sum(each.elements for each in _arrays(instruction.shape))
            return [min(1.0, part / whole) if whole else 1.0]
        if instruction.opcode == "fusion" and instruction.called:
            return self._shares_written(self._module.root(instruction.called[0]), depth - 1)
        if instruction.opcode in ("tuple", *_SAME):
            operands = [
                self._module.find(instruction.computation, operand.name)
                for operand in instruction.operands
            ]
            return [share for each in operands for share in self._shares_written(each, depth - 1)]
        return [1.0] * len(_arrays(instruction.shape))


def traffic(text: str) -> float:
    """Bytes that the kernels of a program read and write in device memory, with all turns of loops.

    Of a conditional the branch counts that moves most.

    Args:
      text: the text of a compiled program, for a GPU or a TPU.

    Returns:
      The bytes on one device.
    """
    module = Module(text)
    moved = Traffic(module)
    kernels = Schedule(module, moved.bytes).kernels()
    return sum(kernel.times * moved.bytes(kernel.instruction) for kernel in kernels)


def _arrays(shape: str) -> list[_ArrayAt]:
    """Reads the arrays of a shape with where they lie.

    >>> _arrays("(f32[2,64]{1,0:T(8,128)}, bf16[16]{0:T(1024)S(1)})")[0].bytes
    4096
    """
    return [_placed(*found) for found in _ARRAY.findall(shape)]


def _placed(short: str, lengths: str, layout: str) -> _ArrayAt:
    sizes = [int(n) for n in lengths.split(",") if n]
    dtype = dtype_of_hlo(short)
    padded = Array(dtype, math.prod(_whole_tiles(sizes, layout)))
    return _ArrayAt(dtype, math.prod(sizes), padded.bytes, "S(" not in layout)


def _whole_tiles(sizes: list[int], layout: str) -> list[int]:
    """Rounds sizes up to whole tiles: `{1,0:T(8,128)}` has the least dimension first."""
    tile = _TILE.search(layout)
    order = layout.partition(":")[0]
    if tile is None or not sizes or not re.fullmatch(r"[\d,]+", order):
        return sizes
    sizes = list(sizes)
    least_first = [int(n) for n in order.split(",")]
    for dimension, length in zip(least_first, reversed(tile[1].split(",")), strict=False):
        sizes[dimension] = -(-sizes[dimension] // int(length)) * int(length)
    return sizes
