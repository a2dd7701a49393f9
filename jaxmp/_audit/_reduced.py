"""A check for tests: no sum over devices in fewer bits than wanted."""

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Iterator
from typing import Any

from jaxmp._audit._check import AuditError, narrow_sums, no_sums
from jaxmp._audit._collectives import collectives
from jaxmp._dtypes import parse_dtype
from jaxmp._name_stacks import names_in

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

    That gradients are summed in float32 shows in no result of a small test: on eight devices the
    error of bfloat16 sums is that of bfloat16 itself, and on CPUs the sums are float32 in any
    case. What the program's collectives carry does show it. For tests of your own.

    Sums of activations may be narrow: of experts, graphs, tensor parallelism. It cannot tell them
    from gradients, since a fused loss has gradients in its forward pass and the backward pass has
    activations too. Name them, or the axis that gradients are summed over.

    Args:
      program: a function that computes gradients, such as a train step; or anything else that
        `collectives` takes.
      dtype: the narrowest dtype that is fine, such as `"float32"`.
      *args: the arguments of a function. Arrays may be `jax.ShapeDtypeStruct` with a sharding.
      mesh: the mesh, if `axis` is given and the arguments do not tell.
      axis: the mesh axis, or a tuple of them, that gradients are summed over, such as `"data"`.
        There must be sums over each: without one, the devices along it all compute the same.
        Sums over other axes alone may be narrower, as those of activations in tensor parallelism
        rightly are.
      activations: names of what sums activations, one or several, as patterns such as
        `"expert*"`: of a linen module, a `jax.named_scope`, a primitive (`"scatter-add"`), a
        function or a file in the line that is reported; or `"forward"` for the forward pass.
      **kwargs: keyword arguments of the function.

    Raises:
      AuditError: with all sums that are too narrow, by line; or if the program has no sums that
        could be: then the check would see nothing. It is an AssertionError.
      TypeError: as `collectives` does, and for activations that are no names.
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
    name, named = parse_dtype(dtype).name, _names(activations)
    report = _without_activations(collectives(program, *args, mesh=mesh, **kwargs), named)
    if axis is None:
        problems = narrow_sums(report, name, "devices")
    else:
        problems = _over_axes(report, name, (axis,) if isinstance(axis, str) else tuple(axis))
    if problems:
        hint = [_HINT] if len(problems) > 1 else []
        raise AuditError("\n".join(problems + hint))


def _names(activations: Any) -> Collection[str]:
    names = (activations,) if isinstance(activations, str) else activations
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "activations are names of scopes, modules, functions, files, primitives or passes, "
            f"such as 'experts', got {activations!r}"
        )
    return names


def _without_activations(report: Any, names: Collection[str]) -> Any:
    """The report without the sums that somebody says are of activations."""
    rows = tuple(row for row in report if not (row.sums and _is_named(row, names)))
    return dataclasses.replace(report, rows=rows)


def _is_named(row: Any, names: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(part, name) for name in names for part in _parts(row))


def _parts(row: Any) -> Iterator[str]:
    """What a sum can be named by: its pass, scopes and primitive, and the file and functions."""
    yield row.direction
    yield from names_in(row.op_name)
    file, _, function = row.line.partition(" (")
    yield file.partition(":")[0]
    yield from re.findall(r"[^.()]+", function)


def _over_axes(report: Any, name: str, axes: tuple[Any, ...]) -> list[str]:
    """What is wrong with the sums over mesh axes, but for those of a single device."""
    sizes = dict(report.mesh_axes)
    several = [axis for axis in axes if sizes.get(axis) != 1] or axes
    missing = [
        line
        for axis in several
        for line in no_sums(report.select(axis=axis), f"the mesh axis {axis!r}")
    ]
    over = f"the mesh {'axis' if len(axes) == 1 else 'axes'} {', '.join(map(repr, axes))}"
    return missing or narrow_sums(report.select(axis=axes), name, over)
