"""Reads from a traced program what runs in which dtype, and where upcasts come from."""

from collections.abc import Callable
from typing import Any

import jax

from jaxmp._audit._arrays import argument_rows, result_rows
from jaxmp._audit._check import AuditError
from jaxmp._audit._collective_report import Collectives, CompiledCollective
from jaxmp._audit._collectives import collectives
from jaxmp._audit._programs import closed_over, is_array
from jaxmp._audit._reduced import assert_reduced_in
from jaxmp._audit._report import AuditReport
from jaxmp._audit._residuals import NoLoss, check_loss, residuals
from jaxmp._audit._rows import (
    Arrays,
    Collective,
    Convert,
    Equations,
    Product,
    ProductLine,
    Recomputed,
    Residual,
    Unseen,
    Upcast,
)
from jaxmp._audit._tally import Tally
from jaxmp._audit._unseen import PARTITIONER, are_sharded, hiding, unseen_in
from jaxmp._audit._upcasts import mark_upcasts
from jaxmp._audit._walk import walk

__all__ = [
    "Arrays",
    "AuditError",
    "AuditReport",
    "Collective",
    "Collectives",
    "CompiledCollective",
    "Convert",
    "Equations",
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
    """What runs in which dtype in a function, and where silent upcasts come from.

    One forgotten cast is enough to run the rest of a model in float32: nothing fails, and no shape
    shows it. Here the function is traced, not compiled and not run, and what it does is counted:
    FLOPs of products by dtype, upcasts by the line of your code, casts, what is kept for the
    backward pass, and what collectives carry.

    Args:
      fn: any function that can be traced: a loss, a train step, `model.apply`; jitted or not.
      *args: its arguments. Arrays may be `jax.ShapeDtypeStruct`. What is no array is handed on
        as it is.
      compiled: whether to compile the function too, for what its collectives carry; or what
        `lower` or `compile` of the jitted function gives. See `collectives`.
      **kwargs: its keyword arguments.

    Returns:
      The report. Print it, look into it, or `check` it. `residuals` are those of a function that
      returns a float scalar, or a pair of one and something else: what a gradient by all floats of
      its first argument keeps, and computes again. Such a function is traced twice, and a third
      time with its gradient if there are checkpoints in it.

    Raises:
      TypeError: if `fn` cannot be called, or for what tracing itself does not accept.

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
    tally = Tally(body.all_sites(), mark_upcasts(body))
    recomputes = any(site.name in ("remat2", "checkpoint") for site in tally.sites)
    kept, reason, both = _residuals(fn, args, kwargs, result, recomputes)
    is_partitioned_later = program is None and are_sharded(arrays, tally.sites)
    unpartitioned = (PARTITIONER,) if is_partitioned_later else ()
    return AuditReport(
        products=tally.products(),
        product_lines=tally.product_lines(),
        upcasts=tally.upcasts(),
        converts=tally.converts(),
        residuals=kept,
        no_residuals=reason,
        recomputed=(tally if both is None else Tally(both.all_sites(), [])).recomputed(),
        arrays=argument_rows(fn, args, kwargs) + result_rows(result),
        collectives=tally.collectives(),
        equations=tally.equations(),
        unseen=unseen_in(tally.sites, is_compiled=program is not None),
        unseen_lines=tally.unseen(hiding(tally.sites)) + unpartitioned,
        work=tally.work(),
        compiled=program,
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
