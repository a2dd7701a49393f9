"""Finds the values of a program to keep for its backward pass.

Of `y = tanh(x @ w) @ v`, the result of `x @ w` is kept, and the tanh is computed again. Operations
that are never computed again, such as products, are called dear here.

A region is the operations between kept values: those that lead to an operand of a dear operation,
to a kept value, or to a result of the program. One backward pass finds the regions that read each
value. The kept values are

- results of dear operations, or a smaller value that is made of them at once: the 16-bit cast of a
  product, the sum of two products, the mask made of random bits;
- values that more than one region reads, such as a stream of activations, each in its narrowest
  form: before a cast to float32, or after a cast to 16 bits;
- statistics: small results of reductions. Their operands stay in the region that reads them.
"""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

from jax.extend import core

from jaxmp._numerics.dtypes import is_inexact, nbytes_of
from jaxmp._program.compat import function_name, is_of_jax, open_jaxpr
from jaxmp._program.derivatives import derivative_of
from jaxmp._program.flops import product_flops
from jaxmp._program.op_classes import CHOICES, COSTS, JITS, LINEAR, REDUCTIONS, Cost
from jaxmp._program.program import Op, Program, numbers

# Values before the first dear operation are computed again in each region, unless a chain of more
# operations than this leads to them.
_LONGEST_BEFORE_PRODUCT = 64
# A reduction makes a statistic if it shrinks its operand by this factor or more.
# A kept statistic costs at most a sixteenth of its operand. If it were not kept, a norm of a 16-bit
# stream would keep a second wide array, and capped logits would be kept twice.
_STATISTIC = 16


# The FLOPs of a product for each byte of its results; and these bytes, with a minus, so that of two
# equal prices that of the larger product comes first.
Price = tuple[float, int]


class Storage(NamedTuple):
    """The kept values of a program.

    Attributes:
      costs: the cost of each operation.
      stored: the numbers of the kept values between regions.
      statistics: the numbers of the values that are kept within a region.
      linear: for each operation, whether its derivative needs none of its operands.
    """

    costs: tuple[Cost, ...]
    stored: frozenset[int]
    statistics: frozenset[int]
    linear: tuple[bool, ...]


def cost_of(equation: core.JaxprEqn, dear: Collection[str] = ()) -> Cost:
    """Returns the cost of running an operation again, without derivatives."""
    if equation.effects or not names_of(equation).isdisjoint(dear):
        return Cost.SEPARATE
    name = equation.primitive.name
    if name in JITS:
        return _cost_within(equation.params["jaxpr"], dear)
    if name == "custom_jvp_call":
        return _cost_within(equation.params["call_jaxpr"], dear)
    return COSTS.get(name, Cost.SEPARATE)


def _cost_with_rule(equation: core.JaxprEqn, dear: Collection[str]) -> Cost:
    """Returns the cost of an operation under differentiation, where `custom_jvp` rules run too.

    The rule is traced for this, even if nobody differentiates in the end.
    """
    cost = cost_of(equation, dear)
    if equation.primitive.name != "custom_jvp_call" or cost is Cost.SEPARATE:
        return cost
    # The derivative of a cheap function may hold a product, which would run twice.
    try:
        return _cost_within(derivative_of(equation), dear)
    except Exception:  # any error: a rule may refuse to be differentiated
        return Cost.SEPARATE


def _cost_within(jaxpr: Any, dear: Collection[str]) -> Cost:
    costs = {cost_of(equation, dear) for equation in open_jaxpr(jaxpr).eqns}
    return Cost.CHEAP if costs <= {Cost.CHEAP} else Cost.SEPARATE


def price_of(equation: core.JaxprEqn) -> Price | None:
    """Returns the price of running a product again; None if this is not a product."""
    size = sum(nbytes_of(variable.aval) for variable in equation.outvars)
    flops = product_flops(equation)
    return (flops / size, -size) if flops and size else None


def names_of(equation: core.JaxprEqn) -> set[str]:
    """Returns the names by which a user can refer to an operation: its primitive, its function."""
    name = equation.primitive.name
    if name in JITS:
        function = equation.params["name"]
        own = is_of_jax(equation.params["jaxpr"], "nn/functions.py")
        return {name, function, *([f"jax.nn.{function}"] if own else [])}
    return {name, function_name(equation)} if name == "custom_jvp_call" else {name}


