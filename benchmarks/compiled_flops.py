"""How many floating-point operations a compiled program takes."""

import math
import re
from typing import Any

from jaxmp._hlo.dataflow import Flow
from jaxmp._hlo.parser import Instruction, Module

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]')


def compiled_flops(compiled: Any) -> float:
    """The operations of a program on one device.

    For a TPU the compiler's own count, which has the body of each loop once. The compiler for GPUs
    has none: there two for each multiply-add of a matrix product, times the turns of its loop.
    """
    cost = compiled.cost_analysis()
    return float(cost["flops"]) if cost else product_flops(str(compiled.as_text()))


def product_flops(text: str) -> float:
    """The operations of the matrix products in the text of a program."""
    module = Module(text)
    flow = Flow(module)
    total = 0.0
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "dot" or '"__cublas' in instruction.attributes:
                total += _flops(module, instruction) * flow.runs(computation.name).times
    return total


def _flops(module: Module, product: Instruction) -> float:
    left = module.find(product.computation, product.operands[0].name)
    contracted = _CONTRACTED.search(product.attributes)
    if left is None or contracted is None:
        raise ValueError(f"no product that can be read: {product.name}{product.rest}")
    sizes = _sizes(left.shape)
    depth = math.prod(sizes[int(i)] for i in re.findall(r"\d+", contracted[1]))
    return 2.0 * math.prod(_sizes(product.shape)) * depth


def _sizes(shape: str) -> list[int]:
    """Of the first array of a shape."""
    found = re.search(r"\w\[([\d,]*)\]", shape)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []
