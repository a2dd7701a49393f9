"""Audits a traced program: which operations run in which dtype, and where upcasts come from."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax

from jaxmp._numerics.dtypes import code_kind
from jaxmp._program import compat
from jaxmp._program.op_classes import CHECKPOINTS
from jaxmp._tools.inspect.checks import AuditError
from jaxmp._tools.inspect.collective_report import Collectives, CompiledCollective
from jaxmp._tools.inspect.collectives import collectives
from jaxmp._tools.inspect.compiled import closed_over, is_array
from jaxmp._tools.inspect.equations import walk
from jaxmp._tools.inspect.lock import numerics_rows
from jaxmp._tools.inspect.reduced import assert_reduced_in
from jaxmp._tools.inspect.report import AuditReport
from jaxmp._tools.inspect.residuals import NoLoss, check_loss, residuals
from jaxmp._tools.inspect.rows import (
    Arrays,
    Collective,
    Convert,
    Equations,
    LeftOut,
    Numerics,
    Product,
    ProductLine,
    Recomputed,
    Residual,
    Unseen,
    Upcast,
    grouped,
)
from jaxmp._tools.inspect.summarize import Tally
from jaxmp._tools.inspect.unseen import hiding, unseen_in

__all__ = [
    "Arrays",
    "AuditError",
    "AuditReport",
    "Collective",
    "Collectives",
    "CompiledCollective",
    "Convert",
    "Equations",
    "LeftOut",
    "Numerics",
    "Product",
    "ProductLine",
    "Recomputed",
    "Residual",
    "Unseen",
    "Upcast",
    "assert_reduced_in",
    "audit",
    "collectives",
]


def audit(fn: Callable[..., Any], *args: Any, compiled: Any = False, **kwargs: Any) -> AuditReport:
    """Reports which operations of a function run in which dtype, and where upcasts come from.

    One forgotten cast is enough to run the rest of a model in float32: nothing fails, and no shape
    shows it. `audit` traces the function, without compiling or running it. It counts FLOPs of
    products by dtype, upcasts by line of your code, casts, residuals of the backward pass, and
    the data of collectives.

    Args:
      fn: any function that can be traced: a loss, a train step, `model.apply`; jitted or not.
      *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`. Other values are passed to `fn`
        unchanged.
      compiled: whether to compile the function too and report its collectives and 8-bit products;
        or the result of `lower` or `compile` of the jitted function. See `collectives`.
      **kwargs: its keyword arguments.

    Returns:
      The report. Print it, look into it, or `check` it. It has `residuals` if the function is a
      loss: if it returns a float scalar, or a pair that starts with one. The gradient is with
      respect to all floats of the first argument. A loss is traced twice and its backward pass
      once, and both together once more if it has checkpoints.

    Raises:
      TypeError: if `fn` is not callable, or if JAX cannot trace it with these arguments.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     hidden = x @ params["first"]
    ...     return jnp.sum(hidden.astype(jnp.float32) @ params["second"].astype(jnp.float32))
    >>> params = {"first": jnp.ones((8, 8), jnp.bfloat16), "second": jnp.ones((8, 4), jnp.bfloat16)}
    >>> report = audit(loss, params, jax.ShapeDtypeStruct((2, 8), jnp.bfloat16))
    >>> [(row.operands[0], row.flops) for row in report.products]
    [('bfloat16', 256), ('float32', 128)]
    >>> round(report.share("bfloat16"), 3)
    0.667
    >>> report.check(products=("bfloat16", "float32"), upcasts=1) is report
    True
    """
    if not callable(fn):
        raise TypeError(f"audit takes a function and its arguments, got {type(fn).__name__}")
    # Only arrays are traced. Other values, such as functions and flags, are passed on unchanged.
    run, inputs, named = fn, args, kwargs
    if hasattr(fn, "on_arrays"):  # of live modules, whose shared variables a tree has twice
        (run, inputs), named = fn.on_arrays(*args, **kwargs), {}
    arrays, call = closed_over(run, inputs, named)
    # Unlike all contexts before: of a function that JAX has traced already, such as a branch, the
    # program would have the lines of its first caller.
    context = object()
    with compat.IS_READ(context):
        jaxpr, result = jax.make_jaxpr(call, return_shape=True)(arrays)
    program = None
    if compiled is True:
        program = collectives(fn, *args, **kwargs)
    elif compiled is not None and compiled is not False:
        program = collectives(compiled)
    whole = walk(jaxpr)
    tally = Tally(whole)
    # The rule of a derivative may hold a checkpoint.
    recomputes = any(site.name in {*CHECKPOINTS, "custom_jvp_call"} for site in tally.sites)
    with compat.IS_READ(context):
        rows, reason, both = _residuals(run, inputs, named, result, recomputes)
    unseen = unseen_in(tally.sites, is_compiled=program is not None)
    dtypes = {dtype for row in tally.products() for dtype in (*row.operands, *row.rounded_to)}
    # Compilers widen codes without a word where the device has no such product.
    if program is not None and not program.float8_products and any(map(code_kind, dtypes)):
        unseen += (
            f"Where the 8-bit operands are: no product of the {program.origin} has one. Its "
            "compiler widened them, and may have dropped the rounding to 8 bits, too.",
        )
    return AuditReport(
        products=tally.products(),
        product_lines=tally.product_lines(),
        left_out=tally.left_out(),
        upcasts=tally.upcasts(),
        converts=tally.converts(),
        residuals=rows,
        no_residuals=reason,
        # Checkpoints of a loss run again in its gradient, which its forward pass does not show.
        recomputed=(tally if both is None else Tally(both)).recomputed(),
        arrays=argument_rows(fn, args, kwargs) + result_rows(result),
        collectives=tally.collectives(),
        equations=tally.equations(),
        unseen=unseen,
        unseen_lines=tally.unseen(hiding(tally.sites)),
        work=tally.work(),
        numerics=numerics_rows(tally, whole),
        compiled=program,
    )


def _residuals(
    fn: Any, args: Any, kwargs: Any, result: Any, recomputes: bool
) -> tuple[Any, str, Any]:
    """Returns the residuals, why there are none, and the program of both passes."""
    first = args[0] if args else None

    # The first argument stays whole: `residuals` differentiates by its floats.
    def from_first(*others: Any, **kwargs: Any) -> Callable[[Any], Any]:
        return lambda first: fn(first, *others, **kwargs)

    arrays, call = closed_over(from_first, args[1:], kwargs)
    has_aux = isinstance(result, tuple)
    try:
        check_loss(result, first)
        rows, both = residuals(lambda x, ys: call(ys)(x), first, arrays, has_aux, recomputes)
    except NoLoss as error:
        return None, str(error), None
    return rows, "", both


# A dictionary with more keys, such as the params of a hundred blocks, is one row.
_MOST_KEYS = 12


def argument_rows(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Arrays, ...]:
    """Returns the rows of the arguments, named after the function's parameters."""
    # Named after parameters: "argument 3" of a train step says nothing in a table.
    rows: list[Arrays] = []
    for name, value in _named_arguments(fn, args, kwargs).items():
        rows += _array_rows("argument", name, value)
    return tuple(rows)


def result_rows(result: Any) -> tuple[Arrays, ...]:
    """Returns the rows of the result; a tuple has rows for each item."""
    items = {"result": result}
    if type(result) is tuple:  # a NamedTuple is one result, and has fields
        items = {f"result[{i}]": item for i, item in enumerate(result)}
    return tuple(row for name, item in items.items() for row in _array_rows("result", name, item))


def _named_arguments(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    numbered = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
    try:
        signature = inspect.signature(fn)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a builtin without a signature, or arguments that do not fit
        return numbered
    values: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            values |= {f"{name}[{i}]": item for i, item in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            values |= value
        else:
            values[name] = value
    return values


def _array_rows(role: Literal["argument", "result"], name: str, value: Any) -> Iterator[Arrays]:
    # Two levels: `state`, and `state.params` and `state.opt_state` of a train state.
    for field, part in _with_fields(name, value, depth=2):
        arrays = filter(is_array, jax.tree.leaves(part))
        for dtype, leaves in grouped(arrays, _dtype_in_jax).items():
            elements = int(sum(leaf.size for leaf in leaves))
            yield Arrays(role, field, str(dtype), len(leaves), elements, elements * dtype.itemsize)


def _dtype_in_jax(leaf: Any) -> Any:
    # A NumPy array of 64 bits has 32 in the program, unless jax_enable_x64 is set.
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)


def _with_fields(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yields a value, or its fields if it is a dictionary, dataclass or NamedTuple."""
    fields: dict[str, Any] = {}
    if depth and hasattr(value, "_fields"):
        fields = {field: getattr(value, field) for field in value._fields}
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {field: getattr(value, field) for field in names}
    elif depth == 2 and isinstance(value, Mapping) and len(value) <= _MOST_KEYS:
        fields = {str(key): item for key, item in value.items()}
    if not fields:
        yield name, value
    for field, item in fields.items():
        yield from _with_fields(f"{name}.{field}", item, depth - 1)
