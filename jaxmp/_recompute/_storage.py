"""Which values of a program are kept for its backward pass.

A region is what lies between kept values: the operations that lead to an operand of a dear
operation, to a kept value, or to what the program returns. One pass backward asks of every value
which regions read it. Kept are

- results of dear operations, or what little they become at once: a product its 16-bit cast, two
  products their sum, random bits the mask that is made of them;
- values that more than one region reads, such as a stream of activations, each in its narrowest
  form: before a cast to float32, or after one to 16 bits;
- statistics: small results of reductions. Their operands stay in the region that reads them.
"""

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmp._compat import function_name, is_of_jax_nn, open_jaxpr
from jaxmp._op_lists import COSTS, Cost
from jaxmp._program import JITS, Op, Program, derivative_of

# What no product has touched is computed again in each region, unless so much leads to it.
_LONGEST_UNTOUCHED = 64
# A reduction makes a statistic if it is to this share of its operand, or less.
_STATISTIC = 16
_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor"}
    | {"argmax", "argmin"}
)
# Linear in every operand, so that their derivatives ask for none.
_LINEAR = frozenset(
    {"add", "sub", "neg", "add_any", "convert_element_type", "reduce_sum", "real", "imag", "copy"}
    | {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "rev", "slice"}
    | {"split", "unstack", "dynamic_slice"}
    | {"concatenate", "pad", "copy_p", "name", "pvary", "pcast", "float32_gradient"}
    | {"sharding_constraint", "reshard"}
)


class Storage(NamedTuple):
    """What is kept.

    Attributes:
      costs: that of each operation.
      stored: the numbers of the values between regions.
      statistics: those of the values that are kept within one.
      linear: for each operation whether its derivative asks for nothing that it reads.
    """

    costs: tuple[Cost, ...]
    stored: frozenset[int]
    statistics: frozenset[int]
    linear: tuple[bool, ...]


def cost_of(equation: core.JaxprEqn, dear: Collection[str] = ()) -> Cost:
    """What it takes to run an operation again, without derivatives."""
    if equation.effects or not names_of(equation).isdisjoint(dear):
        return Cost.APART
    name = equation.primitive.name
    if name in JITS:
        return _cost_within(equation.params["jaxpr"], dear)
    if name == "custom_jvp_call":
        return _cost_within(equation.params["call_jaxpr"], dear)
    return COSTS.get(name, Cost.APART)


def _cost_with_rule(equation: core.JaxprEqn, dear: Collection[str]) -> Cost:
    """That of an operation of a program to be differentiated, where rules of functions run too.

    The rule is traced for it, also where nobody differentiates in the end.
    """
    cost = cost_of(equation, dear)
    if equation.primitive.name != "custom_jvp_call" or cost is Cost.APART:
        return cost
    try:
        return _cost_within(derivative_of(equation), dear)
    except Exception:  # of whatever sort: a rule may refuse to be differentiated
        return Cost.APART


def _cost_within(jaxpr: Any, dear: Collection[str]) -> Cost:
    costs = {cost_of(equation, dear) for equation in open_jaxpr(jaxpr).eqns}
    return Cost.CHEAP if costs <= {Cost.CHEAP} else Cost.APART


def names_of(equation: core.JaxprEqn) -> set[str]:
    """The names by which a user can mean an operation: of its primitive, of a function."""
    name = equation.primitive.name
    if name in JITS:
        function = equation.params["name"]
        own = is_of_jax_nn(equation.params["jaxpr"])
        return {name, function, *([f"jax.nn.{function}"] if own else [])}
    return {name, function_name(equation)} if name == "custom_jvp_call" else {name}


