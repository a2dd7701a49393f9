"""Runs a low-precision program in float32, with each of its roundings in the hands of a subclass.

The program in which everything is low runs here unchanged, forward and backward, but on float32
arrays. Where it rounds, `rounded` says which numbers go on: those that were rounded, those that
were not, or the rounded ones with a derivative that counts errors.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad

from jaxmp._numerics.dtypes import is_inexact, is_narrow
from jaxmp._numerics.rounding import widen_rounded
from jaxmp._primitives.float8_product import without_scale
from jaxmp._program import compat
from jaxmp._program.control_flow import scan_again
from jaxmp._program.facts import BackwardAnalysis, ForwardAnalysis, propagate
from jaxmp._program.flops import programs_inside
from jaxmp._program.op_classes import (
    CASTS,
    CLASSES,
    CONTRACTIONS,
    EFFECTS,
    ENCODES,
    FOREIGN_CALLS,
    IDENTITIES,
    JUMPS,
    OPAQUE,
    ORDERS,
    WIDENED,
    OpClass,
)
from jaxmp._program.program import Op, Program, read
from jaxmp._tools.diagnostics.rerun import Rerun
from jaxmp._tools.inspect.equations import Site, walk
from jaxmp._tools.inspect.lines import line_of
from jaxmp._tools.inspect.upcasts import is_narrow_aval

FLOAT32 = np.dtype(np.float32)
_COMPLEX = (np.dtype(np.complex64), np.dtype(np.complex128))
# By default TPUs round float32 operands to bfloat16: roundings that are switched off would stay.
_EXACT = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
# They are made for the dtypes of the program.
_AS_TRACED = EFFECTS | OPAQUE | FOREIGN_CALLS
# What a turn of a loop does with weights before it multiplies.
_PREPARES = CASTS | IDENTITIES | WIDENED


class Roundings(Rerun):
    """Runs a program in float32. In this class nothing is rounded.

    Where a kernel, a call into another library or the bits of a number need the dtypes of the
    program, it runs as it is. No derivative goes through those, nor through a `while`.
    """

    def rounded(self, site: Site, exact: Any, low: Any) -> Any:
        """Returns the numbers that go on from a rounding: the exact, the low ones, or others."""
        return exact

    def constant(self, value: Any) -> Any:
        return in_float32(value)

    def program_of_call(self, site: Site) -> Any:
        if site.name == "low_precision_product":
            return site.params["jaxpr"]
        return super().program_of_call(site)

    def scan(self, site: Site, operands: list[Any]) -> list[Any]:
        """Runs a scan again. What all turns compute alike from the same arrays runs before it."""
        # A weight that each turn casts is rounded once, in the same way for all turns. Counted as
        # roundings of their own, they made the bar of an LSTM 1.5 times too small.
        (body,) = compat.bodies_of(site.equation)
        carry = site.wiring.carry
        invariant, turn = _without_invariants(read(body), carry.start)
        rules = self.but(outer=site)
        fixed = rules.run(invariant, operands[: carry.start])
        types = site.in_avals[carry.start : carry.stop]

        def again(arguments: list[Any], _: Any) -> tuple[list[Any], Any]:
            results = rules.run(turn, [*arguments, *fixed])
            return [*map(as_bool, results, types), *results[len(types) :]], ()

        # A carry has its type from the start.
        first = map(as_bool, operands[carry.start : carry.stop], types)
        operands = [*operands[: carry.start], *first, *operands[carry.stop :]]
        return scan_again(site.equation, operands, again)[0]

    def inside(self, op: Any, body: Any, arguments: Any, *choice: int) -> list[Any]:
        results = super().inside(op, body, arguments, *choice)
        if not choice:
            return results
        # Branches of a conditional agree in their types.
        return list(map(as_bool, results, [x.aval for x in compat.open_jaxpr(body).outvars]))

    def while_loop(self, site: Site, operands: list[Any]) -> list[Any]:
        return self.whole(site, operands)

    def whole(self, site: Site, operands: list[Any]) -> list[Any]:
        equation, avals = site.equation, site.out_avals
        if site.name in IDENTITIES:
            return operands[:1]
        if site.name == "float8_scale_back":
            return [without_scale(operands[0], lax.stop_gradient(operands[1]), FLOAT32)]
        if is_unseen(site):
            constants = map(as_bool, map(lax.stop_gradient, operands), site.in_avals)
            as_traced = map(_in_traced_dtype, constants, site.in_avals)
            return list(map(in_float32, compat.bind(equation, list(as_traced))))
        if site.name == "reduce_precision":
            return [self.rounded(site, operands[0], *compat.bind(equation, operands))]
        if not any(map(is_narrow_aval, [*avals, *site.in_avals])):
            return compat.bind(equation, operands)
        if site.name == "mxfp8_encode":
            raise NotImplementedError(
                "sensitivity does not know products of blocks. Measure 'tensorwise' or 'rowwise', "
                "which round to the same format"
            )
        if site.name == "float8_encode":
            codes, scale = compat.bind(equation, list(map(lax.stop_gradient, operands)))
            exact = in_float32(operands[0]) * in_float32(scale)
            return [self.rounded(site, exact, widen_rounded(codes)), scale]
        exact_products = {"precision": _EXACT} if site.name in CONTRACTIONS else {}
        results = compat.bind(equation, operands, **_params_in_float32(equation), **exact_products)
        # What moves was rounded before: under rules, a move does not round.
        if moves(site):
            return results
        return [
            self.rounded(site, x, widen_rounded(_in_traced_dtype(x, aval)))
            if is_narrow_aval(aval)
            else x
            for x, aval in zip(results, avals, strict=True)
        ]


def rounds_low(site: Site) -> bool:
    """Whether an operation rounds its results to fewer bits than those of float32."""
    return site.name == "reduce_precision" or any(map(is_narrow_aval, site.out_avals))


def moves(site: Site) -> bool:
    """Whether the results of an operation are numbers of its operands."""
    is_move = CLASSES.get(site.name) is OpClass.MOVE
    return is_move or site.name in IDENTITIES | WIDENED


def is_unseen(site: Site) -> bool:
    """Whether no derivative goes through what an operation does inside."""
    if CLASSES.get(site.name) is OpClass.CONTROL:
        return site.name == "shard_map" or site.wiring.turns is None
    if site.name == "low_precision_product":
        return False
    has_dtypes = site.name in _AS_TRACED or site.name == "bitcast_convert_type"
    # A solver has programs for its derivatives.
    has_programs = bool(programs_inside(site.equation))
    return has_dtypes or has_programs or site.equation.primitive not in ad.primitive_jvps


def as_bool(value: Any, aval: Any) -> Any:
    """Returns a number that stands for a bool of the program as a bool, and anything else as is."""
    is_number = aval.dtype == bool and value.dtype != bool
    return value > 0.5 if is_number else value


def in_float32(value: Any) -> Any:
    """Returns a narrow array in float32, and anything else as it is."""
    return lax.convert_element_type(value, FLOAT32) if is_narrow_aval(value) else value


def _in_traced_dtype(value: Any, aval: Any) -> Any:
    return lax.convert_element_type(value, aval.dtype) if is_narrow_aval(aval) else value


def _params_in_float32(equation: core.JaxprEqn) -> dict[str, Any]:
    """Returns the params of an equation that name a narrow dtype, with float32 instead."""
    params = equation.params.items()
    narrow = [name for name, value in params if isinstance(value, np.dtype) and is_narrow(value)]
    # The program by which a scatter or a reduction joins two numbers has dtypes too.
    bodies = compat.bodies_of(equation)
    programs = (x if compat.lacks_constants(x) else _program_in_float32(x) for x in bodies)
    return dict.fromkeys(narrow, FLOAT32) | compat.params_with(equation, programs)


def _program_in_float32(program: Any) -> Any:
    def run(*arguments: Any) -> list[Any]:
        return Roundings().run(read(program), arguments)

    avals: list[Any] = [variable.aval for variable in compat.open_jaxpr(program).invars]
    return compat.trace(run, [x.update(dtype=FLOAT32) if is_narrow_aval(x) else x for x in avals])


def _without_invariants(body: Program, consts: int) -> tuple[Program, Program]:
    """Splits the body of a scan: what its consts alone decide, and the rest, which reads that."""
    before: list[Op] = []

    def rule(op: Op, are_fixed: Sequence[bool]) -> list[bool]:
        is_fixed = op.name in _PREPARES and all(are_fixed)
        before.extend([op] * is_fixed)
        return [is_fixed] * len(op.outputs)

    analysis = ForwardAnalysis(bottom=True, join=operator.and_, transfer=rule)
    facts = [i < consts for i in range(len(body.inputs))]
    propagate(body, facts, analysis, lambda op: ())
    numbers = tuple(number for op in before for number in op.outputs)
    return (
        body._replace(ops=tuple(before), inputs=body.inputs[:consts], outputs=numbers),
        body._replace(
            ops=tuple(op for op in body.ops if op not in before), inputs=(*body.inputs, *numbers)
        ),
    )


# The place of an operation: its number, and those of the operations around it.
Place = tuple[int, ...]


def place_of(site: Site) -> Place:
    """Returns the place of an operation."""
    return (*(place_of(site.outer) if site.outer is not None else ()), site.number)


def readers_of(closed: Any, owner_of: Callable[[Site], Any]) -> Mapping[Place, set[Any]]:
    """Returns the owners of the products that read the result of each operation.

    A low product rounds what it reads, whoever computed it, and a low operation rounds its result,
    whoever reads it. So a rounding vanishes only if its operation and all of these are high.
    """
    readers: dict[Place, set[Any]] = {}

    def rule(site: Any, places: Sequence[frozenset[Place]]) -> list[frozenset[Place]]:
        if site.name in CONTRACTIONS | ENCODES:
            for place in frozenset().union(*places):
                readers.setdefault(place, set()).add(owner_of(site))
        # A cast rounds what its operand left to round: `reduce_precision` before it leaves nothing.
        passes = moves(site) or site.name in CASTS
        sources = frozenset().union(*places) if passes else frozenset()
        own = frozenset() if moves(site) and sources else frozenset({place_of(site)})
        return [sources | own] * len(site.outputs)

    program = walk(closed)
    nothing: frozenset[Place] = frozenset()
    analysis = ForwardAnalysis(bottom=nothing, join=frozenset.union, transfer=rule)
    propagate(program, [nothing] * len(program.inputs), analysis, lambda site: site.bodies)
    return readers


def uncounted_in(
    closed: Any, demanded: Sequence[bool], *, float32: bool = False
) -> tuple[str, ...]:
    """Returns the operations whose effect no derivative says, as `"net.py:12 (route): top_k"`.

    Kernels, solvers and loops without a known number of turns are among them; orders of numbers and
    whole numbers, which a rounding moves by a jump; and complex numbers. `demanded` says for each
    result whether it counts, `float32` whether float32 operations round too.
    """
    program = walk(closed)
    reads_rounded: set[Any] = set()
    uncounted: dict[str, None] = {}

    def inside(site: Any) -> Sequence[Program]:
        return () if is_unseen(site) else site.bodies

    def forward(site: Any, are_rounded: Sequence[bool]) -> list[bool]:
        if any(are_rounded):
            reads_rounded.add(site)
        rounds = (
            any(are_rounded) or rounds_low(site) or (float32 and site.inputs and not moves(site))
        )
        return [bool(rounds and is_inexact(x)) for x in site.out_avals]

    def backward(site: Any, demanded: Sequence[bool]) -> list[bool]:
        results = [aval for aval, flag in zip(site.out_avals, demanded, strict=True) if flag]
        has_numbers = any(map(is_inexact, site.in_avals))
        is_whole = site.name in ORDERS | CASTS and not all(map(is_inexact, results))
        jumps = site in reads_rounded and (is_whole or site.name in JUMPS)
        # Errors of complex numbers are not modelled.
        is_complex = any(getattr(x, "dtype", None) in _COMPLEX for x in site.out_avals)
        if results and has_numbers and (jumps or is_complex or is_unseen(site)):
            uncounted[f"{line_of(site)}: {site.name}"] = None
        return [bool(results)] * len(site.inputs)

    analysis = ForwardAnalysis(bottom=False, join=operator.or_, transfer=forward)
    propagate(program, [is_narrow_aval(program.avals[i]) for i in program.inputs], analysis, inside)
    BackwardAnalysis(backward, inside, decisions=True).values(program, demanded)
    return tuple(uncounted)
