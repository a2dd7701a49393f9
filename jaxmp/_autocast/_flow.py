"""The plan: in which dtype each operation of a program is to run.

One pass forward follows every value from where it comes, one pass backward lets what feeds only
float32 operations run in float32 itself: the square before a sum, the difference before an
exponential. A program inside of an operation is planned for the dtypes that reach it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jax.extend import core

from jaxmp._autocast._kernels import Taken, taken_step
from jaxmp._autocast._kinds import FLOAT32, Kind, State
from jaxmp._autocast._operations import RULES, adapted, convert, has_own_program
from jaxmp._autocast._scopes import Regions, scopes
from jaxmp._autocast._steps import States, Step, alone, initial, is_foreign, literal
from jaxmp._op_lists import CONTRACTIONS, OpClass, OpLists
from jaxmp._program import JITS, Op, Program

ResultsIn = Literal["low", "either", "float32"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a program is to run.

    Attributes:
      program: the program.
      steps: one for each of its operations.
      results: what is known of what it returns.
    """

    program: Program
    steps: list[Step]
    results: list[State | None]


@dataclasses.dataclass(frozen=True)
class Context:
    """What holds for a whole call of autocast.

    Attributes:
      regions: the policy of each part of the program.
      lists: the classes of operations.
      enter_custom_vjp: whether functions with gradients of their own are rewritten too.
      control: plans an operation that contains programs.
      kernels: those that were traced for 16 bits.
      prefix: the scopes around the program that is being planned.
      functions: the jitted functions around it.
      seen: the names of all primitives and jitted functions that were met.
      memo: what was planned and traced already.
      plans: by operation, the plans of the programs inside of it, each with its program.
    """

    regions: Regions
    lists: OpLists
    enter_custom_vjp: bool
    control: Callable[..., Step]
    kernels: Taken = dataclasses.field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    seen: set[str] = dataclasses.field(default_factory=set)
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict)
    plans: dict[int, tuple[Op, dict[int, Plan]]] = dataclasses.field(default_factory=dict)

    def keep(self, op: Op, jaxpr: Any, planned: Plan) -> Plan:
        """Notes the plan of a program inside of an operation; the last one counts."""
        self.plans.setdefault(id(op), (op, {}))[1][id(jaxpr)] = planned
        return planned

    def plans_of(self, op: Op) -> list[Plan]:
        """The plans of the programs inside of an operation, where it is rewritten."""
        return list(self.plans.get(id(op), (op, {}))[1].values())

    def inside(self, op: Op) -> "Context":
        """The context of the programs inside of an operation."""
        own = (op.params["name"],) if op.name in JITS else ()
        return dataclasses.replace(
            self,
            prefix=(*self.prefix, *scopes(op.stack)),
            functions=(*self.functions, *op.functions, *own),
        )


def plan(
    program: Program,
    arguments: States,
    context: Context,
    *,
    results_in: ResultsIn = "low",
) -> Plan:
    """Decides in which dtype each operation runs.

    Args:
      program: the program.
      arguments: what is known of its arguments.
      context: what holds for the whole call.
      results_in: how its results are read: in 16 bits where they are, in either dtype, or in
        float32 only.

    Returns:
      The plan.
    """
    known: list[State | None] = [None] * len(program.avals)
    for number, state in zip(program.inputs, arguments, strict=True):
        known[number] = state
    for number, _ in program.consts:
        known[number] = initial(program.avals[number])

    def state_of(atom: Any) -> State | None:
        return literal(atom) if isinstance(atom, core.Literal) else known[atom]

    steps = []
    multiplied = _multiplied(program)
    for op in program.ops:
        step = _step(op, [state_of(atom) for atom in op.inputs], context)
        if multiplied.issuperset(op.outputs):
            # The weights of an ensemble are laid out too, and no bias.
            step.results = [_as_param(state) for state in step.results]
        for number, state in zip(op.outputs, step.results, strict=True):
            known[number] = state
        steps.append(step)
    _look_ahead(program, steps, results_in)
    for step in steps:
        for number, state in zip(step.op.outputs, step.results, strict=True):
            known[number] = state
    return Plan(program, steps, [state_of(atom) for atom in program.outputs])


def _multiplied(program: Program) -> set[int]:
    """The values that products read."""
    products = (op for op in program.ops if op.name in CONTRACTIONS)
    return {atom for op in products for atom in op.inputs if isinstance(atom, int)}


def _as_param(state: State | None) -> State | None:
    spread = state is not None and state.kind is Kind.SPREAD
    return State(Kind.PARAM, FLOAT32) if spread else state


def _step(op: Op, states: States, context: Context) -> Step:
    region = context.regions.of((*context.prefix, *scopes(op.stack)))
    functions = (*context.functions, *op.functions)
    context.seen.update((op.name, *functions))
    op_class = context.lists.of(op.name, functions)
    # Scopes inside of a loop may say otherwise than those around it.
    if region.sealed or (region.exact and op_class is not OpClass.CONTROL):
        return alone(op, states, exact=region.result)
    if id(op.equation) in context.kernels and not region.exact:
        return taken_step(op, states, context.kernels[id(op.equation)][1])
    if op.name == "convert_element_type":
        return convert(op, states)
    if op_class is OpClass.CONTROL:
        return context.control(op, states, context, region)
    if op_class in (None, OpClass.ALONE) or has_own_program(op) or is_foreign(op):
        return alone(op, states)
    if not any(states):
        return alone(op, states)
    return adapted(RULES[op_class](op, states, region))


def _look_ahead(program: Program, steps: list[Step], results_in: ResultsIn) -> None:
    """Lets what feeds only float32 operations run in float32.

    A comparison takes what it is given, and a result that is cast to float32 anyway does too.
    """
    results = {atom for atom in program.outputs if isinstance(atom, int)}
    low = results if results_in == "low" else set()
    wide = results if results_in == "float32" else set()
    for step in reversed(steps):
        made = set(step.op.outputs)
        if made & wide and not made & low:
            if step.widened is not None:
                _replace(step, step.widened())
            elif step.may_widen:
                _widen(step)
        if not any(step.results) and step.may_widen:
            continue
        is_product = step.op.name in CONTRACTIONS  # which casts what it reads by itself
        for atom, want in zip(step.op.inputs, step.wants, strict=True):
            if isinstance(atom, int) and want is not None:
                if want == FLOAT32:
                    wide.add(atom)
                elif not is_product:
                    low.add(atom)
    widened = {number for step in steps if not step.may_widen for number in step.op.outputs}
    for step in steps:
        if step.may_widen and not any(step.results) and widened & _numbers(step):
            _widen(step)


def _numbers(step: Step) -> set[int]:
    """The floats that a step reads, by number."""
    inputs = zip(step.op.inputs, step.wants, strict=True)
    return {atom for atom, want in inputs if isinstance(atom, int) and want is not None}


def _replace(step: Step, other: Step) -> None:
    step.wants, step.results, step.run = other.wants, other.results, other.run


def _widen(step: Step) -> None:
    step.wants = [want and FLOAT32 for want in step.wants]
    step.results = [state and State(Kind.BRIEF, FLOAT32) for state in step.results]
    step.may_widen = False
