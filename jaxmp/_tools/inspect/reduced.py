"""Checks in tests that no sum over devices has fewer bits than wanted."""

import dataclasses
import fnmatch
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from jaxmp._numerics.dtypes import parse_dtype
from jaxmp._program.scopes import names_in
from jaxmp._tools.inspect.checks import AuditError
from jaxmp._tools.inspect.collectives import collectives
from jaxmp._tools.inspect.offenders import by_line

_HINT = (
    "A program does not say which sums are of activations, which may be narrow, as of experts, "
    "graphs or tensor parallelism. If some of these are, name what makes them: activations=("
    "'a scope, module, function, file, primitive, or pass',)"
)


def assert_reduced_in(
    program: Any,
    dtype: Any,
    *args: Any,
    mesh: Any = None,
    axis: Any = None,
    activations: Any = (),
    **kwargs: Any,
) -> None:
    """Raises if the compiled program sums gradients over devices in fewer bits than `dtype`.

    Use it in your tests. The results of a small test do not show how gradients are summed: on
    eight devices the error of bfloat16 sums is as small as that of bfloat16 itself, and on CPUs
    the sums are always float32. The dtypes of the program's collectives do show it.

    Sums of activations may be narrow, as in tensor parallelism, experts or graphs. This check
    cannot tell them from gradients: a fused loss has gradients in its forward pass, and the
    backward pass has activations too. Name these sums, or the axis of the gradient sums.

    Args:
      program: a function that computes gradients, such as a train step; or anything else that
        `collectives` takes.
      dtype: the narrowest dtype that is fine, such as `"float32"`.
      *args: the arguments of a function. Arrays may be `jax.ShapeDtypeStruct` with a sharding.
      mesh: the mesh, if `axis` is given and the arguments do not tell.
      axis: the mesh axis that gradients are summed over, such as `"data"`, or a tuple of axes.
        The program must have sums over each of them: without sums, all devices along an axis
        compute the same. Sums over only other axes may be narrower, such as sums of activations
        in tensor parallelism.
      activations: one or several patterns such as `"expert*"` that name the sums of activations:
        the name of a linen module, a `jax.named_scope`, a primitive (`"scatter-add"`), or a
        function or file in the reported line; or `"forward"` for the forward pass (which JAX does
        not tell from the backward pass in a `shard_map`).
      **kwargs: keyword arguments of the function.

    Raises:
      AuditError: with all sums that are too narrow, by line; or if the program has no sums to
        check. It is an AssertionError.
      TypeError: as `collectives` does, and if `activations` are not names.
      ValueError: as `collectives` does, and for an unknown dtype or mesh axis.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    >>> devices = jax.device_count()
    >>> mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    >>> def array(*shape, spec):
    ...     sharding = NamedSharding(mesh, spec)
    ...     return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)))
    >>> args = array(128, 64, spec=P()), array(32, 128, spec=P("data"))
    >>> try:
    ...     assert_reduced_in(jax.grad(loss), "float32", *args)
    ... except AssertionError as error:
    ...     says = str(error)
    >>> "16,384 bytes  bfloat16  all-reduce over data" in says if devices > 1 else True
    True
    """
    name = parse_dtype(dtype).name
    patterns = (activations,) if isinstance(activations, str) else activations
    if not isinstance(patterns, Collection) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            "activations are names of scopes, modules, functions, files, primitives or passes, "
            f"such as 'experts', got {activations!r}"
        )
    report = collectives(program, *args, mesh=mesh, **kwargs)
    rows = tuple(row for row in report if not (row.sums and _matches_any(row, patterns)))
    report = dataclasses.replace(report, rows=rows)
    if axis is None:
        problems = _narrow_sums(report, name, "devices")
    else:
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        sizes = dict(report.mesh_axes)
        problems = []
        # Nothing is summed over an axis of one device. Each of the others must have sums: replicas
        # that read the same examples compute the same, for nothing.
        for one in [axis for axis in axes if sizes.get(axis) != 1] or axes:
            problems += _missing_sums(report.select(axis=one), f"the mesh axis {one!r}")
        over = f"the mesh {'axis' if len(axes) == 1 else 'axes'} {', '.join(map(repr, axes))}"
        problems = problems or _narrow_sums(report.select(axis=axes), name, over)
    if problems:
        hint = [_HINT] if len(problems) > 1 else []
        raise AuditError("\n".join(problems + hint))


def _matches_any(row: Any, patterns: Collection[str]) -> bool:
    """Whether a pattern matches the pass, a scope, the primitive, the file or a function."""
    file, _, function = row.line.partition(" (")
    names = [row.direction, *names_in(row.op_name), file.partition(":")[0]]
    names += re.findall(r"[^.()]+", function)  # each part of "make.loss"
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _narrow_sums(report: Any, name: str, over: str) -> list[str]:
    """Returns error lines about sums narrower than a dtype, or missing, in some `Collectives`."""
    if missing := _missing_sums(report, over):
        return missing
    offenders = []
    for row in [row for row in report if row.sums]:
        # Of a complex number each part is rounded alone.
        parts = 2 if row.dtype.startswith("complex") else 1
        if row.size // max(1, row.elements) // parts < np.dtype(name).itemsize:
            devices = f"over {', '.join(row.axes)}" if row.axes else f"of {row.group_size} devices"
            offenders.append((row, f"{row.bytes:,} bytes", f"{row.dtype}  {row.kind} {devices}"))
    return by_line(f"sums over {over} should carry {name} or wider, these do not:", offenders)


def _missing_sums(report: Any, over: str) -> list[str]:
    """Returns an error line if the program contains no array sums to check."""
    sums = [row for row in report if row.sums]
    # Sums of scalars are those of a loss. A check that sees no gradient must not pass.
    if any(row.elements > row.arrays for row in sums):
        return []
    content = "only sums of scalars, such as that of a loss," if sums else "no sum of floats"
    kinds = sorted({f"{row.kind} {row.dtype}" for row in report})
    there = f" Over it go: {', '.join(kinds)}." if kinds else ""
    if any(row.kind == "all-to-all" for row in report):
        there += (
            " An all-to-all is not a sum, even if each device adds up the parts that it receives: "
            "jaxmp.sharding.per_shard with comm_dtype does that, in float32."
        )
    return [
        f"the {report.origin} has {content} over {over}, so this check sees nothing: give a "
        "function that computes gradients, and arguments that are sharded as in training." + there
    ]
