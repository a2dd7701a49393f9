"""Checks in tests that no sum over devices has fewer bits than wanted."""

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Iterator
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
    name, named = parse_dtype(dtype).name, _activation_names(activations)
    report = _without_activations(collectives(program, *args, mesh=mesh, **kwargs), named)
    if axis is None:
        problems = _narrow_sums(report, name, "devices")
    else:
        problems = _over_axes(report, name, (axis,) if isinstance(axis, str) else tuple(axis))
    if problems:
        hint = [_HINT] if len(problems) > 1 else []
        raise AuditError("\n".join(problems + hint))


def _activation_names(activations: Any) -> Collection[str]:
    names = (activations,) if isinstance(activations, str) else activations
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "activations are names of scopes, modules, functions, files, primitives or passes, "
            f"such as 'experts', got {activations!r}"
        )
    return names


def _without_activations(report: Any, names: Collection[str]) -> Any:
    """Returns the report without the sums that the caller named as activations."""
    rows = tuple(row for row in report if not (row.sums and _is_named(row, names)))
    return dataclasses.replace(report, rows=rows)


def _is_named(row: Any, names: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(part, name) for name in names for part in _parts(row))


def _parts(row: Any) -> Iterator[str]:
    """Yields the names that can select a sum: its pass, scopes, primitive, file and functions."""
    yield row.direction
    yield from names_in(row.op_name)
    file, _, function = row.line.partition(" (")
    yield file.partition(":")[0]
    yield from re.findall(r"[^.()]+", function)


def _over_axes(report: Any, name: str, axes: tuple[Any, ...]) -> list[str]:
    """Returns error lines about the sums over mesh axes; skips axes of a single device."""
    sizes = dict(report.mesh_axes)
    several = [axis for axis in axes if sizes.get(axis) != 1] or axes
    missing = [
        line
        for axis in several
        for line in _no_sums(report.select(axis=axis), f"the mesh axis {axis!r}")
    ]
    over = f"the mesh {'axis' if len(axes) == 1 else 'axes'} {', '.join(map(repr, axes))}"
    return missing or _narrow_sums(report.select(axis=axes), name, over)


def _narrow_sums(report: Any, name: str, over: str) -> list[str]:
    """Returns error lines about narrow or missing sums over devices in a compiled program.

    Args:
      report: the `Collectives` to check.
      name: the narrowest dtype that is fine.
      over: the devices or mesh axes of the sums, in words.

    Returns:
      The lines; empty if all sums are fine.
    """
    if missing := _no_sums(report, over):
        return missing
    sums = [row for row in report if row.sums]
    narrow = [row for row in sums if _bits_of_number(row) < 8 * np.dtype(name).itemsize]
    if not narrow:
        return []
    return [
        f"sums over {over} should carry {name} or wider, these do not:",
        *by_line((row, f"{row.bytes:,} bytes", _described(row)) for row in narrow),
    ]


def _no_sums(report: Any, over: str) -> list[str]:
    """Returns an error line if the program contains no array sums to check."""
    sums = [row for row in report if row.sums]
    # Sums of scalars are those of a loss. A check that sees no gradient must not pass.
    if any(row.elements > row.arrays for row in sums):
        return []
    found = "only sums of scalars, such as that of a loss," if sums else "no sum of floats"
    kinds = sorted({f"{row.kind} {row.dtype}" for row in report})
    there = f" Over it go: {', '.join(kinds)}." if kinds else ""
    if any(row.kind == "all-to-all" for row in report):
        there += (
            " An all-to-all is not a sum, even if each device adds up the parts that it receives: "
            "jaxmp.sharding.per_shard with comm_dtype does that, in float32."
        )
    return [
        f"the {report.origin} has {found} over {over}, so this check sees nothing: give a "
        "function that computes gradients, and arguments that are sharded as in training." + there
    ]


def _bits_of_number(row: Any) -> int:
    """Returns the bits of one number; for complex numbers, of the real or imaginary part."""
    return 8 * row.size // max(1, row.elements) // (2 if row.dtype.startswith("complex") else 1)


def _described(row: Any) -> str:
    over = f"over {', '.join(row.axes)}" if row.axes else f"of {row.group_size} devices"
    return f"{row.dtype}  {row.kind} {over}"
