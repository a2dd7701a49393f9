"""Reads the products of a compiled program whose operands have 8 bits, or had before they widened.

The text of a program does not say how a product runs. Only calls of cuBLAS's products
are sure to multiply 8 bits. The kernel of a fusion on a GPU may widen its operands, and so may a
TPU.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxmp._numerics.dtypes import code_kind
from jaxmp._tools.hlo.dataflow import Flow, HloValue
from jaxmp._tools.hlo.parser import Array, Frame, Instruction, Shape, read_shape

HAS_OPERANDS = " operands"  # after the kind of codes
NOT_KNOWN = "not known"

_PRODUCTS = ("dot", "convolution", "scaled-dot")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LIBRARY_PRODUCT = re.compile(r"matmul|gemm|conv", re.IGNORECASE)
_CUBLAS_FLOAT8 = "matmul$f8"
# Between codes and a product, XLA multiplies by scales: so many factors are followed.
_FACTORS = 3


class HloCodeProduct(NamedTuple):
    """A product of a compiled program with operands of 8 bits, or widened from these.

    Attributes:
      operands: the dtypes of its operands, as narrow as they were.
      result: the dtype of its result.
      ran: how it runs: `"float8"` or `"int8"`; `"float8 operands"` or `"int8 operands"`, of which
        the device decides; `"widened to bfloat16"`; or `"not known"`.
      runs: how often it runs; loops of unknown length count once.
      op_name: JAX's name of the operation, with its scopes.
      frames: the source lines, innermost first.
    """

    operands: tuple[str, str]
    result: str
    ran: str
    runs: int
    op_name: str
    frames: tuple[Frame, ...]


def code_products(flow: Flow) -> Iterator[HloCodeProduct]:
    """Yields the 8-bit products of a program, in the order of its text."""
    for instruction in flow.module.instructions():
        match = _TARGET.search(instruction.structure)
        target = match.group(1) if match and instruction.opcode == "custom-call" else ""
        if instruction.opcode not in _PRODUCTS and not _LIBRARY_PRODUCT.search(target):
            continue
        values = [flow.operand(instruction, i) for i in range(2)]
        dtypes = [_dtype(value) for value in values]
        narrowest = [_narrowest(flow, value, _FACTORS) for value in values]
        if not any(map(code_kind, narrowest)):
            continue
        yield HloCodeProduct(
            operands=(narrowest[0], narrowest[1]),
            result=_first_dtype(read_shape(instruction.shape)),
            ran=_execution(flow, instruction, target, dtypes),
            runs=flow.runs(instruction.computation),
            op_name=instruction.op_name,
            frames=tuple(flow.module.frames(instruction)),
        )


def _execution(flow: Flow, instruction: Instruction, target: str, dtypes: list[str]) -> str:
    widened = [dtype for dtype in dtypes if not code_kind(dtype)]
    if widened:
        return f"widened to {widened[0]}"
    kind = code_kind(dtypes[0])
    if target:
        # For other operands than float8, its ordinary products are of the dtype of the operands.
        is_cublas = "cublas" in target and (kind == "int8" or target.endswith(_CUBLAS_FLOAT8))
        return kind if is_cublas else NOT_KNOWN
    callers = flow.module.callers.get(instruction.computation, [])
    # A TPU's fusions are its ordinary products. Its layouts have tiles, which no other's have. A
    # product of blocks that compilers do not take apart is one, in a fusion of its own.
    is_block_product = instruction.opcode == "scaled-dot"
    is_fused = not is_block_product and any(caller.opcode == "fusion" for caller in callers)
    is_on_tpu = ":T(" in instruction.shape
    return NOT_KNOWN if is_fused and not is_on_tpu else kind + HAS_OPERANDS


def _narrowest(flow: Flow, value: HloValue | None, factors: int) -> str:
    """Returns the dtype of 8 bits that an operand was widened from, or else its dtype."""
    if value is None:
        return ""
    # XLA drops the rounding of operands that it made itself, so one may be wider than the other.
    last, is_integer = value, "int" in _dtype(value)
    for last in flow.trail(value):
        dtype = _dtype(last)
        # Numbers kept in int8, and widened to floats, are no codes of a product.
        if code_kind(dtype) == "float8" or (is_integer and code_kind(dtype)):
            return dtype
    if factors and last.instruction.opcode in ("multiply", "divide"):
        for i in range(2):
            factor = flow.operand(last.instruction, i)
            if code_kind(dtype := _narrowest(flow, factor, factors - 1)) == "float8":
                return dtype
    return _dtype(value)


def _dtype(value: HloValue | None) -> str:
    if value is None:
        return ""
    shape = read_shape(value.instruction.shape)
    if value.element is not None and isinstance(shape, list) and value.element < len(shape):
        shape = shape[value.element]
    return _first_dtype(shape)


def _first_dtype(shape: Shape) -> str:
    while isinstance(shape, list) and shape:
        shape = shape[0]
    return shape.dtype if isinstance(shape, Array) else ""
