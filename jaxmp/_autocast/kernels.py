"""Takes kernels for 16-bit operands from a second trace of the function.

A kernel behind `jax.custom_vjp` or Pallas is made for the dtypes of its operands while the function
is traced, and that is float32. So the function is traced once more, with the arguments that
products read cast to 16 bits. The n-th kernel of that program replaces the n-th kernel of this one.
A kernel without a matrix product inside, such as a norm or a loss, gains nothing from 16 bits and
loses range; an iterative solver may not converge in 16 bits. Both stay in float32. A kernel of
another compiler does not show what is inside, and counts as one with a product.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax.extend import core

from jaxmp._autocast.layers import ends_by_floats
from jaxmp._autocast.op_plans import OpPlan, States, plan_as_traced
from jaxmp._autocast.regions import Region, Regions, scopes
from jaxmp._autocast.strengths import FLOAT32, State, Strength
from jaxmp._numerics.dtypes import is_floating
from jaxmp._numerics.user_warnings import warn
from jaxmp._program import compat
from jaxmp._program.facts import NONE, Labels, made_of
from jaxmp._program.op_classes import CLASSES, CONTRACTIONS, KERNELS, OpClass
from jaxmp._program.program import Op, equations_in

# Equations of the first trace, by their id, each with the equation that replaces it.
Replacements = dict[int, tuple[core.JaxprEqn, core.JaxprEqn]]


class _Kernel(NamedTuple):
    equation: core.JaxprEqn
    region: Region
    path: str


def low_kernels(
    closed: core.ClosedJaxpr,
    regions: Regions,
    trace: Callable[[list[Any]], core.ClosedJaxpr],
    *,
    weights: set[int],
    enter_custom_vjp: bool,
) -> Replacements:
    """Returns the kernels of a function for 16-bit operands; warns of kernels that have none.

    Args:
      closed: the function, traced in float32.
      regions: the policy of each scope. Kernels in float32 regions stay as they were traced.
      trace: traces the function for arguments of other dtypes.
      weights: the numbers of the arguments that are params, and not data.
      enter_custom_vjp: whether `custom_vjp` functions are rewritten, and so are not kernels.
    """
    names = KERNELS - {"custom_vjp_call"} if enter_custom_vjp else KERNELS
    kernels = list(_kernels(compat.open_jaxpr(closed), (), names, regions))
    replacements: Replacements = {}
    reasons: dict[str, None] = {}
    lows = dict.fromkeys(kernel.region.low for kernel in kernels if not kernel.region.exact)
    # A cast of all arguments would round labels: near 1,000, bfloat16 rounds to multiples of 4.
    leaves = _read_by_products(closed, weights) if lows else set()
    for dtype in lows:
        dtypes = [dtype if i in leaves else aval.dtype for i, aval in enumerate(closed.in_avals)]
        try:
            with jax.numpy_dtype_promotion("standard"):  # float32 labels meet 16-bit predictions
                low = trace(dtypes)
        except Exception as error:  # any error: the function was not written for 16-bit arguments
            text = str(error).partition("\n")[0]
            reasons[f"the function fails with them ({type(error).__name__}: {text})"] = None
            continue
        others = list(_kernels(compat.open_jaxpr(low), (), names, regions))
        # Only their order tells which kernels of the two programs belong together.
        if len(others) != len(kernels):
            reasons[f"it calls {len(others)} kernels with them, and {len(kernels)} without"] = None
            continue
        pairs = zip(kernels, others, strict=True)
        in_dtype = [pair for pair in pairs if pair[0].region.low == dtype]
        reasons |= _match_kernels(replacements, in_dtype)
    if reasons:
        warn(
            "kernels='low' takes kernels from a second trace of the function. Some kernels stay as "
            "they were traced, because the second trace has 16-bit arguments, and "
            f"{'; '.join(reasons)}"
        )
    return replacements


def _kernels(
    jaxpr: Any, prefix: tuple[str, ...], names: frozenset[str], regions: Regions
) -> Iterator[_Kernel]:
    """Yields the kernels of a program and of the programs inside it, in order."""
    for equation in jaxpr.eqns:
        path = (*prefix, *scopes(equation.source_info.name_stack))
        region = regions.of(path)
        name = equation.primitive.name
        if region.sealed:
            continue
        # Kernels without a product are norms and losses, also Pallas ones. In float16 a norm gave
        # NaN, and a loss gave infinity; a sum in a Pallas loop was off by a factor of ten.
        is_kernel = name in names and _multiplies(equation)
        if is_kernel:
            inside = equations_in(compat.sub_jaxprs(equation))
            is_kernel = not any(map(ends_by_floats, (equation, *inside)))
        if is_kernel:
            yield _Kernel(equation, region, "/".join((*path, compat.function_name(equation))))
        elif CLASSES.get(name) is OpClass.CONTROL and name != "custom_vjp_call":
            for inner in compat.sub_jaxprs(equation):
                yield from _kernels(inner, path, names, regions)


def _match_kernels(
    replacements: Replacements, pairs: Sequence[tuple[_Kernel, _Kernel]]
) -> dict[str, None]:
    """Replaces kernels by their 16-bit versions where these fit; returns the reasons where not."""
    refused: dict[int, str] = {}
    for kernel, other in pairs:
        old, new = kernel.equation, other.equation
        _, first = replacements.setdefault(id(old), (old, new))
        if _signature(old) != _signature(new):
            refused[id(old)] = f"{kernel.path} has other operands or results with them"
        # JAX traces a jitted function once, so that one equation may stand for several calls. In
        # the second trace, their kernels may have different dtypes.
        elif _dtypes_of_operands(first) != _dtypes_of_operands(new):
            refused[id(old)] = f"{kernel.path} is traced once for calls with several dtypes"
    for number in refused:
        replacements.pop(number, None)
    return dict.fromkeys(refused.values())


def _signature(equation: core.JaxprEqn) -> Any:
    """Returns what a kernel must share with its replacement: all but the dtypes of its floats."""
    avals: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    types = [(aval.shape, None if is_floating(aval) else aval.dtype) for aval in avals]
    return equation.primitive, len(equation.invars), types


def _dtypes_of_operands(equation: core.JaxprEqn) -> list[Any]:
    return [cast(Any, atom.aval).dtype for atom in (*equation.invars, *equation.outvars)]


def _read_by_products(closed: core.ClosedJaxpr, weights: set[int]) -> set[Hashable]:
    """Returns the numbers of the arguments that products read, also inside kernels.

    A param counts if it leads to a product in any way, as a bias does between two products. Data
    counts if a product reads it before it meets the result of a product: inputs count; labels, time
    stamps and the weights of examples do not.
    """
    arguments: set[Hashable] = set()

    def rule(equation: core.JaxprEqn, operands: Sequence[Labels]) -> Labels:
        origin = NONE.union(*operands)
        if _multiplies(equation):
            arguments.update(origin - _PRODUCT)
            return _PRODUCT
        # Data that joins the result of a product is a label or a time stamp. A param that joins
        # there is a bias.
        return (origin & weights) | _PRODUCT if origin >= _PRODUCT else origin

    avals = enumerate(closed.in_avals)
    labels = [frozenset({i}) if aval.dtype == FLOAT32 else NONE for i, aval in avals]
    made_of(closed, labels, rule, is_floating)
    return arguments


# The labels of a float are the numbers of the arguments that make it; -1 stands for products.
_PRODUCT: Labels = frozenset({-1})


def _multiplies(equation: core.JaxprEqn) -> bool:
    """Whether an operation is a product, or a kernel that has or may have one inside."""
    return any(
        x.primitive.name in CONTRACTIONS
        or (x.primitive.name in KERNELS and not compat.sub_jaxprs(x))
        for x in (equation, *equations_in(compat.sub_jaxprs(equation)))
    )


def replaced_kernel(op: Op, states: States, low: core.JaxprEqn) -> OpPlan:
    """Plans a kernel that was traced for 16 bits; its 16-bit results are activations."""
    op_plan = plan_as_traced(op, states)
    in_avals = [cast(Any, atom.aval) for atom in low.invars]
    out_avals = [cast(Any, atom.aval) for atom in low.outvars]
    op_plan.in_dtypes = [state and aval.dtype for state, aval in zip(states, in_avals, strict=True)]
    op_plan.results = [
        state and State(Strength.HIGH if aval.dtype == FLOAT32 else Strength.LOW, aval.dtype)
        for state, aval in zip(op_plan.results, out_avals, strict=True)
    ]
    op_plan.run = functools.partial(compat.bind, low)
    return op_plan
