"""How much the products of a compiled program compute, and how long a TPU takes for all of it.

A TPU's compiler writes every matrix product as a convolution, dimensions of the batch as places
that a window visits. Its own count of operations has everything else in it too, and the body of
each loop once: a product that is computed a second time would hardly show. GPUs convolve in calls
of cuDNN, which `compiled_flops` does not read.
"""

import math
import re

import numpy as np
from compiled_flops import product_flops

from jaxmp._hlo.dataflow import Flow
from jaxmp._hlo.parser import Instruction, Module

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NEVER = 10**13  # what the compiler writes for what it cannot estimate
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def all_product_flops(text: str) -> float:
    """Two for each multiply-add of the matrix products and convolutions, times the turns of loops.

    What a convolution would multiply with padding or with the gaps of a dilation does not count.
    """
    module = Module(text)
    flow = Flow(module)
    total = product_flops(text)
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "convolution" or '"__cudnn$conv' in instruction.attributes:
                total += _flops(module, instruction) * flow.runs(computation.name).times
    return total


def estimated_cycles(text: str) -> tuple[float, float]:
    """What a TPU's compiler expects: with each body of a loop once, and with all its turns."""
    module = Module(text)
    flow = Flow(module)
    once = total = 0.0
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            found = _CYCLES.search(instruction.rest)
            if found and (cycles := int(found[1])) < _NEVER:
                once += cycles
                total += cycles * flow.runs(computation.name).times
    return once, total


def _flops(module: Module, convolution: Instruction) -> float:
    """Of one turn."""
    labels = _LABELS.search(convolution.attributes)
    if labels is None:
        raise ValueError(f"no convolution that can be read: {convolution.rest}")
    sides = _sides(module, convolution)
    left, kernel, out = (dict(zip(labels[i + 1], sides[i], strict=True)) for i in range(3))
    pairs = math.prod(
        _pairs(left[place], out[place], _window(convolution, int(place)))
        for place in filter(str.isdigit, labels[1])
    )
    return 2.0 * out["b"] * out["f"] * kernel["i"] * pairs


def _sides(module: Module, convolution: Instruction) -> list[list[int]]:
    """Sizes of image, kernel and result of the convolution; of the one that a call derives."""
    shapes = []
    for operand in convolution.operands[:2]:
        found = module.find(convolution.computation, operand.name)
        if found is None:
            raise ValueError(f"no operand {operand.name} of {convolution.name}")
        shapes.append(_sizes(found.shape))
    (first, second), result = shapes, _sizes(convolution.shape)
    if "$convBackwardInput" in convolution.attributes:
        return [result, second, first]
    if "$convBackwardFilter" in convolution.attributes:
        return [first, result, second]
    return [first, second, result]


def _window(convolution: Instruction, place: int) -> dict[str, tuple[int, ...]]:
    """Size, stride, padding and dilations along one of the dimensions that it visits."""
    found = re.search(r"window=\{([^}]*)\}", convolution.attributes)
    fields = dict(field.split("=") for field in found[1].split()) if found else {}
    return {
        name: tuple(int(number) for number in values.split("x")[place].split("_"))
        for name, values in fields.items()
    }


def _pairs(left: int, out: int, window: dict[str, tuple[int, ...]]) -> int:
    """How many pairs of a place in the result and one in the window meet an element."""
    (size,), (stride,) = window.get("size", (1,)), window.get("stride", (1,))
    (gaps,), (spread,) = window.get("lhs_dilate", (1,)), window.get("rhs_dilate", (1,))
    before = window.get("pad", (0, 0))[0]
    at = np.arange(out)[:, None] * stride + np.arange(size) * spread - before
    return int(np.sum((at >= 0) & (at < (left - 1) * gaps + 1) & (at % gaps == 0)))


def _sizes(shape: str) -> list[int]:
    """Of the first array of a shape."""
    found = re.search(r"\w\[([\d,]*)\]", shape)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []
