"""Lookups of one number in each row, such as the logit of each label, by comparison.

The transpose of a gather is a scatter, which no compiler fuses: a cross entropy by label writes the
float32 gradient of all logits, and on TPUs also the float32 logits to gather from. A comparison
with the label is elementwise, and fuses with the softmax around it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import Array

from jaxmp._numerics.dtypes import is_floating
from jaxmp._primitives.at_label import at_label
from jaxmp._program.op_classes import CASTS, REPEATS, RESHAPES
from jaxmp._program.program import Op, Program, numbers

# Operations that leave an array as it is, but for its shape and dtype.
_MOVES = RESHAPES | REPEATS | CASTS


class Lookup(NamedTuple):
    """How a gather reads one number of each row.

    Attributes:
      axis: the axis of the operand along which its rows lie.
      component: the component of the index vectors that holds the labels.
      rows: for each other axis of the operand, the axis of the indices that counts along it; None
        for an axis of one row.
    """

    axis: int
    component: int
    rows: tuple[int | None, ...]


def lookups_in(program: Program) -> dict[int, Lookup]:
    """Returns the lookups of a program, by the numbers of their operations."""
    return _Lookups(program).found


def look_up(equation: core.JaxprEqn, lookup: Lookup, x: Array, indices: Array) -> Array:
    """Runs a gather by comparison, to the bit; so do its derivatives."""
    modes, params = lax.GatherScatterMode, equation.params
    axis, mode, length = lookup.axis, params["mode"], x.shape[lookup.axis]
    order = [i for i in lookup.rows if i is not None]
    shape = cast(Any, equation.outvars[0].aval).shape

    def labels_of(indices: Array) -> Array:
        """One label for each row, in the order of the operand."""
        labels = lax.index_in_dim(indices, lookup.component, indices.ndim - 1, keepdims=False)
        if labels.dtype.itemsize < 4:  # too small for the length of a row
            labels = labels.astype(jnp.int32)
        others = [i for i in range(labels.ndim) if i not in order]
        return labels.transpose(*order, *others).reshape(*x.shape[:axis], 1, *x.shape[axis + 1 :])

    def in_order(rows: Array) -> Array:
        """One number for each row, in the order of the result."""
        rows = rows.reshape([indices.shape[i] for i in order]).transpose(*np.argsort(order))
        return rows.reshape(shape)

    @jax.custom_jvp
    def pick(x: Array, indices: Array) -> Array:
        labels = labels_of(indices)
        inside = jnp.clip(labels, 0, length - 1)
        # Of floats, a sum would lose the sign of a zero, and a maximum numbers next to zero.
        bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        bits = lax.reduce_or(at_label(inside, bits, axis), axes=(axis,))
        numbers = lax.bitcast_convert_type(bits, x.dtype)
        if mode == modes.FILL_OR_DROP:
            fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
            numbers = jnp.where((labels == inside).reshape(bits.shape), numbers, fill)
        return in_order(numbers)

    @pick.defjvp
    def _(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
        labels = labels_of(primals[1])
        labels = jnp.clip(labels, 0, length - 1) if mode == modes.CLIP else labels
        tangent = lax.reduce_sum(at_label(labels, tangents[0], axis), (axis,))
        return pick(*primals), in_order(tangent)

    return pick(x, indices)


class _Lookups:
    """Finds the lookups of a program.

    Attributes:
      found: the lookups, by the numbers of their operations.
      counts: by value, the axis along which it counts 0, 1, 2 and so on.
      vectors: the same for each component of index vectors.
      false: the masks that are false everywhere.
    """

    def __init__(self, program: Program) -> None:
        self.found: dict[int, Lookup] = {}
        self.counts = {number: _counted_axis(const) for number, const in program.consts}
        self.vectors: dict[int, list[int | None]] = {}
        self.false = {number for number, const in program.consts if _is_false(const)}
        for op in program.ops:
            self._read(op)

    def _count(self, atom: int | core.Literal) -> int | None:
        return self.counts.get(atom) if isinstance(atom, int) else None

    def _read(self, op: Op) -> None:
        axes = [self._count(atom) for atom in op.inputs]
        is_false = not self.false.isdisjoint(numbers(op.inputs[:1]))
        if op.name == "iota":
            self._counts_along(op, op.params["dimension"])
        elif op.name in _MOVES:
            if is_false:
                self.false.update(op.outputs)
            if axes[0] is not None:
                self._counts_along(op, _axis_after(op, axes[0]))
        elif op.name == "lt" and axes[0] is not None and _is_zero(op.inputs[1]):
            self.false.update(op.outputs)
        elif op.name == "select_n" and is_false:
            # An index below zero counts from the end: where(i < 0, i + n, i).
            self.counts[op.outputs[0]] = axes[1]
        elif op.name == "concatenate" and op.params["dimension"] == op.out_avals[0].ndim - 1:
            self.vectors[op.outputs[0]] = axes
        elif op.name == "gather" and reads_numbers(op.equation):
            (indices,) = op.inputs[1:]
            components = self.vectors.get(indices) if isinstance(indices, int) else None
            if lookup := _lookup_of(op, components or axes[1:]):
                self.found[op.number] = lookup

    def _counts_along(self, op: Op, axis: int | None) -> None:
        (aval,) = op.out_avals
        if axis is None or not jnp.issubdtype(aval.dtype, jnp.integer):
            return
        size = aval.shape[axis]
        if isinstance(size, int) and size <= jnp.iinfo(aval.dtype).max:
            self.counts[op.outputs[0]] = axis


def reads_numbers(equation: core.JaxprEqn) -> bool:
    """Whether a gather reads single floats, and says what it does with labels out of bounds."""
    modes = lax.GatherScatterMode
    known = (modes.CLIP, modes.FILL_OR_DROP, modes.PROMISE_IN_BOUNDS)
    x, params = cast(Any, equation.invars[0].aval), equation.params
    return is_floating(x) and params["mode"] in known and math.prod(params["slice_sizes"]) == 1


def _lookup_of(op: Op, components: Sequence[int | None]) -> Lookup | None:
    """Returns how a gather of single numbers reads one of each row; None if it does not."""
    x, indices = op.in_avals
    dims = op.params["dimension_numbers"]
    if len(components) != len(dims.start_index_map):
        return None
    axes = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
    axes.update(zip(dims.start_index_map, components, strict=True))
    labels = [axis for axis in dims.start_index_map if axes[axis] is None]
    if len(labels) != 1:
        return None
    others = [axis for axis in range(x.ndim) if axis != labels[0]]
    rows = tuple(None if x.shape[axis] == 1 else axes.get(axis) for axis in others)
    # Each row is read once, and each label reads a row.
    covered = [i for i in rows if i is not None]
    sizes = math.prod(indices.shape[i] for i in set(covered))
    is_whole = all(
        x.shape[axis] == (1 if i is None else indices.shape[i])
        for axis, i in zip(others, rows, strict=True)
    )
    if not is_whole or len(set(covered)) < len(covered) or sizes != math.prod(indices.shape[:-1]):
        return None
    return Lookup(labels[0], dims.start_index_map.index(labels[0]), rows)


def _axis_after(op: Op, axis: int) -> int | None:
    """Returns where an axis lies in the result of a reshape or broadcast; None if it is no more."""
    (before,), (after,) = [x.shape for x in op.in_avals[:1]], [x.shape for x in op.out_avals]
    if op.name == "broadcast_in_dim":
        moved = op.params["broadcast_dimensions"][axis]
        return moved if after[moved] == before[axis] else None
    outer = math.prod(before[:axis])
    same = (i for i in range(len(after)) if math.prod(after[:i]) == outer)
    return next((i for i in same if after[i] == before[axis]), None)


def _counted_axis(const: Any) -> int | None:
    """Returns the axis along which an array of NumPy counts from zero; None if there is none."""
    is_array = isinstance(const, np.ndarray) and np.issubdtype(const.dtype, np.integer)
    counts = np.indices(const.shape, sparse=True) if is_array else ()
    return next((axis for axis, count in enumerate(counts) if np.all(const == count)), None)


def _is_false(const: Any) -> bool:
    return isinstance(const, np.ndarray) and const.dtype == bool and not const.any()


def _is_zero(atom: int | core.Literal) -> bool:
    return isinstance(atom, core.Literal) and bool(np.all(atom.val == 0))
