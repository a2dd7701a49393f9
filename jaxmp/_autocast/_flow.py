"""The plan: in which dtype each operation of a program is to run.

One pass forward follows every value from where it comes, one pass backward lets what feeds only
float32 operations run in float32 itself: the square before a sum, the difference before an
exponential. What leaves a backward pass is untouched again: the gradient of a parameter updates it
in float32. A program inside of an operation is planned for the dtypes that reach it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

from jax.extend import core

from jaxmp._autocast._kernels import Taken, taken_step
from jaxmp._autocast._kinds import FLOAT32, Kind, State
from jaxmp._autocast._operations import RULES, adapted, convert, has_own_program
from jaxmp._autocast._scopes import Regions, scopes
from jaxmp._autocast._steps import States, Step, alone, initial, is_foreign, literal
from jaxmp._compat import function_name
from jaxmp._op_lists import CONTRACTIONS, OpClass, OpLists
from jaxmp._program import JITS, Op, Program

ResultsIn = Literal["low", "either", "float32"]
AllIn = ResultsIn | tuple[ResultsIn, ...]


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
      stacks: the same as name stacks, with the transformations that are noted in them.
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
    stacks: tuple[Any, ...] = ()
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
        if op.name == "custom_jvp_call":
            own = (function_name(op.equation),)
        return dataclasses.replace(
            self,
            prefix=(*self.prefix, *scopes(op.stack)),
            stacks=(*self.stacks, op.stack),
            functions=(*self.functions, *op.functions, *own),
        )


def plan(
    program: Program, arguments: States, context: Context, *, results_in: AllIn = "low"
) -> Plan:
    """Decides in which dtype each operation runs.

    Args:
      program: the program.
      arguments: what is known of its arguments.
      context: what holds for the whole call.
      results_in: how its results are read, or each of them: in 16 bits where they are, in float32
        only, or in either dtype, to be cast.

    Returns:
      The plan.
    """
    known: list[State | None] = [None] * len(program.avals)
    for number, state in zip(program.inputs, arguments, strict=True):
        known[number] = state
    for number, _ in program.consts:
        known[number] = initial(program.avals[number])
    # By value, whether a backward pass made it; all the same within a program that is part of one.
    pulled = [False] * len(program.avals)
    within = any(map(is_backward, context.stacks))

    def state_of(atom: Any, inside: bool) -> State | None:
        if isinstance(atom, core.Literal):
            return literal(atom)
        state = known[atom]
        leaves = pulled[atom] and not inside and state is not None
        return State(Kind.WEAK, FLOAT32) if leaves else state

    steps = []
    multiplied = _multiplied(program)
    for op in program.ops:
        inside = not within and is_backward(op.stack)
        step = _step(op, [state_of(atom, inside) for atom in op.inputs], context)
        if op.name == "broadcast_in_dim" and multiplied.issuperset(op.outputs):
            # The weights of an ensemble, and no bias.
            step.results = [state and state._replace(laid=False) for state in step.results]
        for number, state in zip(op.outputs, step.results, strict=True):
            known[number], pulled[number] = state, inside
        steps.append(step)
    _look_ahead(program, steps, results_in)
    for step in steps:
        for number, state in zip(step.op.outputs, step.results, strict=True):
            known[number] = state
    return Plan(program, steps, [state_of(atom, inside=False) for atom in program.outputs])


def _multiplied(program: Program) -> set[int]:
    """The values that products read."""
    products = (op for op in program.ops if op.name in CONTRACTIONS)
    return {atom for op in products for atom in op.inputs if isinstance(atom, int)}


@functools.lru_cache(maxsize=4096)
def is_backward(stack: Any) -> bool:
    """Whether an operation was traced in the backward pass of a gradient within the function."""
    return "transpose(" in str(stack)


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


def _look_ahead(program: Program, steps: list[Step], results_in: AllIn) -> None:
    """Lets what feeds only float32 operations run in float32; products are stored in 16 bits.

    A comparison takes what it is given, and a result that is cast to float32 anyway does too.
    """
    if isinstance(results_in, str):
        results_in = (results_in,) * len(program.outputs)
    low, either, wide = (
        {
            atom
            for atom, dtype in zip(program.outputs, results_in, strict=True)
            if isinstance(atom, int) and dtype == name
        }
        for name in ("low", "either", "float32")
    )
    for step in reversed(steps):
        made = set(step.op.outputs)
        is_low = any(state is not None and state.dtype != FLOAT32 for state in step.results)
        if is_low and made & (wide | either) and not made & low:
            _widen(step, again=bool(made & wide))
        is_product = step.op.name in CONTRACTIONS  # which casts what it reads by itself
        for atom, want in zip(step.op.inputs, step.wants, strict=True):
            if isinstance(atom, int) and want is not None:
                if want == FLOAT32:
                    wide.add(atom)
                elif not is_product:
                    low.add(atom)


def _widen(step: Step, *, again: bool) -> None:
    """Makes a step run in float32; with programs inside only `again`, as each is compiled anew."""
    if step.widened is not None and again:
        other = step.widened()
        step.wants, step.results, step.run = other.wants, other.results, other.run
    elif step.may_widen:
        step.wants = [want and FLOAT32 for want in step.wants]
        step.results = [state and State(Kind.HIGH, FLOAT32) for state in step.results]