def bytes_of(aval: Any) -> int:
    """The size of a value; of a key that of its numbers."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return math.prod(aval.shape) * int(aval.dtype.itemsize)


def numbers(atoms: Collection[Any]) -> Iterator[int]:
    """The values among the operands of an operation, without literals."""
    return (atom for atom in atoms if isinstance(atom, int))


class Analysis:
    """Finds what is kept of a program.

    Args:
      program: the program, without dead code.
      dear: names of primitives and of jitted functions that are never to be computed again.
    """

    def __init__(self, program: Program, dear: Collection[str]) -> None:
        self.program = program
        # Of functions that are called several times, equations are the same ones.
        equations = {id(op.equation): op.equation for op in program.ops}
        known = {i: _cost_with_rule(equation, dear) for i, equation in equations.items()}
        self.costs = tuple(
            Cost.APART if op.name in JITS else known[id(op.equation)] for op in program.ops
        )
        self.made_by: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {}
        for i, op in enumerate(program.ops):
            self.made_by.update(dict.fromkeys(op.outputs, i))
            for number in set(numbers(op.inputs)):
                self.readers.setdefault(number, []).append(i)
        for number in numbers(program.outputs):
            self.readers.setdefault(number, []).append(len(program.ops))
        self.inert = self._without_tangents()
        self.linear = tuple(self._is_linear(op) for op in program.ops)
        self.touched = self._touched()
        self.picks = self._picks()
        self.costs = tuple(
            Cost.CHEAP if i in self.picks else cost for i, cost in enumerate(self.costs)
        )
        self.statistics = frozenset(self._statistics())
        # What is stored whatever reads it: results of dear operations, and operands of those apart.
        self.stored = self._sunk()
        for op, cost in zip(program.ops, self.costs, strict=True):
            if cost is Cost.APART:
                self.stored.update(
                    number for number in numbers(op.inputs) if number in self.made_by
                )
        self._cut()

    def storage(self) -> Storage:
        """What is kept."""
        return Storage(self.costs, frozenset(self.stored), self.statistics, self.linear)

    def size(self, number: int) -> int:
        return bytes_of(self.program.avals[number])

    def _without_tangents(self) -> set[int]:
        """Values that cannot depend on what is differentiated: integers, and what is of them."""
        avals = self.program.avals
        inert = {i for i, aval in enumerate(avals) if not _is_inexact(aval)}
        for op, cost in zip(self.program.ops, self.costs, strict=True):
            if cost is not Cost.APART and inert.issuperset(numbers(op.inputs)):
                inert.update(op.outputs)
        return inert

    def _is_linear(self, op: Op) -> bool:
        if op.name in _LINEAR:
            return True
        variables = list(numbers(op.inputs))
        if op.name == "mul":
            return len(variables) < 2
        if op.name == "div":
            return isinstance(op.inputs[1], core.Literal)
        return op.name == "select_n" and all(atom != op.inputs[0] for atom in op.inputs[1:])

    def _touched(self) -> set[int]:
        """Values that a dear operation leads to, or very many cheap ones."""
        touched, lengths = set[int](), dict[int, int]()
        for op, cost in zip(self.program.ops, self.costs, strict=True):
            inputs = list(numbers(op.inputs))
            length = 1 + max((lengths.get(number, 0) for number in inputs), default=0)
            lengths.update(dict.fromkeys(op.outputs, length))
            leads = cost is not Cost.CHEAP or length > _LONGEST_UNTOUCHED
            if leads or not touched.isdisjoint(inputs):
                touched.update(op.outputs)
        return touched

    def _picks(self) -> set[int]:
        """Gathers that look up little of what was computed, such as the logits of the labels."""
        found, picked = set[int](), set[int]()
        for i, op in enumerate(self.program.ops):
            if op.name != "gather" or self.costs[i] is Cost.APART:
                continue
            if op.inputs[0] not in self.touched:
                continue
            if self._is_small(op) or op.inputs[0] in picked:
                found.add(i)
                picked.update(op.outputs)
        return found

    def _is_small(self, op: Op) -> bool:
        """Whether what an operation returns is small beside what it reads."""
        read = sum(self.size(number) for number in numbers(op.inputs))
        return read >= _STATISTIC * sum(map(self.size, op.outputs))

    def _statistics(self) -> Iterator[int]:
        for i, op in enumerate(self.program.ops):
            if i in self.picks or (op.name in _REDUCTIONS and self._is_small(op)):
                yield from op.outputs

    def _sunk(self) -> set[int]:
        """The values to keep for the results of dear operations: those, or what they become.

        In the order of the program, each value that stands for such results is compared with what
        it is made of: the fewer bytes are kept, and what comes later of what is equal.
        """
        chosen: dict[int, set[int]] = {}  # by the value that stands for them
        for op, cost in zip(self.program.ops, self.costs, strict=True):
            standing = [i for i in set(numbers(op.inputs)) if i in chosen]
            passed = [i for i in standing if self._passes(op, cost, i)]
            before = set().union(*(chosen[i] for i in passed)) if passed else set()
            if cost is Cost.CHEAP and not passed:
                continue
            after = sum(map(self.size, op.outputs))
            # From what may not run again there is no way back.
            if passed and cost is Cost.CHEAP and after > sum(map(self.size, before)):
                chosen.update(dict.fromkeys(op.outputs, before))
            else:
                chosen.update({number: {number} for number in op.outputs})
            if passed:
                for i in passed:
                    del chosen[i]
        return set().union(*chosen.values()) if chosen else set()

    def _passes(self, op: Op, cost: Cost, number: int) -> bool:
        """Whether an operation alone reads a value, and no derivative asks for that."""
        if len(self.readers[number]) > 1 or cost is Cost.APART or len(op.outputs) != 1:
            return False
        if cost is Cost.DEAR and op.name not in _LINEAR:
            return False
        # Of integers and masks there is no derivative, whatever they are made of. But the
        # derivative of a choice asks for its mask.
        if op.outputs[0] in self.inert:
            return True
        return number not in self.inert and self.linear[self.made_by[op.outputs[0]]]

    def _cut(self) -> None:
        """One pass backward: which regions read each value."""
        regions: dict[int, set[Any]] = {number: set() for number in range(len(self.program.avals))}
        for number in numbers(self.program.outputs):
            regions[number].add("results")
        same = self._rearranged()
        for i in reversed(range(len(self.program.ops))):
            op = self.program.ops[i]
            if self.costs[i] is not Cost.CHEAP:
                for number in numbers(op.inputs):
                    regions[number].add(("operand", same[number]))
                continue
            for number in op.outputs:
                several = len(regions[number]) > 1 and number in self.touched
                if several and number not in self.stored:
                    self.keep(number)
                if number in self.stored:
                    regions[number] = {("stored", number)}
            reading = set().union(*(regions[number] for number in op.outputs))
            for number in numbers(op.inputs):
                regions[number] |= reading

    def _rearranged(self) -> dict[int, int]:
        """For each value the one that linear operations make it of, at the same size.

        One region leads to both: to a weight and to its transpose.
        """
        same = {number: number for number in range(len(self.program.avals))}
        for op, linear in zip(self.program.ops, self.linear, strict=True):
            variables = list(numbers(op.inputs))
            if len(variables) == 1 and (linear or op.name == "held"):
                before, after = (self.program.avals[i] for i in (variables[0], op.outputs[0]))
                if math.prod(before.shape) == math.prod(after.shape):
                    same[op.outputs[0]] = same[variables[0]]
        return same

    def keep(self, number: int) -> None:
        """Stores a value that several regions read, or the narrowest one that has its numbers."""
        narrowest = number
        while (before := self._before(narrowest)) is not None:
            if before in self.stored:  # it takes no more than a cast, or a slice
                return
            together = self.program.ops[self.made_by[narrowest]].outputs
            if self.size(before) > sum(map(self.size, together)):
                break
            narrowest = before
        self.stored.add(narrowest)

    def _before(self, number: int) -> int | None:
        """The value of which another is made by a linear operation that reads nothing else large.

        Not by others: where several regions share what is not linear, their cotangents would go
        back through it one by one.
        """
        i = self.made_by.get(number)
        if i is None or number in self.stored or not self.linear[i]:
            return None
        inputs = {
            value
            for value in numbers(self.program.ops[i].inputs)
            if value in self.touched and value not in self.statistics
        }
        return inputs.pop() if len(inputs) == 1 else None


def _is_inexact(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
