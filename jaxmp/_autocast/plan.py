"""The plan: the dtype in which each operation of a program runs.

A forward pass follows every value from its origin. A backward pass (`look_ahead`) lets an operation
run in float32 if only float32 operations read its result. Results of an inner gradient are weak
again: the gradient of a parameter updates it in float32. A program inside an operation is planned
for the dtypes that reach it.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jaxmp._autocast.kernels import Replacements, replaced_kernel
from jaxmp._autocast.layers import ends_by_floats
from jaxmp._autocast.look_ahead import LookAhead
from jaxmp._autocast.op_plans import (
    AllIn,
    OpPlan,
    Reading,
    States,
    adds_gradients,
    argument_state,
    has_foreign_floats,
    literal_state,
    plan_as_traced,
)
from jaxmp._autocast.planners import (
    PLANNERS,
    adapt_scatter,
    ask_for_precision,
    convert,
    has_own_program,
)
from jaxmp._autocast.reading import casts_back, read_for_plan
from jaxmp._autocast.regions import EXACT, SCALED, Region, Regions, scopes
from jaxmp._autocast.strengths import FLOAT32, State, Strength
from jaxmp._program.compat import bodies_of, function_name
from jaxmp._program.op_classes import CLASSES, CONTRACTIONS, JITS, OpClass, may_be_sum
from jaxmp._program.op_lists import OpLists
from jaxmp._program.parts import PartCache
from jaxmp._program.program import Op, Program, numbers


@dataclasses.dataclass(frozen=True)
class Plan:
    """A program, and how each of its operations runs.

    Attributes:
      program: the program.
      op_plans: one for each of its operations.
      states: the state of each of its values.
      results: the states of its results.
      reads: how it reads its arguments.
      rounded: 16-bit values whose rounding float32 operations may not undo.
      shared: what equal parts of the programs of the whole call share.
    """

    program: Program
    op_plans: list[OpPlan]
    states: list[State | None]
    results: list[State | None]
    reads: list[Reading]
    rounded: frozenset[int]
    shared: PartCache


@dataclasses.dataclass(frozen=True)
class PlanContext:
    """The context of a whole call of autocast.

    Attributes:
      regions: the policy of each part of the program.
      lists: the classes of operations.
      enter_custom_vjp: whether `custom_vjp` functions are rewritten too.
      control: plans an operation that contains programs.
      kernels: the kernels that were traced for 16 bits.
      prefix: the scopes around the program that is being planned.
      stacks: the same scopes as name stacks, which also hold the transformations.
      functions: the jitted functions around that program.
      names: those of all primitives and jitted functions found so far.
      unscaled: the float16 products found so far in backward passes without a loss scale.
      plans: by the id of an operation, the operation and the plans of its inner programs.
      shared: what equal parts of the programs share: the plans and jaxprs made so far.
    """

    regions: Regions
    lists: OpLists
    enter_custom_vjp: bool
    control: Callable[..., OpPlan]
    kernels: Replacements = dataclasses.field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    stacks: tuple[Any, ...] = ()
    functions: tuple[str, ...] = ()
    names: set[str] = dataclasses.field(default_factory=set)
    unscaled: list[Op] = dataclasses.field(default_factory=list)
    plans: dict[int, tuple[Op, dict[int, Plan]]] = dataclasses.field(default_factory=dict)
    shared: PartCache = dataclasses.field(default_factory=PartCache)

    def keep(self, op: Op, jaxpr: Any, program_plan: Plan) -> Plan:
        """Stores the plan of a program inside an operation; a later plan replaces it."""
        self.plans.setdefault(id(op), (op, {}))[1][id(jaxpr)] = program_plan
        return program_plan

    def plans_of(self, op: Op) -> list[Plan]:
        """Returns the plans of the programs inside an operation; none if it is not rewritten."""
        return list(self.plans.get(id(op), (op, {}))[1].values())

    def inside(self, op: Op) -> "PlanContext":
        """Returns the context of the programs inside an operation."""
        own = (op.params["name"],) if op.name in JITS else ()
        if op.name == "custom_jvp_call":
            own = (function_name(op.equation),)
        return dataclasses.replace(
            self,
            prefix=(*self.prefix, *scopes(op.stack)),
            stacks=(*self.stacks, op.stack),
            functions=(*self.functions, *op.functions, *own),
        )

    def plan_key(self, states: States, results_in: AllIn) -> Hashable:
        """Returns all that decides the plan of a program in this context, beside the program."""
        names = self.regions.deciding_scopes(self.prefix)
        in_backward = any(map(is_backward, self.stacks))
        return tuple(states), names, self.functions, in_backward, results_in


def plan(jaxpr: Any, arguments: States, context: PlanContext, *, results_in: AllIn = ()) -> Plan:
    """Decides in which dtype each operation of a program runs.

    Args:
      jaxpr: the program.
      arguments: the states of its arguments.
      context: the context of the whole call.
      results_in: how its results are read.
    """
    program = read_for_plan(jaxpr)
    known = dict(zip(program.inputs, arguments, strict=True))
    known |= {number: argument_state(program.avals[number]) for number, _ in program.consts}
    states = [known.get(number) for number in range(len(program.avals))]
    # For each value, whether a backward pass made it. Not tracked inside a backward program.
    # Shapes do not tell: under `vmap`, MAML adds a batched update to a param, and a layer adds a
    # bias to a batch, with the same two shapes.
    from_backward = [False] * len(program.avals)
    in_backward = any(map(is_backward, context.stacks))
    are_inside = [not in_backward and is_backward(op.stack) for op in program.ops]

    def state_of(atom: Any, *, inside: bool = False) -> State | None:
        if isinstance(atom, core.Literal):
            return literal_state(atom)
        state = states[atom]
        leaves = from_backward[atom] and not inside and state is not None
        return State(Strength.WEAK, FLOAT32) if leaves else state

    def operands_of(op: Op) -> list[State | None]:
        return [state_of(atom, inside=are_inside[op.number]) for atom in op.inputs]

    def settle(op_plan: OpPlan, operands: States) -> None:
        _mark_sums(op_plan, operands)
        for number, state in zip(op_plan.op.outputs, op_plan.results, strict=True):
            states[number], from_backward[number] = state, are_inside[op_plan.op.number]

    op_plans, cast_back = [], casts_back(program)
    multiplied = {x for op in program.ops if op.name in CONTRACTIONS for x in numbers(op.inputs)}
    for op in program.ops:
        names, operands = (*context.prefix, *scopes(op.stack)), operands_of(op)
        region = context.regions.of(names)
        planned = _plan_op(op, operands, context, region, cast_back)
        op_plan = ask_for_precision(planned, region.precision)
        is_float16 = op.name in CONTRACTIONS and _FLOAT16 in op_plan.in_dtypes
        is_gradient = in_backward or are_inside[op.number]
        if is_gradient and is_float16 and SCALED not in names:
            context.unscaled.append(op)
        if op.name == "broadcast_in_dim" and multiplied.issuperset(op.outputs):
            # Weights of an ensemble: a bias would be updated in 16 bits when the ensemble trains.
            op_plan.results = [state and state.whole() for state in op_plan.results]
        settle(op_plan, operands)
        op_plans.append(op_plan)
    look_ahead = LookAhead(program, states)
    reads = look_ahead.run(op_plans, results_in)
    # What was widened changes the states behind it: casts of the program hand them on, and
    # operations with programs inside are planned again for operands that became float32.
    for op_plan in op_plans:
        operands = operands_of(op_plan.op)
        if op_plan.keeps_dtype:
            op_plan.results = operands
        elif op_plan.replan is not None and _widened(op_plan, operands):
            wanted = look_ahead.wanted.get(op_plan.op.number, ())
            op_plan = op_plan.replan(states=operands, results_in=wanted)
            op_plans[op_plan.op.number] = op_plan
        settle(op_plan, operands)
    results = list(map(state_of, program.outputs))
    _mark_summed_gradients(op_plans, states)
    return Plan(program, op_plans, states, results, reads, look_ahead.rounded(), context.shared)


def _at_precision(op: Op, states: States, context: PlanContext, region: Region) -> OpPlan:
    """Plans an operation with programs inside that keep their dtypes; their products are exact."""
    op_plan = plan_as_traced(op, states, exact=region.result)
    traced_states = [argument_state(aval) for aval in op.in_avals]
    inside = context.control(op, traced_states, context, region)
    op_plan.run, op_plan.params, op_plan.plan_key = inside.run, inside.params, inside.plan_key
    return op_plan


def _mark_summed_gradients(op_plans: Sequence[OpPlan], states: list[State | None]) -> None:
    """Marks values of 16 bits whose gradients are added up."""
    for op_plan in op_plans:
        for number in adds_gradients(op_plan):
            state = states[number]
            if state is not None and state.dtype != FLOAT32:
                states[number] = state._replace(summed=True)


def _mark_sums(op_plan: OpPlan, operands: States) -> None:
    """Marks float32 results that may be sums over devices."""
    if CLASSES.get(op_plan.op.name) is not OpClass.CONTROL:
        summed = may_be_sum(op_plan.op.name, any(state and state.summed for state in operands))
        op_plan.results = [
            state and state._replace(summed=summed and state.dtype == FLOAT32)
            for state in op_plan.results
        ]


def _widened(op_plan: OpPlan, operands: States) -> bool:
    """Whether operands that programs inside read in float32 have become float32."""
    triples = zip(op_plan.reads, op_plan.in_dtypes, operands, strict=True) if op_plan.reads else ()
    return any(
        state is not None and dtype != state.dtype == FLOAT32 and reading is not Reading.LOW
        for reading, dtype, state in triples
    )


_FLOAT16 = jnp.dtype(jnp.float16)


@functools.lru_cache(maxsize=4096)
def is_backward(stack: Any) -> bool:
    """Whether an operation was traced in the backward pass of a gradient within the function."""
    return "transpose(" in str(stack)


def _plan_op(
    op: Op, states: States, context: PlanContext, region: Region, cast_back: Collection[int]
) -> OpPlan:
    # What holds for a whole region comes first, then what holds for one operation whatever its
    # class (kernels, casts, programs inside), and the class last.
    functions = (*context.functions, *op.functions)
    context.names.update((op.name, *functions))
    op_class = context.lists.of(op.name, functions)
    # In a sealed region no dtype changes, only the precision of products.
    if region.sealed:
        if op_class is OpClass.CONTROL and region.precision is not None:
            return _at_precision(op, states, context, region)
        return plan_as_traced(op, states, exact=region.result)
    # Scopes inside a loop may have another policy than the scopes around it.
    if region.exact and op_class is not OpClass.CONTROL:
        return plan_as_traced(op, states, exact=region.result)
    if op_class is OpClass.CONTROL and not region.exact and ends_by_floats(op.equation):
        # As in `full_precision`; but its results join 16 bits.
        exact = dataclasses.replace(context, prefix=(*context.prefix, EXACT))
        op_plan = _at_precision(op, states, exact, context.regions.of(exact.prefix))
        op_plan.results = [
            State(Strength.HIGH, FLOAT32) if state and state.dtype == FLOAT32 else state
            for state in op_plan.results
        ]
        return op_plan
    if id(op.equation) in context.kernels and not region.exact:
        return replaced_kernel(op, states, context.kernels[id(op.equation)][1])
    if op.name == "convert_element_type":
        return convert(op, states, is_undone=op.number in cast_back)
    if op_class is OpClass.CONTROL or (op_class is None and bodies_of(op.equation)):
        return context.control(op, states, context, region)
    if op_class in (None, OpClass.ALONE) or has_own_program(op) or has_foreign_floats(op):
        return plan_as_traced(op, states)
    if not any(states):
        return plan_as_traced(op, states)
    return adapt_scatter(PLANNERS[op_class](op, states, region))
