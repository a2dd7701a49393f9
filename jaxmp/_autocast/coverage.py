"""Warns if autocast leaves products as they were traced, or none is in 8 bits, and says why."""

import collections
from collections.abc import Iterable
from typing import Any

import jax

from jaxmp._autocast.layers import ends_by_floats
from jaxmp._autocast.op_plans import OpPlan
from jaxmp._autocast.plan import Plan, PlanContext
from jaxmp._autocast.planners import asks_for_precision
from jaxmp._autocast.regions import scopes
from jaxmp._autocast.strengths import FLOAT32
from jaxmp._numerics.dtypes import DType, code_kind
from jaxmp._numerics.user_warnings import warn
from jaxmp._policies.recipe import ONE_ROW
from jaxmp._program.compat import bodies_of
from jaxmp._program.flops import product_flops, programs_inside
from jaxmp._program.hi_primitives import unknown_class
from jaxmp._program.op_classes import CLASSES, PRODUCTS, OpClass
from jaxmp._program.scopes import NOT_FLOAT8
from jaxmp._program.wiring import wiring_of

# Products run in 16 bits, in 8 bits, in 16 bits under a policy in 8 bits (the rest of the key is
# the reason), or in float32 (the key is the reason).
_LOW, _IN_8_BITS = "in 16 bits", "in 8 bits"
_IN_CUSTOM_VJP = (
    "inside of a jax.custom_vjp, which autocast leaves alone, as its author wrote its gradient for "
    "this computation. Kernels and the loops of Equinox and diffrax are such functions. Give "
    "jaxmp.autocast enter_custom_vjp=True; for a train step, "
    "make_train_step(jaxmp.autocast(loss_fn, policy, enter_custom_vjp=True))"
)
_PRECISE = "asked for by jax.default_matmul_precision. Leave it out where 16 bits will do"
_OWN_FLOAT32 = (
    "products of constants or positions, or of numbers that 16 bits do not hold. "
    "Weights and data should be arguments of the function"
)
_UNKNOWN = "unknown: "  # the rest of the key is the name of the call
_Flops = collections.Counter[str]


def warn_of_products_left(plan: Plan, context: PlanContext, warned: list[str]) -> None:
    """Warns if more than half of the FLOPs of products stay in float32 without a request.

    Products that `full_precision`, rules, `float32=` or `precision=` keep in float32 do not count.
    Warns, too, of any product inside a call that jaxmp does not know, and if a policy asks for
    products in 8 bits and none is.

    One warning is enough: `warned` holds those for this function so far, and gets the new one.
    """
    if warned:
        return
    flops = _flops_of_plan(plan, context)
    in_16_bits = {key: n for key, n in flops.items() if key.startswith(NOT_FLOAT8)}
    in_float32 = flops.copy()
    for key in (_LOW, _IN_8_BITS, *in_16_bits):
        del in_float32[key]
    total = flops.total()
    unknown = [key.removeprefix(_UNKNOWN) for key in in_float32 if key.startswith(_UNKNOWN)]
    if unknown:
        warned.append(
            f"autocast does not know {', '.join(unknown)}, and leaves the float32 products inside "
            "as they were traced. Give jaxmp.autocast enter_custom_vjp=True, which rewrites "
            "functions with a derivative of their own; or cast to 16 bits what the call is given. "
            "If float32 is meant, put jaxmp.full_precision around it"
        )
    elif 2 * in_float32.total() > total:
        warned.append(
            f"autocast leaves {100 * in_float32.total() / total:.0f} % of the FLOPs of products in "
            "float32: "
            + " ".join(f"{100 * n / total:.0f} % are {why}." for why, n in in_float32.most_common())
            + " jaxmp.audit has their lines. If float32 is meant, put jaxmp.full_precision around "
            "them"
        )
    elif in_16_bits and not flops[_IN_8_BITS]:
        reasons = [key.removeprefix(NOT_FLOAT8) for key in in_16_bits]
        warned.append(
            "a policy asks for products in 8 bits, and autocast finds none to put there: "
            + "; ".join(reasons)
            + ". jaxmp.audit has their lines. Weights should be float32 arguments of the function; "
            "jaxmp.float8.dot_general takes others. docs/float8.md says what is left out, and why"
        )
    if warned:
        warn(warned[0])


