"""Kernels that are left as they are get 16-bit operands, if the function is traced for them.

A kernel behind `jax.custom_vjp` or Pallas is made for the dtypes of its operands while the function
is traced, and the function is traced in float32. So it is traced once more, with those arguments
cast that products read, and the kernels are taken from there: the n-th of that program in place of
the n-th of this one. A `custom_vjp` without a matrix product or another kernel inside, such as a
norm or a loss, gains nothing from 16 bits and loses range; an iterative solver may not converge in
them. Both stay in float32.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmp import _compat
from jaxmp._autocast._ancestry import NONE, Labels, follow
from jaxmp._autocast._kinds import FLOAT32, Kind, State
from jaxmp._autocast._scopes import Region, Regions, scopes
from jaxmp._autocast._steps import States, Step, alone
from jaxmp._op_lists import CLASSES, CONTRACTIONS, KERNELS, OpClass
from jaxmp._program import Op
from jaxmp._warnings import warn

# Equations of the first trace, by their id, each with the one that is to run in its place.
Taken = dict[int, tuple[core.JaxprEqn, core.JaxprEqn]]


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
) -> Taken:
    """The kernels of a function for 16-bit operands; warns of those that there are none for.

    Args:
      closed: the function, traced in float32.
      regions: which policy holds where. Kernels in float32 stay as they were traced.
      trace: traces it for other abstract arguments.
      weights: the numbers of its arguments that are params, and not data.
      enter_custom_vjp: whether functions with gradients of their own are no kernels.
    """
    names = KERNELS - {"custom_vjp_call"} if enter_custom_vjp else KERNELS
    kernels = list(_kernels(_compat.open_jaxpr(closed), (), names, regions))
    taken: Taken = {}
    reasons: dict[str, None] = {}
    for dtype in dict.fromkeys(x.region.low for x in kernels if not x.region.exact):
        leaves = _read_by_products(closed, weights)
        avals = [
            aval.update(dtype=dtype, weak_type=False) if i in leaves else aval
            for i, aval in enumerate(closed.in_avals)
        ]
        try:
            with jax.numpy_dtype_promotion("standard"):  # labels stay float32 beside predictions
                low = trace(avals)
        except Exception as error:  # of whatever sort: the function was not written for this
            text = str(error).partition("\n")[0]
            reasons[f"the function fails with them ({type(error).__name__}: {text})"] = None
            continue
        others = list(_kernels(_compat.open_jaxpr(low), (), names, regions))
        if len(others) != len(kernels):
            reasons[f"it calls {len(others)} kernels with them, and {len(kernels)} without"] = None
            continue
        pairs = zip(kernels, others, strict=True)
        reasons |= _take(taken, [pair for pair in pairs if pair[0].region.low == dtype])
    if reasons:
        warn(
            "kernels='low' traces the function a second time, with 16-bit arguments, and takes its "
            f"kernels from there. Some stay as they were traced, since {'; '.join(reasons)}"
        )
    return taken


def _kernels(
    jaxpr: Any, prefix: tuple[str, ...], names: frozenset[str], regions: Regions
) -> Iterator[_Kernel]:
    """The kernels of a program and of those in it, in their order."""
    for equation in jaxpr.eqns:
        path = (*prefix, *scopes(equation.source_info.name_stack))
        region = regions.of(path)
        name = equation.primitive.name
        if region.sealed:
            continue
        if name in names and _is_made_for_16_bits(equation):
            yield _Kernel(equation, region, "/".join((*path, _compat.function_name(equation))))
        elif CLASSES.get(name) is OpClass.CONTROL and name != "custom_vjp_call":
            for inner in _compat.sub_jaxprs(equation):
                yield from _kernels(inner, path, names, regions)


def _take(taken: Taken, pairs: Sequence[tuple[_Kernel, _Kernel]]) -> dict[str, None]:
    """Takes kernels in place of others, where they fit; the reasons where they do not."""
    refused: dict[int, str] = {}
    for kernel, other in pairs:
        old, new = kernel.equation, other.equation
        if _signature(old) != _signature(new):
            refused[id(old)] = f"{kernel.path} has other operands or results with them"
        elif _dtypes(taken.setdefault(id(old), (old, new))[1]) != _dtypes(new):
            refused[id(old)] = f"{kernel.path} is traced once for calls with several dtypes"
    for number in refused:
        taken.pop(number, None)
    return dict.fromkeys(refused.values())


def _signature(equation: core.JaxprEqn) -> Any:
    """What a kernel has to have in common with another: all but the dtypes of its floats."""

    def like(atoms: Sequence[Any]) -> list[Any]:
        return [(atom.aval.shape, None if _is_float(atom) else atom.aval.dtype) for atom in atoms]

    return equation.primitive, like(equation.invars), like(equation.outvars)


def _dtypes(equation: core.JaxprEqn) -> list[Any]:
    return [cast(Any, atom.aval).dtype for atom in (*equation.invars, *equation.outvars)]


def _is_float(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _read_by_products(closed: core.ClosedJaxpr, weights: set[int]) -> set[Hashable]:
    """Which arguments are operands of products, within kernels too: by number.

    Params are if they lead to a product by any way: as a bias does, which is added to what one
    product made for the next. Data are if a product reads them before they meet what a product
    made: inputs do, and labels, time stamps and the weights of examples do not.
    """
    read: set[Hashable] = set()

    def rule(equation: core.JaxprEqn, found: Sequence[Labels]) -> Labels:
        origin = NONE.union(*found)
        if _multiplies(equation):
            read.update(origin - _PRODUCT)
            return _PRODUCT
        return (origin & weights) | _PRODUCT if origin >= _PRODUCT else origin

    begin = (i if aval.dtype == FLOAT32 else None for i, aval in enumerate(closed.in_avals))
    given = [NONE if i is None else frozenset({i}) for i in begin]
    follow(_compat.open_jaxpr(closed), given, rule, _is_float)
    return read


# What a float is made of: arguments by number, and products.
_PRODUCT: Labels = frozenset({-1})


def _multiplies(equation: core.JaxprEqn) -> bool:
    """Whether an operation is a product, or a kernel with one inside; of some nobody can tell."""
    return any(
        each.primitive.name in CONTRACTIONS
        or (each.primitive.name in KERNELS and not _compat.sub_jaxprs(each))
        for each in _with_all_inside(equation)
    )


def _is_made_for_16_bits(kernel: core.JaxprEqn) -> bool:
    """Whether it multiplies or is another compiler's, and is no solver."""
    inside = list(_with_all_inside(kernel))
    worth = (CONTRACTIONS | KERNELS) - {"custom_vjp_call"}
    return any(each.primitive.name in worth for each in inside) and not any(map(_converges, inside))


