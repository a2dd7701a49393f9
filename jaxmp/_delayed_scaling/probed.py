"""A value whose cotangent can be measured: its largest magnitude is the gradient of a zero.

A function has no other way to return what only its backward pass knows. JAX would add the gradients
of a zero that is used several times; here the batch of a `vmap` and the devices of a `shard_map`
give the largest of them.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Float32

from jaxmp._primitives.varying import varying_axes

# Operands: a value, and zeros. The identity on the value.
_probed_p = Primitive("probed")


def probed(value: Float[Array, "..."], probe: Float32[Array, "..."]) -> Float[Array, "..."]:
    """Returns the value; the gradient of the probe is the largest magnitude of its cotangent.

    Args:
      value: any array.
      probe: a float32 zero for this one use, or zeros for each place along the first axes of the
        value.

    Returns:
      The value.

    Raises:
      TypeError: for a probe of another shape.

    >>> import jax
    >>> f = lambda x, probe: jnp.sum(probed(x, probe) * jnp.float32([1, -5, 2]))
    >>> jax.grad(f, argnums=1)(jnp.ones(3), jnp.float32(0))
    Array(5., dtype=float32)
    """
    if value.shape[: probe.ndim] != probe.shape:
        raise TypeError(f"a probe of shape {probe.shape} does not fit a value of {value.shape}")
    return _probed_p.bind(value, probe)


def largest_over_devices(largest: Any, like: Any) -> Any:
    """Returns the maximum over the mesh axes of a `shard_map` that another array does not vary on.

    Args:
      largest: the largest magnitude on each device.
      like: the array that it is kept with.
    """
    axes = varying_axes(largest) - varying_axes(like)
    return lax.pmax(largest, tuple(sorted(axes))) if axes else largest


def _probed_jvp(primals: Any, tangents: Any) -> Any:
    out = _probed_p.bind(*primals)
    along, along_probe = tangents
    if isinstance(along_probe, ad.Zero):
        return out, along
    return out, _probed_p.bind(ad.instantiate_zeros(along), along_probe)


def _probed_transpose(ct: Any, value: Any, probe: Any) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [None, None]
    if not ad.is_undefined_primal(probe):
        return [ct, None]
    shown = jnp.abs(ct).astype(jnp.float32)
    largest = jnp.max(shown, axis=tuple(range(probe.aval.ndim, ct.ndim)), initial=0)
    found = largest_over_devices(largest, probe.aval)
    return [ct if ad.is_undefined_primal(value) else None, found]


def _probed_batch(args: Any, axes: Any) -> Any:
    (value, probe), (axis, axis_of_probe) = args, axes
    size = next(x.shape[i] for x, i in zip(args, axes, strict=True) if i is not None)
    if axis_of_probe is None:  # one probe for the batch; places of its own come first
        return _probed_p.bind(jnp.moveaxis(value, axis, probe.ndim), probe), probe.ndim
    moved = [batching.bdim_at_front(x, i, size) for x, i in zip(args, axes, strict=True)]
    return _probed_p.bind(*moved), 0


_probed_p.def_impl(lambda value, probe: value)
_probed_p.def_abstract_eval(lambda value, probe: value)
ad.primitive_jvps[_probed_p] = _probed_jvp
ad.primitive_transposes[_probed_p] = _probed_transpose
batching.primitive_batchers[_probed_p] = _probed_batch
mlir.register_lowering(_probed_p, lambda ctx, value, probe: [value])
