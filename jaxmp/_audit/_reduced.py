"""A check for tests: no sum over devices in fewer bits than wanted."""

from typing import Any

from jaxmp._audit._check import AuditError, narrow_sums, no_sums
from jaxmp._audit._collectives import collectives
from jaxmp._dtypes import parse_dtype


def assert_reduced_in(
    program: Any, dtype: Any, *args: Any, mesh: Any = None, axis: Any = None, **kwargs: Any
) -> None:
    """Raises if the compiled program sums floats over devices in fewer bits than `dtype`.

    That gradients are summed in float32 shows in no result of a small test: on eight devices the
    error of bfloat16 sums is that of bfloat16 itself, and on CPUs the sums are float32 in any
    case. What the program's collectives carry does show it. For tests of your own.

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
      **kwargs: keyword arguments of the function.

    Raises:
      AuditError: with all sums that are too narrow, by line; or if the program has no sums that
        could be: then the check would see nothing. It is an AssertionError.
      TypeError: as `collectives` does.
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
    report = collectives(program, *args, mesh=mesh, **kwargs)
    if axis is None:
        problems = narrow_sums(report, name, "devices")
    else:
        problems = _over_axes(report, name, (axis,) if isinstance(axis, str) else tuple(axis))
    if problems:
        raise AuditError("\n".join(problems))


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
