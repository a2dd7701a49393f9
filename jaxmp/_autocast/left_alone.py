"""Warns if most of a function stays in float32, and says why."""

import collections
from collections.abc import Iterable
from typing import Any

import jax

from jaxmp._autocast.kinds import FLOAT32
from jaxmp._autocast.plan import Call, Plan
from jaxmp._autocast.regions import scopes
from jaxmp._autocast.rules import asks_for_precision
from jaxmp._autocast.steps import Step
from jaxmp._jaxpr.flops import product_flops, programs_inside
from jaxmp._jaxpr.op_classes import PRODUCTS, OpClass
from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.user_warnings import warn

_LOW = "in 16 bits"
_IN_CUSTOM_VJP = (
    "inside of a jax.custom_vjp, which autocast leaves alone, as its author wrote its gradient for "
    "this computation. Kernels and the loops of Equinox and diffrax are such functions. Give "
    "jaxmp.autocast enter_custom_vjp=True; for a train step, "
    "make_train_step(jaxmp.autocast(loss_fn, policy, enter_custom_vjp=True))"
)
_PRECISE = "asked for by jax.default_matmul_precision. Leave it out where 16 bits will do"
_KEPT = (
    "products of constants or positions, outer ones, or of numbers that 16 bits do not hold. "
    "Weights and data should be arguments of the function"
)
_Flops = collections.Counter[str]


def warn_if_most_is_left(planned: Plan, context: Call, told: list[str]) -> None:
    """Warns if more than half of the FLOPs of products stay in float32 without a request.

    Products that `full_precision`, rules, `float32=` or `precision=` keep in float32 do not count.

    Args:
      planned: the plan of a whole function.
      context: the context that it was planned in.
      told: the warnings for this function so far. One is enough; a new one is added to the list.
    """
    if told:
        return
    flops = _of_plan(planned, context)
    total, left = flops.total(), flops.total() - flops[_LOW]
    if 2 * left <= total:
        return
    del flops[_LOW]
    reasons = [f"{100 * n / total:.0f} % are {reason}." for reason, n in flops.most_common()]
    told.append(
        f"autocast leaves {100 * left / total:.0f} % of the FLOPs of products in float32: "
        + " ".join(reasons)
        + " jaxmp.audit has their lines. If float32 is meant, put jaxmp.full_precision around them"
    )
    warn(told[0])


def _of_plan(planned: Plan, context: Call) -> _Flops:
    """Counts the FLOPs of products in 16 bits, and of products left in float32, by reason."""
    key = ("flops", id(planned), context.regions.deciding(context.prefix), context.functions)
    if key not in context.memo:
        context.memo[key] = _added(_of_step(step, context) for step in planned.steps), planned
    found: _Flops = context.memo[key][0]
    return found


def _of_step(step: Step, context: Call) -> _Flops:
    op = step.op
    if plans := context.plans_of(op):
        inside = context.inside(op)
        return _times_run(op.equation, [_of_plan(each, inside) for each in plans])
    names = (*context.prefix, *scopes(op.stack))
    if op.name not in PRODUCTS:
        _, runs = context.kernels.get(id(op.equation), (None, op.equation))
        return _inside(runs, names, context, _reason_of(op.name))
    if context.lists.of(op.name, (*context.functions, *op.functions)) is not OpClass.LOWER:
        return collections.Counter()
    reason = _KEPT
    if asks_for_precision(op.params.get("precision")):
        # The program looks the same, whether the product or the option asked for precision. An
        # option of the whole process may be forgotten.
        if jax.config.jax_default_matmul_precision is None:  # type: ignore[attr-defined]
            return collections.Counter()
        reason = _PRECISE
    if step.float8 is not None:
        return collections.Counter({_LOW: product_flops(op.equation)})
    wants = zip(step.wants[:2], op.in_avals, strict=False)
    dtypes = [want or aval.dtype for want, aval in wants]
    return _of_product(op.equation, dtypes, names, context, reason)


def _reason_of(name: str) -> str:
    if name.startswith("custom_vjp_call"):
        return _IN_CUSTOM_VJP
    return f"inside of {name}, which autocast leaves alone"


def _inside(equation: Any, names: tuple[str, ...], context: Call, reason: str) -> _Flops:
    """Counts them for an operation whose inner programs run as they were traced."""
    programs = [
        _added(_flops_as_traced(each, names, context, reason) for each in program.eqns)
        for program in programs_inside(equation)
    ]
    return _times_run(equation, programs)


def _flops_as_traced(equation: Any, names: tuple[str, ...], context: Call, reason: str) -> _Flops:
    names = (*names, *scopes(equation.source_info.name_stack))
    if equation.primitive.name not in PRODUCTS:
        return _inside(equation, names, context, reason)
    dtypes = [variable.aval.dtype for variable in equation.invars[:2]]
    return _of_product(equation, dtypes, names, context, reason)


def _of_product(
    equation: Any, dtypes: list[DType], names: tuple[str, ...], context: Call, reason: str
) -> _Flops:
    if context.regions.of(names).exact or any(
        dtype.itemsize > FLOAT32.itemsize for dtype in dtypes
    ):
        return collections.Counter()
    return collections.Counter({reason if FLOAT32 in dtypes else _LOW: product_flops(equation)})


def _times_run(equation: Any, found: list[_Flops]) -> _Flops:
    """Returns the FLOPs that an operation runs of its inner programs; of branches, the largest."""
    name = equation.primitive.name
    if name == "cond":
        return max(found, key=lambda flops: flops.total())
    # The turns of a `while` are not known: its body counts once.
    times = equation.params["length"] if name == "scan" else 1
    return collections.Counter({reason: times * n for reason, n in _added(found).items()})


def _added(found: Iterable[_Flops]) -> _Flops:
    total: _Flops = collections.Counter()
    for flops in found:
        total.update(flops)
    return total
