"""Audits a traced program: which operations run in which dtype, and where upcasts come from."""

from collections.abc import Callable
from typing import Any

import jax

from jaxmp._program.op_classes import CHECKPOINTS
from jaxmp._tools.inspect.arrays import argument_rows, result_rows
from jaxmp._tools.inspect.checks import AuditError
from jaxmp._tools.inspect.collective_report import Collectives, CompiledCollective
from jaxmp._tools.inspect.collectives import collectives
from jaxmp._tools.inspect.compiled import closed_over, is_array
from jaxmp._tools.inspect.decoded import is_float8
from jaxmp._tools.inspect.equations import walk
from jaxmp._tools.inspect.reduced import assert_reduced_in
from jaxmp._tools.inspect.report import AuditReport
from jaxmp._tools.inspect.residuals import NoLoss, check_loss, residuals
from jaxmp._tools.inspect.rows import (
    Arrays,
    Collective,
    Convert,
    Equations,
    LeftOut,
    Product,
    ProductLine,
    Recomputed,
    Residual,
    Unseen,
    Upcast,
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
      compiled: whether to compile the function too and report its collectives and float8 products;
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
    arrays, call = closed_over(fn, args, kwargs)
    jaxpr, result = jax.make_jaxpr(call, return_shape=True)(arrays)
    program = None
    if compiled is True:
        program = collectives(fn, *args, **kwargs)
    elif compiled is not None and compiled is not False:
        program = collectives(compiled)
    body = walk(jaxpr)
    tally = Tally(body)
    recomputes = any(site.name in CHECKPOINTS for site in tally.sites)
    kept, reason, both = _residuals(fn, args, kwargs, result, recomputes)
    return AuditReport(
        products=tally.products(),
        product_lines=tally.product_lines(),
        left_out=tally.left_out(),
        upcasts=tally.upcasts(),
        converts=tally.converts(),
        residuals=kept,
        no_residuals=reason,
        recomputed=(tally if both is None else Tally(both)).recomputed(),
        arrays=argument_rows(fn, args, kwargs) + result_rows(result),
        collectives=tally.collectives(),
        equations=tally.equations(),
        unseen=unseen_in(tally.sites, is_compiled=program is not None) + _lost(tally, program),
        unseen_lines=tally.unseen(hiding(tally.sites)),
        work=tally.work(),
        compiled=program,
    )


def _lost(tally: Tally, program: Collectives | None) -> tuple[str, ...]:
    """Returns a sentence if float8 operands of the traced program are not in the compiled one."""
    dtypes = {dtype for row in tally.products() for dtype in (*row.operands, *row.rounded_to)}
    if program is None or program.float8_products or not any(map(is_float8, dtypes)):
        return ()
    return (
        f"Where the float8 operands are: no product of the {program.origin} has one. Its compiler "
        "widened them, and may have dropped the rounding to float8, too.",
    )


def _residuals(
    fn: Any, args: Any, kwargs: Any, result: Any, recomputes: bool
) -> tuple[Any, str, Any]:
    first, rest = (args[0], args[1:]) if args else (None, ())
    leaves, structure = jax.tree.flatten((rest, kwargs))
    arrays = [leaf if is_array(leaf) else None for leaf in leaves]

    def loss(first: Any, arrays: list[Any]) -> Any:
        filled = [x if array is None else array for x, array in zip(leaves, arrays, strict=True)]
        rest, kwargs = jax.tree.unflatten(structure, filled)
        return fn(first, *rest, **kwargs)

    try:
        check_loss(result, first)
        kept, both = residuals(loss, first, arrays, isinstance(result, tuple), recomputes)
    except NoLoss as error:
        return None, str(error), None
    return kept, "", both
