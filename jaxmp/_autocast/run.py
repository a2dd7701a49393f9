"""Runs a plan: binds each operation again, in the planned dtypes."""

from collections.abc import Sequence
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
from jaxmp._program.op_classes import REARRANGES
from jaxmp._program.scopes import NOT_FLOAT8


def run_plan(plan: Plan, arguments: Sequence[Any]) -> list[Any]:
    """Runs a program as planned and returns its results.

    Args:
      plan: the plan.
      arguments: its arguments, in the dtypes that it was planned for.

    Returns:
      The results; floats have the dtypes of `plan.results`.
    """
    values = _Values(plan, arguments)
    for step in plan.steps:
        op = step.op
        with compat.where(op.equation, op.stack, op.traceback):
            made = _run_step(step, values)
        for number, value in zip(op.outputs, made, strict=True):
            values.known[number] = value
            values.maker[number] = step
    results = zip(plan.program.outputs, plan.results, strict=True)
    return [values.read(atom, state and state.dtype) for atom, state in results]


def _run_step(step: Step, values: "_Values") -> list[Any]:
    if step.not_float8 is None:
        return _run_operation(step, values)
    with jax.named_scope(NOT_FLOAT8 + step.not_float8):
        return _run_operation(step, values)


def _run_operation(step: Step, values: "_Values") -> list[Any]:
    op = step.op
    if step.float8 is not None:
        lhs, rhs = (values.read(atom, w) for atom, w in zip(op.inputs, step.wants, strict=True))
        return [float8_product({**op.params, **step.params}, lhs, rhs, *step.float8)]
    if any(step.sources):
        return [_run_product(step, values)]
    inputs = []
    for i, (atom, want) in enumerate(zip(op.inputs, step.wants, strict=True)):
        shape = op.out_avals[0].shape if step.lays_out and step.lays_out[i] else None
        inputs.append(values.read(atom, want, shape if want != FLOAT32 else None))
    if step.run is not None:
        return step.run(op, inputs)
    return compat.bind(op.equation, inputs, **step.params)


def _run_product(step: Step, values: "_Values") -> Any:
    op = step.op
    operands, wide = [], []
    for i, (atom, want) in enumerate(zip(op.inputs, step.wants, strict=True)):
        has_source = i < len(step.sources) and step.sources[i]
        operands.append(values.read(atom, want))
        wide.append(values.read(atom, FLOAT32) if has_source else None)
    params = {**op.params, **step.params}
    return product(op.equation.primitive, params, operands, wide[:2])


class _Values:
    """The values of a program as it runs, and their casts, each made once."""

    def __init__(self, plan: Plan, arguments: Sequence[Any]) -> None:
        program = plan.program
        self.known: list[Any] = [None] * len(program.avals)
        self.maker: dict[int, Step] = {}
        self.casts: dict[Any, Any] = {}
        for number, value in zip(program.inputs, arguments, strict=True):
            self.known[number] = value
        for number, value in program.consts:
            self.known[number] = value

    def read(
        self,
        atom: int | core.Literal,
        want: DType | None,
        laid_out: tuple[int, ...] | None = None,
    ) -> Any:
        """Returns a value in the dtype `want`."""
        if isinstance(atom, core.Literal):
            return compat.number(atom, want)
        value = self.known[atom]
        if want is None or value.dtype == want:
            return value
        key = (atom, want, laid_out)
        if key not in self.casts:
            self.casts[key] = self._cast(atom, want, laid_out)
        return self.casts[key]

    def _cast(self, number: int, want: DType, laid_out: tuple[int, ...] | None) -> Any:
        maker = self.maker.get(number)
        value = self.known[number]
        if maker is not None and (source := self._source(maker, want)) is not None:
            if maker.op.name == "convert_element_type":
                return source
            source = self.read(maker.op.inputs[0], want)
            (moved,) = compat.bind(maker.op.equation, [source])
            return moved
        # The transpose of this broadcast sums the gradient of a bias, here still in float32.
        if laid_out is not None and value.shape != laid_out:
            dims = tuple(range(len(laid_out) - len(value.shape), len(laid_out)))
            value = lax.broadcast_in_dim(value, laid_out, dims)
        return lax.convert_element_type(value, want)

    def _source(self, maker: Step, want: DType) -> Any:
        """Returns an earlier value that a cast can start from, before a move or a cast; or None."""
        op = maker.op
        source = op.inputs[0] if op.inputs else None
        if not isinstance(source, int):
            return None
        value, state = self.known[source], maker.results[0]
        if op.name == "convert_element_type":
            # A cast to fewer bits and back is a rounding that the program asked for.
            widened = self.known[op.outputs[0]].dtype.itemsize > want.itemsize
            return value if widened and getattr(value, "dtype", None) == want else None
        if state is None or state.kind is not Kind.WEAK or state.smaller:
            return None
        # The cast goes before, so that a parameter and its transpose share one cast.
        return value if op.name in REARRANGES else None
