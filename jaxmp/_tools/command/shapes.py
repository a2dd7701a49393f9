"""Finds the sizes of products that a device would pad, and says what to pad them to."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jaxmp._tools.command.program import NamedProgram, UsageError, load_program
from jaxmp._tools.inspect.compiled import closed_over
from jaxmp._tools.inspect.equations import all_sites, walk
from jaxmp._tools.inspect.lines import Lines, direction, scopes_of
from jaxmp._tools.planning.devices import Device


class ProductShape(NamedTuple):
    """The sizes of a product of matrices.

    Attributes:
      rows: of the left operand (M).
      summed: what is summed over (K).
      columns: of the right operand (N).
      line: where it stands in the user's code; `""` if it was given on the command line.
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
      what: what wants a multiple.
      multiple: of what the size should be a multiple.
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
    found = []
    for text in texts:
        if ":" in text:
            found += shapes_in(load_program(text))
            continue
        sizes = re.fullmatch(r"(\d+)[x*,](\d+)[x*,](\d+)", text.lower().replace(" ", ""))
        if sizes is None or "0" in sizes.groups():
            raise UsageError(
                f"--shapes takes rows x summed x columns of products, such as 4096x1024x50257, or "
                f"package.module:factory; got {text!r}"
            )
        rows, summed, columns = map(int, sizes.groups())
        found.append(ProductShape(rows, summed, columns))
    return found


def shapes_in(program: NamedProgram) -> list[ProductShape]:
    """Returns the matrix products of a program by sizes and line, most FLOPs first.

    The program is traced, not run. Products of a backward pass are left out: they have the sizes
    of the forward pass in another order.

    Raises:
      UsageError: if there are none.
    """
    arrays, call = closed_over(program.fn, program.args, program.kwargs)
    lines = Lines()
    runs: dict[ProductShape, int] = {}
    for site in all_sites(walk(jax.make_jaxpr(call)(arrays))):
        if site.name == "dot_general" and direction(scopes_of(site)) != "backward":
            shape = _product_shape(site.equation, lines.of(site))
            runs[shape] = runs.get(shape, 0) + site.runs
    if not runs:
        raise UsageError(f"the program {program.name} has no products of matrices")
    found = [shape._replace(runs=times) for shape, times in runs.items()]
    return sorted(found, key=lambda shape: -shape.flops)


def _product_shape(equation: Any, line: str) -> ProductShape:
    (summed, summed_right), (batch, batch_right) = equation.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in equation.invars[:2])

    def size(shape: Sequence[int], without: Sequence[int]) -> int:
        return math.prod(n for axis, n in enumerate(shape) if axis not in without)

    return ProductShape(
        rows=size(left, (*summed, *batch)),
        summed=math.prod(left[axis] for axis in summed),
        columns=size(right, (*summed_right, *batch_right)),
        line=line,
        batch=math.prod(left[axis] for axis in batch),
    )


# What wants multiples of how much, on a device that the table of devices does not have.
_USUAL = {"16 bits on a GPU": 8, "float8 on a GPU": 16, "a TPU": 128}


def paddings(shapes: Iterable[ProductShape], device: Device | None) -> list[Padding]:
    """Finds the sizes that are no multiple of what the device wants.

    What is summed (K) and the columns (N) matter: in every product of a layer, forward and
    backward, rows of these lengths lie one after the other in memory. The number of rows (M) may
    be any. Where one of the sizes is 1, nothing is multiplied by matrix units.

    Args:
      shapes: the products.
      device: the device; None for the usual ones.

    Returns:
      What fails, in the order of the products.
    """
    wanted = _USUAL if device is None else _wanted(device)
    return [
        Padding(shape, name, size, what, multiple)
        for shape in shapes
        if min(shape.rows, shape.summed, shape.columns) > 1
        for name, size in (("K", shape.summed), ("N", shape.columns))
        for what, multiple in wanted.items()
        if size % multiple
    ]


def _wanted(device: Device) -> dict[str, int]:
    """Returns the multiples that a device wants, each once, by the widest dtype that wants it."""
    dtypes = ("bfloat16", "float16", "float8_e4m3fn")
    native = [dtype for dtype in dtypes if device.peaks.native(dtype)]
    multiples = {device.multiple(dtype): dtype for dtype in reversed(native)}
    return {dtype: multiple for multiple, dtype in sorted(multiples.items())}
