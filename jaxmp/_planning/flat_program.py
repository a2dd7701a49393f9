"""A program as a list of operations over numbered values: calls inlined, dead code left out."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from jaxmp._jaxpr.compat import open_jaxpr, scan_counts
from jaxmp._jaxpr.flops import programs_inside
from jaxmp._jaxpr.op_classes import CHECKPOINTS, CONTROL_FLOW, JITS

# Operations whose programs stay apart: they run several times, or one of several, or on parts.
_APART = CONTROL_FLOW - JITS - CHECKPOINTS


@dataclasses.dataclass(eq=False, slots=True)
class FlatOp:
    """One operation.

    Attributes:
      name: the name of its primitive.
      equation: its equation, for shapes and params.
      inputs: the numbers of its operands; None for numbers that are written in the program.
      outputs: the numbers of its results.
      scope: the scopes and transformations that it was traced in, outermost first.
      bodies: the programs inside of a loop or a conditional.
    """

    name: str
    equation: Any
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    scope: str
    bodies: "tuple[FlatProgram, ...]" = ()


@dataclasses.dataclass(eq=False, slots=True)
class FlatProgram:
    """A program.

    Attributes:
      ops: its operations, in order.
      inputs: the numbers of its arguments.
      outputs: the numbers of its results; None for numbers that are written in the program.
      avals: the abstract value of each value, by its number.
    """

    ops: list[FlatOp]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    avals: dict[int, Any]


def flattened(jaxpr: Any, platform: str) -> FlatProgram:
    """Reads a program: calls, checkpoints and functions with derivatives become their operations.

    Args:
      jaxpr: an open or closed jaxpr.
      platform: what it is compiled for, such as `"cuda"`: of `jax.lax.platform_dependent`, one
        branch is a part of the program.

    Returns:
      The program, without operations whose results nobody reads.

    >>> import jax
    >>> fun = jax.jit(lambda x, y: (2 * x, 3 * y)[0])
    >>> program = flattened(jax.make_jaxpr(fun)(1.0, 2.0), "tpu")
    >>> [op.name for op in program.ops]
    ['mul']
    """
    program = _flattened_program(open_jaxpr(jaxpr), "", platform)
    return pruned(program, [True] * len(program.outputs))[0]


def _flattened_program(jaxpr: core.Jaxpr, outer: str, platform: str) -> FlatProgram:
    program = FlatProgram([], (), (), {})
    known: dict[Any, int | None] = {}

    def number(variable: Any) -> int:
        made = known[variable] = len(program.avals)
        program.avals[made] = variable.aval
        return made

    def look_up(atom: Any) -> int | None:
        return None if isinstance(atom, core.Literal) else known[atom]

    def inline(inner: core.Jaxpr, around: str) -> None:
        for equation in inner.eqns:
            scope = f"{around}/{equation.source_info.name_stack}"
            operands = tuple(look_up(atom) for atom in equation.invars)
            body = _called(equation, platform)
            if body is None:
                inside = _programs(equation)
                bodies = tuple(_flattened_program(each, scope, platform) for each in inside)
                results = tuple(map(number, equation.outvars))
                name = equation.primitive.name
                program.ops.append(FlatOp(name, equation, operands, results, scope, bodies))
                continue
            # The first operand of a conditional says which branch it is.
            known.update(zip(body.invars, operands[-len(body.invars) :], strict=True))
            for constant in body.constvars:
                number(constant)
            inline(body, scope)
            made = [look_up(atom) for atom in body.outvars]
            known.update(zip(equation.outvars, made, strict=True))

    program.inputs = tuple(map(number, jaxpr.invars))
    for constant in jaxpr.constvars:
        number(constant)
    inline(jaxpr, outer)
    program.outputs = tuple(look_up(atom) for atom in jaxpr.outvars)
    return program


def _programs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    return programs_inside(equation) if equation.primitive.name in _APART else []


def _called(equation: core.JaxprEqn, platform: str) -> core.Jaxpr | None:
    """Returns the program that an equation runs once on its operands, if it does no more."""
    if equation.primitive.name == "cond":
        branch = _known_branch(equation, platform)
        return None if branch is None else programs_inside(equation)[branch]
    if equation.primitive.name in _APART:
        return None
    if equation.primitive.name == "conv_general_dilated" and platform == "cuda":
        return _float32_convolution(equation)
    programs = programs_inside(equation)
    counts = len(equation.invars), len(equation.outvars)
    fits = [(len(each.invars), len(each.outvars)) for each in programs] == [counts]
    return programs[0] if fits else None


def _float32_convolution(equation: core.JaxprEqn) -> core.Jaxpr | None:
    """Returns a convolution as GPUs compute it: of float32 operands, if its result is float32."""
    operands: list[Any] = [variable.aval for variable in equation.invars]
    result: Any = equation.outvars[0].aval
    if (operands[0].dtype.itemsize, result.dtype.itemsize) != (2, 4):
        return None

    def convolve(*operands: Any) -> Any:
        wide = [jax.lax.convert_element_type(x, result.dtype) for x in operands]
        return equation.primitive.bind(*wide, **equation.params)

    return jax.make_jaxpr(convolve)(*operands).jaxpr


def _known_branch(equation: core.JaxprEqn, platform: str) -> int | None:
    """Returns which branch a conditional takes, if that is known before it runs."""
    for branch, platforms in enumerate(equation.params.get("branches_platforms") or ()):
        if platforms is None or platform in platforms:
            return branch
    index = equation.invars[0]
    return int(index.val) if isinstance(index, core.Literal) else None


def pruned(program: FlatProgram, wanted: Sequence[bool]) -> tuple[FlatProgram, list[bool]]:
    """Leaves out what the wanted results do not depend on.

    Args:
      program: the program.
      wanted: for each result, whether anyone reads it.

    Returns:
      The program, whose unwanted results are None; and for each argument whether it is read.
    """
    outputs = tuple(v if asked else None for v, asked in zip(program.outputs, wanted, strict=True))
    read, kept = {v for v in outputs if v is not None}, []
    for op in reversed(program.ops):
        asked = [v in read for v in op.outputs]
        if not any(asked) and not op.equation.effects:
            continue
        smaller, is_read = _pruned_op(op, asked)
        inputs = tuple(v if each else None for v, each in zip(op.inputs, is_read, strict=True))
        kept.append(dataclasses.replace(smaller, inputs=inputs))
        read |= {v for v in inputs if v is not None}
    made = FlatProgram(kept[::-1], program.inputs, outputs, program.avals)
    return made, [v in read for v in program.inputs]


def _pruned_op(op: FlatOp, asked: list[bool]) -> tuple[FlatOp, list[bool]]:
    """Returns an operation without what is not asked for, and which operands it then reads."""
    everything = [True] * len(op.inputs)
    if op.name == "cond":
        made = [pruned(body, asked) for body in op.bodies]
        read = [True, *map(any, zip(*[each for _, each in made], strict=True))]
        return dataclasses.replace(op, bodies=tuple(body for body, _ in made)), read
    if op.name != "scan":
        return op, everything
    begin, count = scan_counts(op.equation.params)
    carry = asked[:count]
    while True:
        body, read = pruned(op.bodies[0], [*carry, *asked[count:]])
        # What one turn reads, the turn before has to make.
        more = [a or b for a, b in zip(carry, read[begin : begin + count], strict=True)]
        if more == carry:
            break
        carry = more
    operands = [*read[:begin], *carry, *read[begin + count :]]
    return dataclasses.replace(op, bodies=(body,)), operands
