"""Runs a plan: binds each operation again, in the planned dtypes."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from jaxmp._autocast.kinds import FLOAT32, Kind
from jaxmp._autocast.plan import Plan
from jaxmp._autocast.steps import Step
from jaxmp._numerics.dtypes import DType
from jaxmp._primitives.float8_product import float8_product
from jaxmp._primitives.mixed_product import product
from jaxmp._program import compat
from jaxmp._program.evaluate import Cells, Rules, evaluate
from jaxmp._program.op_classes import REARRANGES
from jaxmp._program.program import Op, Program
from jaxmp._program.scopes import NOT_FLOAT8


def run_plan(plan: Plan, arguments: Sequence[Any]) -> list[Any]:
    """Runs a program as planned, on arguments in the dtypes that it was planned for."""
    return evaluate(plan.program, arguments, _Planned(plan))


class _Planned(Rules[Any]):
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
        """Returns what an operation reads, and behind that the float32 sources of a product."""
        step = self.plan.steps[op.number]
        values, sources = [], []
        has_sources = any(step.sources)
        for i, (atom, want) in enumerate(zip(op.inputs, step.wants, strict=True)):
            lays_out = step.lays_out and step.lays_out[i] and want != FLOAT32
            values.append(self.cast(atom, cells, want, op.out_avals[0].shape if lays_out else None))
            if has_sources and i < len(step.sources):
                sources.append(self.cast(atom, cells, FLOAT32) if step.sources[i] else None)
        return values + sources

    def operation(self, op: Op, operands: list[Any]) -> list[Any]:
        step = self.plan.steps[op.number]
        if step.float8 is not None:
            (lhs, rhs), params = operands, {**op.params, **step.params}
            return [float8_product(params, lhs, rhs, *step.float8)]
        if any(step.sources):
            count, params = len(op.inputs), {**op.params, **step.params}
            primitive = op.equation.primitive
            return [product(primitive, params, operands[:count], operands[count:])]
        if step.run is not None:
            return step.run(operands)
        return compat.bind(op.equation, operands, **step.params)

    def results(self, program: Program, cells: Cells[Any]) -> list[Any]:
        pairs = zip(program.outputs, self.plan.results, strict=True)
        return [self.cast(atom, cells, state and state.dtype) for atom, state in pairs]

    def cast(
        self,
        atom: int | core.Literal,
        cells: Cells[Any],
        want: DType | None,
        laid_out: tuple[int, ...] | None = None,
    ) -> Any:
        """Returns a value in the dtype `want`, which is None if that does not matter."""
        if isinstance(atom, core.Literal):
            return compat.number(atom, want)
        value = cells[atom]
        if want is None or value.dtype == want:
            return value
        key = atom, want, laid_out
        if key not in self.casts:
            self.casts[key] = self._new_cast(atom, cells, want, laid_out)
        return self.casts[key]

    def _new_cast(
        self, number: int, cells: Cells[Any], want: DType, laid_out: tuple[int, ...] | None
    ) -> Any:
        maker, value = self.makers.get(number), cells[number]
        if maker is not None and (source := self._source(maker, cells, want)) is not None:
            if maker.op.name == "convert_element_type":
                return source
            (moved,) = compat.bind(maker.op.equation, [self.cast(maker.op.inputs[0], cells, want)])
            return moved
        # The transpose of this broadcast sums the gradient of a bias, here still in float32.
        if laid_out is not None and value.shape != laid_out:
            dims = tuple(range(len(laid_out) - len(value.shape), len(laid_out)))
            value = lax.broadcast_in_dim(value, laid_out, dims)
        return lax.convert_element_type(value, want)

    def _source(self, maker: Step, cells: Cells[Any], want: DType) -> Any:
        """Returns an earlier value that a cast can start from, before a move or a cast; or None."""
        op = maker.op
        if not op.inputs or isinstance(op.inputs[0], core.Literal):
            return None
        value, state = cells[op.inputs[0]], maker.results[0]
        if op.name == "convert_element_type":
            # A cast to fewer bits and back is a rounding that the program asked for.
            widened = cells[op.outputs[0]].dtype.itemsize > want.itemsize
            return value if widened and getattr(value, "dtype", None) == want else None
        if state is None or state.kind is not Kind.WEAK or state.smaller:
            return None
        # The cast goes before, so that a parameter and its transpose share one cast.
        return value if op.name in REARRANGES else None