def _converges(equation: core.JaxprEqn) -> bool:
    """Whether it is a loop that floats, or a flag, may end: a solver's. Others count turns."""
    if equation.primitive.name != "while":
        return False
    params = equation.params
    condition, body = map(_compat.open_jaxpr, (params["cond_jaxpr"], params["body_jaxpr"]))
    tested = condition.invars[params["cond_nconsts"] :]
    carried = body.invars[params["body_nconsts"] :]
    read = {id(atom) for eqn in condition.eqns for atom in eqn.invars}
    read |= set(map(id, condition.outvars))
    return any(
        id(var) in read and after is not before and (_is_float(var) or _is_flag(var))
        for var, before, after in zip(tested, carried, body.outvars, strict=True)
    )


def _is_flag(atom: Any) -> bool:
    return bool(getattr(atom.aval, "dtype", None) == jnp.bool_)


def _with_all_inside(equation: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    yield equation
    for jaxpr in _compat.sub_jaxprs(equation):
        for each in jaxpr.eqns:
            yield from _with_all_inside(each)


def taken_step(op: Op, states: States, low: core.JaxprEqn) -> Step:
    """A kernel that was traced for 16 bits: what it gives in 16 bits is an activation."""
    step = alone(op, states)
    reads = [cast(Any, atom.aval) for atom in low.invars]
    makes = [cast(Any, atom.aval) for atom in low.outvars]
    step.wants = [state and aval.dtype for state, aval in zip(states, reads, strict=True)]
    step.results = [
        state and State(Kind.HIGH if aval.dtype == FLOAT32 else Kind.LOW, aval.dtype)
        for state, aval in zip(step.results, makes, strict=True)
    ]
    step.run = lambda op, values: _compat.bind(low, values)
    return step
