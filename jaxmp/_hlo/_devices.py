"""What small integers of a program are on each of its devices."""

import operator
import re
from collections.abc import Callable, Iterable

from jaxmp._hlo._flow import Flow, Value
from jaxmp._hlo._shapes import Array, read_shape

_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": lambda a, b: a // b if b else 0,
    "remainder": lambda a, b: a % b if b else 0,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shift-left": lambda a, b: a << min(b, 64),
    "shift-right-logical": lambda a, b: a >> min(b, 64),
}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    **{"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt},
    **{"LE": operator.le, "GT": operator.gt, "GE": operator.ge},
}
_DEPTH = 60


class OnDevices:
    """Computes integers that depend on nothing but the number of the device.

    Args:
      flow: of the program.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def numbers(self, value: Value | None, devices: Iterable[int]) -> list[int] | None:
        """A number on several devices.

        Args:
          value: a scalar, or what is filled with one.
          devices: positions of devices.

        Returns:
          The numbers, or None if they depend on something else.
        """
        found = [self._compute(value, device, _DEPTH) for device in devices]
        numbers = [each[0] for each in found if each is not None and len(each) == 1]
        return numbers if len(numbers) == len(found) else None

    def _compute(self, value: Value | None, device: int, depth: int) -> list[int] | None:
        """The number, or the numbers of a table."""
        if value is None or depth == 0:
            return None
        at = self.flow.source(value).instruction
        if at.opcode == "partition-id":
            return [device]
        if at.opcode == "replica-id":
            return [0]
        if at.opcode == "constant":
            return _constant(at.argument)
        if at.opcode not in (*_BINARY, "broadcast", "compare", "select", "clamp", "dynamic-slice"):
            return None
        operands = [self.flow.operand(at, i) for i in range(len(at.operands))]
        inner = [self._compute(operand, device, depth - 1) for operand in operands]
        if at.opcode == "broadcast":
            return inner[0]
        if at.opcode == "dynamic-slice":
            return _looked_up(inner, read_shape(at.shape))
        scalars = [each[0] for each in inner if each is not None and len(each) == 1]
        if len(scalars) != len(inner):
            return None
        return _scalar(at.opcode, at.attributes, scalars)


def _scalar(opcode: str, attributes: str, numbers: list[int]) -> list[int] | None:
    if opcode in _BINARY and len(numbers) == 2:
        return [_BINARY[opcode](*numbers)]
    direction = re.search(r"\bdirection=(\w\w)", attributes)
    if opcode == "compare" and direction and len(numbers) == 2:
        return [int(_COMPARED[direction.group(1)](*numbers))]
    if opcode == "select" and len(numbers) == 3:
        return [numbers[1] if numbers[0] else numbers[2]]
    if opcode == "clamp" and len(numbers) == 3:
        return [min(max(numbers[0], numbers[1]), numbers[2])]
    return None


def _looked_up(inner: list[list[int] | None], result: object) -> list[int] | None:
    """One number of a table, as the partitioner keeps the coordinates of devices."""
    is_one = isinstance(result, Array) and result.elements == 1
    if not is_one or len(inner) != 2 or inner[0] is None or inner[1] is None:
        return None
    table, (index,) = inner[0], inner[1][:1]
    return [table[min(max(index, 0), len(table) - 1)]]


def _constant(text: str) -> list[int] | None:
    """`5`, `true` or `{0, 1, 0, 1}`."""
    words = re.findall(r"[^\s{},]+", text)
    numbers = [{"true": "1", "false": "0"}.get(word, word) for word in words]
    return [int(n) for n in numbers] if all(re.fullmatch(r"-?\d+", n) for n in numbers) else None
