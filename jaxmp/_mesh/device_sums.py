"""Sums over the devices of a mesh axis, in float32 whatever dtype is sent.

For code that can name mesh axes: inside a `jax.shard_map`, or a `jax.vmap` with an `axis_name`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp._numerics.dtypes import DType, at_least_float32, parse_dtype

Axis = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """A 16-bit format for numbers that devices send, and add up in float32 or in 16 bits.

    Attributes:
      dtype: the dtype in which numbers are sent.
      divisor: numbers are divided by this before the cast, and multiplied by it afterwards.
    """

    dtype: DType
    divisor: int

    @staticmethod
    def of(dtype: DType, world: int) -> "WireFormat":
        """Returns the format for sums over `world` devices, one number from each."""
        return WireFormat(dtype, divide_factors(world, dtype)[0] or 1)

    def send(self, x: Array) -> Array:
        """Converts numbers to the format in which they are sent."""
        # DDP's compression hook divides after the cast, too late for numbers that overflow in it.
        return (x if self.divisor == 1 else _widen_to_sum(x) / self.divisor).astype(self.dtype)

    def receive(self, x: Array) -> Array:
        """Converts received numbers to float32."""
        return _widen_to_sum(x) if self.divisor == 1 else _widen_to_sum(x) * self.divisor


def divide_factors(world: int, dtype: Any) -> tuple[int | None, float | None]:
    """Returns what FSDP2 divides by before and after a sum in float16; else two Nones."""
    if jnp.dtype(dtype) != jnp.float16:
        return None, None
    # float16 must not overflow. Each factor is about the square root of the number of devices; the
    # first is a power of two. Other dtypes have the range of float32.
    before = 1
    while world % before == 0 and world / before > before:
        before *= 2
    return before, world / before


def wire_of(comm_dtype: Any, world: int) -> WireFormat | None:
    if comm_dtype is None:
        return None
    dtype = parse_dtype(comm_dtype)
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"comm_dtype must be bfloat16, float16 or None (which sends float32), got {dtype}"
        )
    return WireFormat.of(dtype, world)


def sum_dtype(dtype: Any) -> DType:
    total = parse_dtype(dtype)
    if total.itemsize == 1:
        raise ValueError(f"gradients cannot be added up in {total}; use float32")
    return total


def _widen_to_sum(x: Array) -> Array:
    return x.astype(at_least_float32(x.dtype))


def device_sum(x: Array, axes: tuple[str, ...], wire: WireFormat | None, over: int) -> Array:
    """Sums over devices in float32 or wider, and divides by `over`."""
    world = axes_size(axes)
    # float64 stays as it is: no wire holds it. Nor is a small array worth two collectives.
    if wire is None or x.dtype.itemsize > 4 or x.size < world:
        return _widen_to_sum(lax.psum(_widen_to_sum(x), axes)) / over
    shape = x.shape
    # An all-to-all and an all-gather of 16 bits send half the bytes of a float32 sum.
    dims = [d for d in range(x.ndim) if shape[d] % world == 0]
    # The largest dimension that the devices divide; else the array is scattered as a padded vector.
    dim = max(dims, key=lambda d: shape[d], default=0)
    if not dims:
        x = jnp.pad(x.ravel(), (0, -x.size % world))
    part = wire.send(scattered_sum(x, axes, dim, wire) / over)
    # With check_vma=True, the type must say that all devices now have the same sum.
    to = "invarying" if varying_is_tracked(axes) else "varying"
    whole = wire.receive(lax.all_gather(part, axes, axis=dim, tiled=True, to=to))
    return whole if dims else whole[: math.prod(shape)].reshape(shape)


def scattered_sum(x: Array, axes: tuple[str, ...], dim: int, wire: WireFormat | None) -> Array:
    """Sums over devices in float32 or wider; returns this device's part along dimension `dim`."""
    if wire is None or x.dtype.itemsize > 4:
        return lax.psum_scatter(_widen_to_sum(x), axes, scatter_dimension=dim, tiled=True)
    world = axes_size(axes)
    shape = (*x.shape[:dim], world, x.shape[dim] // world, *x.shape[dim + 1 :])
    parts = jnp.moveaxis(wire.send(x).reshape(shape), dim, 0)
    # `psum_scatter` would add up in the dtype that is sent. So each device receives its part from
    # every other device, and adds these up itself.
    return jnp.sum(wire.receive(lax.all_to_all(parts, axes, 0, 0, tiled=True)), 0)


def low_precision_sum(x: Array, axes: tuple[str, ...], wire: WireFormat, over: int) -> Array:
    """Sums over devices in 16 bits, as the caller asked, and divides by `over`."""
    # In a shard_map over only some axes of a mesh, XLA:CPU aborts the process on a 16-bit sum (its
    # pass AllReducePromotion, in jax 0.10 and 0.12). Elsewhere it sums in float32 and rounds; this
    # always does so on CPUs.
    total = lax.platform_dependent(
        wire.send(x),
        cpu=lambda low: lax.psum(_widen_to_sum(low), axes).astype(low.dtype),
        default=lambda low: lax.psum(low, axes),
    )
    return wire.receive(total) / over


def bound_axes(axis: Axis, caller: str) -> tuple[str, ...]:
    """Returns the names of axes; raises ValueError unless collectives over them work here."""
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    here = jax.sharding.get_abstract_mesh().manual_axes
    for name in axes:
        try:
            lax.axis_size(name)  # also of the axes of a `vmap`, which no mesh lists
        except NameError:
            raise ValueError(
                f"{caller} is for code inside of a jax.shard_map over mesh axis {name!r}, which "
                f"is not bound here (bound: {', '.join(map(repr, here)) or 'none'}). Under jit "
                "with sharded arrays there are no local gradients or flags: jaxmp.value_and_grad "
                "and jaxmp.numbers.all_finite do the same there"
            ) from None
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"{caller} needs the names of one or more different mesh axes, got {axis!r}; mesh "
            f"axes bound here: {', '.join(map(repr, here)) or 'none, this is no shard_map'}"
        )
    return axes


def axes_size(axes: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(name) for name in axes)


def varying_is_tracked(axes: tuple[str, ...]) -> bool:
    """Whether array types record the mesh axes over which arrays vary (`check_vma=True`)."""
    # The index along an axis differs from device to device: its type says so if any type does.
    return axes[0] in jax.typeof(lax.axis_index(axes[0])).mat.varying
