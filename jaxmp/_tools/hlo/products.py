"""Reads the products of a compiled program whose operands are float8, or were before they widened.

The text of a program does not say how a product runs. Only a call of cuBLAS's float8 product is
sure to multiply float8. The kernel of a fusion on a GPU may widen its operands, and so may a TPU.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxmp._tools.hlo.dataflow import Flow, HloValue
from jaxmp._tools.hlo.parser import Array, Frame, Instruction, Shape, read_shape

RUNS_IN_FLOAT8 = "float8"
HAS_OPERANDS = "float8 operands"
NOT_KNOWN = "not known"

_PRODUCTS = ("dot", "convolution", "scaled-dot")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LIBRARY_PRODUCT = re.compile(r"matmul|gemm|conv", re.IGNORECASE)
_CUBLAS_FLOAT8 = "matmul$f8"
# Between codes and a product, XLA multiplies by scales: so many factors are followed.
_FACTORS = 3


class HloFloat8Product(NamedTuple):
    """A product of a compiled program with float8 operands, or operands widened from float8.

    Attributes:
      operands: the dtypes of its operands, as narrow as they were.
      result: the dtype of its result.
      ran: how it runs: `"float8"`; `"float8 operands"`, of which the device decides; `"widened to
        bfloat16"`; or `"not known"`.
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


def float8_products(flow: Flow) -> Iterator[HloFloat8Product]:
    """Yields the float8 products of a program, in the order of its text."""
    for computation in flow.module.computations.values():
        for instruction in computation.instructions.values():
            match = _TARGET.search(instruction.structure)
            target = match.group(1) if match and instruction.opcode == "custom-call" else ""
            if instruction.opcode not in _PRODUCTS and not _LIBRARY_PRODUCT.search(target):
                continue
            values = [flow.operand(instruction, i) for i in range(2)]
            dtypes = [_dtype(value) for value in values]
            narrowest = [_narrowest(flow, value, _FACTORS) for value in values]
            if not any(map(_is_float8, narrowest)):
                continue
            yield HloFloat8Product(
                operands=(narrowest[0], narrowest[1]),
                result=_first_dtype(read_shape(instruction.shape)),
                ran=_execution(flow, instruction, target, dtypes),
                runs=flow.runs(instruction.computation).times,
                op_name=instruction.op_name,
                frames=tuple(flow.module.frames(instruction)),
            )


def _execution(flow: Flow, instruction: Instruction, target: str, dtypes: list[str]) -> str:
    widened = [dtype for dtype in dtypes if not _is_float8(dtype)]
    if widened:
        return f"widened to {widened[0]}"
    if target:
        return RUNS_IN_FLOAT8 if target.endswith(_CUBLAS_FLOAT8) else NOT_KNOWN
    callers = flow.module.callers.get(instruction.computation, [])
    # A TPU's fusions are its ordinary products. Its layouts have tiles, which no other's have.
    is_fused = any(caller.opcode == "fusion" for caller in callers)
    return NOT_KNOWN if is_fused and ":T(" not in instruction.shape else HAS_OPERANDS


def _narrowest(flow: Flow, value: HloValue | None, factors: int) -> str:
    """Returns the float8 dtype that an operand was widened from, or else its dtype."""
    if value is None:
        return ""
    # XLA drops the rounding of operands that it made itself, so one may be wider than the other.
    last = value
    for last in flow.trail(value):
        if _is_float8(dtype := _dtype(last)):
            return dtype
    if factors and last.instruction.opcode in ("multiply", "divide"):
        for i in range(2):
            factor = flow.operand(last.instruction, i)
            if _is_float8(dtype := _narrowest(flow, factor, factors - 1)):
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


def _is_float8(dtype: str) -> bool:
    return dtype.startswith("float8")
