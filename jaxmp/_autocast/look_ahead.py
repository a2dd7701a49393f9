"""The backward pass of a plan: what only float32 operations read is computed in float32.

In `log(1 - sigmoid(h))` only the logarithm reads the difference: nothing is left of it if the
sigmoid was rounded to 16 bits. In `eigvalsh(h.T @ h)` the product returns its float32 sums. What a
norm, a softmax or an activation reads stays as compilers store it, in 16 bits: the first two shift
and scale it by its own mean or maximum, and its rounding does no more harm than any other in the
network.
"""

import collections

import jax.numpy as jnp

from jaxmp._autocast.op_plans import AllIn, OpPlan, Reading, States
from jaxmp._autocast.strengths import FLOAT32, Materialized, Strength
from jaxmp._program.op_classes import (
    ACTIVATIONS,
    ADDS,
    CLASSES,
    CONTRACTIONS,
    MAXIMA,
    SCALES,
    OpClass,
)
from jaxmp._program.program import Op, Program, numbers

_FLOAT16 = jnp.dtype(jnp.float16)
# Operations that may be between a product and a norm or a softmax of it.
_PASSING = (OpClass.PROMOTE, OpClass.RANGE, OpClass.MOVE)


class LookAhead:
    """Widens plans of operations, the last first, by how those behind them read their results.

    Attributes:
      wanted: for operations with programs inside, by their numbers, how their results are read.
      multiplied: the sources of the 16-bit operands of products that return float32, as bits.
    """

    def __init__(self, program: Program, states: States) -> None:
        self.wanted: dict[int, AllIn] = {}
        self.multiplied = 0
        self._program, self._states = program, states
        self._readings: list[set[Reading]] = [set() for _ in states]
        self._products = _products_of(program)
        readers = [program.outputs, *(op.inputs for op in program.ops)]
        self._counts = collections.Counter(x for atoms in readers for x in set(numbers(atoms)))

    def run(self, op_plans: list[OpPlan], results_in: AllIn) -> list[Reading]:
        """Widens the plans; returns how they read the arguments of the program."""
        readings = (*results_in, *[Reading.LOW] * len(self._program.outputs))
        for atom, reading in zip(self._program.outputs, readings, strict=False):
            if isinstance(atom, int):
                self._readings[atom].add(reading)
        for op_plan in reversed(op_plans):
            op_plans[op_plan.op.number] = self._visit(op_plan)
        return list(map(self._reading, self._program.inputs))

    def _reading(self, number: int) -> Reading:
        """Returns the reading of a value that decides."""
        return min(self._readings[number], default=Reading.EITHER)

    def rounded(self) -> frozenset[int]:
        """Returns the values that float32 operations must read rounded, as float32 products do.

        Compilers drop casts to 16 bits and back. Then `sum(h**2)` and the diagonal of `h @ h.T`
        differ by roundings, and their differences, squares of distances, are below zero.
        """
        rows = enumerate(zip(self._products, self._readings, strict=True))
        low = ((i, x) for i, (bits, x) in rows if bits & self.multiplied and Reading.LOW in x)
        return frozenset(i for i, x in low if x & {Reading.NORMED, Reading.FLOAT32})

    def _visit(self, op_plan: OpPlan) -> OpPlan:
        outputs = op_plan.op.outputs
        readings = list(map(self._reading, outputs))
        is_low = any(state is not None and state.dtype != FLOAT32 for state in op_plan.results)
        is_wanted = any(x in (Reading.NORMED, Reading.FLOAT32) for x in readings)
        if is_low and is_wanted and op_plan.replan is not None:
            # Programs inside are compiled anew, which results that may have any dtype are not
            # worth.
            self.wanted[op_plan.op.number] = wanted = tuple(readings)
            op_plan = op_plan.replan(results_in=wanted)
        for_either = False
        if is_low and op_plan.may_widen and Reading.LOW not in readings:
            stored = any(x and x.materialized is not Materialized.NO for x in op_plan.results)
            is_read = any(self._readings[number] for number in outputs)
            for_either = is_read and not (is_wanted or op_plan.is_low_product or stored)
            stays = stored and (Reading.NORMED in readings or self._is_residual(op_plan))
            if for_either or (is_wanted and not stays):
                op_plan.widen()
                for number in numbers(op_plan.op.inputs if op_plan.is_low_product else ()):
                    state = self._states[number]
                    if state is not None and state.strength is Strength.LOW:
                        self.multiplied |= self._products[number]
        for i, (atom, dtype) in enumerate(zip(op_plan.op.inputs, op_plan.in_dtypes, strict=True)):
            if not isinstance(atom, int):
                continue
            if op_plan.reads:
                self._readings[atom].add(op_plan.reads[i])
            elif op_plan.keeps_dtype:
                self._readings[atom] |= self._readings[outputs[0]]
            elif dtype is not None and dtype != FLOAT32:
                self._readings[atom].add(Reading.LOW)
            elif dtype is not None and not for_either:
                activates = is_low and op_plan.op.name in ACTIVATIONS
                normed = activates or self._is_normed(op_plan.op, i, atom)
                self._readings[atom].add(Reading.NORMED if normed else Reading.FLOAT32)
            elif dtype is not None:
                self._readings[atom].add(Reading.EITHER)
        return op_plan

    def _is_residual(self, op_plan: OpPlan) -> bool:
        """Whether it adds a value to another that more operations read, as in `x + f(x)`."""
        # A sum of two products, such as a gate of an LSTM, has operands that nothing else reads.
        pairs = ((x, self._states[x]) for x in numbers(op_plan.op.inputs))
        low = [x for x, state in pairs if state is not None and state.strength is Strength.LOW]
        return op_plan.op.name in ADDS and len(low) > 1 and any(self._counts[x] > 1 for x in low)

    def _is_normed(self, op: Op, i: int, atom: int) -> bool:
        """Whether a float32 operation is a part of a norm or a softmax of its operand."""
        state = self._states[atom]
        if op.name in MAXIMA:
            # Scores that float16 does not hold are infinite: there they are float32.
            return state is not None and state.dtype != _FLOAT16
        reading = min(map(self._reading, op.outputs), default=Reading.EITHER)
        passes = CLASSES.get(op.name) in _PASSING and reading is Reading.NORMED
        for other, aval in zip(op.inputs, op.in_avals, strict=True):
            if not isinstance(other, int) or other == atom:
                continue
            state = self._states[other]
            if state is None or state.strength is Strength.WEAK:
                continue
            is_wide, is_own = state.dtype == FLOAT32, self._products[other] & self._products[atom]
            is_small = state.broadcast or aval.size < op.in_avals[i].size
            if op.name in SCALES and is_wide and is_own and is_small:
                return True  # by a statistic of it
            if op.name in ADDS and not is_own and (is_wide or op.name == "sub"):
                passes = False  # it cancels
        return passes


def _products_of(program: Program) -> list[int]:
    """Returns, for each value, the nearest products and arguments that it is made of, as bits."""
    bits = [0] * len(program.avals)
    sources = 0
    for number in program.inputs:
        bits[number], sources = 1 << sources, sources + 1
    for op in program.ops:
        made_of = 0
        if op.name in CONTRACTIONS:
            made_of, sources = 1 << sources, sources + 1
        else:
            for number in numbers(op.inputs):
                made_of |= bits[number]
        for number in op.outputs:
            bits[number] = made_of
    return bits
