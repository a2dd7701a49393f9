"""The layout of a param: which mesh axes split it, and over which it is gathered for use."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmp._numerics.dtypes import DType
from jaxmp._program.mesh_axes import automatic, entries_of, named_axes
from jaxmp._program.op_classes import RESHAPES, SAME_DIMENSIONS

# For each dimension, the mesh axes that split it.
Axes = tuple[tuple[str, ...], ...]


class Layout(NamedTuple):
    """The layout of one array.

    Attributes:
      mesh: the mesh.
      axes: for each dimension the mesh axes that split it.
      gather: the mesh axes over which the array is gathered for use.
      dtype: the dtype to which the array is cast before it is gathered; None for the dtype in which
        it is used.
      recomputed: whether the backward pass recomputes the gathered array and then frees it, as in a
        checkpoint. Elsewhere the array is freed after use, and gathered again.
      gathered: whether the array is gathered already, for products; its gradient is not scattered
        yet.
    """

    mesh: Mesh | AbstractMesh
    axes: Axes
    gather: frozenset[str]
    dtype: DType | None = None
    recomputed: bool = False
    gathered: bool = False

    @property
    def stored(self) -> NamedSharding:
        return _sharding(self.mesh, self.axes)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of the array where it is used."""
        axes_left = (tuple(a for a in axes if a not in self.gather) for axes in self.axes)
        return _sharding(self.mesh, axes_left)

    def splits(self, dimension: int) -> bool:
        """Whether a dimension is split over axes that are gathered."""
        over = self.gather.intersection(self.axes[dimension])
        return any(self.mesh.shape[axis] > 1 for axis in over)

    def with_axes(self, axes: Sequence[tuple[str, ...]]) -> "Layout":
        return self._replace(axes=tuple(axes))

    @property
    def ends(self) -> tuple[NamedSharding, NamedSharding]:
        """The shardings in which the array is stored and used."""
        return self.stored, self.whole


def layout_of(sharding: NamedSharding, ndim: int, gather: frozenset[str], dtype: Any) -> Layout:
    """Returns the layout of an array of `ndim` dimensions."""
    spec = entries_of(sharding.spec, ndim)
    # Constraints are for the partitioner, which knows automatic axes only.
    return Layout(
        automatic(sharding.mesh), tuple(named_axes(entry) for entry in spec), gather, dtype
    )


def _sharding(mesh: Mesh | AbstractMesh, axes: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[names or None for names in axes]))


def layout_after(layout: Layout | None, equation: Any) -> Layout | None:
    """Returns the layout after a move of the first operand; None if it must be gathered first."""
    if layout is None:
        return None
    name, params = equation.primitive.name, equation.params
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    axes = layout.axes
    if name == "transpose":
        return layout.with_axes([axes[i] for i in params["permutation"]])
    if name in SAME_DIMENSIONS:
        changed = [i for i in range(len(before)) if before[i] != after[i]]
        changed += params["dimensions"] if name == "rev" else ()
        # A device that holds a part of a dimension cannot cut or reverse the whole of it.
        return None if any(axes[i] for i in changed) else layout
    if name not in RESHAPES:
        return None
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return None
    # Only dimensions of size 1 come or go. If axes split one of them, they would be lost.
    pairs = list(zip(before, axes, strict=True))
    if any(names for size, names in pairs if size == 1):
        return None
    names_left = iter([names for size, names in pairs if size != 1])
    return layout.with_axes([() if size == 1 else next(names_left) for size in after])


def unstacked_layout(layout: Layout | None) -> Layout | None:
    """Returns the layout of one of the arrays that are stacked along the first dimension."""
    # If devices split the stack itself, each has some of the arrays and none of the others.
    if layout is None or layout.axes[0]:
        return None
    return layout.with_axes(layout.axes[1:])


def stacked_layout(layout: Layout | None) -> Layout | None:
    """Returns the layout of a stack, along a new first dimension, of arrays with this layout."""
    return None if layout is None else layout.with_axes([(), *layout.axes])
