"""Bytes that a compiled program moves through device memory, read from its text.

A compiler's own count of bytes accessed, where there is one, takes what it copies into a TPU's
vector memory, and from one layout into another inside of a kernel, for traffic.
"""

import math
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*?^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$", re.MULTILINE)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "f32": 4}
_BYTES |= {"s32": 4, "u32": 4, "s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
# What moves nothing by itself: names for what is there, and the ends of copies.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-done"}
_FREE |= {"slice-done", "async-done", "all-reduce-done", "after-all", "partition-id"}
# Puts slices together that lie beside each other.
_CONCATENATION = 'custom_call_target="ConcatBitcast"'


def traffic(program: str) -> int:
    """Bytes of operands and results of every kernel that lie in device memory.

    Of a conditional the branch counts that moves most.

    Args:
      program: the text of a compiled program, for a GPU or a TPU, without loops.

    Returns:
      The bytes on one device.

    Raises:
      ValueError: for a loop, whose turns are not known here.
    """
    bodies = {found[1]: found[0] for found in _COMPUTATION.finditer(program)}
    entry = next(name for name, text in bodies.items() if text.startswith("ENTRY"))
    return _of(entry, bodies)


class Beside(NamedTuple):
    """What a program for a GPU without loops does beside its matrix products.

    Attributes:
      bytes: what its other kernels read and write.
      launches: how many of them there are.
      products: what the products themselves read and write, without work space.
    """

    bytes: int
    launches: int
    products: int


def beside_products(program: str) -> Beside:
    """Splits the traffic of a program: calls of cuBLAS, and the rest.

    Args:
      program: the text of a program that was compiled for a GPU without Triton's products.

    Returns:
      Both parts.
    """
    bodies = {found[1]: found[0] for found in _COMPUTATION.finditer(program)}
    (entry,) = (text for text in bodies.values() if text.startswith("ENTRY"))
    sizes: dict[str, int] = {}
    moved, launches, products = 0, 0, 0
    for name, shape, operation, rest in _INSTRUCTION.findall(entry):
        sizes[name] = _size(shape)
        operands = re.findall(r"%([^ ,)]+)", rest[: rest.index(")")])
        total = sizes[name] + sum(sizes[operand] for operand in operands)
        if "__cublas" in rest:
            work_space = [_size(found[0]) for found in _ARRAY.finditer(shape) if found[1] == "s8"]
            products += total - sum(work_space)
        elif operation not in _FREE:
            moved, launches = moved + total, launches + 1
    return Beside(moved, launches, products)


def _of(computation: str, bodies: dict[str, str]) -> int:
    sizes: dict[str, int] = {}
    total = 0
    for name, shape, operation, rest in _INSTRUCTION.findall(bodies[computation]):
        sizes[name] = _size(shape)
        if operation == "while":
            raise ValueError(f"{name} is a loop, of which the program does not say how long")
        if operation == "conditional":
            branches = re.findall(r"%([^ ,)}]+)", rest[rest.index("computation") :])
            total += max(_of(branch, bodies) for branch in branches if branch in bodies)
        elif operation == "slice-start":  # ((whole), slice, context)
            whole, part = list(_ARRAY.finditer(shape))[:2]
            moved = _length(part[1], part[2])
            total += moved * (bool(_size(whole[0])) + bool(_size(part[0])))
        elif operation == "copy-start":  # (to, from, context)
            total += sizes[name]
        elif operation not in _FREE and _CONCATENATION not in rest:
            operands = re.findall(r"%([^ ,)]+)", rest[: rest.index(")")])
            total += sizes[name] + sum(sizes[operand] for operand in operands)
    return total


def _size(shape: str) -> int:
    """Bytes of those arrays that lie in device memory: other spaces have a number."""
    arrays = _ARRAY.findall(shape)
    return sum(_length(dtype, lengths) for dtype, lengths, layout in arrays if "S(" not in layout)


def _length(dtype: str, lengths: str) -> int:
    return math.prod(int(n) for n in lengths.split(",") if n) * _BYTES[dtype]
