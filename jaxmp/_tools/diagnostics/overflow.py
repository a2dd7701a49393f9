"""The report on an operation whose value left the range of its dtype."""

import dataclasses
import math

from jaxmp._numerics.user_warnings import first_few
from jaxmp._tools.inspect.rows import Direction


@dataclasses.dataclass(frozen=True)
class OverflowOperand:
    """An operand of an operation.

    Attributes:
      dtype: its dtype.
      shape: its shape; on one device, in a `shard_map`.
      largest: the largest magnitude of its finite numbers; 0 if there are none.
      smallest: the smallest magnitude of those that are not zero; 0 if there are none.
    """

    dtype: str
    shape: tuple[int, ...]
    largest: float
    smallest: float


@dataclasses.dataclass(frozen=True)
class Overflow:
    """The operation whose value first left the range of its dtype. It prints a line for each fact.

    Attributes:
      operation: the name of the primitive, such as `"exp"`; `"argument"` or `"constant"` if what
        was given, or a number in the program, is not finite itself.
      line: the line of the user's code; the name of the leaf for an argument.
      path: the module or scope.
      direction: `"forward"`, `"backward"`, `"recomputed"` by a checkpoint, or `""`.
      turns: the numbers of the turns of the loops that it is in, outermost first: for layers in a
        scan, the layer.
      operands: what it read.
      dtype: the dtype of its result.
      shape: the shape of its result.
      infinite: how many numbers of its result are infinite.
      nan: how many are NaN.
      index: where the first of these is.
      reaches: which results are not finite because of it: `"loss"`, `"gradients/..."`, `"norm"`
        for the norm of all gradients, and `"aux/..."`.
      gradients: how many gradients there are.
    """

    operation: str
    line: str
    path: str
    direction: Direction
    turns: tuple[int, ...]
    operands: tuple[OverflowOperand, ...]
    dtype: str
    shape: tuple[int, ...]
    infinite: int
    nan: int
    index: tuple[int, ...]
    reaches: tuple[str, ...]
    gradients: int

    def __str__(self) -> str:
        # A line for each fact: the numbers, their place, the operands, and the results they reach.
        size = math.prod(self.shape)
        bad = [f"{n:,} {word}" for n, word in ((self.infinite, "infinite"), (self.nan, "NaN")) if n]
        share = f"{' and '.join(bad)} of {size:,} numbers in {self.dtype}"
        grads = [name for name in self.reaches if name.startswith("gradients")]
        others = [name for name in self.reaches if name not in grads]
        results = ["the norm of all gradients" if name == "norm" else name for name in others]
        # A model has hundreds of gradients, and an overflow in the loss reaches all of them.
        if grads:
            names = first_few([name.removeprefix("gradients/") for name in grads])
            results.append(f"{len(grads)} of {self.gradients} gradients ({names})")
        # One place is enough to print the number, or to find the example of the batch.
        first = f"{share}, first at {self.index}"
        where = [self.line, self.path and f"in {self.path}", self.direction]
        where += [f"turn {', '.join(map(str, self.turns))} of its loop"] * bool(self.turns)
        at = f"at: {', '.join(part for part in where if part)}"
        if self.operation == "argument":
            lines = [f"{self.line} was given with {first}"]
        elif self.operation == "constant":
            lines = [f"a constant of the program holds {first}", f"read {at}"]
        else:
            read = (
                f"from: {x.dtype}{list(x.shape)} of {x.smallest:.3g} to {x.largest:.3g}"
                for x in self.operands
            )
            lines = [f"{self.operation} gives {first}", at, *read]
        return "\n  ".join([*lines, f"then not finite: {', '.join(results)}"])
