"""Runs a plan: binds each operation again, in the planned dtypes."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmp._autocast.kinds import FLOAT32, Kind
from jaxmp._autocast.plan import Plan
from jaxmp._autocast.steps import Step
from jaxmp._numerics.dtypes import DType, is_half
from jaxmp._numerics.rounding import BFLOAT16, open_cast
from jaxmp._primitives.float8_product import float8_product
from jaxmp._primitives.mixed_product import product
from jaxmp._program import compat
from jaxmp._program.derivatives import in_standard_form
from jaxmp._program.evaluate import Cells, Rules, evaluate
from jaxmp._program.op_classes import REARRANGES
from jaxmp._program.program import Op, Program
from jaxmp._program.scopes import NOT_FLOAT8


def run_plan(plan: Plan, arguments: Sequence[Any]) -> list[Any]:
    """Runs a program as planned, on arguments in the dtypes that it was planned for."""
    return evaluate(plan.program, arguments, _PlanRules(plan))


class _PlanRules(Rules[Any]):
    """Runs each operation by its step. Each cast of a value is made once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.makers = {number: step for step in plan.steps for number in step.op.outputs}
        self.casts: dict[Any, Any] = {}

    @contextlib.contextmanager
    def where(self, op: Op) -> Iterator[None]:
        reason = self.plan.steps[op.number].not_float8
        scope = contextlib.nullcontext() if reason is None else jax.named_scope(NOT_FLOAT8 + reason)
        with super().where(op), scope:
            yield

    def operands(self, op: Op, cells: Cells[Any]) -> list[Any]:
        """Returns the operands of an operation; of a product, also their float32 sources."""
        step = self.plan.steps[op.number]
        values, sources = [], []
        has_sources = any(step.sources)
        for i, (atom, dtype) in enumerate(zip(op.inputs, step.in_dtypes, strict=True)):
            broadcasts = step.broadcasts and step.broadcasts[i] and dtype != FLOAT32
            shape = op.out_avals[0].shape if broadcasts else None
            values.append(self.cast(atom, cells, dtype, shape))
            if has_sources and i < len(step.sources):
                sources.append(self.cast(atom, cells, FLOAT32) if step.sources[i] else None)
        return values + sources

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        pairs = zip(op.outputs, self._run(op, operands), strict=True)
        # Behind a barrier the rounding of the value stays, for all that read it.
        rounded = self.plan.rounded
        return [
            lax.optimization_barrier(x) if number in rounded and is_half(x) else x
            for number, x in pairs
        ]

    def _run(self, op: Op, operands: list[Any]) -> list[Any]:
        step = self.plan.steps[op.number]
        if step.float8 is not None:
            (lhs, rhs), params = operands, {**op.params, **step.params}
            return [float8_product(params, lhs, rhs, *step.float8)]
        if step.sources:
            return [self._product(step, operands)]
        if step.run is not None:
            return step.run(operands)
        return compat.bind(op.equation, operands, **step.params)

    def _product(self, step: Step, operands: list[Any]) -> Any:
        """Multiplies in 16 bits; in the 16 bits of operands or in float32, with our derivatives."""
        op, (low, *_) = step.op, step.in_dtypes
        count, params = len(op.inputs), {**op.params, **step.params}
        multiply = functools.partial(product, op.equation.primitive, params)
        ours = functools.partial(multiply, compute=low)
        returned = params["preferred_element_type"]

        def plain(arrays: list[Any], sources: list[Any]) -> Any:
            # Not every product of bfloat16 that returns float32 runs on CPUs (jaxlib 0.12.0.1).
            widens = returned == FLOAT32 and low == BFLOAT16 and jax.default_backend() == "cpu"
            exact = [lax.convert_element_type(x, FLOAT32) for x in arrays] if widens else arrays
            return multiply(exact, ())

        run = in_standard_form(plain, ours) if any(step.sources) or returned != low else plain
        return run(operands[:count], operands[count:] or [None, None])

    def results(self, program: Program, cells: Cells[Any]) -> list[Any]:
        pairs = zip(program.outputs, self.plan.results, strict=True)
        return [self.cast(atom, cells, state and state.dtype) for atom, state in pairs]

    def cast(
        self,
        atom: int | core.Literal,
        cells: Cells[Any],
        dtype: DType | None,
        shape: tuple[int, ...] | None = None,
    ) -> Any:
        """Returns a value in a dtype, broadcast before its cast; None leaves dtype or shape."""
        if isinstance(atom, core.Literal):
            return compat.number(atom, dtype)
        value, key = cells[atom], (atom, dtype, shape)
        if dtype is None or value.dtype == dtype:
            return value
        if key in self.casts:
            return self.casts[key]
        maker = self.makers.get(atom)
        source = None if maker is None else self._cast_source(maker, cells, dtype)
        if maker is not None and source is not None:
            if maker.op.name != "convert_element_type":
                operand = self.cast(maker.op.inputs[0], cells, dtype)
                (source,) = compat.bind(maker.op.equation, [operand])
            self.casts[key] = source
            return source
        # The transpose of this broadcast sums the gradient of a bias, here still in float32.
        if shape is not None and value.shape != shape:
            dims = tuple(range(len(shape) - len(value.shape), len(shape)))
            value = lax.broadcast_in_dim(value, shape, dims)
        state = self.plan.states[atom]
        is_open = state is not None and state.summed
        self.casts[key] = (open_cast if is_open else lax.convert_element_type)(value, dtype)
        return self.casts[key]

    def _cast_source(self, maker: Step, cells: Cells[Any], dtype: DType) -> Any:
        """Returns an earlier value that a cast can start from, before a move or a cast; or None."""
        op = maker.op
        if not op.inputs or isinstance(op.inputs[0], core.Literal):
            return None
        value, state = cells[op.inputs[0]], maker.results[0]
        if op.name == "convert_element_type":
            # A cast to fewer bits and back is a rounding by the program itself.
            narrows = cells[op.outputs[0]].dtype.itemsize > dtype.itemsize
            return value if narrows and getattr(value, "dtype", None) == dtype else None
        if state is None or state.kind is not Kind.WEAK or state.broadcast:
            return None
        # The cast goes before, so that a parameter and its transpose share one cast.
        return value if op.name in REARRANGES else None
