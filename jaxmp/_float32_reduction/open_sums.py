"""Where sums over devices are rounded in the open, so that TPUs sum in float32.

Which values may be such sums: results of operations that add up, and the gradients of weights.
"""

import operator
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from jaxmp._float32_reduction.values import FLOAT32
from jaxmp._numerics.precision import meaning_of, name_of_param
from jaxmp._numerics.rounding import BFLOAT16, rounded_to_bfloat16
from jaxmp._primitives.open_rounding import open_gradient, open_operand
from jaxmp._program.facts import ForwardAnalysis, Propagation, shared_programs
from jaxmp._program.op_classes import CONTRACTIONS, may_be_sum
from jaxmp._program.program import Memo, Op


def multiplies_bfloat16(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a product that TPUs compute in bfloat16, whatever its operands."""
    if equation.primitive.name not in CONTRACTIONS:
        return False
    return meaning_of(name_of_param(equation.params["precision"])).tpu == "bf16 x 1"


def open_product(equation: core.JaxprEqn, x: Any) -> Any:
    """Returns a result of weights; of a float32 product, TPUs round the gradient in the open."""
    return open_gradient(x) if x.dtype == FLOAT32 and multiplies_bfloat16(equation) else x


def reads_openly(op: Op, summed: Sequence[bool]) -> bool:
    """Whether an operation lets TPUs sum in bfloat16, if these of its operands are sums."""
    if not any(summed):
        return False
    is_cast = op.name == "convert_element_type" and op.params["new_dtype"] == BFLOAT16
    return is_cast or multiplies_bfloat16(op.equation)


def opened(op: Op, arrays: Sequence[Any], summed: Sequence[bool]) -> list[Any]:
    """Returns operands of an operation, with those rounded that may be float32 sums."""
    if not reads_openly(op, summed):
        return list(arrays)
    round_openly = open_operand if op.name in CONTRACTIONS else rounded_to_bfloat16
    return [round_openly(x) if s else x for x, s in zip(arrays, summed, strict=True)]


class Sums:
    """Follows sums through operations and the programs inside of them."""

    def __init__(self) -> None:
        self.inside = shared_programs()
        self.facts = Propagation(_analysis(_is_sum), self.inside)
        self.memo = Memo()

    def through(self, op: Op, summed: Sequence[bool]) -> Sequence[bool]:
        """Returns which results of an operation may be float32 sums, up to their rounding."""
        return self.facts.through(op, list(summed))

    def are_read_in(self, op: Op, summed: Sequence[bool]) -> bool:
        """Whether the programs inside of an operation would let TPUs sum in bfloat16."""
        programs = self.inside(op)
        key = (*map(id, programs), *summed)
        return self.memo.once(key, programs, lambda: self._are_read_in(op, summed))

    def _are_read_in(self, op: Op, summed: Sequence[bool]) -> bool:
        found = []

        def rule(inner: Op, operands: Sequence[bool]) -> list[bool]:
            found.append(reads_openly(inner, operands))
            return _is_sum(inner, operands)

        Propagation(_analysis(rule), self.inside).through(op, list(summed))
        return any(found)


def _is_sum(op: Op, operands: Sequence[bool]) -> list[bool]:
    return [may_be_sum(op.name, any(operands))] * len(op.outputs)


def _analysis(rule: Any) -> ForwardAnalysis[bool]:
    return ForwardAnalysis(
        False, operator.or_, rule, restrict=lambda aval, x: x and aval.dtype == FLOAT32
    )
