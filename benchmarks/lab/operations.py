"""Counts the operations of the products of a compiled program, by the dtype of their operands.

A TPU's compiler writes every matrix product as a convolution, dimensions of the batch as places
that a window visits. Its own count of operations has everything else in it too, and the body of
each loop once. The compiler for GPUs has none.
"""

import collections
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxmp._tools.hlo.parser import Instruction, Module, bits, dtype_of_hlo

from .kernels import Schedule

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_PRECISION = re.compile(r'operand_precision"?[=:][{\[]"?(\w+)', re.IGNORECASE)
_ALGORITHM = re.compile(r"algorithm=dot_(\w+?)_\w*?(?:_x(\d))?\b")
_FIRST_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_INSIDE = ("fusion", "call")


class HloProduct(NamedTuple):
    """A matrix product or a convolution in a compiled program.

    Attributes:
      dtype: of its operands, of the wider one if they differ.
      precision: `"highest"`, `"high"` or `"default"`.
      flops: two for each multiply-add, of one run. What a convolution would multiply with padding,
        or with the gaps of a dilation, does not count.
    """

    dtype: str
    precision: str
    flops: float


def products_of(module: Module, kernel: Instruction) -> list[HloProduct]:
    """Returns the products that one run of a kernel computes, also those inside of a fusion.

    Raises:
      ValueError: if the text of a product cannot be read.
    """
    return list(_products_inside(module, kernel))


def _products_inside(module: Module, instruction: Instruction) -> Iterator[HloProduct]:
    if instruction.opcode in _INSIDE:
        for name in instruction.called:
            found = module.computations.get(name)
            for each in found.instructions.values() if found else ():
                yield from _products_inside(module, each)
    elif instruction.opcode in ("dot", "scaled-dot") or '"__cublas' in instruction.structure:
        yield _read_product(module, instruction, _of_dot(module, instruction))
    elif instruction.opcode == "convolution" or '"__cudnn$conv' in instruction.structure:
        yield _read_product(module, instruction, _of_convolution(module, instruction))


def hlo_product_flops(text: str) -> dict[str, float]:
    """The operations of the products of a program by the dtype of their operands.

    Loops count with all their turns; of a conditional the branch with most operations counts.

    Args:
      text: the text of a compiled program.

    Returns:
      The operations on one device.
    """
    module = Module(text)

    @functools.cache
    def products(kernel: Instruction) -> list[HloProduct]:
        return products_of(module, kernel)

    kernels = Schedule(module, lambda kernel: sum(each.flops for each in products(kernel)))
    total: collections.Counter[str] = collections.Counter()
    for kernel in kernels.kernels():
        for each in products(kernel.instruction):
            total[each.dtype] += kernel.times * each.flops  # type: ignore[assignment]
    return dict(total)


def _read_product(module: Module, instruction: Instruction, flops: float) -> HloProduct:
    found = [_array(module, instruction, i)[0] for i in range(2)]
    dtype = max(found, key=bits)
    precision = _PRECISION.search(instruction.attributes)
    named = precision[1].lower() if precision else "default"
    if algorithm := _ALGORITHM.search(instruction.attributes):
        dtype = dtype_of_hlo(algorithm[1]) if algorithm[1] != "tf32" else "float32"
        named, flops = "default", flops * int(algorithm[2] or 1)
        if algorithm[1] == "f32":
            named = "highest"
    return HloProduct(dtype, named, flops)


def _array(module: Module, user: Instruction, position: int) -> tuple[str, list[int]]:
    """Dtype and sizes of an operand."""
    found = module.find(user.computation, user.operands[position].name)
    if found is None:
        raise ValueError(f"no operand {user.operands[position].name} of {user.name}")
    return _first_array(found.shape)


def _first_array(shape: str) -> tuple[str, list[int]]:
    found = _FIRST_ARRAY.search(shape)
    if found is None:
        return "", []
    return dtype_of_hlo(found[1]), [int(n) for n in found[2].split(",") if n]


def _of_dot(module: Module, product: Instruction) -> float:
    contracted = _CONTRACTED.search(product.attributes)
    if contracted is None:
        raise ValueError(f"no product that can be read: {product.name}{product.text}")
    sizes = _array(module, product, 0)[1]
    depth = math.prod(sizes[int(i)] for i in re.findall(r"\d+", contracted[1]))
    return 2.0 * math.prod(_first_array(product.shape)[1]) * depth


def _of_convolution(module: Module, convolution: Instruction) -> float:
    labels = _LABELS.search(convolution.attributes)
    if labels is None:
        raise ValueError(f"no convolution that can be read: {convolution.text}")
    sides = _sides(module, convolution)
    left, kernel, out = (dict(zip(labels[i + 1], sides[i], strict=True)) for i in range(3))
    pairs = math.prod(
        _meeting_pairs(left[place], out[place], *_window(convolution, int(place)))
        for place in filter(str.isdigit, labels[1])
    )
    return 2.0 * out["b"] * out["f"] * kernel["i"] * pairs


def _sides(module: Module, convolution: Instruction) -> list[list[int]]:
    """Sizes of image, kernel and result of the convolution; of the one that a call derives."""
    first, second = (_array(module, convolution, i)[1] for i in range(2))
    result = _first_array(convolution.shape)[1]
    if "$convBackwardInput" in convolution.attributes:
        return [result, second, first]
    if "$convBackwardFilter" in convolution.attributes:
        return [first, result, second]
    return [first, second, result]


def _window(convolution: Instruction, place: int) -> tuple[int, int, int, int, int]:
    """Size, stride, padding before and dilations along one of the dimensions that it visits."""
    found = _WINDOW.search(convolution.attributes)
    fields = dict(field.split("=") for field in found[1].split()) if found else {}

    def field(name: str, default: int) -> int:
        return int(fields[name].split("x")[place].split("_")[0]) if name in fields else default

    return (
        field("size", 1),
        field("stride", 1),
        field("pad", 0),
        field("lhs_dilate", 1),
        field("rhs_dilate", 1),
    )


@functools.lru_cache(maxsize=4096)
def _meeting_pairs(
    left: int, out: int, size: int, stride: int, before: int, gaps: int, spread: int
) -> int:
    """How many pairs of a place in the result and one in the window meet an element."""
    at = np.arange(out)[:, None] * stride + np.arange(size) * spread - before
    return int(np.sum((at >= 0) & (at < (left - 1) * gaps + 1) & (at % gaps == 0)))
