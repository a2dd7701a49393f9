"""A check for tests: no sum over devices in fewer bits than wanted."""

from typing import Any

from jaxmp._audit._check import AuditError, narrow_sums
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
    if axis is not None:
        report = report.select(axis=axis)
    over = "devices" if axis is None else f"the mesh axis {axis!r}"
    if problems := narrow_sums(report, name, over):
        raise AuditError("\n".join(problems))
