"""How a param lies on the devices, and over which mesh axes it is gathered where it is used."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmp._dtypes import DType
from jaxmp._specs import named_axes

# The mesh axes along which each dimension is split.
Axes = tuple[tuple[str, ...], ...]


class Layout(NamedTuple):
    """The layout of one array.

    Attributes:
      mesh: the mesh.
      axes: for each dimension the mesh axes that split it.
      gather: the mesh axes over which it is gathered for use.
      dtype: what it is cast to before it is gathered, None for the dtype in which it is used.
      recomputed: whether what is gathered lives no longer than a backward pass that computes it
        again, as in a checkpoint. Elsewhere it is let go after use, and gathered again.
    """

    mesh: Mesh | AbstractMesh
    axes: Axes
    gather: frozenset[str]
    dtype: DType | None = None
    recomputed: bool = False

    @property
    def stored(self) -> NamedSharding:
        return _sharding(self.mesh, self.axes)

    @property
    def whole(self) -> NamedSharding:
        """Its sharding where it is used."""
        kept = (tuple(name for name in each if name not in self.gather) for each in self.axes)
        return _sharding(self.mesh, kept)

    def splits(self, dimension: int) -> bool:
        """Whether what is gathered is in parts along a dimension."""
        over = self.gather.intersection(self.axes[dimension])
        return any(self.mesh.shape[axis] > 1 for axis in over)

    def with_axes(self, axes: Sequence[tuple[str, ...]]) -> "Layout":
        return self._replace(axes=tuple(axes))

    @property
    def ends(self) -> tuple[NamedSharding, NamedSharding]:
        """How it is stored, and how it is used."""
        return self.stored, self.whole


def layout_of(sharding: NamedSharding, ndim: int, gather: frozenset[str], dtype: Any) -> Layout:
    """The layout of an array of `ndim` dimensions."""
    spec = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    return Layout(sharding.mesh, tuple(named_axes(entry) for entry in spec), gather, dtype)


def _sharding(mesh: Mesh | AbstractMesh, axes: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[each or None for each in axes]))


def moved(layout: Layout | None, equation: Any) -> Layout | None:
    """The layout after a move of the first operand; None where it has to be gathered before.

    A dimension that is split must come out as it went in.
    """
    if layout is None:
        return None
    name, params = equation.primitive.name, equation.params
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    axes = layout.axes
    if name == "transpose":
        return layout.with_axes([axes[i] for i in params["permutation"]])
    if name in ("slice", "dynamic_slice", "rev", "optimization_barrier", "copy", "copy_p", "name"):
        touched = [i for i in range(len(before)) if before[i] != after[i]]
        touched += params["dimensions"] if name == "rev" else ()
        return None if any(layout.axes[i] for i in touched) else layout
    if name in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(layout, before, after)
    return None


def _reshaped(layout: Layout, before: Any, after: Any) -> Layout | None:
    """Where nothing but dimensions of size 1 come and go."""
    kept = [(size, each) for size, each in zip(before, layout.axes, strict=True) if size != 1]
    if [size for size, _ in kept] != [size for size in after if size != 1]:
        return None
    if any(each for size, each in zip(before, layout.axes, strict=True) if size == 1):
        return None
    rest = iter(kept)
    return layout.with_axes([() if size == 1 else next(rest)[1] for size in after])


def unstacked(layout: Layout | None) -> Layout | None:
    """The layout of one of the arrays that are stacked along the first dimension."""
    if layout is None or layout.axes[0]:
        return None
    return layout.with_axes(layout.axes[1:])


def stacked(layout: Layout | None) -> Layout | None:
    """The layout of arrays of one layout, stacked along a new first dimension."""
    return None if layout is None else layout.with_axes([(), *layout.axes])
