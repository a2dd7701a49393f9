"""What a report consists of: one small record for each row of its tables."""

import dataclasses
from typing import Literal

from jaxmp._audit._branches import Choice

Direction = Literal["forward", "backward", "recomputed", ""]


@dataclasses.dataclass(frozen=True)
class Product:
    """The matrix products and convolutions of the same dtypes.

    Of branches that exclude each other, those count in `flops` that have most of them. So the
    shares of two rows can add up to more than 1.

    Attributes:
      operands: the dtypes of the two operands.
      result: the dtype of the result. In which dtype the products are summed up is up to the
        compiler.
      count: how many equations there are.
      runs: how often they run: a scan repeats its body.
      flops: of all runs, two for each multiply-add.
      share: of the FLOPs of the program, from 0 to 1.
    """

    operands: tuple[str, str]
    result: str
    count: int
    runs: int
    flops: int
    share: float


@dataclasses.dataclass(frozen=True)
class ProductLine(Product):
    """The same for one line of the user's code.

    Attributes:
      line: `"file.py:12 (function)"`, the innermost line outside of JAX, Flax and optax.
      path: the module, where the name stack has it, as in linen: `"LM/Block_0/q"`.
      direction: `"forward"`, `"backward"`, `"recomputed"` (by a checkpoint), or `""` where
        nothing is differentiated.
      branch: the branch of a `cond` or a `switch` that it is in, by its index (of a `cond`, 0 is
        where the predicate is False), or several; `""` if it is in none.
    """

    line: str
    path: str
    direction: Direction
    branch: str


@dataclasses.dataclass(frozen=True)
class Upcast:
    """Casts of one line from a float of fewer than 32 bits to a wider one.

    Attributes:
      line: the line of the user's code.
      path: the module, where the name stack has it.
      direction: as in `ProductLine`.
      kind: `"cast"`; or `"product"`, a product that widens an operand itself, or that returns
        more bits than its operands have, and wide products follow.
      source: the dtype before.
      target: the dtype after.
      count: how many equations.
      runs: how often they run.
      bytes: the size of all their results.
      flops: those of the products that have an operand of 32 bits or more because of it: one
        that was computed from the result of the upcast, with no narrower value in between.
        Several upcasts may share a product.
      share: of the FLOPs of the program.
      branch: as in `ProductLine`.
    """

    line: str
    path: str
    direction: Direction
    kind: Literal["cast", "product"]
    source: str
    target: str
    count: int
    runs: int
    bytes: int
    flops: int
    share: float
    branch: str


@dataclasses.dataclass(frozen=True)
class Convert:
    """All casts from one dtype to another.

    Attributes:
      source: the dtype before.
      target: the dtype after.
      count: how many equations.
      runs: how often they run.
      bytes: the size of all their results.
    """

    source: str
    target: str
    count: int
    runs: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Residual:
    """What one line leaves in memory for the backward pass.

    Attributes:
      dtype: its dtype.
      line: the line that computed it.
      path: the module, where the name stack has it.
      count: how many arrays.
      bytes: their size.
      branch: as in `ProductLine`.
      kind: `"params"` for copies of params, cast or moved, such as the 16-bit weights of products;
        `"activations"` for everything else.
    """

    dtype: str
    line: str
    path: str
    count: int
    bytes: int
    branch: str
    kind: Literal["activations", "params"]


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """What checkpoints compute again of one line, for the backward pass.

    Attributes:
      line: the line of the user's code.
      path: the module, where the name stack has it.
      count: how many equations.
      runs: how often they run.
      operations: of all runs: the FLOPs of products, one for each number that another operation
        makes or a reduction reads, and none for what only moves numbers.
      branch: as in `ProductLine`.
    """

    line: str
    path: str
    count: int
    runs: int
    operations: int
    branch: str


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of one dtype in an argument or a result, or in one field of it.

    Attributes:
      role: `"argument"` or `"result"`.
      name: its name, `"state.opt_state.inner"`.
      dtype: the dtype.
      leaves: how many arrays.
      elements: how many numbers.
      bytes: their size.
    """

    role: Literal["argument", "result"]
    name: str
    dtype: str
    leaves: int
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that the program itself asks for, as in `shard_map`.

    Attributes:
      name: the primitive's: `"psum"`, `"all_gather"`, `"reduce_scatter"`, ...
      axes: the mesh axes.
      dtype: what it carries.
      line: the line of the user's code.
      path: the module, where the name stack has it.
      direction: as in `ProductLine`.
      count: how many equations.
      runs: how often they run.
      bytes: what each device puts in, in all runs.
      branch: as in `ProductLine`.
    """

    name: str
    axes: tuple[str, ...]
    dtype: str
    line: str
    path: str
    direction: Direction
    count: int
    runs: int
    bytes: int
    branch: str

    @property
    def sums(self) -> bool:
        """Whether it adds what the devices have, so that its dtype decides about rounding."""
        return "psum" in self.name or "reduce_scatter" in self.name


@dataclasses.dataclass(frozen=True)
class Equations:
    """The equations of one primitive.

    Attributes:
      primitive: its name.
      count: how many there are in the program.
      runs: how often they run.
    """

    primitive: str
    count: int
    runs: int


@dataclasses.dataclass(frozen=True)
class Unseen:
    """Equations of one line that do something which the report does not show.

    Attributes:
      name: the primitive: `"pallas_call"`, `"cholesky"`; `"while"` for a loop with products, of
        which it is not known how often they run; or `"partitioner"`, which inserts collectives for
        the sharded arrays of a program that is not compiled yet.
      dtypes: those of what it takes; of a while loop, of what it multiplies.
      line: the line of the user's code.
      path: the module, where the name stack has it.
      direction: as in `ProductLine`.
      count: how many equations.
      branch: as in `ProductLine`.
    """

    name: str
    dtypes: tuple[str, ...]
    line: str
    path: str
    direction: Direction
    count: int
    branch: str


@dataclasses.dataclass(frozen=True)
class Work:
    """The product FLOPs of the same dtypes in one branch, or outside of all.

    Attributes:
      operands: the dtypes of the two operands.
      flops: of all runs, if the branch is taken.
      branches: the branches that they are in, from the outermost to the innermost.
    """

    operands: tuple[str, str]
    flops: int
    branches: tuple[Choice, ...]