def _flops_of_plan(plan: Plan, context: PlanContext) -> _Flops:
    """Counts the FLOPs of products in 16 bits, and of products left in float32, by reason."""
    key = ("flops", id(plan), context.regions.deciding_scopes(context.prefix), context.functions)
    op_plans = (x for x in plan.op_plans if x.op.name in PRODUCTS or bodies_of(x.op.equation))
    flops: _Flops = context.shared.once(
        key, plan, lambda: _sum(_flops_of_op_plan(op_plan, context) for op_plan in op_plans)
    )
    return flops


def _flops_of_op_plan(op_plan: OpPlan, context: PlanContext) -> _Flops:
    op = op_plan.op
    names = (*context.prefix, *scopes(op.stack))
    if CLASSES.get(op.name) is OpClass.CONTROL and ends_by_floats(op.equation):
        return _Flops()  # in 16 bits they may never end
    if plans := context.plans_of(op):
        inside = context.inside(op)
        return _times_run(op.equation, [_flops_of_plan(plan, inside) for plan in plans])
    if op.name not in PRODUCTS:
        _, equation = context.kernels.get(id(op.equation), (None, op.equation))
        name = unknown_class(equation) or equation.primitive.name
        reason = f"inside of {name}, which autocast leaves alone"
        if name not in CLASSES:
            reason = _UNKNOWN + name
        elif name.startswith("custom_vjp_call"):
            reason = _IN_CUSTOM_VJP
        flops = _flops_as_traced(equation, names, context, reason)
        if op_plan.not_float8 is not None and (low := flops.pop(_LOW, 0)):
            flops[NOT_FLOAT8 + op_plan.not_float8] = low
        return flops
    if context.lists.of(op.name, (*context.functions, *op.functions)) is not OpClass.LOWER:
        return _Flops()
    reason = _OWN_FLOAT32
    if asks_for_precision(op.params.get("precision")):
        # The program looks the same, whether the product or the option asked for precision. An
        # option of the whole process may be forgotten.
        if jax.config.jax_default_matmul_precision is None:  # type: ignore[attr-defined]
            return _Flops()
        reason = _PRECISE
    if op_plan.float8 is not None or op_plan.not_float8 is not None:
        key = _LOW if op_plan.not_float8 == ONE_ROW else f"{NOT_FLOAT8}{op_plan.not_float8}"
        return _Flops({_IN_8_BITS if op_plan.float8 else key: product_flops(op.equation)})
    pairs = zip(op_plan.in_dtypes[:2], op.in_avals, strict=False)
    dtypes = [dtype or aval.dtype for dtype, aval in pairs]
    return _flops_of_product(op.equation, dtypes, names, context, reason)


def _flops_as_traced(
    equation: Any, names: tuple[str, ...], context: PlanContext, reason: str
) -> _Flops:
    """Counts them for an operation that runs as it was traced, in these scopes."""
    if equation.primitive.name in PRODUCTS:
        dtypes = [variable.aval.dtype for variable in equation.invars[:2]]
        return _flops_of_product(equation, dtypes, names, context, reason)

    def inside(equation: Any) -> _Flops:
        inner = (*names, *scopes(equation.source_info.name_stack))
        return _flops_as_traced(equation, inner, context, reason)

    programs = programs_inside(equation)
    return _times_run(equation, [_sum(map(inside, program.eqns)) for program in programs])


def _flops_of_product(
    equation: Any, dtypes: list[DType], names: tuple[str, ...], context: PlanContext, reason: str
) -> _Flops:
    is_wide = any(dtype.itemsize > FLOAT32.itemsize for dtype in dtypes)
    if is_wide or context.regions.of(names).exact:
        return _Flops()
    # Layers of Flax under a policy of their own, and hand-written products.
    in_8_bits = any(code_kind(dtype.name) for dtype in dtypes)
    key = _IN_8_BITS if in_8_bits else reason if FLOAT32 in dtypes else _LOW
    return _Flops({key: product_flops(equation)})


def _times_run(equation: Any, programs: list[_Flops]) -> _Flops:
    """Returns the FLOPs that an operation runs of its programs; of branches, the largest."""
    wiring = wiring_of(equation)
    if wiring.chooses:
        return max(programs, key=lambda flops: flops.total())
    # Where the turns of a loop are not known, its body counts once.
    total = _sum(programs)
    return _Flops({reason: wiring.known_turns * n for reason, n in total.items()})


def _sum(parts: Iterable[_Flops]) -> _Flops:
    total = _Flops()
    for flops in parts:
        total.update(flops)
    return total
