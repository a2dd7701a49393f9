"""Gathers the operands of a product, and scatters their gradients.

The sum that makes a gradient goes over all devices that have a part of the batch, and devices of
several replicas store the same part of a param. If a gradient were pinned whole after its product,
they would sum all of it and drop most. So it is pinned as it is stored: it is scattered within a
replica, and replicas sum parts. Where the scattered dimensions come from, operands of the product
are pinned, too, to keep the partitioner from splitting those instead.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._mesh.specs import axes_of_spec
from jaxmp._program.mesh_axes import entries_of

_OPEN = PartitionSpec.UNCONSTRAINED


class Gather(NamedTuple):
    """How an operand is gathered, and its gradient scattered.

    Attributes:
      stored: the sharding of the operand before it is gathered.
      whole: its sharding afterwards.
      here: whether the product gathers it, and its derivatives gather it again. Otherwise the
        operand is whole already, and only its gradient is scattered.
    """

    stored: NamedSharding
    whole: NamedSharding
    here: bool = True

    @property
    def has_replicas(self) -> bool:
        """Whether several devices store the same part of the operand."""
        mesh, used = self.stored.mesh, axes_of_spec(self.stored.spec)
        return any(size > 1 and axis not in used for axis, size in mesh.shape.items())


def gathered(x: Any, gather: Gather | None) -> Any:
    """Gathers an array that is split over devices."""
    if gather is None or not gather.here:
        return x
    # The shardings before and after are pinned. With the last one alone, the partitioner moves it
    # back through the cast, and gathers float32 (see jax issue 23543).
    return _constrain(_constrain(x, gather.stored), gather.whole)


def scattered(x: Any, gather: Gather | None, *, is_summed_whole: bool) -> Any:
    """Scatters the gradient of a gathered operand."""
    if gather is None:
        return x
    return _constrain(_constrain(x, gather.whole if is_summed_whole else None), gather.stored)


def with_batch_axis(gather: Gather | None, axis: int | None) -> Gather | None:
    """Returns the gather of an operand with one more dimension, which is whole, if it has one."""
    if gather is None or axis is None:
        return gather

    def with_axis(sharding: NamedSharding) -> NamedSharding:
        spec = entries_of(sharding.spec, axis)
        return NamedSharding(sharding.mesh, PartitionSpec(*spec[:axis], None, *spec[axis:]))

    return Gather(with_axis(gather.stored), with_axis(gather.whole), gather.here)


def _constrain(x: Any, sharding: NamedSharding | None) -> Any:
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)


def pinned_operands(
    operands: Sequence[Any], equation: Any, moves: Sequence[Any], gather: Gather | None
) -> list[Any] | None:
    """Pins the operands of a product whose result is the gradient of a gathered operand.

    Args:
      operands: the two operands.
      equation: the product.
      moves: the equations after it.
      gather: the shardings of the gathered operand.

    Returns:
      The operands, with the dimensions that are scattered later as they are in the whole gradient.
      None if there are no replicas, if this is not a matrix product, which is only transposed
      afterwards, or if a batch dimension of it is scattered.
    """
    transposed = all(move.primitive.name == "transpose" for move in moves)
    is_matrix_product = equation.primitive.name == "dot_general" and transposed
    # Without replicas, early scattering gains nothing, and the TPU compiler may send partial sums
    # from device to device.
    if gather is None or not gather.has_replicas or not is_matrix_product:
        return None
    ndim = len(equation.outvars[0].aval.shape)
    stored, whole = entries_of(gather.stored.spec, ndim), entries_of(gather.whole.spec, ndim)
    pins = [b if a != b else _OPEN for a, b in zip(stored, whole, strict=True)]
    for move in reversed(moves):
        entries: list[Any] = [_OPEN] * ndim
        for pin, dimension in zip(pins, move.params["permutation"], strict=True):
            entries[dimension] = pin
        pins = entries
    (contracted, batch) = equation.params["dimension_numbers"]
    if any(pin is not _OPEN for pin in pins[: len(batch[0])]):
        return None
    free_pins = iter(pins[len(batch[0]) :])
    results = []
    for x, sum_axes, batch_axes in zip(operands, contracted, batch, strict=True):
        not_free = {*sum_axes, *batch_axes}
        spec = [_OPEN if i in not_free else next(free_pins) for i in range(x.ndim)]
        is_open = all(entry is _OPEN for entry in spec)
        sharding = NamedSharding(gather.whole.mesh, PartitionSpec(*spec))
        results.append(_constrain(x, None if is_open else sharding))
    return results
