"""How operations run on the slice of one layer, which keeps its axis, with one entry."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._gradient_release.values import Operation
from jaxmp._program import compat
from jaxmp._program.op_classes import ELEMENTWISE, REDUCTIONS, RESHAPES, RUNNING

# For each operand the axis along which it is cut for a cut along an axis of the result; None for an
# operand that is read whole. None in place of all: the result cannot be computed in slices.
Axes = list[int | None] | None


def operand_axes(operation: Operation, axis: int) -> Axes:
    """Returns how the operands are cut for a slice of the results along an axis."""
    rule = AXES.get(operation.op.name)
    return None if rule is None else rule(operation.op.equation, axis)


def run_on_slices(equation: Any, operands: list[Any], axis: int, layer: Any) -> list[Any]:
    """Runs an operation on slices.

    Args:
      equation: the operation.
      operands: slices of operands, and whole operands.
      axis: the axis of its result along which a slice has one entry.
      layer: the number of that entry.
    """

    def one(entries: Sequence[int], entry: int) -> tuple[int, ...]:
        return (*entries[:axis], entry, *entries[axis + 1 :])

    params, name = equation.params, equation.primitive.name
    if name == "iota" and params["dimension"] == axis:
        return [jnp.full(one(params["shape"], 1), layer, params["dtype"])]
    shapes = _SHAPES.get(name, {})
    changed = {param: one(params[param], entry) for param, entry in shapes.items()}
    return compat.bind(equation, operands, **changed)


def _operand_shapes(equation: Any) -> list[tuple[int, ...]]:
    return [atom.aval.shape for atom in equation.invars]


def _result_size(equation: Any, axis: int) -> int:
    return equation.outvars[0].aval.shape[axis]


def _same(equation: Any, axis: int) -> Axes:
    """An operand of another size along the axis is a scalar, or is repeated along it."""
    size, ndim = _result_size(equation, axis), equation.outvars[0].aval.ndim
    axes = [
        axis if len(shape) == ndim and shape[axis] == size else None
        for shape in _operand_shapes(equation)
    ]
    return axes if axis in axes else None


def _not_along(param: str) -> Callable[[Any, int], Axes]:
    """The rule of an operation along one axis, or several, that a param names."""

    def rule(equation: Any, axis: int) -> Axes:
        along = np.ravel(equation.params[param])
        return None if axis in along else _same(equation, axis)

    return rule


def _whole_along(equation: Any, axis: int) -> Axes:
    """The rule of an operation that may take a part along an axis."""
    is_whole = _operand_shapes(equation)[0][axis] == _result_size(equation, axis)
    return _same(equation, axis) if is_whole else None


def _pad(equation: Any, axis: int) -> Axes:
    """Nothing may be added or taken away along the axis."""
    return None if any(equation.params["padding_config"][axis]) else [axis, None]


def _broadcast(equation: Any, axis: int) -> Axes:
    dimensions, shape = equation.params["broadcast_dimensions"], _operand_shapes(equation)[0]
    place = dimensions.index(axis) if axis in dimensions else None
    return [place if place is not None and shape[place] == _result_size(equation, axis) else None]


def _of_reshape(equation: Any, axis: int) -> Axes:
    """The axis must stay whole: as many numbers before it, and its own size."""
    shape, result = _operand_shapes(equation)[0], equation.outvars[0].aval.shape
    before = math.prod(result[:axis])
    places = (
        i for i, size in enumerate(shape) if size == result[axis] and math.prod(shape[:i]) == before
    )
    place = next(places, None)
    return None if place is None else [place]


def _reduce(equation: Any, axis: int) -> Axes:
    axes = equation.params["axes"]
    return [[i for i in range(len(_operand_shapes(equation)[0])) if i not in axes][axis]]


def _dot_general(equation: Any, axis: int) -> Axes:
    contracting, batch = equation.params["dimension_numbers"]
    if axis < len(batch[0]):
        return [side[axis] for side in batch]
    free = [
        (operand, i)
        for operand, shape in enumerate(_operand_shapes(equation))
        for i in range(len(shape))
        if i not in (*contracting[operand], *batch[operand])
    ]
    operand, place = free[axis - len(batch[0])]
    return [place if i == operand else None for i in range(2)]


def _of_constraint(equation: Any, axis: int) -> Axes:
    sharding = equation.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return None
    spec = sharding.spec
    free = (None, PartitionSpec.UNCONSTRAINED)
    return [axis] if axis >= len(spec) or spec[axis] in free else None


AXES: dict[str, Callable[[Any, int], Axes]] = {
    **dict.fromkeys(ELEMENTWISE, _same),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(RESHAPES, _of_reshape),
    **dict.fromkeys(RUNNING, _not_along("axis")),
    "broadcast_in_dim": _broadcast,
    "concatenate": _not_along("dimension"),
    "dot_general": _dot_general,
    "iota": lambda equation, axis: [],
    "optimization_barrier": lambda equation, axis: [axis],
    "pad": _pad,
    "rev": _not_along("dimensions"),
    "sharding_constraint": _of_constraint,
    "slice": _whole_along,
    "sort": _not_along("dimension"),
    "transpose": lambda equation, axis: [equation.params["permutation"][axis]],
}
# The params that hold the shape of a result or the limits of a part, and their entry for a slice.
_SHAPES = {
    "broadcast_in_dim": {"shape": 1},
    "iota": {"shape": 1},
    "reshape": {"new_sizes": 1},
    "slice": {"start_indices": 0, "limit_indices": 1},
}
