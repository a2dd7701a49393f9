"""Finds the sizes of products that a device would pad, and the next sizes that fit."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jaxmp._tools.command.program import NamedProgram, UsageError, load_program
from jaxmp._tools.inspect.compiled import closed_over
from jaxmp._tools.inspect.equations import all_sites, walk
from jaxmp._tools.inspect.lines import direction, line_of, scopes_of
from jaxmp._tools.planning.devices import Device


class ProductShape(NamedTuple):
    """The sizes of a product of matrices.

    Attributes:
      rows: of the left operand (M).
      summed: of the sum (K).
      columns: of the right operand (N).
      line: its line in the user's code; `""` if it comes from the command line.
      runs: how often it runs.
      batch: how many products there are side by side, as the heads of attention.
    """

    rows: int
    summed: int
    columns: int
    line: str = ""
    runs: int = 1
    batch: int = 1

    @property
    def flops(self) -> int:
        """The FLOPs of all runs."""
        return 2 * self.rows * self.summed * self.columns * self.runs * self.batch

    def __str__(self) -> str:
        return f"{self.rows} x {self.summed} x {self.columns}"


class Padding(NamedTuple):
    """A size that a device pads.

    Attributes:
      shape: the product.
      name: `"M"`, `"K"` or `"N"`.
      size: the size.
      what: the dtype or device that needs a multiple.
      multiple: the size should be a multiple of this.
    """

    shape: ProductShape
    name: str
    size: int
    what: str
    multiple: int

    @property
    def padded(self) -> int:
        """The next size that fits."""
        return -(-self.size // self.multiple) * self.multiple


def parse_shapes(texts: Iterable[str]) -> list[ProductShape]:
    """Reads products: M x K x N, such as `"4096x1024x50257"`, or programs for all of theirs.

    Raises:
      UsageError: for anything else.

    >>> parse_shapes(["4096x1024x50257"])[0].columns
    50257
    """
    shapes = []
    for text in texts:
        if ":" in text:
            shapes += shapes_in(load_program(text))
            continue
        sizes = re.fullmatch(r"(\d+)[x*,](\d+)[x*,](\d+)", text.lower().replace(" ", ""))
        if sizes is None or "0" in sizes.groups():
            raise UsageError(
                f"--shapes takes rows x summed x columns of products, such as 4096x1024x50257, or "
                f"package.module:factory; got {text!r}"
            )
        rows, inner, columns = map(int, sizes.groups())
        shapes.append(ProductShape(rows, inner, columns))
    return shapes


def shapes_in(program: NamedProgram) -> list[ProductShape]:
    """Returns the matrix products of a program by sizes and line, most FLOPs first.

    The program is traced, not run.

    Raises:
      UsageError: if there are none.
    """
    arrays, call = closed_over(program.fn, program.args, program.kwargs)
    runs: dict[ProductShape, int] = {}
    # Products of a backward pass have the sizes of the forward pass in another order.
    for site in all_sites(walk(jax.make_jaxpr(call)(arrays))):
        if site.name == "dot_general" and direction(scopes_of(site)) != "backward":
            shape = _product_shape(site.equation, line_of(site))
            runs[shape] = runs.get(shape, 0) + site.runs
    if not runs:
        raise UsageError(f"the program {program.name} has no products of matrices")
    shapes = [shape._replace(runs=times) for shape, times in runs.items()]
    return sorted(shapes, key=lambda shape: -shape.flops)


def _product_shape(equation: Any, line: str) -> ProductShape:
    (inner, inner_right), (batch, batch_right) = equation.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in equation.invars[:2])

    def size(shape: Sequence[int], without: Sequence[int]) -> int:
        return math.prod(n for axis, n in enumerate(shape) if axis not in without)

    return ProductShape(
        rows=size(left, (*inner, *batch)),
        summed=math.prod(left[axis] for axis in inner),
        columns=size(right, (*inner_right, *batch_right)),
        line=line,
        batch=math.prod(left[axis] for axis in batch),
    )


_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
# The multiples for a device that the table of devices does not have.
_USUAL = {"16 bits on a GPU": 8, "float8 on a GPU": 16, "a TPU": 128}


def paddings(shapes: Iterable[ProductShape], device: Device | None) -> list[Padding]:
    """Finds the sizes that are not multiples of the numbers that a device needs.

    Args:
      shapes: the products.
      device: the device; None for the usual ones.

    Returns:
      The sizes to pad, in the order of the products.
    """
    multiples = _USUAL
    if device is not None:
        # Each multiple once, with the widest dtype that needs it.
        native = [dtype for dtype in _DTYPES if device.peaks.native(dtype)]
        dtypes = {device.multiple(dtype): dtype for dtype in reversed(native)}
        multiples = {dtype: multiple for multiple, dtype in sorted(dtypes.items())}
    # K and N matter: in every product of a layer, forward and backward, rows of these lengths are
    # one after the other in memory. The number of rows (M) may be any. Where one of the sizes is 1,
    # nothing is multiplied by matrix units.
    return [
        Padding(shape, name, size, what, multiple)
        for shape in shapes
        if min(shape.rows, shape.summed, shape.columns) > 1
        for name, size in (("K", shape.summed), ("N", shape.columns))
        for what, multiple in multiples.items()
        if size % multiple
    ]