class Analysis:
    """The analysis that finds the kept values of a program.

    `dear` names operations that never run again, `again` is the highest price of a product that
    does, and `in_codes` says whether values are kept in codes.
    """

    def __init__(
        self, program: Program, dear: Collection[str], again: Price | None, in_codes: bool
    ) -> None:
        self.program, self.in_codes = program, in_codes
        # Calls of the same function share their equations.
        equations = {id(op.equation): op.equation for op in program.ops}
        costs = {i: _cost_with_rule(equation, dear) for i, equation in equations.items()}
        if again is not None:
            for i, equation in equations.items():
                price = price_of(equation)
                if costs[i] is Cost.EXPENSIVE and price is not None and price <= again:
                    costs[i] = Cost.CHEAP
        self.costs = tuple(
            Cost.SEPARATE if op.name in JITS else costs[id(op.equation)] for op in program.ops
        )
        self.made_by: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for i, op in enumerate(program.ops):
            self.made_by.update(dict.fromkeys(op.outputs, i))
            for number in set(numbers(op.inputs)):
                self.readers.setdefault(number, []).append(i)
        for number in numbers(program.outputs):
            self.readers.setdefault(number, []).append(len(program.ops))
        # Integers, and values made of integers alone.
        self.without_tangent = {i for i, x in enumerate(program.avals) if not is_inexact(x)}
        for op, cost in zip(program.ops, self.costs, strict=True):
            if cost is not Cost.SEPARATE and self.without_tangent.issuperset(numbers(op.inputs)):
                self.without_tangent.update(op.outputs)
        self.linear = tuple(self._is_linear(op) for op in program.ops)
        self.after_product = self._after_product()
        self.label_lookups = self._label_lookups()
        self.costs = tuple(
            Cost.CHEAP if i in self.label_lookups else cost for i, cost in enumerate(self.costs)
        )
        # Of a norm, these are two numbers a row. Its operand stays in the region that reads it.
        self.statistics = frozenset(
            number
            for i, op in enumerate(program.ops)
            if i in self.label_lookups or (op.name in REDUCTIONS and self._is_small(op))
            for number in op.outputs
        )
        # These are stored whatever reads them: results of dear operations, and operands of SEPARATE
        # ones.
        self.stored = self._moved_to_smaller_value()
        for op, cost in zip(program.ops, self.costs, strict=True):
            if cost is Cost.SEPARATE:
                self.stored.update(self.made_by.keys() & set(numbers(op.inputs)))
            elif in_codes and op.name in CHOICES:
                # A choice made of codes may be another one than in the forward pass.
                self.stored.update(self.after_product.intersection(op.outputs))
        self._keep_shared_values()

    def storage(self) -> Storage:
        """Returns the kept values."""
        return Storage(self.costs, frozenset(self.stored), self.statistics, self.linear)

    def size(self, number: int) -> int:
        return nbytes_of(self.program.avals[number])

    def _is_linear(self, op: Op) -> bool:
        if op.name in LINEAR:
            return True
        variables = list(numbers(op.inputs))
        if op.name == "mul":
            return len(variables) < 2
        if op.name == "div":
            return isinstance(op.inputs[1], core.Literal)
        return op.name == "select_n" and all(atom != op.inputs[0] for atom in op.inputs[1:])

    def _after_product(self) -> set[int]:
        """Returns the values that a dear operation leads to, or a long chain of cheap ones."""
        after_product, lengths = set[int](), dict[int, int]()
        for op, cost in zip(self.program.ops, self.costs, strict=True):
            inputs = list(numbers(op.inputs))
            length = 1 + max((lengths.get(number, 0) for number in inputs), default=0)
            lengths.update(dict.fromkeys(op.outputs, length))
            leads = cost is not Cost.CHEAP or length > _LONGEST_BEFORE_PRODUCT
            if leads or not after_product.isdisjoint(inputs):
                after_product.update(op.outputs)
        return after_product

    def _label_lookups(self) -> set[int]:
        """Returns the gathers of few computed values, such as the logits of the labels."""
        gathers, chosen = set[int](), set[int]()
        for i, op in enumerate(self.program.ops):
            if op.name != "gather" or self.costs[i] is Cost.SEPARATE:
                continue
            # A lookup in a table of params makes activations. They are kept.
            if op.inputs[0] not in self.after_product:
                continue
            # Otherwise a pick of the labels' logits keeps a second copy of all logits, if these are
            # capped as in Gemma.
            if self._is_small(op) or op.inputs[0] in chosen:
                gathers.add(i)
                chosen.update(op.outputs)
        return gathers

    def _is_small(self, op: Op) -> bool:
        """Whether the results of an operation are much smaller than its operands."""
        read = sum(self.size(number) for number in numbers(op.inputs))
        return read >= _STATISTIC * sum(map(self.size, op.outputs))

    def _moved_to_smaller_value(self) -> set[int]:
        """Returns the values to keep for the results of dear operations: these, or later values.

        In the order of the program, each value that stands for such results is compared with the
        values that it is made of. The smaller in bytes are kept. If they are equal, the later: that
        saves an operation. Of values in codes it is the earlier: a mask may fill scores with -1e30,
        and the scale of such a row would leave nothing of them.
        """
        chosen: dict[int, set[int]] = {}  # by the value that stands for them
        for op, cost in zip(self.program.ops, self.costs, strict=True):
            candidates = [i for i in set(numbers(op.inputs)) if i in chosen]
            sources = [i for i in candidates if self._is_free_to_move(op, cost, i)]
            before = set().union(*(chosen[i] for i in sources))
            if cost is Cost.CHEAP and not sources:
                continue
            after = sum(map(self.size, op.outputs))
            # An operation that may not run again must keep its results.
            size = sum(map(self.size, before))
            is_better = after < size if self.in_codes else after <= size
            if sources and cost is Cost.CHEAP and not is_better:
                chosen.update(dict.fromkeys(op.outputs, before))
            else:
                chosen.update({number: {number} for number in op.outputs})
            for i in sources:
                del chosen[i]
        return set().union(*chosen.values())

    def _is_free_to_move(self, op: Op, cost: Cost, number: int) -> bool:
        """Whether an operation is the only reader of a value, and no derivative needs it."""
        if len(self.readers[number]) > 1 or cost is Cost.SEPARATE or len(op.outputs) != 1:
            return False
        if cost is Cost.EXPENSIVE and op.name not in LINEAR:
            return False
        # Integers and masks have no derivative, whatever they are made of. But the derivative of a
        # choice needs its mask.
        if op.outputs[0] in self.without_tangent:
            return True
        return number not in self.without_tangent and self.linear[self.made_by[op.outputs[0]]]

    def _keep_shared_values(self) -> None:
        """Finds the regions that read each value, in one backward pass, and keeps shared values."""
        regions: dict[int, set[Any]] = {number: set() for number in range(len(self.program.avals))}
        for number in numbers(self.program.outputs):
            regions[number].add("results")
        # A weight and its transpose lead to one region: for each value, the value of the same
        # size from which linear operations make it.
        sources = {number: number for number in regions}
        for op, linear in zip(self.program.ops, self.linear, strict=True):
            variables = list(numbers(op.inputs))
            # Under autocast, products read their operands through `held`.
            if len(variables) == 1 and (linear or op.name == "held"):
                before, after = (self.program.avals[i] for i in (variables[0], op.outputs[0]))
                if math.prod(before.shape) == math.prod(after.shape):
                    sources[op.outputs[0]] = sources[variables[0]]
        for i in reversed(range(len(self.program.ops))):
            op = self.program.ops[i]
            if self.costs[i] is not Cost.CHEAP:
                for number in numbers(op.inputs):
                    regions[number].add(("operand", sources[number]))
                continue
            for number in op.outputs:
                several = len(regions[number]) > 1 and number in self.after_product
                if several and number not in self.stored:
                    self.store(number)
                if number in self.stored:
                    regions[number] = {("stored", number)}
            readers = set().union(*(regions[number] for number in op.outputs))
            for number in numbers(op.inputs):
                regions[number] |= readers

    def store(self, number: int) -> None:
        """Stores a value that several regions read, or the narrowest with the same numbers."""
        if self.in_codes and number in self.statistics:
            # Beside codes of the scores, their exact maximum and sum would not fit. Each region
            # computes them of the codes.
            return
        narrowest = number
        # A norm reads the stream through a cast to float32. The 16-bit stream is half as large.
        while (before := self._large_operand(narrowest)) is not None:
            if before in self.stored:  # a cast or a slice of it is enough
                return
            results = self.program.ops[self.made_by[narrowest]].outputs
            if self.size(before) > sum(map(self.size, results)):
                break
            narrowest = before
        self.stored.add(narrowest)

    def _large_operand(self, number: int) -> int | None:
        """Returns the only large operand of the linear operation that makes a value, or None.

        Other operations do not count: if several regions shared one that is not linear, their
        cotangents would go back through it one by one.
        """
        i = self.made_by.get(number)
        if i is None or number in self.stored or not self.linear[i]:
            return None
        inputs = {
            value
            for value in numbers(self.program.ops[i].inputs)
            if value in self.after_product and value not in self.statistics
        }
        return inputs.pop() if len(inputs) == 1 else None
