"""Bytes that a compiled program moves through device memory, read from its text.

A compiler's own count of bytes accessed, where there is one, takes what it copies into a TPU's
vector memory, and from one layout into another inside of a kernel, for traffic.
"""

import math
import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*?^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$", re.MULTILINE)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "f32": 4}
_BYTES |= {"s32": 4, "u32": 4, "s64": 8, "u64": 8, "f64": 8}
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
