"""How the values of a program are split over a mesh, found from how its arguments are split.

A partitioner decides this when it compiles. Here each result takes over what its operands say of
its dimensions, and an explicit constraint overrules that.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from jaxmp._jaxpr.mesh_axes import named_axes
from jaxmp._jaxpr.op_classes import IDENTITIES, RESHAPES

# For each dimension of an array, the mesh axes that split it.
Split = tuple[frozenset[str], ...]
WHOLE: frozenset[str] = frozenset()


def split_of(sharding: Any, ndim: int) -> Split:
    """Returns how a sharding splits an array of so many dimensions; not at all if it has no spec.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> split_of(NamedSharding(mesh, jax.P(None, "data")), 3)
    (frozenset(), frozenset({'data'}), frozenset())
    """
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    entries = [frozenset(named_axes(entry)) for entry in spec]
    return (*entries, *[WHOLE] * (ndim - len(entries)))


def pieces_of(split: Split, sizes: Mapping[str, int]) -> int:
    """Returns into how many parts an array is split, on a mesh with these axes."""
    return math.prod(sizes.get(axis, 1) for axes in split for axis in axes)


def joined(some: Split, others: Split) -> Split:
    """Returns the split of a value that is one of two, or made of both: an axis splits once."""
    used: set[str] = set()
    found = []
    for a, b in zip(some, others, strict=True):
        axes = (a or b) - used
        used |= axes
        found.append(axes)
    return tuple(found)


def once(split: Split) -> Split:
    """Returns a split in which each axis splits the first dimension that it is given for."""
    return joined(split, (WHOLE,) * len(split))


def result_splits(equation: Any, operands: Sequence[Split], mesh: Mapping[str, int]) -> list[Split]:
    """Returns how the results of an equation without programs are split.

    Args:
      equation: the equation.
      operands: how its operands are split.
      mesh: the sizes of the mesh axes.

    Returns:
      One split for each result.
    """
    if equation.primitive.name in RESHAPES:
        return [_split_of_reshaped(equation, operands[0], mesh)]
    if equation.primitive.name in IDENTITIES:
        return list(operands[: len(equation.outvars)])
    rule = _RULES.get(equation.primitive.name)
    return _alike(equation, operands, mesh) if rule is None else rule(equation, operands)


def _shape_of(variable: Any) -> tuple[int, ...]:
    return tuple(getattr(variable.aval, "shape", ()))


def _alike(equation: Any, operands: Sequence[Split], mesh: Mapping[str, int]) -> list[Split]:
    """A dimension is split as in the operands of the same rank, if the parts divide it."""
    found = []
    for out in equation.outvars:
        shape = _shape_of(out)
        split: Split = (WHOLE,) * len(shape)
        for each in operands:
            if len(each) == len(shape):
                sizes = zip(each, shape, strict=True)
                divided = (a if n % pieces_of((a,), mesh) == 0 else WHOLE for a, n in sizes)
                split = joined(split, tuple(divided))
        found.append(split)
    return found


def read_splits(equation: Any, operands: Sequence[Split], result: Split) -> list[Split]:
    """Returns how a product reads its operands, if its result is split so.

    An axis splits one dimension of the work. So an operand is gathered over the axes that split a
    dimension of the result that is not its own; over those of a sum, where both are split or one
    can be cut, it is not.

    Args:
      equation: any equation; what is no product reads its operands as they lie.
      operands: how its operands are split.
      result: how its result is split.
    """
    used = WHOLE.union(*result)
    positions = _POSITIONS.get(equation.primitive.name)
    if positions is None:
        return list(operands)
    if _is_computed_whole(equation):
        return [(WHOLE,) * len(split) for split in operands]
    return [
        tuple(axes & result[at[i]] if i in at else axes - used for i, axes in enumerate(split))
        for at, split in zip(positions(equation), operands, strict=True)
    ]


def _is_computed_whole(equation: Any) -> bool:
    """Whether partitioners leave a product whole: a convolution in groups of several channels."""
    if equation.params.get("feature_group_count", 1) == 1:
        return False
    return _shape_of(equation.invars[1])[equation.params["dimension_numbers"].rhs_spec[1]] > 1


def _split_of_product(equation: Any, operands: Sequence[Split]) -> list[Split]:
    split = [WHOLE] * len(_shape_of(equation.outvars[0]))
    for at, operand in zip(_POSITIONS[equation.primitive.name](equation), operands, strict=True):
        for i, place in at.items():
            split[place] = split[place] or operand[i]
    return [once(tuple(split))]


# For each operand of a product, the dimensions of the result that are its own.
_Positions = tuple[dict[int, int], dict[int, int]]


def _positions_of_dot(equation: Any) -> _Positions:
    summed, batch = equation.params["dimension_numbers"]
    free = [
        [i for i in range(variable.aval.ndim) if i not in (*gone, *kept)]
        for variable, gone, kept in zip(equation.invars, summed, batch, strict=True)
    ]
    left = [*batch[0], *free[0]]
    right = dict(zip(free[1], itertools.count(len(left))))
    return dict(zip(left, itertools.count())), dict(zip(batch[1], itertools.count())) | right


def _positions_of_convolution(equation: Any) -> _Positions:
    params = equation.params
    numbers = params["dimension_numbers"]
    examples, features = numbers.out_spec[:2]
    left = {numbers.lhs_spec[0]: examples if params["batch_group_count"] == 1 else features}
    if params["feature_group_count"] > 1:
        left[numbers.lhs_spec[1]] = features
    return left, {numbers.rhs_spec[0]: features}


_POSITIONS: dict[str, Callable[[Any], _Positions]] = {
    "dot_general": _positions_of_dot,
    "conv_general_dilated": _positions_of_convolution,
}


def _transpose(equation: Any, operands: Sequence[Split]) -> list[Split]:
    return [tuple(operands[0][i] for i in equation.params["permutation"])]


def _broadcast(equation: Any, operands: Sequence[Split]) -> list[Split]:
    given, shape = _shape_of(equation.invars[0]), _shape_of(equation.outvars[0])
    split = [WHOLE] * len(shape)
    for i, dimension in enumerate(equation.params["broadcast_dimensions"]):
        if given[i] == shape[dimension]:
            split[dimension] = operands[0][i]
    return [tuple(split)]


def _reduce(equation: Any, operands: Sequence[Split]) -> list[Split]:
    gone = equation.params["axes"]
    kept = tuple(axes for i, axes in enumerate(operands[0]) if i not in gone)
    return [kept] * len(equation.outvars)


def _split_of_reshaped(equation: Any, given: Split, mesh: Mapping[str, int]) -> Split:
    """Dimensions that are merged or cut hand on the split of the first, if it divides the new."""
    before, after = _shape_of(equation.invars[0]), _shape_of(equation.outvars[0])
    split = [WHOLE] * len(after)
    for sources, targets in _groups(before, after):
        large = [i for i in targets if after[i] > 1]
        axes = [given[i] for i in sources if before[i] > 1]
        if len(large) == len(axes):
            for i, each in zip(large, axes, strict=True):
                split[i] = each
        elif large and axes:
            parts = pieces_of((axes[0],), mesh)
            divided = [i for i in large if after[i] % parts == 0]
            split[(divided or large)[0]] = axes[0]
    return tuple(split)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns the smallest runs of dimensions of two shapes that hold the same numbers."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        sources, targets = [i], [j]
        while (a := _size_of(before, sources)) != (b := _size_of(after, targets)):
            more, shape = (sources, before) if a < b else (targets, after)
            if more[-1] + 1 == len(shape):
                return groups  # an empty array: nothing follows from its dimensions
            more.append(more[-1] + 1)
        groups.append((sources, targets))
        i, j = sources[-1] + 1, targets[-1] + 1
    return groups


def _size_of(shape: Sequence[int], dimensions: Sequence[int]) -> int:
    return math.prod(shape[i] for i in dimensions)


def _constrained_split(equation: Any, operands: Sequence[Split]) -> list[Split]:
    asked = equation.params.get("sharding", equation.params.get("dst_sharding"))
    aval = equation.outvars[0].aval
    if not isinstance(asked, NamedSharding):
        return [operands[0]]
    free = equation.params.get("unconstrained_dims") or ()
    split = split_of(asked, aval.ndim)
    return [tuple(operands[0][i] if i in free else axes for i, axes in enumerate(split))]


def _gather(equation: Any, operands: Sequence[Split]) -> list[Split]:
    """Rows are split as what picks them; what is taken whole stays as it was."""
    numbers = equation.params["dimension_numbers"]
    table, indices = operands[:2]
    shape = _shape_of(equation.outvars[0])
    split = [WHOLE] * len(shape)
    picked = [i for i in range(len(shape)) if i not in numbers.offset_dims]
    for i, axes in zip(picked, indices[:-1], strict=False):
        split[i] = axes
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    left = [i for i in range(len(table)) if i not in gone]
    given = _shape_of(equation.invars[0])
    for i, source in zip(numbers.offset_dims, left, strict=False):
        if shape[i] == given[source]:
            split[i] = table[source]
    return [once(tuple(split))]


def _scatter(equation: Any, operands: Sequence[Split]) -> list[Split]:
    """The array is split as what is written into it, where that has whole rows or batches."""
    numbers = equation.params["dimension_numbers"]
    array, indices, updates = operands[:3]
    given, written = _shape_of(equation.invars[0]), _shape_of(equation.invars[2])
    split = [WHOLE] * len(array)
    batch = tuple(getattr(numbers, "operand_batching_dims", ()))
    for i, source in zip(batch, getattr(numbers, "scatter_indices_batching_dims", ()), strict=True):
        split[i] = indices[source]
    gone = {*numbers.inserted_window_dims, *batch}
    left = [i for i in range(len(array)) if i not in gone]
    for i, source in zip(left, numbers.update_window_dims, strict=True):
        if given[i] == written[source]:
            split[i] = updates[source]
    return [joined(array, tuple(split))]


def _identity(equation: Any, operands: Sequence[Split]) -> list[Split]:
    return list(operands[: len(equation.outvars)])


_Rule = Callable[[Any, Sequence[Split]], list[Split]]
_RULES: dict[str, _Rule] = {
    "dot_general": _split_of_product,
    "conv_general_dilated": _split_of_product,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "sharding_constraint": _constrained_split,
    "reshard": _constrained_split,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-sub": _scatter,
    "scatter-mul": _scatter,
    "scatter-min": _scatter,
    "scatter-max": _scatter,
    "optimization_barrier": _identity,
    "reduce_sum": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_and": _reduce,
    "reduce_or": _reduce,
    "reduce_prod": _reduce,
    "argmax": _reduce,
    "argmin": _reduce,
}
