"""Runs a plan: binds each operation again, in the planned dtypes."""

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core

from jaxmp._autocast.op_plans import OpPlan
from jaxmp._autocast.plan import Plan
from jaxmp._autocast.strengths import FLOAT32, Strength
from jaxmp._numerics.dtypes import DType, is_half
from jaxmp._numerics.rounding import BFLOAT16, open_cast
from jaxmp._primitives.float8_product import float8_product
from jaxmp._primitives.mixed_product import product
from jaxmp._program import compat
from jaxmp._program.derivatives import in_standard_form
from jaxmp._program.evaluate import Cells, Interpreter, evaluate
from jaxmp._program.op_classes import REARRANGES
from jaxmp._program.program import Op, Program
from jaxmp._program.scopes import NOT_FLOAT8


def run_plan(plan: Plan, arguments: Sequence[Any]) -> list[Any]:
    """Runs a program as planned, on arguments in the dtypes that it was planned for."""
    interpreter = _PlanInterpreter(plan)
    pairs = zip(plan.program.inputs, arguments, strict=True)
    cells = [_CastCell(value, summed=interpreter.summed(number)) for number, value in pairs]
    return evaluate(plan.program, cells, interpreter)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _CastCell:
    """A value, and what it was cast to: each cast of a value is made once in a part.

    Attributes:
      value: the value.
      casts: by dtype, and by the shape to which it is broadcast before, what it was cast to.
      before: the value that it was made of by a cast or by moves, where casts start from there.
      moves: that cast, or these moves.
      summed: whether it may be a float32 sum over devices.
    """

    value: Any
    casts: dict[str, Any] = dataclasses.field(default_factory=dict)
    before: "_CastCell | None" = None
    moves: "tuple[_Move, ...]" = dataclasses.field(default=(), metadata={"static": True})
    summed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def is_cast(self) -> bool:
        return any(move.primitive.name == "convert_element_type" for move in self.moves)

    def after(self, move: "_Move", value: Any, summed: bool) -> "_CastCell":
        """Returns the cell of what a cast or a move makes of the value."""
        if move.primitive.name == "convert_element_type":
            # Without what was before: from layer to layer, a chain of cells would grow.
            return _CastCell(value, {}, _CastCell(self.value), (move,), summed)
        if self.before is None or self.is_cast:
            return _CastCell(value, {}, self, (move,), summed)
        return _CastCell(value, {}, self.before, (*self.moves, move), summed)

    def cast(self, dtype: DType | None, shape: tuple[int, ...] = ()) -> Any:
        """Returns the value in a dtype, broadcast before its cast; None and () leave these."""
        if dtype is None or self.value.dtype == dtype:
            return self.value
        key = f"{dtype.name}{shape}"  # in a tree, keys are sorted: sizes may be symbols
        if key not in self.casts:
            self.casts[key] = self._new_cast(dtype, shape)
        return self.casts[key]

    def _new_cast(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        value = self.value
        if self.before is not None:
            if not self.is_cast:
                # The cast goes before, so that a parameter and its transpose share one cast.
                return functools.reduce(
                    lambda x, move: move(x), self.moves, self.before.cast(dtype)
                )
            # A cast to fewer bits and back is a rounding by the program itself.
            narrows = value.dtype.itemsize > dtype.itemsize
            if narrows and getattr(self.before.value, "dtype", None) == dtype:
                return self.before.value
        # The transpose of this broadcast sums the gradient of a bias, here still in float32.
        if shape and value.shape != shape:
            dims = tuple(range(len(shape) - len(value.shape), len(shape)))
            value = lax.broadcast_in_dim(value, shape, dims)
        return (open_cast if self.summed else lax.convert_element_type)(value, dtype)


class _Move(NamedTuple):
    """A cast or a move of one value; unlike their equations, those of equal parts are equal."""

    primitive: core.Primitive
    params: tuple[tuple[str, Any], ...]

    def __call__(self, x: Any) -> Any:
        return self.primitive.bind(x, **dict(self.params))


class _PlanInterpreter(Interpreter[_CastCell]):
    """Runs each operation by its plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.shared = plan, plan.shared

    def variant(self, op: Op) -> Hashable:
        op_plan = self.plan.op_plans[op.number]
        if op_plan.run is not None and not op_plan.is_cast and op_plan.plan_key is None:
            return None
        results = [(self.plan.states[x], x in self.plan.rounded) for x in op.outputs]
        reads = (*op_plan.in_dtypes, *op_plan.sources, *op_plan.broadcasts)
        of_op = op_plan.plan_key, op_plan.float8, op_plan.not_float8
        return (*reads, *results, *op_plan.params.items(), *of_op)

    def summed(self, number: int) -> bool:
        """Whether a value may be a float32 sum over devices."""
        state = self.plan.states[number]
        return state is not None and state.summed

    def constant(self, value: Any) -> _CastCell:
        return _CastCell(value)

    @contextlib.contextmanager
    def where(self, op: Op) -> Iterator[None]:
        reason = self.plan.op_plans[op.number].not_float8
        scope = contextlib.nullcontext() if reason is None else jax.named_scope(NOT_FLOAT8 + reason)
        with super().where(op), scope:
            yield

    def operands(self, op: Op, cells: Cells[_CastCell]) -> list[Any]:
        """Returns the operands of an operation; of a product, also their float32 sources.

        Before them stands the cell from which casts of its result may start.
        """
        op_plan = self.plan.op_plans[op.number]
        values: list[Any] = [self._before(op_plan, cells)]
        sources = []
        has_sources = any(op_plan.sources)
        for i, (atom, dtype) in enumerate(zip(op.inputs, op_plan.in_dtypes, strict=True)):
            broadcasts = op_plan.broadcasts and op_plan.broadcasts[i] and dtype != FLOAT32
            shape = op.out_avals[0].shape if broadcasts else ()
            values.append(self.cast(atom, cells, dtype, shape))
            if has_sources and i < len(op_plan.sources):
                sources.append(self.cast(atom, cells, FLOAT32) if op_plan.sources[i] else None)
        return values + sources

    def _before(self, op_plan: OpPlan, cells: Cells[_CastCell]) -> _CastCell | None:
        """Returns the cell from which casts of the result may start, before a move or a cast."""
        op, state = op_plan.op, op_plan.results[0] if op_plan.results else None
        if not op.inputs or isinstance(op.inputs[0], core.Literal):
            return None
        is_weak = state is not None and state.strength is Strength.WEAK and not state.broadcast
        moves = op.name == "convert_element_type" or (is_weak and op.name in REARRANGES)
        return cells[op.inputs[0]] if moves else None

    def operation(self, op: Op, operands: list[Any]) -> list[_CastCell]:
        before, *values = operands
        move = _Move(op.equation.primitive, tuple(op.params.items()))
        cells = []
        for number, x in zip(op.outputs, self._run(op, values), strict=True):
            # Behind a barrier the rounding of the value stays, for all that read it.
            is_rounded = number in self.plan.rounded and is_half(x)
            x, summed = lax.optimization_barrier(x) if is_rounded else x, self.summed(number)
            cell = _CastCell(x, summed=summed) if before is None else before.after(move, x, summed)
            cells.append(cell)
        return cells

    def _run(self, op: Op, operands: list[Any]) -> list[Any]:
        op_plan = self.plan.op_plans[op.number]
        if op_plan.float8 is not None:
            (lhs, rhs), params = operands, {**op.params, **op_plan.params}
            return [float8_product(params, lhs, rhs, *op_plan.float8)]
        if op_plan.is_low_product:
            return [self._product(op_plan, operands)]
        if op_plan.run is not None:
            return op_plan.run(operands)
        return compat.bind(op.equation, operands, **op_plan.params)

    def _product(self, op_plan: OpPlan, operands: list[Any]) -> Any:
        """Multiplies in 16 bits; in the 16 bits of operands or in float32, with our derivatives."""
        op, (low, *_) = op_plan.op, op_plan.in_dtypes
        count, params = len(op.inputs), {**op.params, **op_plan.params}
        multiply = functools.partial(product, op.equation.primitive, params)
        ours = functools.partial(multiply, compute=low)
        returned = params["preferred_element_type"]

        def plain(arrays: list[Any], sources: list[Any]) -> Any:
            # Not every product of bfloat16 that returns float32 runs on CPUs (jaxlib 0.12.0.1).
            widens = returned == FLOAT32 and low == BFLOAT16 and jax.default_backend() == "cpu"
            exact = [lax.convert_element_type(x, FLOAT32) for x in arrays] if widens else arrays
            return multiply(exact, ())

        run = in_standard_form(plain, ours) if any(op_plan.sources) or returned != low else plain
        return run(operands[:count], operands[count:] or [None, None])

    def results(self, program: Program, cells: Cells[Any]) -> list[Any]:
        pairs = zip(program.outputs, self.plan.results, strict=True)
        return [self.cast(atom, cells, state and state.dtype) for atom, state in pairs]

    def cast(
        self,
        atom: int | core.Literal,
        cells: Cells[_CastCell],
        dtype: DType | None,
        shape: tuple[int, ...] = (),
    ) -> Any:
        """Returns a value in a dtype, broadcast before its cast; None and () leave these."""
        if isinstance(atom, core.Literal):
            return compat.number(atom, dtype)
        return cells[atom].cast(dtype, shape)
