"""Reports how far each array of a tree is from the end of the range of a dtype."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import is_inexact, parse_dtype
from jaxmp._numerics.tree import count_nonfinite, leaf_names, widen
from jaxmp._tools.diagnostics.inputs import check_numbers, number_of_scale
from jaxmp._tools.inspect.table_report import TableReport


@dataclasses.dataclass(frozen=True)
class LeafRange:
    """The range of the numbers in one array.

    Attributes:
      name: the path of the array in its tree.
      dtype: its dtype.
      size: how many numbers it has.
      infinite: how many of them are infinite.
      nan: how many are NaN.
      largest: the largest magnitude of the finite ones.
      headroom: how often that can be doubled before it overflows, in powers of two; negative if it
        overflows already, infinite for zeros.
    """

    name: str
    dtype: str
    size: int
    infinite: int
    nan: int
    largest: float
    headroom: float


@dataclasses.dataclass(frozen=True)
class OverflowReport(TableReport):
    """The ranges of all arrays of a tree, those with the least headroom first. Prints as a table.

    Attributes:
      rows: one for each array of floats.
      dtype: the format that the headroom is measured in; `""` if it is that of each array.
      scale: the factor of the numbers.
    """

    rows: tuple[LeafRange, ...]
    dtype: str
    scale: float

    @property
    def overflowing(self) -> tuple[LeafRange, ...]:
        """The arrays with numbers that are not finite, or that overflow in `dtype`."""
        return tuple(row for row in self.rows if row.infinite or row.nan or row.headroom < 0)

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        times = f" after multiplication by {self.scale:g}" if self.scale != 1 else ""
        caption = f"headroom in {self.dtype or 'the dtype of each array'}{times}, powers of two"
        table = Table(caption=caption, caption_justify="left")
        table.add_column("array", overflow="fold")
        table.add_column("dtype")
        for name in ("numbers", "infinite", "NaN", "largest", "headroom"):
            table.add_column(name, justify="right")
        for row in self.rows:
            counts = [f"{n:,}" if n else "" for n in (row.size, row.infinite, row.nan)]
            room = "" if math.isinf(row.headroom) else f"{row.headroom:.1f}"
            table.add_row(Text(row.name), row.dtype, *counts, f"{row.largest:.3g}", room)
        return table


def overflow_report(tree: PyTree, *, dtype: Any = None, loss_scale: Any = 1.0) -> OverflowReport:
    """Reports which arrays are not finite, and how near the others are to an overflow.

    For gradients: those of a skipped step say where it overflowed, and those of a step that was
    taken say how much the loss scale can still grow.

    Args:
      tree: gradients, params, or any tree of arrays. Leaves that are not floats are left out.
      dtype: the format to measure headroom in, for gradients that were unscaled to float32:
        `"float16"`. By default the dtype of each array.
      loss_scale: the factor that the numbers had, or will have: a number, or `state.loss_scale`.

    Returns:
      The report. It waits for the device.

    Raises:
      ValueError: for an unknown dtype, or a scale that is not positive.
      TypeError: for arrays without numbers, as under `jit`, or a scale that is not a number.

    >>> grads = {"w": jnp.array([3.0, -1.0]), "b": jnp.array([jnp.inf, 1e-3])}
    >>> report = overflow_report(grads, dtype="float16", loss_scale=2.0**10)
    >>> [(row.name, row.infinite, row.largest, round(row.headroom, 1)) for row in report.rows]
    [('b', 1, 0.0010000000474974513, 16.0), ('w', 0, 3.0, 4.4)]
    """
    format_dtype = None if dtype is None else parse_dtype(dtype)
    scale = number_of_scale(loss_scale)
    check_numbers(tree, "overflow_report")
    leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    floats = {name: jnp.asarray(x) for name, x in leaves if is_inexact(x)}
    # One transfer for all arrays: each waits for the device.
    bad, nan, largest = jax.device_get(_ranges(list(floats.values())))
    rows = []
    for (name, x), not_finite, is_nan, most in zip(floats.items(), bad, nan, largest, strict=True):
        limit = float(jnp.finfo(format_dtype or x.dtype).max)
        most, room = float(most), math.inf
        if most > 0:
            # A sum of logarithms: the product of number and scale may overflow float64.
            room = math.log2(limit) - math.log2(most) - math.log2(scale)
        infinite = int(not_finite) - int(is_nan)
        rows.append(LeafRange(name, x.dtype.name, x.size, infinite, int(is_nan), most, room))
    # Arrays that are not finite first, then by the room that is left.
    rows.sort(key=lambda row: (not (row.infinite or row.nan), row.headroom))
    return OverflowReport(tuple(rows), "" if format_dtype is None else format_dtype.name, scale)


@jax.jit
def _ranges(floats: list[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Returns of each array how many numbers are not finite, how many NaN, and the largest."""
    sizes = [jnp.abs(widen(x)) for x in floats]  # of a complex infinity with NaN, infinity
    nan = [jnp.sum(jnp.isnan(x), dtype=jnp.uint32) for x in sizes]
    largest = [jnp.max(jnp.where(jnp.isfinite(x), x, 0), initial=0) for x in sizes]
    return count_nonfinite(floats), nan, largest
