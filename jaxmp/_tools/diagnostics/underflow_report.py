"""Reports from histograms how much of each array a format would lose at a scale."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._numerics.dtypes import is_inexact, parse_dtype
from jaxmp._numerics.histograms import (
    FINITE,
    INFINITE,
    NAN,
    ZEROS,
    Histograms,
    counts_below,
    histograms,
)
from jaxmp._tools.diagnostics.histogram_counts import (
    check_not_empty,
    cumulative_counts,
    fetch_counts,
)
from jaxmp._tools.diagnostics.inputs import check_numbers, number_of_scale
from jaxmp._tools.inspect.table_report import TableReport

# The recommended scale leaves room for numbers 8 times as large (docs/statistics.md).
_HEADROOM = 3


@dataclasses.dataclass(frozen=True)
class UnderflowRow:
    """The losses of one array, or of all, in a format.

    Attributes:
      name: the path of the array in its tree, or the module.
      dtype: the dtype that it has.
      size: how many numbers were counted.
      zeros: how many of them are zero before.
      flushed: the share of the other finite numbers that become zero, from 0 to 1.
      subnormal: the share that become subnormal: they keep some of their bits.
      overflow: the share that become infinite, or NaN in a format without infinity.
      infinite: how many numbers are infinite before.
      nan: how many are NaN.
      largest: the largest finite magnitude before.
      recommended_scale: the largest power of two that leaves room for numbers 8 times as large; 1
        for formats with the exponents of float32, None if all numbers are zero.
    """

    name: str
    dtype: str
    size: int
    zeros: int
    flushed: float
    subnormal: float
    overflow: float
    infinite: int
    nan: int
    largest: float
    recommended_scale: float | None


@dataclasses.dataclass(frozen=True)
class UnderflowReport(TableReport):
    """The losses of all arrays in a format. Prints as a table.

    Attributes:
      rows: one for each array: first those with infinities or NaN, then those that lose most.
      total: all arrays together.
      dtype: the format.
      scale: the factor of the numbers.
    """

    rows: tuple[UnderflowRow, ...]
    total: UnderflowRow
    dtype: str
    scale: float

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        times = f" after multiplication by {self.scale:g}" if self.scale != 1 else ""
        caption = (
            f"shares of the numbers that are not zero, in {self.dtype}{times}; largest: before"
        )
        # Numbers that an array could not hold are zero in it already.
        narrow = {row.dtype for row in self.rows if row.dtype}
        narrow = {d for d in narrow if any(jnp.dtype(x).itemsize < 4 for x in d.split(", "))}
        if narrow:
            caption += f"\nwhat {' and '.join(sorted(narrow))} had lost before is not seen"
        table = Table(caption=caption, caption_justify="left")
        table.add_column("array", overflow="fold")
        total = (self.total,) if len(self.rows) > 1 else ()
        columns = [column for column in _COLUMNS if column.has_cells(self.total)]
        for column in columns:
            table.add_column(column.title, justify="right")
        for row in (*self.rows, *total):
            if row is self.total:
                table.add_section()
            table.add_row(Text(row.name), *(column.text(row) for column in columns))
        return table


def underflow_report(
    tree: PyTree | Histograms, *, dtype: Any = "float16", loss_scale: Any = 1.0
) -> UnderflowReport:
    """Reports what share of each array would become zero, subnormal or infinite in a format.

    A gradient that becomes zero trains nothing, and no overflow shows it. Of a skipped step it says
    which gradients are infinite or NaN, and how large the others are. For arrays the shares are
    those of a cast. A histogram answers for all formats and scales, nearly as well.

    The recommended scale is 2**(e - 3 - m), with e the exponent of the largest number of the format
    and m that of the largest magnitude: as torch.amp finds it, but for the room that is left.

    Args:
      tree: gradients or other arrays; or `Histograms` of them, such as `metrics["histograms"]`.
        Histograms with leading axes, of several steps, are added up.
      dtype: the format.
      loss_scale: the factor of the numbers: a number, or `state.loss_scale`.

    Returns:
      The report. It waits for the device. In `Histograms`, numbers between two powers of two are
      taken to be spread evenly over their logarithms. At scales that are powers of two this
      matters only for the largest numbers of a format, and for those that round up to its smallest
      normal one: shares are right to 1e-4 in float16 and bfloat16. In float8, `flushed` is as
      exact, `subnormal` and `overflow` to about 0.02; where `largest` fits, `overflow` is 0.

    Raises:
      ValueError: for an unknown dtype, a scale that is not positive, or histograms of a step in
        which nothing was counted.
      TypeError: for arrays without numbers, as under `jit`, or a scale that is not a number.

    >>> grads = {"w": jnp.array([1e-9, 1e-6, 1e-3, 0.0])}
    >>> report = underflow_report(grads, dtype="float16", loss_scale=1.0)
    >>> [round(share, 2) for share in (report.total.flushed, report.total.subnormal)]
    [0.33, 0.33]
    >>> report.total.recommended_scale == 2.0**22
    True
    """
    format_dtype, scale = parse_dtype(dtype), number_of_scale(loss_scale)
    check_numbers(tree, "underflow_report")
    bins = tree if isinstance(tree, Histograms) else histograms(tree)
    counts, largest = fetch_counts(bins)
    limits = limits_of(format_dtype)
    # Limits are divided, so that the numbers stay as they are: a product would round them.
    ends = (limits.smallest, limits.normal, limits.ends, math.inf)
    bounds = np.array([limit / scale for limit in ends])
    if bins is tree:
        check_not_empty(counts)
        arrays = zip(counts[:, FINITE], largest, strict=True)
        below = [_counts_below(*array, bounds) for array in arrays]
    else:
        # Devices compare in float32: the smallest float32 that are not below the bounds.
        with np.errstate(over="ignore"):
            near = bounds.astype(np.float32)
        bounds32 = np.where(near < bounds, np.nextafter(near, np.float32(np.inf)), near)
        floats = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
        below = list(jax.device_get(counts_below(floats, bounds32)))
    columns = zip(bins.names, bins.dtypes, counts, largest, below, strict=True)
    rows = [_row_of_array(*column, limits.exponent) for column in columns]
    most = largest.max(initial=0)
    total = _row_of_array("all", "", counts.sum(0), most, sum(below, np.zeros(4)), limits.exponent)
    # What is broken already comes first.
    rows.sort(key=lambda x: (not (x.infinite or x.nan), -x.overflow, -x.flushed, -x.subnormal))
    return UnderflowReport(tuple(rows), total, format_dtype.name, scale)


class FormatLimits(NamedTuple):
    """The magnitudes at which a format changes what it does, and its largest exponent.

    Attributes:
      smallest: below it numbers become zero: just above half of the smallest number.
      normal: below it they are subnormal: numbers just below the smallest normal one round to it.
      ends: from it on they overflow: half a place above the largest number.
      exponent: of the largest number.
    """

    smallest: float
    normal: float
    ends: float
    exponent: int


def limits_of(dtype: Any) -> FormatLimits:
    """Returns the limits of a floating dtype."""
    info = jnp.finfo(dtype)
    largest, step = float(info.max), float(info.smallest_subnormal)
    exponent = math.frexp(largest)[1] - 1
    # Half of the smallest number rounds to zero, to the even neighbor.
    smallest = math.nextafter(step / 2, 1)
    ends = largest + 2.0 ** (exponent - int(info.nmant) - 1)
    with np.errstate(over="ignore"):
        # Where the largest number is even, as in float8_e4m3fn, half a place above rounds to it.
        if np.isfinite(np.float64(ends).astype(dtype).astype(np.float64)):
            ends = math.nextafter(ends, math.inf)
    return FormatLimits(smallest, float(info.smallest_normal) - step / 2, ends, exponent)


def _row_of_array(
    name: str, dtype: str, counts: Any, largest: Any, below: Any, exponent: int
) -> UnderflowRow:
    """Returns the row of an array, given how many numbers are below each limit; the last is all."""
    # Shares are of the finite numbers that are not zero: zeros lose nothing.
    zeros, infinite, nan = (round(float(counts[i])) for i in (ZEROS, INFINITE, NAN))
    flushed, small, fits, recommended = 0.0, 0.0, 1.0, None
    *counts_of_limits, numbers = map(float, below)
    if numbers:
        flushed, small, fits = (n / numbers for n in counts_of_limits)
        # Formats with the exponents of float32 need no scale.
        room = exponent - _HEADROOM - (math.frexp(largest)[1] - 1)
        recommended = 2.0**room if exponent < 127 else 1.0
    return UnderflowRow(
        name,
        dtype,
        round(float(counts.sum())),
        zeros,
        flushed,
        max(small - flushed, 0.0),
        1 - fits,
        infinite,
        nan,
        float(largest),
        recommended,
    )


def _counts_below(numbers: Any, largest: Any, limits: Any) -> Any:
    """Returns how many numbers are below limits, given their counts in the finite bins."""
    if not largest:
        return np.zeros(len(limits))
    edges, below = cumulative_counts(numbers, largest)
    # Bins end at powers of two, and formats do not: above the largest number nothing overflows.
    return np.where(limits > largest, numbers.sum(), np.interp(np.log2(limits), edges, below))


class _Column(NamedTuple):
    """A column of the table, which is left out if it is `optional` and all its numbers are 0."""

    title: str
    of: Callable[[UnderflowRow], Any]
    form: str
    optional: bool = False

    def has_cells(self, total: UnderflowRow) -> bool:
        return bool(self.of(total)) or not self.optional

    def text(self, row: UnderflowRow) -> str:
        value = self.of(row)
        return "" if value is None or (self.optional and not value) else format(value, self.form)


# Optional columns are empty in most reports: the table fits a terminal without them.
_COLUMNS = (
    _Column("numbers", lambda row: row.size, ","),
    _Column("zeros", lambda row: row.zeros, ",", True),
    _Column("flushed", lambda row: row.flushed, ".2%"),
    _Column("subnormal", lambda row: row.subnormal, ".2%"),
    _Column("overflow", lambda row: row.overflow, ".2%"),
    _Column("infinite", lambda row: row.infinite, ",", True),
    _Column("NaN", lambda row: row.nan, ",", True),
    _Column("largest", lambda row: row.largest, ".3g"),
    _Column(
        "recommended scale",
        lambda row: row.recommended_scale and f"2**{round(math.log2(row.recommended_scale))}",
        "",
    ),
)
